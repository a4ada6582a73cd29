"""What a step does to parameters beside the optimizer: biases are set, heads are clipped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig, OptimizerConfig
from k3jax.model.plan import Plan, at, bodies
from k3jax.model.statistics import LayerStatistics
from k3jax.train.optim import Correction
from k3jax.train.qk_clip import clip_factor, row_factors
from k3jax.train.quantile_balance import estimated_bias, load_metrics
from k3jax.train.sign_balance import bias_step

BIAS = ('block_sparse_moe', 'e_score_correction_bias')


def corrections(
    seen: Any, params: Any, model: ModelConfig, plan: Plan, config: OptimizerConfig
) -> dict[tuple[str, ...], Correction]:
    """What is to be done to parameters after their update, by their path.

    Args:
      seen: statistics of the whole batch, of `Kimi`'s output.
      params: that the batch was routed with.
    """
    found: dict[tuple[str, ...], Correction] = {}
    for path, _ in bodies(model, plan):
        statistics: LayerStatistics = at(seen, path)
        if statistics.histogram is not None:
            bias = estimated_bias(
                statistics.histogram,
                at(params, path + BIAS),
                model.num_experts_per_token,
                config.quantile_balance.momentum,
            )
            found[path + BIAS] = lambda x, bias=bias: bias.astype(x.dtype)
        if config.sign_balance_step and statistics.load is not None:
            step = bias_step(statistics.load, config.sign_balance_step)
            found[path + BIAS] = lambda x, step=step: x + step.astype(x.dtype)
        if statistics.max_logit is None or config.qk_clip_threshold is None:
            continue
        factor = clip_factor(statistics.max_logit, config.qk_clip_threshold)
        for name in at(params, (*path, 'self_attn')):
            rows = row_factors(name, factor, model)
            if rows is not None:
                found[(*path, 'self_attn', name)] = lambda x, rows=rows: x * rows[..., None]
    return found


def layer_metrics(seen: Any, model: ModelConfig, plan: Plan) -> dict[str, jax.Array]:
    """What was seen, of each layer that has it, in the layers' order: one value a layer.

    `load_metrics` of layers with experts, and `max_logit` of those with attention (0 where there
    was no token).
    """
    found = [(layers.ravel(), at(seen, path)) for path, layers in bodies(model, plan)]

    def in_order(parts: list[tuple[np.ndarray, jax.Array]]) -> jax.Array:
        """[layers, ...] of stacks of layers, with their numbers."""
        rows = jnp.concatenate([x.reshape(-1, x.shape[-1]) for _, x in parts])
        return rows[np.argsort(np.concatenate([numbers for numbers, _ in parts]))]

    metrics = {}
    if loads := [(n, x.load) for n, x in found if x.load is not None]:
        metrics = load_metrics(in_order(loads))
    if logits := [(n, x.max_logit) for n, x in found if x.max_logit is not None]:
        top = jnp.max(in_order(logits), axis=-1)
        metrics['max_logit'] = jnp.where(top == -jnp.inf, 0.0, top)
    return metrics
