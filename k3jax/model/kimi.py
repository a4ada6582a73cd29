"""The model: embedding, layers, readout, head; forward, prefill and decode."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import ModelConfig, require
from k3jax.model.cache import Cache
from k3jax.model.layer import Sequence, joined, run_block
from k3jax.model.layout import global_leaves, vision_leaves
from k3jax.model.mtp import MTP
from k3jax.model.norms import rms_norm
from k3jax.model.param import declare
from k3jax.model.plan import Plan, block_ends, depth_plan
from k3jax.model.run import Run
from k3jax.parallel.sequence import row_of
from k3jax.parallel.shard import Parallel
from pallas_kernels.attn_res import attn_res

Params = dict[str, Any]


class Output(NamedTuple):
    """What the model makes of tokens.

    Attributes:
      hidden: [B, T, D], normalised and ready for `head`.
      cache: after the tokens, or None.
      seen: what the run watches, by the layers' names in the parameters, or None.
      taps: what `run.taps` asks for, [B, T, D] each.
      next_hidden: [B, T, D], ready for `head`, of the tokens after next, or None.
    """

    hidden: jax.Array
    cache: Cache | None
    seen: Any
    taps: tuple[jax.Array, ...]
    next_hidden: jax.Array | None


def tap_blocks(config: ModelConfig, layers: tuple[int, ...]) -> tuple[int, ...]:
    """How many attention-residual blocks are done where each of 0-based `layers` ends.

    The running sum after such a layer is what its block hands to all later layers; inside a block,
    and in models without attention residuals before the end, it would have to be kept apart.

    Raises:
      ConfigError: a layer that is neither a block's last nor the model's.
    """
    ends = block_ends(config)
    for layer in layers:
        require(layer in ends, 'taps', layer, f'one of {list(ends)}, where blocks of layers end')
    return tuple(ends.index(layer) + 1 for layer in layers)


class Kimi(nn.Module):
    """Kimi K3, Kimi Linear and their relatives: one class, told apart by layer specs."""

    config: ModelConfig
    run: Run
    scan_layers: bool = True

    @property
    def plan(self) -> Plan:
        return depth_plan(self.config, scan=self.scan_layers)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        next_tokens: jax.Array | None = None,
        media_rows: jax.Array | None = None,
    ) -> Output:
        """Embedding, layers, readout; multi-token prediction.

        Args:
          tokens: [B, T] int32.
          segment_ids: [B, T]: packed documents, 0 = padding. With a cache: 1 on real tokens, 0 on
            padding at the end of a row, or None where all are real.
          cache: what came before, or None for whole documents from their start.
          next_tokens: [B, T], of the same document, negative where there is none; then the tokens
            after those are predicted too. In models with `num_nextn_predict_layers`.
          media_rows: [B, N, D] of `vision.media_rows`: the j-th media token of a row has the j-th
            of these in place of its embedding. Where chips share a row's tokens, whole.
        """
        config = self.config
        params = declare(self, global_leaves(config), config.initializer_range, self.run)
        parallel = self.run.parallel
        if config.vision is not None and self.is_initializing():
            leaves = vision_leaves(
                config.vision, config.hidden_size
            )  # `vision.media_rows` reads them
            declare(self, leaves, config.initializer_range, self.run)
        prefix = embed(params, tokens, parallel).astype(self.run.dtype)
        places = None
        if media_rows is not None:
            places = media_places(tokens, config.media_placeholder_token_id, parallel)
            prefix = with_media(prefix, tokens, config, media_rows, places)
        bank = None
        if config.attn_res_block_size is not None:
            bank = jnp.zeros((0, *prefix.shape), prefix.dtype)
        row = None
        if parallel is not None and parallel.num_shards > 1:
            row = row_of(tokens.shape[0], segment_ids, parallel.num_shards)
        sequence = Sequence(segment_ids, None if cache is None else cache.length, row)
        carry, left = (bank, 0, prefix), {}
        for block in self.plan:
            own = None if cache is None else cache.layers[block.name]
            carry, left[block.name] = run_block(config, self.run, block, carry, own, sequence)
        bank, num_live, last = carry
        if bank is None:
            h = rms_norm(last, params['norm'], config.rms_norm_eps)
        else:
            h = attn_res(
                bank,
                last,
                params['output_attn_res_norm'],
                params['output_attn_res_proj'],
                params['norm'],
                num_live=num_live,
                use_prefix=True,
                eps=config.rms_norm_eps,
                implementation=self.run.implementation,
            )
        blocks = tap_blocks(config, self.run.taps)
        taps = tuple(last if bank is None or n == len(bank) else bank[n] for n in blocks)
        left, next_hidden = joined(left, self.run, cache), None
        if next_tokens is not None:
            embedded = embed(params, jnp.maximum(next_tokens, 0), parallel)
            embedded = jnp.where(next_tokens[..., None] < 0, 0, embedded).astype(self.run.dtype)
            if media_rows is not None:
                embedded = with_media(embedded, next_tokens, config, media_rows, places + 1)
            next_hidden, of_mtp = MTP(config, self.run, name='mtp')(last, embedded, sequence)
            if left.seen is not None:
                left = left._replace(seen=left.seen | {'mtp': {'layer': of_mtp.seen}})
        if cache is None:
            return Output(h, None, left.seen, taps, next_hidden)
        new = tokens.shape[1] if segment_ids is None else jnp.sum(segment_ids > 0, axis=1)
        if row is not None:
            new = lax.psum(new, parallel.rules.tokens)
        return Output(h, Cache(cache.length + new, left.cache), left.seen, taps, next_hidden)


@jax.named_scope('embed')
def embed(params: Params, tokens: jax.Array, parallel: Parallel | None) -> jax.Array:
    """[B, T, D] in the table's dtype; the table may be cut along the vocabulary."""
    table = params['embed_tokens']
    axes = () if parallel is None else parallel.cut_of('vocab')
    if not axes:
        return jnp.take(table, tokens, axis=0)
    own = tokens - lax.axis_index(axes) * table.shape[0]
    here = (own >= 0) & (own < table.shape[0])
    rows = jnp.take(table, jnp.where(here, own, 0), axis=0)
    return parallel.total(jnp.where(here[..., None], rows, 0), 'vocab')


