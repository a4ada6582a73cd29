"""How alike two tokens of a chunk are, with the decay between them: L and A, and their gradients.

    L_ts = k_t . (k_s e^{g_{s+1} + .. + g_t}), s < t        A_ts = q_t . (the same), s <= t

Two forms share one interface. BOUNDED needs g >= -5: each tile of rows is one dense product,
decayed to and from the tile's middle row. In a tile of 32 rows, 16 steps of -5 to either side are
2^115, just inside the float range; in one of 16 they are 2^58, which leaves room for gradients of
any size, and for the parts that a float32 product is made of.
EXACT holds for any gate: pairs of blocks of 1, 2, .. 64 tokens, each decayed to and from the edge
between them, so that no factor exceeds 1. All decays are log2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.tpu.decay import (
    Ranges,
    range_sums,
    range_sums_backward,
    reverse_running_sum,
    running_sum,
    sum_before,
)
from pallas_kernels.kda.tpu.words import (
    CHUNK,
    dot,
    keep,
    matrix,
    numbers,
    pack,
    rows,
    rows_per_word,
    stack,
)

Masks = dict[str, jax.Array]
Rows = list[jax.Array]  # a matrix, by row tiles


def row_tiles(tile: int) -> list[slice]:
    return [slice(i, i + tile) for i in range(0, CHUNK, tile)]


class Factors(NamedTuple):
    """The rows of one head, decayed.

    reads: words [2 C, K], k over q, from the chunk's start. k_out: float32 [C, K], to the chunk's
    end. total: [1, K], the factor of the whole chunk. own: what the form's other functions need.
    """

    reads: jax.Array
    k_out: jax.Array
    total: jax.Array
    own: Any


class FactorGrads(NamedTuple):
    """Gradients. low, a: of L and A, words [C, C], masked. The rest float32: reads [2 C, K], k_out
    [C, K], total [1, K]."""

    low: jax.Array
    a: jax.Array
    reads: jax.Array
    k_out: jax.Array
    total: jax.Array


class Form(NamedTuple):
    """One way to score.

    factors(q, k, g, dtype, tile) -> Factors; tile: rows of a tile, where the form has tiles.
    scores(own, masks, dtype) -> L and A, the upper triangle undefined, inf and NaN included; only_a
    likewise gives A alone. backward(factors, grads, masks, dtype) -> dq, dk, dg, float32 [C, K], dg
    by the natural log decay.
    """

    factors: Callable[..., Factors]
    scores: Callable[..., tuple[Rows, Rows]]
    only_a: Callable[..., Rows]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class _Tiles(NamedTuple):
    """By row tile. rows: its k and q stacked, words [2 n, K]. keys: all up to it, words [C, K].

    Decays, float32: to_row from the middle to the row and to_key back; start from the chunk's start
    to the middle [1, K]; to_end from the row to the tile's end; hops[i][j] from the end of tile j
    to the middle of tile i; outs from the tile's end to the chunk's.
    """

    rows: list[jax.Array]
    keys: list[jax.Array]
    to_row: list[jax.Array]
    to_key: list[jax.Array]
    start: list[jax.Array]
    to_end: list[jax.Array]
    hops: list[list[jax.Array]]
    outs: list[jax.Array]


def _bounded_factors(
    q: jax.Array, k: jax.Array, g: jax.Array, dtype: jnp.dtype, tile: int
) -> Factors:
    sums, tiles = running_sum(g), row_tiles(tile)
    ends = [sums[tile.stop - 1 : tile.stop] for tile in tiles]
    outs = [jnp.exp2(ends[-1] - end) for end in ends[:-1]]
    to_end = [jnp.exp2(end - sums[tile]) for end, tile in zip(ends, tiles, strict=True)]
    k_end = [k[tile] * decay for tile, decay in zip(tiles, to_end, strict=True)]
    own = _Tiles([], [], [], [], [], to_end, [], outs)
    k_in, q_in = [], []
    for i, tile in enumerate(tiles):
        middle = sums[(half := (tile.start + tile.stop) // 2) - 1 : half]
        to_row, to_key = jnp.exp2(sums[tile] - middle), jnp.exp2(middle - sums[tile])
        start = jnp.exp2(middle)
        k_row, q_row = k[tile] * to_row, q[tile] * to_row
        hops = [jnp.exp2(middle - ends[j]) for j in range(i)]
        keys = [k_end[j] * hop for j, hop in enumerate(hops)] + [k[tile] * to_key]
        if tile.stop < CHUNK:
            keys.append(jnp.zeros((CHUNK - tile.stop, k.shape[1]), jnp.float32))
        own.rows.append(pack(stack([k_row, q_row]), dtype))
        own.keys.append(pack(stack(keys), dtype))
        own.to_row.append(to_row)
        own.to_key.append(to_key)
        own.start.append(start)
        own.hops.append(hops)
        k_in.append(k_row * start)
        q_in.append(q_row * start)
    k_out = [x * out for x, out in zip(k_end[:-1], outs, strict=True)] + k_end[-1:]
    return Factors(
        pack(stack(k_in + q_in), dtype),
        stack(k_out),
        jnp.exp2(ends[-1]),
        own,
    )


def _bounded_scores(own: _Tiles, masks: Masks, dtype: jnp.dtype) -> tuple[Rows, Rows]:
    del masks
    products = [
        dot(matrix(tile, dtype), matrix(keys, dtype), (1, 1))
        for tile, keys in zip(own.rows, own.keys, strict=True)
    ]
    half = products[0].shape[0] // 2
    return [p[:half] for p in products], [p[half:] for p in products]


def _bounded_a(own: _Tiles, masks: Masks, dtype: jnp.dtype) -> Rows:
    del masks
    queries = [tile[tile.shape[0] // 2 :] for tile in own.rows]
    return [
        dot(matrix(tile, dtype), matrix(keys, dtype), (1, 1))
        for tile, keys in zip(queries, own.keys, strict=True)
    ]


def _bounded_backward(
    factors: Factors, grads: FactorGrads, masks: Masks, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A decayed row y = x e^s has ds = dy y. Both sides of a product take y as the product saw it,
    rounded: what is added to one row's sum and taken from another's then cancels exactly."""
    del masks
    own = factors.own
    tiles = row_tiles(CHUNK // len(own.rows))
    size = tiles[0].stop
    to_keys, to_rows = [], []
    for i, tile in enumerate(tiles):
        d = stack([rows(x, tile.start, tile.stop, dtype) for x in (grads.low, grads.a)])
        to_rows.append(dot(matrix(d, dtype), matrix(own.keys[i], dtype)))
        # Zero rows up to the width of the matrix unit.
        blank = jnp.zeros((CHUNK // rows_per_word(dtype) - d.shape[0], CHUNK), jnp.int32)
        tall = stack([d, blank])
        wide = stack([own.rows[i], blank[:, : own.rows[i].shape[1]]])
        to_keys.append(dot(matrix(tall, dtype), matrix(wide, dtype), (0, 0)))
    read = numbers(factors.reads, dtype)
    k_in, q_in = read[:CHUNK], read[CHUNK:]
    dq, dk, d_sums = [], [], []
    for i, tile in enumerate(tiles):
        rows_ = numbers(own.rows[i], dtype)
        dk_row, dq_row = to_rows[i][:size], to_rows[i][size:]
        dk_in, dq_in = grads.reads[:CHUNK][tile], grads.reads[CHUNK:][tile]
        dq.append((dq_row + dq_in * own.start[i]) * own.to_row[i])
        d_sum = dk_row * rows_[:size] + dq_row * rows_[size:]
        d_sum += dk_in * k_in[tile] + dq_in * q_in[tile]
        own_key = numbers(rows(own.keys[i], tile.start, tile.stop, dtype), dtype)
        d_sum -= to_keys[i][tile] * own_key
        k_out = grads.k_out[tile] if i == len(tiles) - 1 else grads.k_out[tile] * own.outs[i]
        dk_end = k_out
        for later in range(i + 1, len(tiles)):
            d_key = to_keys[later][tile]
            dk_end += d_key * own.hops[later][i]
            d_sum -= d_key * numbers(rows(own.keys[later], tile.start, tile.stop, dtype), dtype)
        dk.append(
            (dk_row + dk_in * own.start[i]) * own.to_row[i]
            + to_keys[i][tile] * own.to_key[i]
            + dk_end * own.to_end[i]
        )
        d_sums.append(d_sum)
    # Decays to the chunk's end are summed forward: as the whole minus the rest, a large term of the
    # last token, which has not decayed, would be rounded into every row.
    dg = reverse_running_sum(stack(d_sums)) + sum_before(grads.k_out * factors.k_out)
    return stack(dq), stack(dk), dg + grads.total * factors.total


BOUNDED = Form(_bounded_factors, _bounded_scores, _bounded_a, _bounded_backward)


class _Levels(NamedTuple):
    """k, q: words [C, K] by level, times the decay of that level; then undecayed; the decays."""

    k: list[jax.Array]
    q: list[jax.Array]
    plain_k: jax.Array
    plain_q: jax.Array
    decays: Ranges


def _exact_factors(
    q: jax.Array, k: jax.Array, g: jax.Array, dtype: jnp.dtype, tile: int
) -> Factors:
    del tile
    decays = jax.tree.map(jnp.exp2, range_sums(g))
    own = _Levels(
        [pack(k * decay, dtype) for decay in decays.levels],
        [pack(q * decay, dtype) for decay in decays.levels],
        pack(k, dtype),
        pack(q, dtype),
        decays,
    )
    return Factors(
        pack(stack([k * decays.from_start, q * decays.from_start]), dtype),
        k * decays.to_end,
        decays.from_start[CHUNK - 1 :],
        own,
    )


CUT = 32  # rows of the pieces in which scores are handed on
_WHOLE = 16  # rows of a register of bfloat16: smaller blocks are not cut out


def _right_rows(words: jax.Array, level: int, dtype: jnp.dtype) -> jax.Array:
    """Rows of a level's right blocks, where these are whole registers; else all rows."""
    size = 1 << level
    if size < _WHOLE:
        return words
    return stack([rows(words, s, s + size, dtype) for s in range(size, CHUNK, 2 * size)])


def _spread_rows(x: jax.Array, level: int) -> jax.Array:
    """Undoes `_right_rows` on float32 rows; rows of left blocks are 0."""
    size = 1 << level
    if size < _WHOLE:
        return x
    zeros = jnp.zeros((size, x.shape[1]), jnp.float32)
    pieces = [x[s : s + size] for s in range(0, CHUNK // 2, size)]
    return stack([part for piece in pieces for part in (zeros, piece)])


def _exact_scores(own: _Levels, masks: Masks, dtype: jnp.dtype) -> tuple[Rows, Rows]:
    plain = dot(matrix(own.plain_q, dtype), matrix(own.plain_k, dtype), (1, 1))
    low, a = jnp.zeros((CHUNK, CHUNK), jnp.float32), keep(plain, masks['eye_bits'])
    for level, (k, q) in enumerate(zip(own.k, own.q, strict=True)):
        both = stack([_right_rows(k, level, dtype), _right_rows(q, level, dtype)])
        product = dot(matrix(both, dtype), matrix(k, dtype), (1, 1))
        half, here = product.shape[0] // 2, masks[f'level_{level}_bits']
        low += keep(_spread_rows(product[:half], level), here)
        a += keep(_spread_rows(product[half:], level), here)
    return [low[tile] for tile in row_tiles(CUT)], [a[tile] for tile in row_tiles(CUT)]


def _exact_a(own: _Levels, masks: Masks, dtype: jnp.dtype) -> Rows:
    plain = dot(matrix(own.plain_q, dtype), matrix(own.plain_k, dtype), (1, 1))
    a = keep(plain, masks['eye_bits'])
    for level, (k, q) in enumerate(zip(own.k, own.q, strict=True)):
        q = _right_rows(q, level, dtype)
        product = dot(matrix(q, dtype), matrix(k, dtype), (1, 1))
        a += keep(_spread_rows(product, level), masks[f'level_{level}_bits'])
    return [a[tile] for tile in row_tiles(CUT)]


def _exact_backward(
    factors: Factors, grads: FactorGrads, masks: Masks, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A decayed row y = x e^s has ds = dy y, and s is a sum over its own range of g."""
    own, decays = factors.own, factors.own.decays
    low, a = grads.low, grads.a
    dk_in, dq_in = grads.reads[:CHUNK], grads.reads[CHUNK:]
    dq = dq_in * decays.from_start
    dk = dk_in * decays.from_start + grads.k_out * decays.to_end
    on_diagonal = a & masks['eye']
    dq += dot(matrix(on_diagonal, dtype), matrix(own.plain_k, dtype))
    dk += dot(matrix(on_diagonal, dtype), matrix(own.plain_q, dtype))
    moves = []
    for level, (k, q) in enumerate(zip(own.k, own.q, strict=True)):
        here = masks[f'level_{level}']
        d_low, d_a = low & here, a & here
        both = stack([_right_rows(d_low, level, dtype), _right_rows(d_a, level, dtype)])
        to_rows = dot(matrix(both, dtype), matrix(k, dtype))
        half = to_rows.shape[0] // 2
        dk_row = _spread_rows(to_rows[:half], level)
        dq_row = _spread_rows(to_rows[half:], level)
        dk_level = dk_row + dot(matrix(d_low, dtype), matrix(k, dtype), (0, 0))
        dk_level += dot(matrix(d_a, dtype), matrix(q, dtype), (0, 0))
        moves.append(dk_level * numbers(k, dtype) + dq_row * numbers(q, dtype))
        dq += dq_row * decays.levels[level]
        dk += dk_level * decays.levels[level]
    read = numbers(factors.reads, dtype)
    k_in, q_in = read[:CHUNK], read[CHUNK:]
    d = Ranges(moves, dk_in * k_in + dq_in * q_in, grads.k_out * factors.k_out)
    return dq, dk, range_sums_backward(d, grads.total * factors.total)


EXACT = Form(_exact_factors, _exact_scores, _exact_a, _exact_backward)
