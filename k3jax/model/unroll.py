"""Attention in the steps of a draft that is trained on its own guesses.

In step j a position stands for the j-th token of a guess that began j - 1 tokens before. It sees
the first step's keys up to where its guess began, which come from the target's own features, and
after that one key of each later step: those of its own guess. Source: EAGLE-3 (arXiv 2503.01840),
training-time test.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.model.cache import UnrolledCache

QUERY_BLOCK = 512

Expansion = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def _in_turn(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [T / block, B, block, ...]."""
    batch, length = x.shape[:2]
    return jnp.moveaxis(x.reshape(batch, length // QUERY_BLOCK, QUERY_BLOCK, *x.shape[2:]), 1, 0)


def unrolled_attention(
    q: jax.Array,
    compressed: jax.Array,
    expand: Expansion,
    cache: UnrolledCache,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, UnrolledCache]:
    """One step's attention output [B, T, H, V], and the cache for the next step.

    Where a guess would begin before its document, what comes out is finite and means nothing.

    Args:
      q: [B, T, H, K]. compressed: [B, T, C], latent and shared key of the same positions.
      expand: of compressed [..., S, C] the keys [..., S, H, K] and values [..., S, H, V].
      segment_ids: [B, T], packed documents; None for one a row.
    """
    batch, length, num_heads, width = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    step, scale = cache.step, width**-0.5
    first = jnp.where(step == 1, compressed, cache.first)
    later = jnp.roll(cache.later, 1, axis=2)
    mine = jnp.arange(len(later)) == step - 2
    later = jnp.where(mine[:, None, None, None], compressed, later)
    keys, values = expand(first)
    own_keys, own_values = expand(later.reshape(-1, length, later.shape[-1]))
    own_keys = own_keys.reshape(-1, batch, length, num_heads, width)
    own_values = own_values.reshape(-1, batch, length, num_heads, values.shape[-1])
    reached = jnp.arange(len(later)) < step - 1
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids

    def attend(block):
        """Of queries [B, Q, H, K]: segments and places [B, Q]; own keys, values [B, Q, J, ...]."""
        q, own_ids, place, own_keys, own_values = block
        scores = jnp.einsum('bthk,bshk->bhts', q, keys, preferred_element_type=wide)
        seen = jnp.arange(length) <= place[..., None] - (step - 1)
        seen &= ids[:, None, :] == own_ids[..., None]
        scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
        own = jnp.einsum('bthk,btjhk->bhtj', q, own_keys, preferred_element_type=wide)
        own = jnp.where(reached, own * scale, -jnp.inf)
        # A position always sees itself.
        weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1).astype(q.dtype)
        mixed = jnp.einsum(
            'bhts,bshv->bthv', weights[..., :length], values, preferred_element_type=wide
        )
        mixed += jnp.einsum(
            'bhtj,btjhv->bthv', weights[..., length:], own_values, preferred_element_type=wide
        )
        return mixed.astype(q.dtype)

    place = jnp.broadcast_to(jnp.arange(length), (batch, length))
    own_keys, own_values = (jnp.moveaxis(x, 0, 2) for x in (own_keys, own_values))
    blocks = q, ids, place, own_keys, own_values
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        o = attend(blocks)
    else:
        o = lax.map(jax.checkpoint(attend), jax.tree.map(_in_turn, blocks))
        o = jnp.moveaxis(o, 0, 1).reshape(batch, length, *o.shape[3:])
    return o, UnrolledCache(first, later, step + 1)
