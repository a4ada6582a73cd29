"""What the feed-forward half of a layer computes: a dense gated MLP, or routed experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.model.norms import project, rms_norm
from k3jax.model.routing import Routing, required_bias_histogram, route, router_logits
from k3jax.model.run import Run
from k3jax.model.statistics import LayerStatistics, Watch
from k3jax.parallel.moe_ep import routed_mlp
from k3jax.parallel.moe_gathered import gathered_mlp
from k3jax.parallel.moon_ep import count_entries
from k3jax.parallel.shard import Parallel
from pallas_kernels.grouped_mlp import (
    Experts,
    GatedActivation,
    Mxfp4,
    Mxfp4Tiles,
    Mxfp8,
    SiTU,
    SwiGLU,
    grouped_mlp,
    round_rows,
)

Params = dict[str, Any]


def activation_of(config: ModelConfig) -> GatedActivation:
    if config.hidden_act == 'silu':
        return SwiGLU()
    return SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)


def _rounding_of(run: Run) -> Mxfp8 | None:
    how = run.quantisation
    return None if how.activations is None else Mxfp8(how.scale_rule)


@jax.named_scope('mlp')
def gated_mlp(
    params: Params, x: jax.Array, activation: GatedActivation, parallel: Parallel | None
) -> jax.Array:
    """down(activation(gate(x), up(x))); the inner width may be cut."""
    gate, up = project(x, params['gate_proj']), project(x, params['up_proj'])
    y = project(activation(gate, up), params['down_proj'])
    return y if parallel is None else parallel.total(y, 'mlp')


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
    packed = [(params[f'{w}_packed'], params[f'{w}_scale']) for w in ('w1', 'w3', 'w2')]
    # As released, or in the kernels' order: serve/expert_tiles.py.
    form = Mxfp4 if packed[0][0].dtype == jnp.uint8 else Mxfp4Tiles
    return Experts(*(form(*pair) for pair in packed))


def _on_one_chip(
    z: jax.Array, routing: Routing, experts: Experts, activation: GatedActivation, run: Run
) -> jax.Array:
    """sum_j weights_j experts_j(z), every expert being here: [M, L] float32."""
    flat = routing.experts.reshape(-1)
    order = jnp.argsort(flat)
    inverse = jnp.argsort(order)
    z, quantise = round_rows(z, _rounding_of(run))
    rows = grouped_mlp(
        _permute(jnp.repeat(z, routing.experts.shape[1], axis=0), order, inverse),
        experts,
        jnp.bincount(flat, length=experts.num_experts).astype(jnp.int32),
        activation,
        quantise=quantise,
        implementation=run.implementation,
    )
    rows = _permute(rows, inverse, order).reshape(*routing.weights.shape, -1)
    wide = jnp.promote_types(z.dtype, jnp.float32)
    return jnp.sum(routing.weights[..., None] * rows.astype(wide), axis=1)


def _mixed(
    z: jax.Array, routing: Routing, experts: Experts, activation: GatedActivation, run: Run
) -> jax.Array:
    """sum_j weights_j experts_j(z), wherever the experts are: [M, L] float32."""
    parallel = run.parallel
    if parallel is None or parallel.size(*parallel.rules.experts) == 1:
        return _on_one_chip(z, routing, experts, activation, run)
    arguments = (z, routing.experts, routing.weights, experts, activation)
    if parallel.strategy == 'decode':
        return gathered_mlp(
            *arguments,
            parallel=parallel,
            quantise=_rounding_of(run),
            implementation=run.implementation,
        )
    (axis,) = parallel.rules.experts
    return routed_mlp(
        *arguments,
        axis=axis,
        axis_size=parallel.size(axis),
        method=parallel.expert_parallel,
        quantise=_rounding_of(run),
        implementation=run.implementation,
    )


def _routed(
    params: Params, x: jax.Array, config: ModelConfig, watch: Watch | None, counted: jax.Array
) -> tuple[Routing, LayerStatistics | None]:
    """x [M, D] routed at full width, and what `watch` asks for of the rows `counted` [M]."""
    bias, num_chosen = params['e_score_correction_bias'], config.num_experts_per_token
    # Where every expert is chosen, there is nothing to balance.
    balanced = watch is not None and watch.bins > 0 and num_chosen < config.num_experts
    logits = router_logits(x, params['gate'])
    routing = route(
        logits,
        bias,
        num_chosen=num_chosen,
        renormalize=config.moe_renormalize,
        scaling_factor=config.routed_scaling_factor,
        with_cutoff=balanced,
    )
    if watch is None:
        return routing, None
    with jax.named_scope('watch'):
        chosen = jnp.where(counted[:, None], routing.experts, config.num_experts)
        load, histogram = count_entries(chosen, config.num_experts), None
        if balanced:
            scores = jax.nn.sigmoid(logits)
            histogram = required_bias_histogram(scores, routing.cutoff, bias, counted, watch.bins)
    return routing, LayerStatistics(load, histogram)


def routed_experts(
    params: Params, x: jax.Array, config: ModelConfig, run: Run, counted: jax.Array
) -> tuple[jax.Array, LayerStatistics | None]:
    """The routed half of the MoE: latent down, experts, weighted sum, norm, latent up.

    The router reads x at full width. Args: x [M, D]. Returns [M, D], and what the run watches.
    """
    routing, seen = _routed(params, x, config, run.watch, counted)
    latent = config.routed_expert_hidden_size is not None
    z = project(x, params['routed_expert_down_proj']) if latent else x
    experts = _experts_of(params['experts'])
    mixed = _mixed(z, routing, experts, activation_of(config), run).astype(x.dtype)
    if not latent:
        return mixed, seen
    if config.latent_moe_use_norm:
        mixed = rms_norm(mixed, params['routed_expert_norm'], config.rms_norm_eps)
    return project(mixed, params['routed_expert_up_proj']), seen


@jax.named_scope('block_sparse_moe')
def moe(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    run: Run,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, LayerStatistics | None]:
    """Routed experts plus the shared MLP, both reading x [B, T, D].

    segment_ids: [B, T], 0 = padding; None where there is none. Only what is watched depends on it.

    Source: Kimi K3 `block_sparse_moe` (Stable LatentMoE); without a latent width, Kimi Linear's.
    """
    rows = x.reshape(-1, x.shape[-1])
    counted = jnp.ones(len(rows), bool) if segment_ids is None else segment_ids.reshape(-1) > 0
    out, seen = routed_experts(params, rows, config, run, counted)
    out = out.reshape(x.shape)
    if config.num_shared_experts:
        shared = gated_mlp(params['shared_experts'], x, activation_of(config), run.parallel)
        out = out + shared
    return out, seen
