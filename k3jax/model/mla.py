"""How MLA layers mix tokens: latent attention without positions, expanded or absorbed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import ModelConfig
from k3jax.model.cache import MLACache, UnrolledCache
from k3jax.model.norms import project, rms_norm
from k3jax.model.run import Run
from k3jax.model.statistics import LayerStatistics
from k3jax.model.unroll import unrolled_attention
from k3jax.parallel.attention_cp import Expand, from_balanced, sequence_attention, to_balanced
from k3jax.parallel.sequence import Row
from pallas_kernels.mla import causal_attention

Params = dict[str, Any]

QUERY_BLOCK = 512
KEY_BLOCK = 512
MAX_ABSORBED = 8  # new tokens for which keys and values are not worth being expanded
PREFIX = 256  # tokens of a cache that one new token always attends to


def expand(
    config: ModelConfig, compressed: jax.Array, kv_b_proj: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Per-head keys [B, S, H, qk] and values [B, S, H, V] of latents and shared keys [B, S, R]."""
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    latent, key = compressed[..., :rank], compressed[..., rank:]
    kv = project(latent, kv_b_proj)
    kv = kv.reshape(*latent.shape[:2], -1, nope + config.v_head_dim)
    shared = jnp.broadcast_to(key[:, :, None], (*kv.shape[:3], key.shape[-1]))
    return jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]


@functools.cache
def _expansion(config: ModelConfig) -> Expand:
    """`expand` of this model, the same object at every call."""
    return functools.partial(expand, config)


