"""How training attention is computed in plain JAX: softmax over earlier tokens, block by block.

Neither direction holds a [T, T] array: blocks above the diagonal are never visited, and the
backward pass recomputes the scores of a block from the saved log of the softmax's denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.segments import Runs
from pallas_kernels.mla.blocks import LOWEST, How

BLOCK = 128  # tokens; scores of a block stay in cache
LONG = 4096  # tokens from which larger blocks keep the loops short
LONG_BLOCK = 512
NO_RUN = -1  # of padding; matches nothing


class _Blocks(NamedTuple):
    """q, k: [n, B, H, block, qk]; v: [n, B, H, block, V]; runs: [n, B, block] int32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    query_run: jax.Array
    key_run: jax.Array


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _block_of(length: int) -> int:
    return LONG_BLOCK if length >= LONG else min(BLOCK, length)


def _split(x: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] as [n, B, H, block, D]; zeros past T."""
    batch, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    return jnp.einsum('bnchd->nbhcd', x.reshape(batch, -1, block, heads, width))


def _joined(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `_split`."""
    num, batch, heads, block, width = x.shape
    return jnp.einsum('nbhcd->bnchd', x).reshape(batch, num * block, heads, width)[:, :length]


def _rows(x: jax.Array, length: int) -> jax.Array:
    """[n, B, H, block, 1] as [B, H, T]."""
    return jnp.swapaxes(_joined(x, length)[..., 0], 1, 2)


def _blocks(q: jax.Array, k: jax.Array, v: jax.Array, runs: tuple[Runs, Runs] | None) -> _Blocks:
    batch, length = q.shape[:2]
    block = _block_of(length)

    def numbers(one: Runs | None) -> jax.Array:
        if one is None:
            run = jnp.zeros((batch, length), jnp.int32)
        else:
            run = jnp.where(one.real, one.number, NO_RUN)
        run = jnp.pad(run, ((0, 0), (0, -length % block)), constant_values=NO_RUN)
        return jnp.moveaxis(run.reshape(batch, -1, block), 1, 0)

    if runs is not None:
        # What padding holds must not matter, and 0 * NaN would.
        of_queries, of_keys = (one.real[:, :, None, None] for one in runs)
        q, k, v = (
            jnp.where(real, x, 0) for x, real in ((q, of_queries), (k, of_keys), (v, of_keys))
        )
    split = (_split(x, block) for x in (q, k, v))
    return _Blocks(*split, *(numbers(one) for one in runs or (None, None)))


def _scores(blocks: _Blocks, i: jax.Array, j: jax.Array, q: jax.Array, causal: bool) -> jax.Array:
    """Masked scores [B, H, block, block] of query block i and key block j."""
    scores = jnp.einsum('bhqd,bhkd->bhqk', q, blocks.k[j], preferred_element_type=_wide(q))
    row, column = blocks.query_run[i][:, None, :, None], blocks.key_run[j][:, None, None, :]
    seen = (row == column) & (row != NO_RUN)
    if causal:
        size = scores.shape[-1]
        place = jnp.arange(size)
        seen &= (i * size + place)[:, None] >= j * size + place
    return jnp.where(seen, scores * q.shape[-1] ** -0.5, LOWEST)


def attention_xla(
    how: How, q: jax.Array, k: jax.Array, v: jax.Array, runs: tuple[Runs, Runs] | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o [B, T, H, V], log denominators and largest logits a query, [B, H, T] in float32 or wider.

    Of a query that is padding, the largest logit is -inf.
    """
    length, blocks = q.shape[1], _blocks(q, k, v, runs)
    num_blocks, *lead, _ = blocks.q.shape
    wide, out = _wide(q), how.out_dtype or v.dtype

    def end(i: jax.Array) -> jax.Array | int:
        return i + 1 if how.causal else num_blocks

    def rows(i: jax.Array) -> tuple[jax.Array, ...]:
        q = blocks.q[i]

        def step(j, carry):
            top, total, mixed = carry
            scores = _scores(blocks, i, j, q, how.causal)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_top)
            shrink = jnp.exp(top - new_top)
            value = blocks.v[j]
            read = jnp.einsum(
                'bhqk,bhkv->bhqv', weights.astype(value.dtype), value, preferred_element_type=wide
            )
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return new_top, total, mixed * shrink + read

        top = jnp.full((*lead, 1), LOWEST, wide)
        mixed = jnp.zeros((*lead, blocks.v.shape[-1]), wide)
        top, total, mixed = lax.fori_loop(0, end(i), step, (top, jnp.zeros_like(top), mixed))
        real = (blocks.query_run[i] != NO_RUN)[:, None, :, None]
        o = jnp.where(real, mixed / total, 0).astype(out)
        return o, top + jnp.log(total), jnp.where(real, top, -jnp.inf)

    o, log_total, top = lax.map(rows, jnp.arange(num_blocks))
    return _joined(o, length), _rows(log_total, length), _rows(top, length)


def attention_xla_gradients(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: tuple[Runs, Runs] | None,
    o: jax.Array,
    log_total: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from what `attention_xla` returned and the cotangent of o."""
    length, blocks = q.shape[1], _blocks(q, k, v, runs)
    wide, block = _wide(q), _block_of(q.shape[1])
    scale = q.shape[-1] ** -0.5
    out = how.out_dtype or q.dtype

    def end(i: jax.Array) -> jax.Array | int:
        return i + 1 if how.causal else blocks.k.shape[0]

    o, do = _split(o, block), _split(do, block)
    log_total = _split(jnp.swapaxes(log_total, 1, 2)[..., None], block)

    def rows(carry, i):
        q, do_i = blocks.q[i], do[i]
        real = (blocks.query_run[i] != NO_RUN)[:, None, :, None]
        do_i = jnp.where(real, do_i, 0)
        mean = jnp.sum(do_i.astype(wide) * o[i].astype(wide), axis=-1, keepdims=True)

        def step(j, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(blocks, i, j, q, how.causal) - log_total[i])
            d_weights = jnp.einsum(
                'bhqv,bhkv->bhqk', do_i, blocks.v[j], preferred_element_type=wide
            )
            d_scores = (weights * (d_weights - mean) * scale).astype(q.dtype)
            weights = weights.astype(do_i.dtype)
            to_v = jnp.einsum('bhqk,bhqv->bhkv', weights, do_i, preferred_element_type=wide)
            to_k = jnp.einsum('bhqk,bhqd->bhkd', d_scores, q, preferred_element_type=wide)
            dq += jnp.einsum('bhqk,bhkd->bhqd', d_scores, blocks.k[j], preferred_element_type=wide)
            return dq, dk.at[j].add(to_k), dv.at[j].add(to_v)

        dq, dk, dv = lax.fori_loop(0, end(i), step, (jnp.zeros(q.shape, wide), *carry))
        return (dk, dv), dq.astype(out)

    zeros = jnp.zeros(blocks.k.shape, wide), jnp.zeros(blocks.v.shape, wide)
    (dk, dv), dq = lax.scan(rows, zeros, jnp.arange(blocks.q.shape[0]))
    dk, dv = dk.astype(out), dv.astype(out)
    return _joined(dq, length), _joined(dk, length), _joined(dv, length)
