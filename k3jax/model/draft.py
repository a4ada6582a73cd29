"""The EAGLE-3 draft: a cheap guess at the tokens that the model will say next.

It is the layer of multi-token prediction, fed by the model's own hidden states at three depths
through a fusion matrix, and by its own output where the model has not been yet. Embedding and head
are the model's. Source: report section 4.1.4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import ConfigError, ModelConfig
from k3jax.model.cache import MLACache, UnrolledCache, layer_cache
from k3jax.model.kimi import Kimi, embed, tap_blocks
from k3jax.model.layer import Depth, Sequence, layer_class
from k3jax.model.layout import Leaf, Tree, mtp_block, mtp_leaves
from k3jax.model.mtp import mtp_input
from k3jax.model.norms import project, rms_norm
from k3jax.model.param import init_leaf
from k3jax.model.plan import block_ends

Params = dict[str, Any]


def default_taps(config: ModelConfig) -> tuple[int, ...]:
    """Where the first block of layers ends, the middle one, and the last; 0-based layers.

    In K3, of eight blocks: 11, 47 and 92. A model without attention residuals has its last only.
    """
    ends = block_ends(config)
    return tuple(dict.fromkeys((ends[0], ends[(len(ends) - 1) // 2], ends[-1])))


def draft_leaves(config: ModelConfig, num_taps: int) -> Tree:
    """The draft's parameters: `fc` joins the taps, `mtp` is the layer with its inputs and norm."""
    d = config.hidden_size
    fc = Leaf((d, num_taps * d), ('embed', 'features'))
    return {'fc': fc, 'mtp': mtp_leaves(config)}


def with_taps(model: Kimi, taps: tuple[int, ...] = ()) -> Kimi:
    """A model on a single chip as a draft needs it: it hands out what that is fed with.

    taps: 0-based layers; () for `default_taps`.

    Raises:
      ConfigError: layers that no block ends with, or whose last is not the model's; a layer of
        multi-token prediction that is not attention.
    """
    config = model.config
    taps = taps or default_taps(config)
    tap_blocks(config, taps)
    if taps[-1] != config.num_hidden_layers - 1:
        raise ConfigError(
            f'draft.taps: got {taps}, wanted the last layer ({config.num_hidden_layers - 1}) last'
        )
    if config.mtp_mixer != 'mla':
        raise ConfigError(
            f"model.mtp_mixer: got {config.mtp_mixer!r}, wanted 'mla': a draft forgets the guesses "
            'that were wrong, which a recurrent state cannot'
        )
    assert model.run.parallel is None
    return model.clone(run=model.run._replace(taps=taps))


def init_draft(model: Kimi, target: Params, key: jax.Array) -> Params:
    """Fresh float32 parameters: those of the target's own layer of multi-token prediction, if any.

    `fc` starts as [0, .., 0, I]: the draft is then fed the last tap alone, as that layer was.
    """
    config, num_taps = model.config, len(model.run.taps)

    def fresh(key: jax.Array, entry: Leaf | Tree) -> Any:
        if isinstance(entry, Leaf):
            return init_leaf(key, entry, config.initializer_range, jnp.dtype('float32'))
        keys = jax.random.split(key, len(entry))
        return {name: fresh(k, child) for k, (name, child) in zip(keys, entry.items(), strict=True)}

    mtp = target.get('mtp') or fresh(key, mtp_leaves(config))
    d = config.hidden_size
    fc = jnp.concatenate([jnp.zeros((d, (num_taps - 1) * d)), jnp.eye(d)], axis=1)
    return {'fc': fc, 'mtp': jax.tree.map(lambda x: x.astype(jnp.float32), mtp)}


def fused(params: Params, taps: tuple[jax.Array, ...]) -> jax.Array:
    """[B, T, D]: the features that stand for what the model knows at each token."""
    return project(jnp.concatenate(taps, axis=-1), params['fc'])


def ready_for_head(model: Kimi, params: Params, x: jax.Array) -> jax.Array:
    """[..., D] for `kimi.head`, of what `read` gives."""
    return rms_norm(x, params['mtp']['norm'], model.config.rms_norm_eps)


def read(
    model: Kimi,
    params: Params,
    table: Params,
    features: jax.Array,
    next_tokens: jax.Array,
    cache: MLACache | UnrolledCache,
    length: jax.Array | None,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """One pass of the draft's layer.

    Args:
      table: with the model's `embed_tokens`.
      features: [B, T, D], `fused` or the draft's own output of the token before.
      next_tokens: [B, T], negative where there is none.
      cache, length, segment_ids: as the layer takes them; length is None for an UnrolledCache.

    Returns:
      [B, T, D], the layer's sum: features for a next pass, or through `ready_for_head` a guess at
      the tokens after `next_tokens`; and the cache.
    """
    config, run = model.config, model.run
    embedded = embed(table, jnp.maximum(next_tokens, 0), None)
    embedded = jnp.where(next_tokens[..., None] < 0, 0, embedded).astype(features.dtype)
    x = mtp_input(params['mtp'], features, embedded, config.rms_norm_eps)
    layer = layer_class(run, in_scan=True)(mtp_block(config), run._replace(watch=None), 0)
    arguments = x, Depth(None, 0), Sequence(segment_ids, length, None), True, cache
    x, left = layer.apply({'params': params['mtp']['layer']}, *arguments)
    return x, left.cache


def unrolled(
    model: Kimi,
    params: Params,
    table: Params,
    taps: tuple[jax.Array, ...],
    next_tokens: jax.Array,
    segment_ids: jax.Array | None,
    num_steps: int,
    then: Any,
) -> Any:
    """What `then` makes of each of the steps of a guess, begun at every token at once.

    In step j, a position stands for the j-th token of the guess that began j - 1 tokens before, fed
    with the draft's output of the step and token before. Positions whose guess would begin before
    their document mean nothing.

    Args:
      taps: of the model, [B, T, D] each. next_tokens, segment_ids: [B, T].
      then: (x [B, T, D], step) -> a tree of arrays; called in a scan, steps from 1.

    Returns:
      Trees of arrays stacked over steps.
    """
    features = fused(params, taps)
    batch, length = features.shape[:2]
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    shape = batch, length, width
    cache = UnrolledCache(
        jnp.zeros(shape, features.dtype),
        jnp.zeros((max(1, num_steps - 1), *shape), features.dtype),
        jnp.int32(1),
    )

    def step(carry: tuple[jax.Array, UnrolledCache], number: jax.Array) -> Any:
        features, cache = carry
        arguments = features, next_tokens, cache, None, segment_ids
        x, cache = read(model, params, table, *arguments)
        return (jnp.roll(x, 1, axis=1), cache), then(x, number)

    return lax.scan(step, (features, cache), jnp.arange(1, num_steps + 1))[1]


def empty_cache(model: Kimi, batch: int, size: int) -> MLACache:
    """For generating; size: of the model's own cache."""
    return layer_cache(mtp_block(model.config), 0, (), batch, size, model.run.dtype)