def media_places(tokens: jax.Array, media_id: int, parallel: Parallel | None) -> jax.Array:
    """[B, T]: how many media tokens there are in a row through each token, but for one."""
    is_media = (tokens == media_id).astype(jnp.int32)
    places = jnp.cumsum(is_media, axis=1) - 1
    if parallel is not None and parallel.num_shards > 1:
        axes = parallel.rules.tokens
        counts = lax.all_gather(places[:, -1] + 1, axes)
        before = jnp.arange(len(counts))[:, None] < lax.axis_index(axes)
        places += jnp.sum(jnp.where(before, counts, 0), axis=0)[:, None]
    return places


@jax.named_scope('embed')
def with_media(
    embedded: jax.Array,
    tokens: jax.Array,
    config: ModelConfig,
    media_rows: jax.Array,
    places: jax.Array,
) -> jax.Array:
    """`embedded` [B, T, D] of tokens [B, T], with media_rows[b, places[b, t]] at media tokens."""
    places = jnp.clip(places, 0, media_rows.shape[1] - 1)
    rows = jnp.take_along_axis(media_rows, places[..., None], axis=1).astype(embedded.dtype)
    return jnp.where((tokens == config.media_placeholder_token_id)[..., None], rows, embedded)


def lm_head(model: Kimi, params: Params) -> jax.Array:
    """The output matrix [Z, D] as `head` takes it; on a mesh, gathered unless kept cut."""
    weight, parallel = params['lm_head'], model.run.parallel
    if parallel is None:
        return weight
    with jax.named_scope('gather_parameters'):
        return parallel.gather(weight, global_leaves(model.config)['lm_head'])


@jax.named_scope('head')
def head(weight: jax.Array, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., Z] of hidden states [..., D]; weight: [Z, D]."""
    weight = weight.astype(hidden.dtype)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(hidden, weight, contract, preferred_element_type=wide)


def _logits(model: Kimi, params: Params, hidden: jax.Array) -> jax.Array:
    logits, parallel = head(lm_head(model, params), hidden), model.run.parallel
    return logits if parallel is None else parallel.joined(logits, 'vocab')


def forward(
    model: Kimi,
    params: Params,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    media_rows: jax.Array | None = None,
) -> jax.Array:
    """Logits [B, T, Z] of whole documents, packed ones by `segment_ids` [B, T].

    media_rows: see `Kimi`.
    """
    hidden = model.apply({'params': params}, tokens, segment_ids, media_rows=media_rows).hidden
    return _logits(model, params, hidden)


def _first_token(model: Kimi, length: int) -> jax.Array | int:
    """Where in its row this chip's part of `length` tokens starts."""
    parallel = model.run.parallel
    if parallel is None or parallel.num_shards == 1:
        return 0
    return lax.axis_index(parallel.rules.tokens) * length


def _last_real(model: Kimi, hidden: jax.Array, num_real: jax.Array) -> jax.Array:
    """[B, D]: hidden [B, T, D] at each row's last real token, on whichever chip that is."""
    place = num_real - 1 - _first_token(model, hidden.shape[1])
    here = (place >= 0) & (place < hidden.shape[1])
    last = jnp.take_along_axis(hidden, jnp.where(here, place, 0)[:, None, None], axis=1)[:, 0]
    parallel = model.run.parallel
    if parallel is None or parallel.num_shards == 1:
        return last
    return lax.psum(jnp.where(here[:, None], last, 0), parallel.rules.tokens)


def prefill(
    model: Kimi,
    params: Params,
    tokens: jax.Array,
    num_real: jax.Array,
    cache: Cache,
    media_rows: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Reads a piece of each prompt; pieces of any size give what one prefill gives.

    Args:
      tokens: [B, T], padded at the end. num_real: [B], real tokens of each row (at least 1).
        Where chips share the tokens of a row, tokens is this chip's part, num_real counts the
        whole row, and the cache is empty and as long as the row.
      media_rows: [B, N, D], of the media tokens of this piece; see `Kimi`.

    Returns:
      Logits [B, Z] after each row's last real token, and the cache.
    """
    length = tokens.shape[1]
    valid = _first_token(model, length) + jnp.arange(length) < num_real[:, None]
    valid = valid.astype(jnp.int32)
    output = model.apply({'params': params}, tokens, valid, cache, media_rows=media_rows)
    last = _last_real(model, output.hidden, num_real)
    return _logits(model, params, last), output.cache


def decode(model: Kimi, params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """One token a sequence: tokens [B] -> logits [B, Z] and the cache after them."""
    output = model.apply({'params': params}, tokens[:, None], None, cache)
    return _logits(model, params, output.hidden[:, 0]), output.cache


def init_params(model: Kimi, key: jax.Array) -> Params:
    """Fresh parameters; under `jax.eval_shape`, their shapes and dtypes only."""
    # Whole arrays; and the outputs are thrown away, so no kernel needs to be traced for them.
    model = model.clone(run=model.run._replace(implementation='xla', parallel=None))
    token = jnp.zeros((1, 1), jnp.int32)
    next_tokens = token if model.config.num_nextn_predict_layers else None
    return model.init(key, token, next_tokens=next_tokens)['params']
