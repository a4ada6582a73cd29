"""What decoding remembers: KDA states and convolution tails, MLA latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig
from k3jax.model.plan import Plan, stacks
from k3jax.parallel.shard import Parallel


class KDACache(NamedTuple):
    """state: [B, H, K, V] float32. q_tail, k_tail, v_tail: [B, W - 1, P], rows before the conv."""

    state: jax.Array
    q_tail: jax.Array
    k_tail: jax.Array
    v_tail: jax.Array


class KDAWindow(NamedTuple):
    """Tokens that a KDA layer has looked at and may yet forget, W of them; None before it has.

    Of `before`, to have the state after some of them without running the layer again:

    Attributes:
      before: the cache, which they are not in.
      projected_q, projected_k, projected_v: [B, W, P], what enters the convolutions.
      k, v, g, beta: [B, W, H, ...], what enters the recurrence; k normalised, g the log decay.

    Source: report, speculative decoding with replayed projections.
    """

    before: KDACache
    projected_q: jax.Array | None = None
    projected_k: jax.Array | None = None
    projected_v: jax.Array | None = None
    k: jax.Array | None = None
    v: jax.Array | None = None
    g: jax.Array | None = None
    beta: jax.Array | None = None


class MLACache(NamedTuple):
    """latent: [B, S, R] after its norm. key: [B, S, rope dims], shared by all heads."""

    latent: jax.Array
    key: jax.Array


class UnrolledCache(NamedTuple):
    """Of an MLA layer in the steps of a draft that is trained; C = latent and shared key.

    first: [B, T, C] of the first step. later: [J - 1, B, T, C] of steps 2 .. J, each moved on by a
    token a step. step: int32, that of the next call, from 1.
    """

    first: jax.Array
    later: jax.Array
    step: jax.Array


class Cache(NamedTuple):
    """length: [B] int32, tokens seen. layers: nested and stacked as the parameters are."""

    length: jax.Array
    layers: dict[str, Any]


def layer_cache(
    config: ModelConfig, layer: int, lead: tuple[int, ...], batch: int, size: int, dtype: jnp.dtype
) -> KDACache | MLACache:
    """An empty cache of a layer, or of layers stacked on the axes `lead`."""
    if not config.is_kda(layer):
        return MLACache(
            jnp.zeros((*lead, batch, size, config.kv_lora_rank), dtype),
            jnp.zeros((*lead, batch, size, config.qk_rope_head_dim), dtype),
        )
    c = config.linear_attn_config
    rows = (*lead, batch, c.short_conv_kernel_size - 1, c.num_heads * c.head_dim)
    state = (*lead, batch, c.num_heads, c.head_dim, c.head_dim)
    # Distinct buffers: the cache is donated at every step.
    tails = (jnp.zeros(rows, dtype) for _ in range(3))
    return KDACache(jnp.zeros(state, jnp.promote_types(dtype, jnp.float32)), *tails)


def cache_specs(config: ModelConfig, plan: Plan, parallel: Parallel) -> Cache:
    """How the mesh cuts a cache: a `Cache` of PartitionSpec. Rows, KDA heads, MLA tokens."""
    rows, tokens = parallel.rules.rows or None, parallel.rules.tokens or None
    heads = parallel.cut_of('kda_heads') or None
    layers: dict[str, Any] = {}
    for stack in stacks(plan):
        node = layers
        for name in stack.path[:-1]:
            node = node.setdefault(name, {})
        lead = [None] * stack.layers.ndim
        if config.is_kda(int(stack.layers.flat[0])):
            tail = PartitionSpec(*lead, rows, None, heads)
            specs = KDACache(PartitionSpec(*lead, rows, heads, None, None), tail, tail, tail)
        else:
            latent = PartitionSpec(*lead, rows, tokens, None)
            specs = MLACache(latent, latent)
        node[stack.path[-1]] = specs
    return Cache(PartitionSpec(rows), layers)


def init_cache(config: ModelConfig, plan: Plan, batch: int, size: int, dtype: jnp.dtype) -> Cache:
    """An empty cache for `batch` sequences of up to `size` tokens.

    Raises:
      ValueError: size is not positive or above `max_position_embeddings`.
    """
    if not 0 < size <= config.max_position_embeddings:
        raise ValueError(
            f'cache size: got {size}, wanted 1..{config.max_position_embeddings} '
            '(model.max_position_embeddings)'
        )
    layers: dict[str, Any] = {}
    for stack in stacks(plan):
        node = layers
        for name in stack.path[:-1]:
            node = node.setdefault(name, {})
        lead = stack.layers.shape
        node[stack.path[-1]] = layer_cache(
            config, int(stack.layers.flat[0]), lead, batch, size, dtype
        )
    return Cache(jnp.zeros((batch,), jnp.int32), layers)
