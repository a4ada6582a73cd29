"""The text model: embedding, layers, readout, head; forward, prefill and decode."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import ModelConfig
from k3jax.model.cache import Cache
from k3jax.model.layer import Run, Sequence, run_block
from k3jax.model.layout import global_leaves
from k3jax.model.norms import rms_norm
from k3jax.model.param import declare
from k3jax.model.plan import Plan, depth_plan
from pallas_kernels.attn_res import attn_res

Params = dict[str, Any]


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
    ) -> tuple[jax.Array, Cache | None]:
        """Final hidden states [B, T, D], normalised and ready for `head`, and the cache.

        Args:
          tokens: [B, T] int32.
          segment_ids: [B, T]: packed documents, 0 = padding. With a cache: 1 on real tokens, 0 on
            padding at the end of a row, or None where all are real.
          cache: what came before, or None for whole documents from their start.
        """
        config = self.config
        params = declare(
            self, global_leaves(config), config.initializer_range, self.run.param_dtype
        )
        prefix = jnp.take(params['embed_tokens'], tokens, axis=0).astype(self.run.dtype)
        bank = None
        if config.attn_res_block_size is not None:
            bank = jnp.zeros((0, *prefix.shape), prefix.dtype)
        sequence = Sequence(segment_ids, None if cache is None else cache.length)
        carry, layers = (bank, 0, prefix), {}
        for block in self.plan:
            own = None if cache is None else cache.layers[block.name]
            carry, layers[block.name] = run_block(config, self.run, block, carry, own, sequence)
        bank, num_live, h = carry
        if bank is None:
            h = rms_norm(h, params['norm'], config.rms_norm_eps)
        else:
            h = attn_res(
                bank,
                h,
                params['output_attn_res_norm'],
                params['output_attn_res_proj'],
                params['norm'],
                num_live=num_live,
                use_prefix=True,
                eps=config.rms_norm_eps,
                implementation=self.run.implementation,
            )
        if cache is None:
            return h, None
        new = tokens.shape[1] if segment_ids is None else jnp.sum(segment_ids > 0, axis=1)
        return h, Cache(cache.length + new, layers)


@jax.named_scope('head')
def head(params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., Z] of hidden states [..., D]."""
    weight = params['lm_head'].astype(hidden.dtype)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(hidden, weight, contract, preferred_element_type=wide)


def forward(
    model: Kimi, params: Params, tokens: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Logits [B, T, Z] of whole documents, packed ones by `segment_ids` [B, T]."""
    hidden, _ = model.apply({'params': params}, tokens, segment_ids)
    return head(params, hidden)


def prefill(
    model: Kimi, params: Params, tokens: jax.Array, num_real: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads a piece of each prompt; pieces of any size give what one prefill gives.

    Args:
      tokens: [B, T], padded at the end. num_real: [B], real tokens of each row (at least 1).

    Returns:
      Logits [B, Z] after each row's last real token, and the cache.
    """
    valid = (jnp.arange(tokens.shape[1]) < num_real[:, None]).astype(jnp.int32)
    hidden, cache = model.apply({'params': params}, tokens, valid, cache)
    last = jnp.take_along_axis(hidden, (num_real - 1)[:, None, None], axis=1)[:, 0]
    return head(params, last), cache


def decode(model: Kimi, params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """One token a sequence: tokens [B] -> logits [B, Z] and the cache after them."""
    hidden, cache = model.apply({'params': params}, tokens[:, None], None, cache)
    return head(params, hidden[:, 0]), cache


def init_params(model: Kimi, key: jax.Array) -> Params:
    """Fresh parameters; under `jax.eval_shape`, their shapes and dtypes only."""
    # The outputs are thrown away: no kernel needs to be traced for them.
    model = model.clone(run=model.run._replace(implementation='xla'))
    return model.init(key, jnp.zeros((1, 1), jnp.int32))['params']
