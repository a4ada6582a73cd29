"""What the last few tokens add: depthwise causal convolution and SiLU, with state and resets."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.segments import Runs, runs_of


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

    Returns:
      y: [B, T, P] in x's dtype; tail: [B, W - 1, P] after the last real token.

    Raises:
      ValueError: shapes disagree.

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
    wide = jnp.promote_types(x.dtype, jnp.float32)
    extended = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    runs = None if segment_ids is None else runs_of(segment_ids)
    numbers = None if runs is None else jnp.pad(runs.number, ((0, 0), (taps - 1, 0)))
    total = jnp.zeros((batch, length, width), wide)
    for tap in range(taps):
        rows = extended[:, tap : tap + length].astype(wide)
        if runs is not None:
            same = numbers[:, tap : tap + length] == runs.number
            rows = jnp.where(same[..., None], rows, 0)
        total = total + rows * weight[:, tap].astype(wide)
    return jax.nn.silu(total).astype(x.dtype), _new_tail(extended, runs, taps)
