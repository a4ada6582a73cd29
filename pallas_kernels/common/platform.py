"""Which implementation runs where: TPU kernels, their interpreted form, plain XLA."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax import lax

Implementation = Literal['reference', 'xla', 'pallas']

# Generations without the memory or the instructions that the kernels are built for.
_UNSUPPORTED_KINDS = ('v2', 'v3', 'v4', 'v5 lite', 'v5e', 'v5litepod')


def kernel_call(on_tpu: Callable[..., Any], *args: Any) -> Any:
    """on_tpu(interpret, *args): interpreted where lowered for the CPU, else compiled for TPU.

    Raises (while lowering): NotImplementedError for any other platform.
    """
    compiled, interpreted = (functools.partial(on_tpu, interpret) for interpret in (False, True))
    return lax.platform_dependent(*args, cpu=interpreted, tpu=compiled)


def implementation_on(platform: str) -> Implementation | None:
    """What to ask for on devices of a platform that are there: where no kernel can run, not to
    trace any, which takes longer than the XLA forms do."""
    return None if platform == 'tpu' else 'xla'


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _device_kind() -> str | None:
    """Kind of the TPU that is traced for, as far as it is known; None under AOT without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.device_kind
    if jax.default_backend() == 'tpu':
        return jax.devices()[0].device_kind
    return None


def tpu_has_kernels(kernel: str) -> bool:
    """False on TPU generations before v5p and on v5e, with one warning a kernel."""
    kind = _device_kind()
    if kind is None or not any(name in kind.lower() for name in _UNSUPPORTED_KINDS):
        return True
    _warn_once(f'{kernel}: no kernel for {kind}; the XLA form runs instead')
    return False


def check_implementation(
    name: str, implementation: Any, known: tuple[str, ...] = get_args(Implementation)
) -> None:
    """Raises ValueError for what is neither None nor one of the known implementations."""
    if implementation is not None and implementation not in known:
        raise ValueError(
            f'{name}: implementation is {implementation!r}, '
            f'wanted {", ".join(map(repr, known))} or None'
        )


def form_for(
    name: str, implementation: Implementation | None, problem: str | None
) -> Implementation | None:
    """The implementation asked for; 'xla' for None where the kernel cannot take the arguments.

    Args:
      problem: why it cannot, as in 'takes bfloat16, got int8'; None where it can.

    Raises:
      NotImplementedError: 'pallas' was asked for and there is a problem.
    """
    if implementation == 'pallas' and problem:
        raise NotImplementedError(f"{name}: 'pallas' {problem}; use implementation='xla'")
    return 'xla' if implementation is None and problem else implementation


def run_form(
    kernel: str,
    implementation: Implementation | None,
    on_tpu: Callable[..., Any],
    xla: Callable[..., Any],
    *args: Any,
) -> Any:
    """on_tpu(interpret, *args) or xla(*args), by the implementation asked for.

    Args:
      kernel: what a warning calls it.
      implementation: 'pallas' for the kernel, as `kernel_call` runs it; 'xla'; else the kernel
        where lowered for a TPU that has it and the XLA form elsewhere.
      on_tpu, xla: functions of the same arrays with the same results.
    """
    if implementation == 'pallas':
        return kernel_call(on_tpu, *args)
    if implementation == 'xla' or not tpu_has_kernels(kernel):
        return xla(*args)
    return lax.platform_dependent(*args, tpu=functools.partial(on_tpu, False), default=xla)
