"""What a step does to parameters beside the optimizer: biases are set, heads are clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig, OptimizerConfig
from k3jax.model.plan import Plan, stacks
from k3jax.model.statistics import LayerStatistics
from k3jax.train.optim import Correction
from k3jax.train.qk_clip import clip_factor, row_factors
from k3jax.train.quantile_balance import estimated_bias, load_metrics

Path = tuple[str, ...]

BIAS = ('block_sparse_moe', 'e_score_correction_bias')


def at(tree: Any, path: Path) -> Any:
    """What lies at `path` in nested dicts."""
    return functools.reduce(lambda node, name: node[name], path, tree)


def _over_layers(function: Callable[..., jax.Array], lead: int) -> Callable[..., jax.Array]:
    for _ in range(lead):
        function = jax.vmap(function)
    return function


def corrections(
    seen: Any, params: Any, model: ModelConfig, plan: Plan, config: OptimizerConfig
) -> dict[Path, Correction]:
    """What is to be done to parameters after their update, by their path.

    Args:
      seen: statistics of the whole batch, of `Kimi`'s output.
      params: that the batch was routed with.
    """
    found: dict[Path, Correction] = {}
    for path, layers in stacks(plan):
        statistics: LayerStatistics = at(seen, path)
        if statistics.histogram is not None:
            rule = functools.partial(
                estimated_bias,
                num_chosen=model.num_experts_per_token,
                momentum=config.quantile_balance.momentum,
            )
            old = at(params, path + BIAS)
            bias = _over_layers(rule, layers.ndim)(statistics.histogram, old)
            found[path + BIAS] = lambda x, bias=bias: bias.astype(x.dtype)
        if statistics.max_logit is None or config.qk_clip_threshold is None:
            continue
        factor = clip_factor(statistics.max_logit, config.qk_clip_threshold)
        for name in at(params, (*path, 'self_attn')):
            rows = row_factors(name, factor, model)
            if rows is not None:
                found[(*path, 'self_attn', name)] = lambda x, rows=rows: x * rows[..., None]
    return found


def layer_metrics(seen: Any, plan: Plan) -> dict[str, jax.Array]:
    """What was seen, of each layer that has it, in the layers' order: one value a layer.

    `load_metrics` of layers with experts, and `max_logit` of those with attention (0 where there
    was no token).
    """
    loads: dict[int, jax.Array] = {}
    logits: dict[int, jax.Array] = {}
    for path, layers in stacks(plan):
        statistics: LayerStatistics = at(seen, path)
        for of_layer, values in ((loads, statistics.load), (logits, statistics.max_logit)):
            if values is not None:
                of_layer.update(zip(layers.flat, values.reshape(-1, values.shape[-1]), strict=True))
    metrics = {}
    if loads:
        metrics = load_metrics(jnp.stack([loads[layer] for layer in sorted(loads)]))
    if logits:
        top = jnp.stack([jnp.max(logits[layer]) for layer in sorted(logits)])
        metrics['max_logit'] = jnp.where(top == -jnp.inf, 0.0, top)
    return metrics
