"""What the feed-forward half of a layer computes: a dense gated MLP, or routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.model.norms import project, rms_norm
from k3jax.model.routing import route, router_logits
from pallas_kernels.common.platform import Implementation
from pallas_kernels.grouped_mlp import (
    Experts,
    GatedActivation,
    Mxfp4,
    SiTU,
    SwiGLU,
    grouped_mlp,
)

Params = dict[str, Any]


def activation_of(config: ModelConfig) -> GatedActivation:
    if config.hidden_act == 'silu':
        return SwiGLU()
    return SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)


@jax.named_scope('mlp')
def gated_mlp(params: Params, x: jax.Array, activation: GatedActivation) -> jax.Array:
    """down(activation(gate(x), up(x)))."""
    gate, up = project(x, params['gate_proj']), project(x, params['up_proj'])
    return project(activation(gate, up), params['down_proj'])


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[order]; its gradient is a gather too, where autodiff would scatter."""
    return x[order]


_permute.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, dy: (dy[inverse], None, None),
)


def _experts_of(params: Params) -> Experts:
    if 'w1' in params:
        return Experts(params['w1'], params['w3'], params['w2'])
    return Experts(
        *(Mxfp4(params[f'{w}_packed'], params[f'{w}_scale']) for w in ('w1', 'w3', 'w2'))
    )


def routed_experts(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The routed half of the MoE: latent down, experts, weighted sum, norm, latent up.

    The router reads x at full width. Args: x [M, D]. Returns [M, D].
    """
    routing = route(
        router_logits(x, params['gate']),
        params['e_score_correction_bias'],
        num_chosen=config.num_experts_per_token,
        renormalize=config.moe_renormalize,
        scaling_factor=config.routed_scaling_factor,
    )
    latent = config.routed_expert_hidden_size is not None
    z = project(x, params['routed_expert_down_proj']) if latent else x
    flat = routing.experts.reshape(-1)
    order = jnp.argsort(flat)
    inverse = jnp.argsort(order)
    group_sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
    repeated = jnp.repeat(z, config.num_experts_per_token, axis=0)
    rows = grouped_mlp(
        _permute(repeated, order, inverse),
        _experts_of(params['experts']),
        group_sizes,
        activation_of(config),
        implementation=implementation,
    )
    rows = _permute(rows, inverse, order).reshape(*routing.weights.shape, -1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    mixed = jnp.sum(routing.weights[..., None] * rows.astype(wide), axis=1).astype(x.dtype)
    if not latent:
        return mixed
    if config.latent_moe_use_norm:
        mixed = rms_norm(mixed, params['routed_expert_norm'], config.rms_norm_eps)
    return project(mixed, params['routed_expert_up_proj'])


@jax.named_scope('block_sparse_moe')
def moe(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Routed experts plus the shared MLP, both reading x [B, T, D].

    Source: Kimi K3 `block_sparse_moe` (Stable LatentMoE); without a latent width, Kimi Linear's.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = routed_experts(params, rows, config, implementation).reshape(x.shape)
    if config.num_shared_experts:
        out = out + gated_mlp(params['shared_experts'], x, activation_of(config))
    return out
