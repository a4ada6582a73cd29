"""How KDA runs in parallel: chunks of tokens by matmuls, with a hand-written backward.

Every decay factor is exp of a sum of log decays taken directly over its own range of tokens, never
a difference of two cumulative sums, so no gate, however strong or mixed, loses precision or
overflows. The README of this folder derives the formulas.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.segments import Runs

CHUNK = 64
TILE = 16  # below this, pairs of blocks are done as one masked product


class Masks(NamedTuple):
    """Where packed documents let information pass; all bool.

    same: [B, 1, N, C, C], both tokens in one run. cont: [B, 1, N, C, 1], token in the run that the
    incoming state belongs to. last: [B, 1, N, C, 1], token in the run that leaves the chunk.
    keep: [B, 1, N, 1, 1], the incoming run is the one that leaves.
    """

    same: jax.Array
    cont: jax.Array
    last: jax.Array
    keep: jax.Array


class Inputs(NamedTuple):
    """q, k, g: [B, H, N, C, K]; v: [B, H, N, C, V]; beta: [B, H, N, C, 1]; state: [B, H, K, V]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    state: jax.Array


class Ranges(NamedTuple):
    """Sums of g inside blocks of one size: prefix up to and with a token, suffix after it, total.

    prefix, suffix: [..., C, K]; total: [..., C / block, K].
    """

    prefix: jax.Array
    suffix: jax.Array
    total: jax.Array


