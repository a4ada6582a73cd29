"""What the last few tokens add: depthwise causal convolution and SiLU, with state and resets."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.checks import check_floating, check_integer, check_not_empty
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form
from pallas_kernels.common.segments import Runs, check_runs, runs_of
from pallas_kernels.short_conv.backward_kernel import backward
from pallas_kernels.short_conv.blocks import LANES, SUBLANES, TAPS, Plan, plan_for
from pallas_kernels.short_conv.forward_kernel import forward
from pallas_kernels.short_conv.reference import short_conv_reference, short_conv_xla


def _new_tail(extended: jax.Array, runs: Runs | None, taps: int) -> jax.Array:
    """The last `taps - 1` real rows of the last run, zeros where it is shorter."""
    size = taps - 1
    if runs is None:
        return extended[:, extended.shape[1] - size :]
    count = jnp.sum(runs.real, axis=1)
    rows = count[:, None] + jnp.arange(size)
    tail = jnp.take_along_axis(extended, rows[..., None], axis=1)
    numbers = jnp.pad(runs.number, ((0, 0), (size, 0)))
    last = jnp.take_along_axis(numbers, (count + size - 1)[:, None], axis=1)
    return jnp.where((jnp.take_along_axis(numbers, rows, axis=1) == last)[..., None], tail, 0)


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    tail: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """SiLU of a depthwise causal convolution, and the rows that the next call needs.

    c_t = sum_j weight[:, j] x_{t - W + 1 + j};   y = c * sigmoid(c).  The last tap weighs x_t.

    Args:
      x: [B, T, P].
      weight: [P, W]; accumulation is in float32.
      tail: [B, W - 1, P], the rows before x, oldest first; None for zeros. It belongs to the first
        segment.
      segment_ids: [B, T] int32, runs of equal ids, 0 = padding at the end of a row; nothing
        passes from one run to the next.
      implementation: 'reference' | 'xla' | 'pallas' | None (best for the platform lowered for).

    Returns:
      y: [B, T, P] in x's dtype; tail: [B, W - 1, P] after the last real token.

    Raises:
      ValueError: shapes disagree.
      NotImplementedError: 'pallas' with other than four taps, or another dtype than bfloat16 or
        float32.

    Source: Kimi K3 `short_conv_kernel_size`.
    """
    batch, length, width = x.shape
    taps = weight.shape[-1]
    if weight.shape != (width, taps):
        raise ValueError(
            f'short_conv: weight has shape {weight.shape}, wanted ({width}, W) for x {x.shape}'
        )
    if tail is None:
        tail = jnp.zeros((batch, taps - 1, width), x.dtype)
    if tail.shape != (batch, taps - 1, width):
        raise ValueError(
            f'short_conv: tail has shape {tail.shape}, wanted {(batch, taps - 1, width)}'
        )
    check_implementation('short_conv', implementation)
    check_not_empty('short_conv', x=x)
    check_floating('short_conv', x=x, weight=weight, tail=tail)
    _check_segments(x, segment_ids)
    tail = tail.astype(x.dtype)
    runs = None if segment_ids is None else runs_of(segment_ids)
    if runs is not None:
        x = jnp.where(runs.real[..., None], x, 0)
    numbers = () if runs is None else (runs.number,)
    missing = -width % LANES
    if implementation == 'pallas' and missing:
        x, tail = (jnp.pad(a, ((0, 0), (0, 0), (0, missing))) for a in (x, tail))
        weight = jnp.pad(weight, ((0, missing), (0, 0)))
        y, tail = short_conv(
            x, weight, tail=tail, segment_ids=segment_ids, implementation=implementation
        )
        return y[..., :width], tail[..., :width]
    implementation = form_for('short_conv', implementation, _unsupported(x, taps))
    if implementation == 'reference':
        y = short_conv_reference(x, weight, tail, *numbers)
    elif implementation == 'xla' or (implementation is None and length == 1):
        # A single token is a handful of rows: the kernel's tile would be mostly empty.
        y = short_conv_xla(x, weight, tail, *numbers)
    else:
        y = _short_conv(implementation, x, weight, tail, *numbers)
    return y, _new_tail(jnp.concatenate([tail, x], axis=1), runs, taps)


def _check_segments(x: jax.Array, segment_ids: jax.Array | None) -> None:
    if segment_ids is None:
        return
    check_integer('short_conv', segment_ids=segment_ids)
    if segment_ids.shape != x.shape[:2]:
        raise ValueError(
            f'short_conv: segment_ids has shape {segment_ids.shape}, wanted {x.shape[:2]}'
        )
    check_runs('short_conv', segment_ids)
    if isinstance(segment_ids, jax.core.Tracer):
        return
    real = np.asarray(segment_ids) > 0
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise ValueError('short_conv: segment_ids have padding before a token, wanted it behind')


def _unsupported(x: jax.Array, taps: int) -> str | None:
    """Why the TPU kernel cannot take these arguments."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes bfloat16 or float32, got {x.dtype}'
    if x.shape[-1] % LANES:
        return f'takes a multiple of {LANES} channels, got {x.shape[-1]}'
    if taps != TAPS:
        return f'takes {TAPS} taps, got {taps}'
    return None


