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
import numpy as np
from jax import lax

from pallas_kernels.common.segments import Runs

CHUNK = 64
TILE = 16  # pairs of blocks inside a tile are scored by products of tiles, others of the chunk


class Masks(NamedTuple):
    """Where packed documents let information pass, one chunk; all bool.

    same: [B, 1, C, C], both tokens in one run. cont: [B, 1, C, 1], token in the run that the
    incoming state belongs to. last: [B, 1, C, 1], token in the run that leaves the chunk.
    keep: [B, 1, 1, 1], the incoming run is the one that leaves.
    """

    same: jax.Array
    cont: jax.Array
    last: jax.Array
    keep: jax.Array


class Inputs(NamedTuple):
    """One chunk. q, k, g: [B, H, C, K]; v: [B, H, C, V]; beta: [B, H, C, 1]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Solved(NamedTuple):
    """What the forward pass of a chunk keeps for its backward pass.

    state: [B, H, K, V], what enters the chunk. scores: [B, H, 2, C, C], A and L.
    inverse: [B, H, C, C]. u: [B, H, C, V].
    """

    state: jax.Array
    scores: jax.Array
    inverse: jax.Array
    u: jax.Array


@functools.cache
def _num_levels(chunk: int) -> int:
    return chunk.bit_length() - 1


@functools.cache
def _range_matrix(chunk: int) -> np.ndarray:
    """[(levels + 2) * C, C] of 0 and 1: which log decays each row adds up.

    Level l has blocks of b = 2^l tokens. A token in a right (odd) block adds from the block's
    start to itself, a token in a left block from behind itself to the block's end. Then come the
    ranges from the chunk's start to each token, and from behind each token to the chunk's end.
    """
    t, s = np.arange(chunk)[:, None], np.arange(chunk)[None]
    rows = []
    for level in range(_num_levels(chunk)):
        block = t >> level
        same = block == (s >> level)
        rows.append(same & np.where(block % 2 == 1, s <= t, s > t))
    rows += [s <= t, s > t]
    return np.concatenate(rows).astype(np.float32)


@functools.cache
def _pair_masks(size: int, first: int, last: int) -> np.ndarray:
    """[levels, size, size] float32: row in a right block, column in the left block before it."""
    t, s = np.arange(size)[:, None], np.arange(size)[None]
    masks = [
        ((t >> level) % 2 == 1) & ((t >> level) == (s >> level) + 1) for level in range(first, last)
    ]
    return np.stack(masks).astype(np.float32)


def _dot(spec: str, a: jax.Array, b: jax.Array, precision: lax.Precision) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=a.dtype)


def _range_matrices(g: jax.Array) -> jax.Array:
    """`_range_matrix` a head: as one matmul of all heads its result would need a transpose."""
    matrix = jnp.asarray(_range_matrix(g.shape[-2]), g.dtype)
    return jnp.broadcast_to(matrix, (*g.shape[:2], *matrix.shape))


def _ranges(g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """exp of the range sums: levels [B, H, levels, C, K], from start, to end [B, H, C, K], all."""
    *lead, chunk, width = g.shape
    sums = _dot('bhrj,bhjk->bhrk', _range_matrices(g), g, lax.Precision.HIGHEST)
    factors = jnp.exp(sums).reshape(*lead, -1, chunk, width)
    total = jnp.exp(jnp.sum(g, axis=-2, keepdims=True))
    return factors[..., :-2, :, :], factors[..., -2, :, :], factors[..., -1, :, :], total


def _split(x: jax.Array, size: int) -> jax.Array:
    """[..., C, K] -> [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


class _Tier(NamedTuple):
    """Levels `first` to `last` scored by products of `size` x `size` tokens."""

    size: int
    first: int
    last: int


def _tiers(chunk: int) -> list[_Tier]:
    small, levels = min(TILE, chunk), _num_levels(chunk)
    cut = _num_levels(small)
    tiers = [_Tier(small, 0, cut), _Tier(chunk, cut, levels)]
    return [tier for tier in tiers if tier.first < tier.last]


def _on_diagonal(blocks: jax.Array) -> jax.Array:
    """[..., n, size, size] -> [..., n * size, n * size] with the blocks on its diagonal."""
    *lead, count, size, _ = blocks.shape
    if count == 1:
        return blocks[..., 0, :, :]
    eye = jnp.eye(count, dtype=blocks.dtype)
    spread = blocks[..., :, :, None, :] * eye[:, None, :, None]
    return spread.reshape(*lead, count * size, count * size)


def _diagonal_blocks(x: jax.Array, size: int) -> jax.Array:
    """[..., C, C] -> its diagonal blocks [..., C / size, size, size]."""
    *lead, chunk, _ = x.shape
    blocks = [x[..., i : i + size, i : i + size] for i in range(0, chunk, size)]
    return jnp.stack(blocks, axis=-3)


def _scores(
    q: jax.Array, k: jax.Array, factors: jax.Array, precision: lax.Precision
) -> tuple[jax.Array, jax.Array]:
    """A = tril(q_i . k_j e^{g_{j+1}+..+g_i}) with its diagonal, L the same with k_i, strict.

    Two tokens meet at the one level where they sit in neighbouring blocks: the row decays from
    the edge between the blocks, the column up to it, and both factors are at most 1.

    Args: q, k [B, H, C, K]; factors [B, H, levels, C, K]. Returns: two [B, H, C, C].
    """
    chunk = q.shape[-2]
    a = jnp.sum(q * k, axis=-1)[..., None] * jnp.eye(chunk, dtype=q.dtype)
    low = jnp.zeros_like(a)
    for size, first, last in _tiers(chunk):
        f = factors[:, :, first:last]
        keys = _split(k[:, :, None] * f, size)
        queries = _split(q[:, :, None] * f, size)
        masks = jnp.asarray(_pair_masks(size, first, last), q.dtype)[:, None]
        from_q = _dot('bhlnik,bhlnjk->bhlnij', queries, keys, precision)
        from_k = _dot('bhlnik,bhlnjk->bhlnij', keys, keys, precision)
        a = a + _on_diagonal(_add_levels(from_q, masks))
        low = low + _on_diagonal(_add_levels(from_k, masks))
    return a, low


def _add_levels(x: jax.Array, masks: jax.Array) -> jax.Array:
    """[B, H, levels, n, size, size] -> [B, H, n, size, size], each level where its mask is."""
    # Adds, not a sum over the axis: XLA's CPU backend crashes on some dots fused with one.
    return sum(x[:, :, level] * masks[level] for level in range(x.shape[2]))


def _scores_backward(
    q: jax.Array,
    k: jax.Array,
    factors: jax.Array,
    da: jax.Array,
    dl: jax.Array,
    precision: lax.Precision,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Gradients of `_scores`: dq, dk, and those of the range sums [B, H, levels, C, K] by tier."""
    chunk = q.shape[-2]
    diagonal = jnp.sum(da * jnp.eye(chunk, dtype=q.dtype), axis=-1)[..., None]
    dq, dk, d_sums = diagonal * k, diagonal * q, []
    for size, first, last in _tiers(chunk):
        f = factors[:, :, first:last]
        keys = _split(k[:, :, None] * f, size)
        queries = _split(q[:, :, None] * f, size)
        masks = jnp.asarray(_pair_masks(size, first, last), q.dtype)[:, None]
        d_from_q = _diagonal_blocks(da, size)[:, :, None] * masks
        d_from_k = _diagonal_blocks(dl, size)[:, :, None] * masks
        d_queries = _dot('bhlnij,bhlnjk->bhlnik', d_from_q, keys, precision)
        both = d_from_k + jnp.swapaxes(d_from_k, -1, -2)
        d_keys = _dot('bhlnij,bhlnjk->bhlnik', both, keys, precision)
        d_keys = d_keys + _dot('bhlnij,bhlnik->bhlnjk', d_from_q, queries, precision)
        d_sums.append((d_queries * queries + d_keys * keys).reshape(f.shape))
        d_queries = d_queries.reshape(f.shape) * f
        d_keys = d_keys.reshape(f.shape) * f
        dq = dq + sum(d_queries[:, :, level] for level in range(f.shape[2]))
        dk = dk + sum(d_keys[:, :, level] for level in range(f.shape[2]))
    return dq, dk, d_sums


def _unit_lower_inverse(n: jax.Array, precision: lax.Precision) -> jax.Array:
    """(I + n)^-1 for strictly lower n [B, H, C, C], by recursive doubling of solved blocks."""
    chunk = n.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(chunk, dtype=n.dtype), n.shape)
    for size, first, last in _tiers(chunk):
        low = _diagonal_blocks(n, size)
        solved = _diagonal_blocks(inverse, size)
        for mask in _pair_masks(size, first, last):
            update = _dot('bhnij,bhnjk->bhnik', low * jnp.asarray(mask, n.dtype), solved, precision)
            solved = solved - _dot('bhnij,bhnjk->bhnik', solved, update, precision)
        inverse = _on_diagonal(solved)
    return inverse


def _mask(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


def _decays(
    from_start: jax.Array, to_end: jax.Array, total: jax.Array, masks: Masks | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decay from the incoming state to each token, from each token to the outgoing one, of all."""
    if masks is None:
        return from_start, to_end, total
    return (
        _mask(from_start, masks.cont),
        _mask(to_end, masks.last),
        _mask(total, masks.keep),
    )


def _chunk_forward(
    state: jax.Array, inputs: Inputs, masks: Masks | None, precision: lax.Precision
) -> tuple[jax.Array, jax.Array, Solved]:
    """One chunk: the state after it, its outputs [B, H, C, V], and what backward needs."""
    q, k, v, g, beta = inputs
    factors, *edges = _ranges(g)
    from_start, to_end, total = _decays(*edges, masks)
    same = None if masks is None else masks.same
    a, low = _scores(q, k, factors, precision)
    a, low = _mask(a, same), _mask(low, same)
    inverse = _unit_lower_inverse(beta * low, precision)
    error = v - _dot('bhck,bhkv->bhcv', k * from_start, state, precision)
    u = _dot('bhij,bhjv->bhiv', inverse, beta * error, precision)
    o = _dot('bhck,bhkv->bhcv', q * from_start, state, precision)
    o = o + _dot('bhij,bhjv->bhiv', a, u, precision)
    after = jnp.swapaxes(total, -1, -2) * state
    after = after + _dot('bhck,bhcv->bhkv', k * to_end, u, precision)
    return after, o, Solved(state, jnp.stack([a, low], axis=2), inverse, u)


def _chunk_backward(
    d_state: jax.Array,
    do: jax.Array,
    inputs: Inputs,
    masks: Masks | None,
    solved: Solved,
    precision: lax.Precision,
) -> tuple[jax.Array, Inputs]:
    """Gradients of `_chunk_forward`: of the incoming state, and of the inputs."""
    q, k, v, g, beta = inputs
    state, scores, inverse, u = solved
    a, low = scores[:, :, 0], scores[:, :, 1]
    factors, *edges = _ranges(g)
    from_start, to_end, total = _decays(*edges, masks)
    q_in, k_in, k_out = q * from_start, k * from_start, k * to_end

    du = _dot('bhij,bhiv->bhjv', a, do, precision)
    du = du + _dot('bhck,bhkv->bhcv', k_out, d_state, precision)
    dr = _dot('bhij,bhiv->bhjv', inverse, du, precision)
    de = beta * dr
    decay = jnp.swapaxes(total, -1, -2)
    before = decay * d_state + _dot('bhck,bhcv->bhkv', q_in, do, precision)
    before = before - _dot('bhck,bhcv->bhkv', k_in, de, precision)

    chunk = q.shape[-2]
    causal = jnp.asarray(np.tri(chunk, dtype=np.float32), q.dtype)
    strict = jnp.asarray(np.tri(chunk, k=-1, dtype=np.float32), q.dtype)
    same = None if masks is None else masks.same
    da = _mask(_dot('bhiv,bhjv->bhij', do, u, precision) * causal, same)
    dn = _mask(_dot('bhiv,bhjv->bhij', dr, u, precision) * -strict, same)
    error = v - _dot('bhck,bhkv->bhcv', k_in, state, precision)
    d_beta = jnp.sum(dr * error, -1, keepdims=True) + jnp.sum(dn * low, -1, keepdims=True)
    dq, dk, d_sums = _scores_backward(q, k, factors, da, beta * dn, precision)

    dq_in = _dot('bhcv,bhkv->bhck', do, state, precision)
    dk_in = -_dot('bhcv,bhkv->bhck', de, state, precision)
    dk_out = _dot('bhcv,bhkv->bhck', u, d_state, precision)
    dq = dq + dq_in * from_start
    dk = dk + dk_in * from_start + dk_out * to_end
    d_sums.append((dq_in * q_in + dk_in * k_in)[:, :, None])
    d_sums.append((dk_out * k_out)[:, :, None])
    d_sums = jnp.concatenate(d_sums, axis=2).reshape(*g.shape[:2], -1, g.shape[-1])
    dg = _dot('bhrj,bhrk->bhjk', _range_matrices(g), d_sums, lax.Precision.HIGHEST)
    d_total = jnp.sum(decay * d_state * state, axis=-1)[:, :, None]
    return before, Inputs(dq, dk, de, dg + d_total, d_beta)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunks(
    state: jax.Array, inputs: Inputs, masks: Masks | None, precision: lax.Precision
) -> tuple[jax.Array, jax.Array]:
    """All chunks in order, on a leading axis N: outputs [N, B, H, C, V] and the final state."""

    def step(state, x):
        after, o, _ = _chunk_forward(state, *x, precision)
        return after, o

    final, o = lax.scan(step, state, (inputs, masks))
    return o, final


def _chunks_forward(state, inputs, masks, precision):
    def step(state, x):
        after, o, solved = _chunk_forward(state, *x, precision)
        return after, (o, solved)

    final, (o, solved) = lax.scan(step, state, (inputs, masks))
    return (o, final), (inputs, masks, solved)


def _chunks_backward(precision, residuals, cotangents):
    do, d_final = cotangents

    def step(d_state, x):
        return _chunk_backward(d_state, *x, precision)

    d_initial, d_inputs = lax.scan(step, d_final, (do, *residuals), reverse=True)
    return d_initial, d_inputs, None


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _masks(number: jax.Array, chunk: int) -> Masks:
    """number: [B, N * C] run numbers -> masks on a leading axis N."""
    number = jnp.moveaxis(number.reshape(number.shape[0], -1, 1, chunk), 1, 0)
    leaving = number[..., -1:]
    entering = jnp.pad(leaving[:-1], ((1, 0), (0, 0), (0, 0), (0, 0)))
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
    batch, length = q.shape[:2]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    padding = -length % chunk

    def split(x):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return jnp.einsum('bnchk->nbhck', x.reshape(batch, -1, chunk, *x.shape[2:]))

    beta = beta[..., None]
    masks = None
    if runs is not None:
        real = runs.real[:, :, None, None]
        q, k, v, g, beta = (jnp.where(real, x, 0) for x in (q, k, v, g, beta))
        masks = _masks(jnp.pad(runs.number, ((0, 0), (0, padding)), mode='edge'), chunk)
    inputs = Inputs(*(split(x) for x in (q, k, v, g, beta)))
    o, final = _chunks(initial_state, inputs, masks, precision)
    o = jnp.einsum('nbhcv->bnchv', o).reshape(batch, -1, *v.shape[2:])[:, :length]
    if runs is not None:
        o = jnp.where(runs.real[:, :, None, None], o, 0)
    return o, final
