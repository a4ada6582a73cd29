"""What the routed experts compute: a gated MLP per group of rows, groups of any size."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.mxfp4 import Mxfp4, decode_mxfp4

MAX_TILE = 128  # rows of one expert that the CPU form multiplies at once

Weight = jax.Array | Mxfp4


class Experts(NamedTuple):
    """w1 (gate) and w3 (up): [E, F, L]; w2 (down): [E, L, F]; arrays or `Mxfp4`."""

    w1: Weight
    w3: Weight
    w2: Weight


def _dense(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    return decode_mxfp4(weight, dtype) if isinstance(weight, Mxfp4) else weight.astype(dtype)


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, I] x [O, I] -> [M, O]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def _mlp(activation: GatedActivation, x: jax.Array, experts: Experts) -> jax.Array:
    w1, w3, w2 = experts
    return _times(activation(_times(x, w1), _times(x, w3)), w2)


class _Tiles(NamedTuple):
    """Row tiles, each inside one group: expert and first row of each, rows in its group."""

    expert: jax.Array
    start: jax.Array
    rows: jax.Array
    count: jax.Array


def _tiles(group_sizes: jax.Array, num_rows: int, tile: int) -> _Tiles:
    num_groups = group_sizes.shape[0]
    per_group = -(-group_sizes // tile)
    last = jnp.cumsum(per_group)
    index = jnp.arange(-(-num_rows // tile) + num_groups, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, index, side='right'), num_groups - 1)
    expert = expert.astype(jnp.int32)
    offset = (index - (last - per_group)[expert]) * tile
    start = (jnp.cumsum(group_sizes) - group_sizes)[expert] + offset
    return _Tiles(expert, start, group_sizes[expert] - offset, last[-1])


def _pick(experts: Experts, expert: jax.Array, dtype: jnp.dtype) -> Experts:
    one = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), experts)
    return Experts(*(_dense(w, dtype) for w in one))


def _tile_size(num_rows: int, num_groups: int) -> int:
    average = max(1, num_rows // num_groups)
    return min(MAX_TILE, 1 << (average - 1).bit_length())


def _forward_by_tiles(x, experts, group_sizes, activation):
    tile = _tile_size(x.shape[0], group_sizes.shape[0])
    tiles = _tiles(group_sizes, x.shape[0], tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def body(i, out):
        start = tiles.start[i]
        rows = lax.dynamic_slice_in_dim(padded, start, tile)
        y = _mlp(activation, rows, _pick(experts, tiles.expert[i], x.dtype))
        # Rows past the group's end are overwritten by the next group's tile.
        return lax.dynamic_update_slice_in_dim(out, y, start, 0)

    return lax.fori_loop(0, tiles.count, body, jnp.zeros_like(padded))[: x.shape[0]]


def _backward_by_tiles(x, experts, group_sizes, dy, activation):
    tile = _tile_size(x.shape[0], group_sizes.shape[0])
    tiles = _tiles(group_sizes, x.shape[0], tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    dy = jnp.pad(dy, ((0, tile), (0, 0)))

    def body(i, carry):
        dx, grads = carry
        start, expert = tiles.start[i], tiles.expert[i]
        inside = (jnp.arange(tile) < tiles.rows[i])[:, None]
        rows = lax.dynamic_slice_in_dim(padded, start, tile)
        d_rows = jnp.where(inside, lax.dynamic_slice_in_dim(dy, start, tile), 0)
        weights = _pick(experts, expert, x.dtype)
        _, vjp = jax.vjp(functools.partial(_mlp, activation), rows, weights)
        d_in, d_weights = vjp(d_rows)

        def add(total, one):
            row = lax.dynamic_index_in_dim(total, expert, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, row + one.astype(row.dtype), expert, 0)

        dx = lax.dynamic_update_slice_in_dim(dx, d_in, start, 0)
        return dx, jax.tree.map(add, grads, d_weights)

    zeros = jax.tree.map(jnp.zeros_like, experts)
    dx, grads = lax.fori_loop(0, tiles.count, body, (jnp.zeros_like(padded), zeros))
    return dx[: x.shape[0]], grads


def _forward_ragged(x, experts, group_sizes, activation):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )

    def times(rows, weight):
        return lax.ragged_dot_general(rows, _dense(weight, rows.dtype), group_sizes, numbers)

    hidden = activation(times(x, experts.w1), times(x, experts.w3))
    return times(hidden, experts.w2)


def _backward_ragged(x, experts, group_sizes, dy, activation):
    def forward(x, experts):
        return _forward_ragged(x, experts, group_sizes, activation)

    return jax.vjp(forward, x, experts)[1](dy)


def _by_platform(cpu, default, activation, *operands):
    """On the CPU backend ragged_dot multiplies every row by every expert; tiles do not."""
    return lax.platform_dependent(
        *operands,
        cpu=functools.partial(cpu, activation=activation),
        default=functools.partial(default, activation=activation),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_mlp(x, experts, group_sizes, activation):
    return _by_platform(_forward_by_tiles, _forward_ragged, activation, x, experts, group_sizes)


def _grouped_mlp_forward(x, experts, group_sizes, activation):
    return _grouped_mlp(x, experts, group_sizes, activation), (x, experts, group_sizes)


def _grouped_mlp_backward(activation, residuals, dy):
    x, experts, group_sizes = residuals
    if any(isinstance(weight, Mxfp4) for weight in experts):
        raise NotImplementedError(
            'grouped_mlp: gradients through MXFP4 experts; expand them to bf16 to train'
        )
    dx, grads = _by_platform(
        _backward_by_tiles, _backward_ragged, activation, x, experts, group_sizes, dy
    )
    return dx, grads, None


_grouped_mlp.defvjp(_grouped_mlp_forward, _grouped_mlp_backward)


def grouped_mlp(
    x: jax.Array, experts: Experts, group_sizes: jax.Array, activation: GatedActivation
) -> jax.Array:
    """y_m = w2_e activation(w1_e x_m, w3_e x_m), e the group of row m.

    Args:
      x: [M, L], rows sorted by expert.
      experts: weights, any float dtype, or MXFP4 (forward only); used in x's dtype.
      group_sizes: [E] int32, rows of each expert, summing to M; may be 0.
      activation: `SiTU` or `SwiGLU`.

    Returns:
      [M, L] in x's dtype.

    Raises:
      ValueError: widths disagree. NotImplementedError: gradients through MXFP4.

    Source: Kimi K3 `block_sparse_moe.experts`.
    """
    w1 = experts.w1.packed if isinstance(experts.w1, Mxfp4) else experts.w1
    width = w1.shape[-1] * (2 if isinstance(experts.w1, Mxfp4) else 1)
    if x.ndim != 2 or x.shape[1] != width or group_sizes.shape != (w1.shape[0],):
        raise ValueError(
            f'grouped_mlp: x {x.shape} and group_sizes {group_sizes.shape}, '
            f'wanted [M, {width}] and ({w1.shape[0]},)'
        )
    return _grouped_mlp(x, experts, group_sizes, activation)