class _Operands(NamedTuple):
    """The kernels' form of weight, tail and documents; see `forward`."""

    weight: jax.Array
    tail: jax.Array
    reach: jax.Array | None


def _operands(pass_name: str, x, weight, tail, *numbers) -> tuple[Plan, _Operands]:
    taps = weight.shape[-1]
    plan = plan_for(pass_name, x.shape, x.dtype, packed=bool(numbers))
    halved = jnp.repeat(0.5 * weight.astype(jnp.float32).T[:, None], SUBLANES, axis=1)
    tail = jnp.pad(tail.astype(jnp.float32), ((0, 0), (SUBLANES - taps + 1, 0), (0, 0)))
    reach = None
    if numbers:
        (number,) = numbers
        position = jnp.arange(plan.length, dtype=jnp.int32)
        starts = jnp.pad(number[:, 1:] != number[:, :-1], ((0, 0), (1, 0)))
        since = position - lax.cummax(jnp.where(starts, position, 1 - taps), axis=1)
        reach = jnp.minimum(since, taps).astype(jnp.float32)
        reach = jnp.pad(reach, ((0, 0), (0, plan.padded - plan.length)))[:, None]
    return plan, _Operands(halved, tail, reach)


def _forward_on_tpu(interpret: bool, x, weight, tail, *numbers):
    plan, operands = _operands('forward', x, weight, tail, *numbers)
    return forward(x, *operands, plan=plan, interpret=interpret)


def _backward_on_tpu(interpret: bool, dy, x, weight, tail, *numbers):
    plan, operands = _operands('backward', x, weight, tail, *numbers)
    dx, d_weight, d_tail = backward(x, dy, *operands, plan=plan, interpret=interpret)
    d_weight = 0.5 * jnp.sum(d_weight, axis=(0, 2)).T
    d_tail = d_tail[:, SUBLANES - TAPS + 1 :]
    return dx, d_weight.astype(weight.dtype), d_tail.astype(tail.dtype)


def _backward_in_xla(dy, x, weight, tail, *numbers):
    return jax.vjp(lambda *args: short_conv_xla(*args, *numbers), x, weight, tail)[1](dy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _short_conv(implementation: Implementation | None, *args: jax.Array) -> jax.Array:
    return run_form('short_conv', implementation, _forward_on_tpu, short_conv_xla, *args)


def _short_conv_fwd(implementation: Implementation | None, *args: jax.Array):
    return _short_conv(implementation, *args), args


def _short_conv_bwd(
    implementation: Implementation | None, args: tuple[jax.Array, ...], dy: jax.Array
):
    forms = _backward_on_tpu, _backward_in_xla
    grads = run_form('short_conv', implementation, *forms, dy, *args)
    return *grads, *[None] * (len(args) - len(grads))


_short_conv.defvjp(_short_conv_fwd, _short_conv_bwd)