def cached_attention(
    params: Params, q: jax.Array, cache: MLACache, position: jax.Array, config: ModelConfig
) -> jax.Array:
    """Attention of new tokens to the cache they are already written to, by blocks of keys.

    Blocks that no query reaches are not visited. Args: q [B, T, H, qk]; position [B, T], each
    query's place in its sequence. Returns [B, T, H, V].
    """
    size = cache.latent.shape[1]
    block = min(KEY_BLOCK, size)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def attend(q: jax.Array, position: jax.Array) -> jax.Array:
        shape = (q.shape[0], q.shape[2], q.shape[1], 1)
        # The last block is pulled back to end with the cache; what it repeats is masked.
        num_blocks = jnp.minimum(jnp.max(position) // block + 1, -(-size // block))

        def step(i, carry):
            top, total, mixed = carry
            start = jnp.minimum(i * block, size - block)
            latent = lax.dynamic_slice_in_dim(cache.latent, start, block, axis=1)
            key = lax.dynamic_slice_in_dim(cache.key, start, block, axis=1)
            compressed = jnp.concatenate([latent, key], axis=-1).astype(q.dtype)
            k, v = expand(config, compressed, params['kv_b_proj'])
            scores = jnp.einsum('bthk,bshk->bhts', q, k, preferred_element_type=wide)
            place = start + jnp.arange(block)
            seen = (place <= position[..., None]) & (place >= i * block)
            scores = jnp.where(seen[:, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - new_top)
            shrink = jnp.exp(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            read = jnp.einsum(
                'bhts,bshv->bhtv', weights.astype(v.dtype), v, preferred_element_type=wide
            )
            return new_top, total, mixed * shrink + read

        # Key 0 is visible to every query, so the first block makes `top` finite.
        start = jnp.full(shape, -1e30, wide), jnp.zeros(shape, wide)
        mixed = jnp.zeros((*shape[:3], config.v_head_dim), wide)
        _, total, mixed = lax.fori_loop(0, num_blocks, step, (*start, mixed))
        return jnp.moveaxis(mixed / total, 1, 2).astype(q.dtype)

    batch, length = position.shape
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(q, position)
    split = (-1, QUERY_BLOCK)
    q = jnp.moveaxis(q.reshape(batch, *split, *q.shape[2:]), 1, 0)
    out = lax.map(lambda x: attend(*x), (q, jnp.moveaxis(position.reshape(batch, *split), 1, 0)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, *out.shape[3:])


def _prefixes(size: int) -> list[int]:
    """Parts of a cache that attention may be confined to, the last the whole."""
    return [*itertools.takewhile(lambda n: n < size, (PREFIX << i for i in range(32))), size]


def absorbed_attention(
    params: Params, q: jax.Array, cache: MLACache, position: jax.Array, config: ModelConfig
) -> jax.Array:
    """Few queries a sequence against the latents themselves: k_b moves to the queries' side.

    What of the cache is after the longest sequence is not read, to a factor of two.

    Args: q [B, T, H, qk]; position [B, T], each query's place. Returns [B, T, H, V].
    """
    nope = config.qk_nope_head_dim
    batch, num_new, num_heads, _ = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    kv_b = params['kv_b_proj'].astype(q.dtype)
    kv_b = kv_b.reshape(-1, nope + config.v_head_dim, config.kv_lora_rank)
    q_latent = jnp.einsum('bthk,hkr->bthr', q[..., :nope], kv_b[:, :nope])

    def attend(size: int, q_latent: jax.Array, q: jax.Array, cache: MLACache) -> jax.Array:
        latent, key = (x[:, :size].astype(q.dtype) for x in cache)
        q_latent, q_key = (x.reshape(batch, -1, x.shape[-1]) for x in (q_latent, q[..., nope:]))
        scores = jnp.einsum('bmr,bsr->bms', q_latent, latent, preferred_element_type=wide)
        scores += jnp.einsum('bmk,bsk->bms', q_key, key, preferred_element_type=wide)
        scores = scores.reshape(batch, num_new, num_heads, size)
        seen = jnp.arange(size) <= position[..., None]
        scores = jnp.where(seen[:, :, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        mixed = jnp.einsum('bms,bsr->bmr', weights.reshape(batch, -1, size), latent)
        return mixed.reshape(batch, num_new, num_heads, -1)

    sizes = _prefixes(cache.latent.shape[1])
    longest = jnp.sum(jnp.max(position) >= np.array(sizes[:-1], np.int32))
    branches = [functools.partial(attend, size) for size in sizes]
    mixed = lax.switch(longest, branches, q_latent, q, cache)
    return jnp.einsum('bthr,hvr->bthv', mixed, kv_b[:, nope:])


def _write(cache: MLACache, latent: jax.Array, key: jax.Array, position: jax.Array) -> MLACache:
    """Stores rows at their positions; a position past the end (padding) is dropped."""
    rows = jnp.arange(position.shape[0])[:, None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows, position].set(new.astype(old.dtype), mode='drop')

    return MLACache(put(cache.latent, latent), put(cache.key, key))


@jax.named_scope('mla_mixer')
def mla_mixer(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    segment_ids: jax.Array | None,
    cache: MLACache | UnrolledCache | None,
    length: jax.Array | None,
    run: Run,
    row: Row | None = None,
) -> tuple[jax.Array, MLACache | UnrolledCache | None, LayerStatistics | None]:
    """One MLA layer's attention output.

    Args:
      x: [B, T, D], normalised.
      segment_ids: [B, T] or None; with a cache, 1 on real tokens and 0 on padding at the end.
      cache, length: what came before and how many tokens that is [B], or None.
      run: how the model runs; on a mesh that cuts heads, params hold this chip's.
      row: where chips share the tokens of a row, what is known of all of it; a cache is then empty
        and as long as the row, and each chip keeps its part of it.

    Returns:
      [B, T, D], the cache after x (None without one), and what the run watches: each head's largest
      logit, without a cache.

    Source: Kimi K3 section "Gated MLA": no rotation, scale (nope + rope)^-0.5, sigmoid output gate.
    """
    batch, num_new, _ = x.shape
    eps, rank = config.mla_latent_norm_eps, config.kv_lora_rank
    compressed = project(x, params['kv_a_proj_with_mqa'])
    latent = rms_norm(compressed[..., :rank], params['kv_a_layernorm'], eps)
    key = compressed[..., rank:]
    if row is not None:
        x = to_balanced(x, run.parallel.num_shards)
    if config.q_lora_rank is None:
        q = project(x, params['q_proj'])
    else:
        q = rms_norm(project(x, params['q_a_proj']), params['q_a_layernorm'], eps)
        q = project(q, params['q_b_proj'])
    q = q.reshape(batch, num_new, -1, config.qk_head_dim)
    compressed = jnp.concatenate([latent, key], axis=-1)
    if row is not None:
        o, top = sequence_attention(
            q,
            compressed,
            params['kv_b_proj'],
            row,
            _expansion(config),
            num_shards=run.parallel.num_shards,
            implementation=run.implementation,
        )
        if cache is not None:
            cache = MLACache(latent.astype(cache.latent.dtype), key.astype(cache.key.dtype))
    elif isinstance(cache, UnrolledCache):
        expansion = functools.partial(expand, config, kv_b_proj=params['kv_b_proj'])
        o, cache = unrolled_attention(q, compressed, expansion, cache, segment_ids)
    elif cache is None:
        k, v = expand(config, compressed, params['kv_b_proj'])
        options = {'implementation': run.implementation, 'with_max_logit': True}
        o, top = causal_attention(q, k, v, segment_ids, **options)
    else:
        position = length[:, None] + jnp.arange(num_new)
        target = position
        if segment_ids is not None:
            target = jnp.where(segment_ids > 0, position, cache.latent.shape[1])
        cache = _write(cache, latent, key, target)
        attend = absorbed_attention if num_new <= MAX_ABSORBED else cached_attention
        o = attend(params, q, cache, position, config)
    o = o.reshape(batch, num_new, -1)
    if config.mla_use_output_gate:
        o = o * jax.nn.sigmoid(project(x, params['g_proj']))
    out = project(o, params['o_proj'])
    if row is not None:
        out = from_balanced(out, run.parallel.num_shards)
    if run.parallel is not None:
        out = run.parallel.total(out, 'heads')
    watched = run.watch is not None and cache is None
    return out, cache, LayerStatistics(max_logit=top) if watched else None