def _halves(x: jax.Array, block: int) -> jax.Array:
    """[..., C, K] -> [..., C / (2 block), 2, block, K]."""
    *lead, length, width = x.shape
    return x.reshape(*lead, length // (2 * block), 2, block, width)


def _range_levels(g: jax.Array) -> list[Ranges]:
    """Ranges for blocks of 1, 2, 4, ..., C tokens, each built from the one before."""
    levels = [Ranges(g, jnp.zeros_like(g), g)]
    block = 1
    while block < g.shape[-2]:
        prefix, suffix, total = levels[-1]
        p, s = _halves(prefix, block), _halves(suffix, block)
        t = _halves(total, 1)
        left, right = t[..., 0, :, :], t[..., 1, :, :]
        p = jnp.stack([p[..., 0, :, :], p[..., 1, :, :] + left], axis=-3)
        s = jnp.stack([s[..., 0, :, :] + right, s[..., 1, :, :]], axis=-3)
        total = (left + right)[..., 0, :]
        levels.append(Ranges(p.reshape(g.shape), s.reshape(g.shape), total))
        block *= 2
    return levels


def _merge_gradients(
    d_prefix: jax.Array, d_suffix: jax.Array, d_total: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Transpose of one step of `_range_levels`: gradients at 2 * block -> gradients at block."""
    p, s = _halves(d_prefix, block), _halves(d_suffix, block)
    d_left = d_total + p[..., 1, :, :].sum(-2)
    d_right = d_total + s[..., 0, :, :].sum(-2)
    total = jnp.stack([d_left, d_right], axis=-2)
    return d_prefix, d_suffix, total.reshape(*d_total.shape[:-2], -1, d_total.shape[-1])


def _tiles(x: jax.Array, tile: int) -> jax.Array:
    """[..., C, K] -> [..., C / tile, tile, K]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // tile, tile, x.shape[-1])


def _pair_mask(tile: int, block: int) -> jax.Array:
    """[tile, tile] bool: row in a right block of size `block`, column in its left neighbour."""
    index = jnp.arange(tile) // block
    return (index[:, None] == index[None, :] + 1) & (index[:, None] % 2 == 1)


def _dot(spec: str, a: jax.Array, b: jax.Array, precision: lax.Precision) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=a.dtype)


def _assemble(left: jax.Array, off: jax.Array, right: jax.Array) -> jax.Array:
    """[[left, 0], [off, right]] of equal square blocks."""
    top = jnp.concatenate([left, jnp.zeros_like(off)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([off, right], axis=-1)], axis=-2)


def _side_factors(ranges: Ranges, block: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Decay from the block edge to right-block rows and from left-block rows to it, else 0."""
    is_right = ((jnp.arange(tile) // block) % 2 == 1)[:, None]
    prefix, suffix = _tiles(ranges.prefix, tile), _tiles(ranges.suffix, tile)
    return jnp.where(is_right, jnp.exp(prefix), 0.0), jnp.where(is_right, 0.0, jnp.exp(suffix))


def _intra_scores(
    q: jax.Array, k: jax.Array, levels: list[Ranges], precision: lax.Precision
) -> tuple[jax.Array, jax.Array]:
    """A = tril(q_i . k_j e^{g_{j+1}+..+g_i}) with its diagonal, L the same with k_i, strict.

    Two tokens meet at the one level where they sit in neighbouring blocks: rows decay from the
    edge between the blocks, columns up to it, and both factors are at most 1.
    """
    chunk = q.shape[-2]
    tile = min(TILE, chunk)
    qk = jnp.stack([_tiles(q, tile), _tiles(k, tile)], axis=-3)
    diagonal = jnp.sum(q * k, axis=-1).reshape(*q.shape[:-2], chunk // tile, 1, tile)
    diagonal = diagonal * jnp.eye(tile, dtype=q.dtype)
    scores = jnp.stack([diagonal, jnp.zeros_like(diagonal)], axis=-3)
    block = 1
    while block < tile:
        row, column = _side_factors(levels[block.bit_length() - 1], block, tile)
        product = _dot(
            '...sik,...jk->...sij', qk * row[..., None, :, :], _tiles(k, tile) * column, precision
        )
        scores = scores + jnp.where(_pair_mask(tile, block), product, 0.0)
        block *= 2
    while block < chunk:
        ranges = levels[block.bit_length() - 1]
        row = jnp.exp(_halves(ranges.prefix, block)[..., 1, :, :])
        column = jnp.exp(_halves(ranges.suffix, block)[..., 0, :, :])
        qk = jnp.stack([_halves(x, block)[..., 1, :, :] for x in (q, k)], axis=-3)
        keys = _halves(k, block)[..., 0, :, :] * column
        off = _dot('...sik,...jk->...sij', qk * row[..., None, :, :], keys, precision)
        pairs = scores.reshape(*scores.shape[:-4], -1, 2, *scores.shape[-3:])
        scores = _assemble(pairs[..., 0, :, :, :], off, pairs[..., 1, :, :, :])
        block *= 2
    return scores[..., 0, 0, :, :], scores[..., 0, 1, :, :]


def _diagonal_blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., C, C] -> its diagonal blocks [..., C / block, block, block]."""
    count = x.shape[-1] // block
    split = x.reshape(*x.shape[:-2], count, block, count, block)
    return jnp.moveaxis(jnp.diagonal(split, axis1=-4, axis2=-2), -1, -3)


def _intra_backward(
    q: jax.Array,
    k: jax.Array,
    levels: list[Ranges],
    d_scores: jax.Array,
    d_ranges: Ranges,
    precision: lax.Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `_intra_scores` and of the chunk-wide ranges: (dq, dk, dg).

    d_scores: [..., 2, C, C], of A (causal) and L (strict). d_ranges: of levels[-1].
    """
    chunk = q.shape[-2]
    tile = min(TILE, chunk)
    diagonal = jnp.diagonal(d_scores[..., 0, :, :], axis1=-2, axis2=-1)[..., None]
    dq, dk = diagonal * k, diagonal * q
    d_prefix, d_suffix, d_total = d_ranges
    block = chunk // 2
    while block >= 1:
        d_prefix, d_suffix, d_total = _merge_gradients(d_prefix, d_suffix, d_total, block)
        ranges = levels[block.bit_length() - 1]
        if block >= tile:
            row = jnp.exp(_halves(ranges.prefix, block)[..., 1, :, :])[..., None, :, :]
            column = jnp.exp(_halves(ranges.suffix, block)[..., 0, :, :])
            rows = jnp.stack([_halves(x, block)[..., 1, :, :] for x in (q, k)], axis=-3) * row
            columns = _halves(k, block)[..., 0, :, :] * column
            pairs = _diagonal_blocks(d_scores, 2 * block)
            d = jnp.moveaxis(pairs[..., block:, :block], -4, -3)
        else:
            row, column = _side_factors(ranges, block, tile)
            row = row[..., None, :, :]
            rows = jnp.stack([_tiles(q, tile), _tiles(k, tile)], axis=-3) * row
            columns = _tiles(k, tile) * column
            d = jnp.where(_pair_mask(tile, block), _diagonal_blocks(d_scores, tile), 0.0)
            d = jnp.moveaxis(d, -4, -3)
        d_rows = _dot('...sij,...jk->...sik', d, columns, precision)
        d_columns = _dot('...sij,...sik->...jk', d, rows, precision)
        through_prefix = d_rows * rows
        # An add, not a sum over the axis of two: XLA's CPU backend crashes on a dot fused with one.
        through_prefix = through_prefix[..., 0, :, :] + through_prefix[..., 1, :, :]
        through_suffix = d_columns * columns
        d_rows, d_columns = d_rows * row, d_columns * column
        if block >= tile:
            zero = jnp.zeros_like(through_suffix)

            def right(x, zero=zero):
                return jnp.stack([zero, x], axis=-3).reshape(q.shape)

            def left(x, zero=zero):
                return jnp.stack([x, zero], axis=-3).reshape(q.shape)
        else:

            def right(x):
                return x.reshape(q.shape)

            left = right
        d_prefix = d_prefix + right(through_prefix)
        d_suffix = d_suffix + left(through_suffix)
        dq = dq + right(d_rows[..., 0, :, :])
        dk = dk + right(d_rows[..., 1, :, :]) + left(d_columns)
        block //= 2
    return dq, dk, d_prefix + d_total


def _unit_lower_inverse(n: jax.Array, precision: lax.Precision) -> jax.Array:
    """(I + n)^-1 for strictly lower n [..., C, C], by recursive doubling of solved blocks."""
    chunk = n.shape[-1]
    tile = min(TILE, chunk)
    low = _diagonal_blocks(n, tile)
    inverse = jnp.broadcast_to(jnp.eye(tile, dtype=n.dtype), low.shape)
    block = 1
    while block < tile:
        off = jnp.where(_pair_mask(tile, block), low, 0.0)
        update = _dot('...ij,...jk->...ik', off, inverse, precision)
        inverse = inverse - _dot('...ij,...jk->...ik', inverse, update, precision)
        block *= 2
    while block < chunk:
        off = _diagonal_blocks(n, 2 * block)[..., block:, :block]
        pairs = inverse.reshape(*inverse.shape[:-3], -1, 2, block, block)
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        update = _dot('...ij,...jk->...ik', off, left, precision)
        update = -_dot('...ij,...jk->...ik', right, update, precision)
        inverse = _assemble(left, update, right)
        block *= 2
    return inverse[..., 0, :, :]


class Residuals(NamedTuple):
    """Kept for the backward pass. states: [N, B, H, K, V], what enters each chunk."""

    inputs: Inputs
    masks: Masks | None
    scores: jax.Array  # L and A: [B, H, N, 2, C, C], A first
    inverse: jax.Array  # [B, H, N, C, C]
    u: jax.Array  # [B, H, N, C, V]
    states: jax.Array


def _over_chunks(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 2, 0)


def _mask(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


def _decays(
    inputs: Inputs, top: Ranges, masks: Masks | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q and k decayed from the chunk's start, k decayed to its end, and the state's own decay."""
    cont, last, keep = (None, None, None) if masks is None else masks[1:]
    from_start = _mask(jnp.exp(top.prefix), cont)
    to_end = _mask(jnp.exp(top.suffix), last)
    state_decay = _mask(jnp.exp(top.total), keep)
    return inputs.q * from_start, inputs.k * from_start, inputs.k * to_end, state_decay


def _forward(
    inputs: Inputs, masks: Masks | None, precision: lax.Precision
) -> tuple[jax.Array, jax.Array, Residuals]:
    q, k, v, g, beta, state = inputs
    levels = _range_levels(g)
    same = None if masks is None else masks.same
    a, low = _intra_scores(q, k, levels, precision)
    a, low = _mask(a, same), _mask(low, same)
    inverse = _unit_lower_inverse(beta * low, precision)
    q_in, k_in, k_out, state_decay = _decays(inputs, levels[-1], masks)

    def step(state, x):
        k_in, k_out, v, beta, inverse, decay = x
        error = v - _dot('bhck,bhkv->bhcv', k_in, state, precision)
        u = _dot('bhij,bhjv->bhiv', inverse, beta * error, precision)
        after = decay[..., 0, :, None] * state + _dot('bhck,bhcv->bhkv', k_out, u, precision)
        return after, (u, state)

    xs = tuple(_over_chunks(x) for x in (k_in, k_out, v, beta, inverse, state_decay))
    final, (u, states) = lax.scan(step, state, xs)
    u = jnp.moveaxis(u, 0, 2)
    o = _dot('bhnck,nbhkv->bhncv', q_in, states, precision)
    o = o + _dot('bhnij,bhnjv->bhniv', a, u, precision)
    scores = jnp.stack([a, low], axis=-3)
    return o, final, Residuals(inputs, masks, scores, inverse, u, states)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chunks(
    inputs: Inputs, masks: Masks | None, precision: lax.Precision
) -> tuple[jax.Array, jax.Array]:
    return _forward(inputs, masks, precision)[:2]


def _chunks_forward(inputs, masks, precision):
    o, final, residuals = _forward(inputs, masks, precision)
    return (o, final), residuals


def _chunks_backward(precision, residuals, cotangents):
    do, d_final = cotangents
    inputs, masks, scores, inverse, u, states = residuals
    q, k, v, g, beta, _ = inputs
    a, low = scores[..., 0, :, :], scores[..., 1, :, :]
    levels = _range_levels(g)
    q_in, k_in, k_out, state_decay = _decays(inputs, levels[-1], masks)

    def step(d_state, x):
        do, q_in, k_in, k_out, a, inverse, beta, decay = x
        du = _dot('bhij,bhiv->bhjv', a, do, precision)
        du = du + _dot('bhck,bhkv->bhcv', k_out, d_state, precision)
        dr = _dot('bhij,bhiv->bhjv', inverse, du, precision)
        before = decay[..., 0, :, None] * d_state
        before = before + _dot('bhck,bhcv->bhkv', q_in, do, precision)
        before = before - _dot('bhck,bhcv->bhkv', k_in, beta * dr, precision)
        return before, (dr, d_state)

    xs = tuple(_over_chunks(x) for x in (do, q_in, k_in, k_out, a, inverse, beta, state_decay))
    d_initial, (dr, d_states) = lax.scan(step, d_final, xs, reverse=True)
    dr = jnp.moveaxis(dr, 0, 2)

    de = beta * dr
    error = v - _dot('bhnck,nbhkv->bhncv', k_in, states, precision)
    chunk = q.shape[-2]
    same = None if masks is None else masks.same
    strict = jnp.tril(jnp.ones((chunk, chunk), bool), -1)
    dn = -jnp.where(strict, _dot('bhniv,bhnjv->bhnij', dr, u, precision), 0.0)
    da = jnp.where(
        jnp.tril(jnp.ones((chunk, chunk), bool)),
        _dot('bhniv,bhnjv->bhnij', do, u, precision),
        0.0,
    )
    d_beta = jnp.sum(dr * error, -1, keepdims=True) + jnp.sum(dn * low, -1, keepdims=True)
    d_scores = jnp.stack([_mask(da, same), _mask(beta * dn, same)], axis=-3)

    dq_in = _dot('bhncv,nbhkv->bhnck', do, states, precision)
    dk_in = -_dot('bhncv,nbhkv->bhnck', de, states, precision)
    dk_out = _dot('bhncv,nbhkv->bhnck', u, d_states, precision)
    d_total = state_decay * jnp.moveaxis(jnp.sum(d_states * states, -1), 0, 2)[..., None, :]
    d_ranges = Ranges(dq_in * q_in + dk_in * k_in, dk_out * k_out, d_total)

    dq, dk, dg = _intra_backward(q, k, levels, d_scores, d_ranges, precision)
    cont, last = (None, None) if masks is None else (masks.cont, masks.last)
    from_start = _mask(jnp.exp(levels[-1].prefix), cont)
    to_end = _mask(jnp.exp(levels[-1].suffix), last)
    dq = dq + dq_in * from_start
    dk = dk + dk_in * from_start + dk_out * to_end
    return Inputs(dq, dk, de, dg, d_beta, d_initial), None


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _masks(number: jax.Array, chunk: int) -> Masks:
    """number: [B, N * C] run numbers."""
    number = number.reshape(number.shape[0], 1, -1, chunk)
    leaving = number[..., -1:]
    entering = jnp.pad(leaving[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    return Masks(
        same=number[..., :, None] == number[..., None, :],
        cont=(number == entering)[..., None],
        last=(number == leaving)[..., None],
        keep=(leaving == entering)[..., None],
    )


def chunked_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    runs: Runs | None,
    precision: lax.Precision,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """KDA by chunks in plain JAX; arguments as in `kda`, q and k normalised.

    Returns:
      o: [B, T, H, V] float32, final state [B, H, K, V] float32.
    """
    length = q.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    padding = -length % chunk

    def split(x):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return jnp.moveaxis(x, 2, 1).reshape(x.shape[0], x.shape[2], -1, chunk, x.shape[3])

    beta = beta[..., None]
    masks = None
    if runs is not None:
        real = runs.real[:, :, None, None]
        q, k, v, g, beta = (jnp.where(real, x, 0) for x in (q, k, v, g, beta))
        masks = _masks(jnp.pad(runs.number, ((0, 0), (0, padding)), mode='edge'), chunk)
    inputs = Inputs(*(split(x) for x in (q, k, v, g, beta)), initial_state)
    o, final = _chunks(inputs, masks, precision)
    o = o.reshape(o.shape[0], o.shape[1], -1, o.shape[-1])[:, :, :length]
    o = jnp.moveaxis(o, 1, 2)
    if runs is not None:
        o = jnp.where(runs.real[:, :, None, None], o, 0)
    return o, final
