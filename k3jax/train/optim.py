"""How parameters move: Muon or AdamW on a warm-up and cosine schedule; some leaves are held."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import optax

from k3jax.config import ConfigError, ModelConfig, OptimizerConfig
from k3jax.model.layout import Leaf
from k3jax.model.param import map_leaves
from k3jax.model.plan import Plan
from k3jax.train.muon import Blocks, scale_by_muon

# What a parameter is to the optimizer. heads: a matrix whose rows are those of one head after the
# other; keys_and_values: so, and in each head first the keys' rows; matrix: a single one, or one
# for each expert; other: no matrix, or a table of vectors; held: set by another rule.
Group = Literal['heads', 'keys_and_values', 'matrix', 'router', 'other', 'held']
Label = Literal['muon', 'decayed', 'plain', 'held']

# Every parameter of the family. Source: report section 2.5 for the heads of queries, keys and
# values; what is not said there is as in Moonlight and K2.
_NAMES: dict[Group, str] = {
    'heads': 'q_proj k_proj v_proj q_b_proj',
    'keys_and_values': 'kv_b_proj',
    'matrix': """
        f_a_proj f_b_proj b_proj o_proj g_proj g_a_proj g_b_proj kv_a_proj_with_mqa q_a_proj
        gate_proj up_proj down_proj routed_expert_down_proj routed_expert_up_proj w1 w2 w3""",
    'router': 'gate',
    'other': """
        embed_tokens lm_head norm input_layernorm post_attention_layernorm kv_a_layernorm
        q_a_layernorm o_norm routed_expert_norm A_log dt_bias q_conv1d k_conv1d v_conv1d
        self_attention_res_norm self_attention_res_proj mlp_res_norm mlp_res_proj
        output_attn_res_norm output_attn_res_proj""",
    'held': """
        e_score_correction_bias w1_packed w2_packed w3_packed w1_scale w2_scale w3_scale""",
}
_GROUPS: dict[str, Group] = {
    name: group for group, names in _NAMES.items() for name in names.split()
}
assert set(_NAMES) == set(get_args(Group))


def group_of(name: str) -> Group:
    """What the parameter of this name is to the optimizer.

    Raises:
      ConfigError: no group has it.
    """
    if name not in _GROUPS:
        raise ConfigError(f'optimizer: no group has the parameter {name!r}; add it to one in optim')
    return _GROUPS[name]


def _label(name: str, leaf: Leaf, config: OptimizerConfig) -> Label:
    group = group_of(name)
    if group == 'held':
        return 'held'
    routed = group != 'router' or config.muon.router
    if config.name == 'muon' and group != 'other' and routed:
        return 'muon'
    return 'decayed' if leaf.init == 'normal' and len(leaf.shape) > 1 else 'plain'


def labels_of(config: OptimizerConfig, model: ModelConfig, plan: Plan) -> dict[str, Any]:
    """What moves each leaf of the model's tree: Muon, AdamW with or without decay, or nothing."""
    return map_leaves(lambda name, leaf, lead: _label(name, leaf, config), model, plan)


def blocks_of(name: str, leaf: Leaf, model: ModelConfig, split_kv_b: bool) -> Blocks:
    """The matrices in a leaf that Muon moves."""
    rows, group = leaf.shape[-2], group_of(name)
    if group not in ('heads', 'keys_and_values'):
        return Blocks(1, (rows,))
    is_kda = leaf.axes[-2] == 'kda_heads'
    heads = model.linear_attn_config.num_heads if is_kda else model.num_attention_heads
    if rows % heads:
        raise ConfigError(f'optimizer: {name} has {rows} rows, wanted a multiple of {heads} heads')
    if group == 'keys_and_values' and split_kv_b:
        return Blocks(heads, (model.qk_nope_head_dim, model.v_head_dim))
    return Blocks(heads, (rows // heads,))


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
    config: OptimizerConfig, num_steps: int, model: ModelConfig, plan: Plan
) -> optax.GradientTransformation:
    """Global-norm clipping, then what `labels_of` says; weight decay on matrices."""
    schedule, labels = learning_rate(config, num_steps), labels_of(config, model, plan)

    def blocks(name: str, leaf: Leaf, lead: tuple[int, ...]) -> Any:
        del lead
        if _label(name, leaf, config) != 'muon':
            return optax.MaskedNode()
        return blocks_of(name, leaf, model, config.muon.split_kv_b)

    muon = optax.chain(
        scale_by_muon(map_leaves(blocks, model, plan), config.muon),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda label: label == 'decayed', labels),
    )
    kinds = {'muon': 'muon', 'decayed': 'adamw', 'plain': 'adamw', 'held': 'held'}
    moved = jax.tree.map(kinds.__getitem__, labels)
    return optax.chain(
        optax.clip_by_global_norm(config.grad_clip_norm),
        optax.partition({'muon': muon, 'adamw': adamw, 'held': optax.set_to_zero()}, moved),
    )
