"""What attention computes in training: softmax over earlier tokens, block by block.

Neither direction holds a [T, T] array: blocks above the diagonal are never visited, and the
backward pass recomputes the scores of a block from the saved log of the softmax's denominator.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.segments import runs_of

BLOCK = 128  # tokens; scores of a block stay in cache
LONG = 4096  # tokens from which larger blocks keep the loops short
LONG_BLOCK = 512
NO_RUN = -1  # of padding; matches nothing
_LOWEST = -1e30  # finite, so that rows without a key stay finite


class _Blocks(NamedTuple):
    """q, k: [n, B, H, block, qk]; v: [n, B, H, block, V]; run: [n, B, block] int32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    run: jax.Array


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _scores(blocks: _Blocks, i: jax.Array, j: jax.Array, q: jax.Array) -> jax.Array:
    """Masked scores [B, H, block, block] of query block i and key block j."""
    scores = jnp.einsum('bhqd,bhkd->bhqk', q, blocks.k[j], preferred_element_type=_wide(q))
    size = scores.shape[-1]
    row, column = blocks.run[i][:, None, :, None], blocks.run[j][:, None, None, :]
    place = jnp.arange(size)
    earlier = (i * size + place)[:, None] >= j * size + place
    seen = (row == column) & (row != NO_RUN) & earlier
    return jnp.where(seen, scores * q.shape[-1] ** -0.5, _LOWEST)


def _forward(blocks: _Blocks) -> tuple[jax.Array, jax.Array]:
    """Outputs [n, B, H, block, V] and log denominators [n, B, H, block, 1]."""
    num_blocks, *lead, _ = blocks.q.shape
    wide = _wide(blocks.q)

    def rows(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = blocks.q[i]

        def step(j, carry):
            top, total, mixed = carry
            scores = _scores(blocks, i, j, q)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_top)
            shrink = jnp.exp(top - new_top)
            value = blocks.v[j]
            read = jnp.einsum(
                'bhqk,bhkv->bhqv', weights.astype(value.dtype), value, preferred_element_type=wide
            )
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return new_top, total, mixed * shrink + read

        top = jnp.full((*lead, 1), _LOWEST, wide)
        mixed = jnp.zeros((*lead, blocks.v.shape[-1]), wide)
        top, total, mixed = lax.fori_loop(0, i + 1, step, (top, jnp.zeros_like(top), mixed))
        real = (blocks.run[i] != NO_RUN)[:, None, :, None]
        return jnp.where(real, mixed / total, 0).astype(blocks.v.dtype), top + jnp.log(total)

    return lax.map(rows, jnp.arange(num_blocks))


@jax.custom_vjp
def _attend(blocks: _Blocks) -> jax.Array:
    return _forward(blocks)[0]


def _attend_forward(blocks: _Blocks):
    o, log_total = _forward(blocks)
    return o, (blocks, o, log_total)


def _attend_backward(residuals, do):
    blocks, o, log_total = residuals
    wide = _wide(blocks.q)
    scale = blocks.q.shape[-1] ** -0.5

    def rows(carry, i):
        q, do_i = blocks.q[i], do[i]
        real = (blocks.run[i] != NO_RUN)[:, None, :, None]
        do_i = jnp.where(real, do_i, 0)
        mean = jnp.sum(do_i.astype(wide) * o[i].astype(wide), axis=-1, keepdims=True)

        def step(j, carry):
            dq, dk, dv = carry
            weights = jnp.exp(_scores(blocks, i, j, q) - log_total[i])
            d_weights = jnp.einsum(
                'bhqv,bhkv->bhqk', do_i, blocks.v[j], preferred_element_type=wide
            )
            d_scores = (weights * (d_weights - mean) * scale).astype(q.dtype)
            weights = weights.astype(do_i.dtype)
            to_v = jnp.einsum('bhqk,bhqv->bhkv', weights, do_i, preferred_element_type=wide)
            to_k = jnp.einsum('bhqk,bhqd->bhkd', d_scores, q, preferred_element_type=wide)
            dq += jnp.einsum('bhqk,bhkd->bhqd', d_scores, blocks.k[j], preferred_element_type=wide)
            return dq, dk.at[j].add(to_k), dv.at[j].add(to_v)

        dq, dk, dv = lax.fori_loop(0, i + 1, step, (jnp.zeros(q.shape, wide), *carry))
        return (dk, dv), dq.astype(q.dtype)

    zeros = jnp.zeros(blocks.k.shape, wide), jnp.zeros(blocks.v.shape, wide)
    (dk, dv), dq = lax.scan(rows, zeros, jnp.arange(blocks.q.shape[0]))
    return (_Blocks(dq, dk.astype(blocks.k.dtype), dv.astype(blocks.v.dtype), None),)


_attend.defvjp(_attend_forward, _attend_backward)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """o_t = sum_s softmax_s(q_t . k_s / sqrt(qk)) v_s over s <= t in t's document.

    Softmax and its statistics in float32, probabilities in v's dtype.

    Args:
      q, k: [B, T, H, qk]. v: [B, T, H, V].
      segment_ids: [B, T] int32, runs of equal ids, 0 = padding.

    Returns:
      [B, T, H, V] in v's dtype, 0 on padding.

    Raises:
      ValueError: shapes disagree.

    Source: Kimi K3 Gated MLA (no rotation; the scale is that of q's whole width).
    """
    batch, length, heads, width = q.shape
    if k.shape != q.shape or v.shape[:3] != (batch, length, heads):
        raise ValueError(
            f'causal_attention: got q {q.shape}, k {k.shape}, v {v.shape}, wanted q and k alike '
            f'and v [{batch}, {length}, {heads}, V]'
        )
    if segment_ids is None:
        run = jnp.zeros((batch, length), jnp.int32)
    else:
        runs = runs_of(segment_ids)
        run = jnp.where(runs.real, runs.number, NO_RUN)
    block = LONG_BLOCK if length >= LONG else min(BLOCK, length)
    padding = -length % block

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return jnp.einsum('bnchd->nbhcd', x.reshape(batch, -1, block, heads, x.shape[-1]))

    run = jnp.pad(run, ((0, 0), (0, padding)), constant_values=NO_RUN)
    run = jnp.moveaxis(run.reshape(batch, -1, block), 1, 0)
    o = _attend(_Blocks(split(q), split(k), split(v), run))
    return jnp.einsum('nbhcv->bnchv', o).reshape(batch, -1, heads, v.shape[-1])[:, :length]
