"""What runs without the kernels: loops over tiles on CPUs, ragged products elsewhere."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.experts import Experts, Kept, Weight, is_packed
from pallas_kernels.grouped_mlp.mxfp4 import Mxfp4, decode_mxfp4
from pallas_kernels.grouped_mlp.mxfp4_tiles import Mxfp4Tiles, untile_mxfp4
from pallas_kernels.grouped_mlp.visits import ends

MAX_TILE = 128  # rows of one expert that the CPU form multiplies at once


def dense(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    if isinstance(weight, Mxfp4Tiles):
        weight = untile_mxfp4(weight)
    return decode_mxfp4(weight, dtype) if isinstance(weight, Mxfp4) else weight.astype(dtype)


def _times(x: jax.Array, w: jax.Array) -> jax.Array:
    """[M, I] x [O, I] -> [M, O]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


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
    return Experts(*(dense(w, dtype) for w in one))


def _tile_size(num_rows: int, num_groups: int) -> int:
    """A few rows of an expert cost as much as one, whose weights are read: so that few experts of
    a decode step are read twice, its tiles are twice the average group."""
    average = max(1, num_rows // num_groups)
    if 1 < average < 16:
        average *= 2
    return min(MAX_TILE, 1 << (average - 1).bit_length())


def forward_by_tiles(x, experts, group_sizes, activation, *, keep=False):
    tile = _tile_size(x.shape[0], group_sizes.shape[0])
    tiles = _tiles(group_sizes, x.shape[0], tile)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def body(i, outs):
        start = tiles.start[i]
        rows = lax.dynamic_slice_in_dim(padded, start, tile)
        w1, w3, w2 = _pick(experts, tiles.expert[i], x.dtype)
        a, b = _times(rows, w1), _times(rows, w3)
        results = (_times(activation(a, b), w2), a, b)
        # Rows past the group's end are overwritten by the next group's tile.
        return [
            lax.dynamic_update_slice_in_dim(out, result, start, 0)
            for out, result in zip(outs, results, strict=False)
        ]

    inner = jnp.zeros((padded.shape[0], experts.inner), x.dtype)
    outs = [jnp.zeros_like(padded), *([inner, inner] if keep else [])]
    y, *kept = (out[: x.shape[0]] for out in lax.fori_loop(0, tiles.count, body, outs))
    return (y, Kept(*kept)) if keep else y


def backward_by_tiles(x, experts, group_sizes, kept, dy, activation):
    """dx, and the gradients of weights that are arrays (None for packed ones)."""
    tile = _tile_size(x.shape[0], group_sizes.shape[0])
    tiles = _tiles(group_sizes, x.shape[0], tile)
    whole = [jnp.pad(rows, ((0, tile), (0, 0))) for rows in (x, *kept, dy)]

    def body(i, carry):
        dx, grads = carry
        start, expert = tiles.start[i], tiles.expert[i]
        inside = (jnp.arange(tile) < tiles.rows[i])[:, None]
        rows, a, b, d_rows = (lax.dynamic_slice_in_dim(r, start, tile) for r in whole)
        d_rows = jnp.where(inside, d_rows, 0)
        w1, w3, w2 = _pick(experts, expert, x.dtype)
        hidden, vjp = jax.vjp(activation, a, b)
        da, db = vjp(d_rows @ w2)

        def add(total, left, right):
            if total is None:
                return None
            one = lax.dynamic_index_in_dim(total, expert, keepdims=False)
            one += (left.T @ right).astype(one.dtype)
            return lax.dynamic_update_index_in_dim(total, one, expert, 0)

        pairs = ((da, rows), (db, rows), (d_rows, hidden))
        grads = [add(total, *pair) for total, pair in zip(grads, pairs, strict=True)]
        return lax.dynamic_update_slice_in_dim(dx, da @ w1 + db @ w3, start, 0), grads

    zeros = [None if is_packed(w) else jnp.zeros_like(w) for w in experts]
    dx, grads = lax.fori_loop(0, tiles.count, body, (jnp.zeros_like(whole[0]), zeros))
    return dx[: x.shape[0]], grads


def _ragged_times(x: jax.Array, w: jax.Array, group_sizes: jax.Array, axis: int) -> jax.Array:
    """[M, I] x [E, .., ..] contracted over the weight's `axis`."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (axis,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(x, w, group_sizes, numbers)


def forward_ragged(x, experts, group_sizes, activation, *, keep=False):
    w1, w3, w2 = (dense(w, x.dtype) for w in experts)
    a, b = (_ragged_times(x, w, group_sizes, 2) for w in (w1, w3))
    y = _ragged_times(activation(a, b), w2, group_sizes, 2)
    return (y, Kept(a, b)) if keep else y


def backward_ragged(x, experts, group_sizes, kept, dy, activation):
    w1, w3, w2 = (dense(w, x.dtype) for w in experts)
    hidden, vjp = jax.vjp(activation, *kept)
    da, db = vjp(_ragged_times(dy, w2, group_sizes, 1))
    dx = _ragged_times(da, w1, group_sizes, 1) + _ragged_times(db, w3, group_sizes, 1)
    over_rows = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    grads = [
        None
        if is_packed(weight)
        else lax.ragged_dot_general(left, right, group_sizes, over_rows).astype(weight.dtype)
        for weight, left, right in zip(experts, (da, db, dy), (x, x, hidden), strict=True)
    ]
    return dx, grads


def _by_platform(cpu: Any, default: Any, *operands: Any) -> Any:
    """On the CPU backend ragged_dot multiplies every row by every expert; tiles do not."""
    return lax.platform_dependent(*operands, cpu=cpu, default=default)


def _inside(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Sizes that fit the rows, and [M, 1] bool: which rows have a group."""
    last = ends(group_sizes, num_rows)
    return jnp.diff(last, prepend=0).astype(jnp.int32), jnp.arange(num_rows)[:, None] < last[-1]


def forward(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    activation: GatedActivation,
    *,
    keep: bool,
) -> Any:
    """[M, L], and with `keep` what the backward pass needs; 0 in rows of no group."""
    sizes, inside = _inside(group_sizes, x.shape[0])
    forms = (
        functools.partial(form, activation=activation, keep=keep)
        for form in (forward_by_tiles, forward_ragged)
    )
    found = _by_platform(*forms, x, experts, sizes)
    return jax.tree.map(lambda rows: jnp.where(inside, rows, 0), found)


def backward(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    kept: Kept,
    dy: jax.Array,
    activation: GatedActivation,
) -> tuple[jax.Array, list[jax.Array | None]]:
    """dx, and the gradients of the weights that are arrays."""
    sizes, inside = _inside(group_sizes, x.shape[0])
    forms = (
        functools.partial(form, activation=activation)
        for form in (backward_by_tiles, backward_ragged)
    )
    dx, grads = _by_platform(*forms, x, experts, sizes, kept, dy)
    return jnp.where(inside, dx, 0), grads
