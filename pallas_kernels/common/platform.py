"""Which implementation runs where: TPU kernels, their interpreted form, plain XLA."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import lax

Implementation = Literal['reference', 'xla', 'pallas']

# Generations without the memory or the instructions that the kernels are built for.
_UNSUPPORTED_KINDS = ('v2', 'v3', 'v4', 'v5 lite', 'v5e', 'v5litepod')


def kernel_call(build: Callable[[bool], Callable[..., Any]], *args: Any) -> Any:
    """Runs build(interpret)(*args): interpreted where lowered for the CPU, else compiled for TPU.

    Raises (while lowering): NotImplementedError for any other platform.
    """
    return lax.platform_dependent(*args, cpu=build(True), tpu=build(False))


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


def best_of(kernel: str, pallas: Callable[..., Any], xla: Callable[..., Any], *args: Any) -> Any:
    """pallas(*args) where lowered for a TPU that has the kernel, xla(*args) elsewhere."""
    if not tpu_has_kernels(kernel):
        return xla(*args)
    return lax.platform_dependent(*args, tpu=pallas, default=xla)
