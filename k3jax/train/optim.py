"""How parameters move: AdamW on a warm-up and cosine schedule; some leaves are held."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax

from k3jax.config import ModelConfig, OptimizerConfig
from k3jax.model.layout import Leaf
from k3jax.model.param import map_leaves
from k3jax.model.plan import Plan

Label = Literal['decayed', 'plain', 'frozen']


def _label(name: str, leaf: Leaf) -> Label:
    if name == 'e_score_correction_bias':
        return 'frozen'  # load balancing sets it, not the gradient
    return 'decayed' if leaf.init == 'normal' and len(leaf.shape) > 1 else 'plain'


def leaf_labels(config: ModelConfig, plan: Plan) -> dict[str, Any]:
    """What the optimizer does with each leaf of the model's tree: decay it, move it, hold it."""
    return map_leaves(lambda name, leaf, lead: _label(name, leaf), config, plan)


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup_steps`, then cosine to the final ratio at `num_steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.final_learning_rate_ratio,
    )


def make_optimizer(
    config: OptimizerConfig, num_steps: int, labels: dict[str, Any]
) -> optax.GradientTransformation:
    """AdamW with global-norm clipping; weight decay on matrices; frozen leaves untouched."""
    schedule = learning_rate(config, num_steps)
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda label: label == 'decayed', labels),
    )
    held = jax.tree.map(lambda label: 'frozen' if label == 'frozen' else 'moved', labels)
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm),
        optax.partition({'moved': adamw, 'frozen': optax.set_to_zero()}, held),
    )
