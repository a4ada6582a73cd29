"""Kimi K3: which tensor of the release is which leaf.

`{N}` counts layers from 0; `{E}` counts experts, whose tensors are stacked on the leaf's first
axis.
"""

from k3jax.convert.rules import Family, Rule
from k3jax.convert.transforms import (
    EXPAND_MXFP4,
    SQUEEZE_CONV,
    SQUEEZE_RES_PROJ,
    TRIM_ZERO_PADDING,
)
from k3jax.convert.vision import PREFIXES, VISION

SOURCE, LEAF = 'language_model.model.layers.{N}.', 'layers_{N}/'
ATTN, ATTN_LEAF = SOURCE + 'self_attn.', LEAF + 'self_attn/'
MOE, MOE_LEAF = SOURCE + 'block_sparse_moe.', LEAF + 'block_sparse_moe/'
EXPERT, EXPERT_LEAF = MOE + 'experts.{E}.', MOE_LEAF + 'experts/'

RULES = (
    Rule('language_model.model.embed_tokens.weight', 'embed_tokens'),
    Rule('language_model.model.norm.weight', 'norm'),
    Rule('language_model.lm_head.weight', 'lm_head'),
    Rule('language_model.model.output_attn_res_norm.weight', 'output_attn_res_norm'),
    Rule(
        'language_model.model.output_attn_res_proj.weight', 'output_attn_res_proj', SQUEEZE_RES_PROJ
    ),
    # Every layer.
    Rule(SOURCE + 'input_layernorm.weight', LEAF + 'input_layernorm'),
    Rule(SOURCE + 'post_attention_layernorm.weight', LEAF + 'post_attention_layernorm'),
    Rule(SOURCE + 'self_attention_res_norm.weight', LEAF + 'self_attention_res_norm'),
    Rule(
        SOURCE + 'self_attention_res_proj.weight',
        LEAF + 'self_attention_res_proj',
        SQUEEZE_RES_PROJ,
    ),
    Rule(SOURCE + 'mlp_res_norm.weight', LEAF + 'mlp_res_norm'),
    Rule(SOURCE + 'mlp_res_proj.weight', LEAF + 'mlp_res_proj', SQUEEZE_RES_PROJ),
    # KDA and MLA layers.
    Rule(ATTN + 'q_proj.weight', ATTN_LEAF + 'q_proj'),
    Rule(ATTN + 'g_proj.weight', ATTN_LEAF + 'g_proj'),
    Rule(ATTN + 'o_proj.weight', ATTN_LEAF + 'o_proj'),
    # KDA layers.
    Rule(ATTN + 'k_proj.weight', ATTN_LEAF + 'k_proj'),
    Rule(ATTN + 'v_proj.weight', ATTN_LEAF + 'v_proj'),
    Rule(ATTN + 'q_conv1d.weight', ATTN_LEAF + 'q_conv1d', SQUEEZE_CONV),
    Rule(ATTN + 'k_conv1d.weight', ATTN_LEAF + 'k_conv1d', SQUEEZE_CONV),
    Rule(ATTN + 'v_conv1d.weight', ATTN_LEAF + 'v_conv1d', SQUEEZE_CONV),
    Rule(ATTN + 'f_a_proj.weight', ATTN_LEAF + 'f_a_proj'),
    Rule(ATTN + 'f_b_proj.weight', ATTN_LEAF + 'f_b_proj'),
    Rule(ATTN + 'g_a_proj.weight', ATTN_LEAF + 'g_a_proj'),
    Rule(ATTN + 'g_b_proj.weight', ATTN_LEAF + 'g_b_proj'),
    Rule(ATTN + 'b_proj.weight', ATTN_LEAF + 'b_proj'),
    Rule(ATTN + 'A_log', ATTN_LEAF + 'A_log', TRIM_ZERO_PADDING),
    Rule(ATTN + 'dt_bias', ATTN_LEAF + 'dt_bias'),
    Rule(ATTN + 'o_norm.weight', ATTN_LEAF + 'o_norm'),
    # MLA layers.
    Rule(ATTN + 'q_a_proj.weight', ATTN_LEAF + 'q_a_proj'),
    Rule(ATTN + 'q_a_layernorm.weight', ATTN_LEAF + 'q_a_layernorm'),
    Rule(ATTN + 'q_b_proj.weight', ATTN_LEAF + 'q_b_proj'),
    Rule(ATTN + 'kv_a_proj_with_mqa.weight', ATTN_LEAF + 'kv_a_proj_with_mqa'),
    Rule(ATTN + 'kv_a_layernorm.weight', ATTN_LEAF + 'kv_a_layernorm'),
    Rule(ATTN + 'kv_b_proj.weight', ATTN_LEAF + 'kv_b_proj'),
    # Dense layers.
    Rule(SOURCE + 'mlp.gate_proj.weight', LEAF + 'mlp/gate_proj'),
    Rule(SOURCE + 'mlp.up_proj.weight', LEAF + 'mlp/up_proj'),
    Rule(SOURCE + 'mlp.down_proj.weight', LEAF + 'mlp/down_proj'),
    # Layers with experts.
    Rule(MOE + 'gate.weight', MOE_LEAF + 'gate'),
    Rule(MOE + 'gate.e_score_correction_bias', MOE_LEAF + 'e_score_correction_bias'),
    Rule(MOE + 'routed_expert_down_proj.weight', MOE_LEAF + 'routed_expert_down_proj'),
    Rule(MOE + 'routed_expert_up_proj.weight', MOE_LEAF + 'routed_expert_up_proj'),
    Rule(MOE + 'routed_expert_norm.weight', MOE_LEAF + 'routed_expert_norm'),
    Rule(MOE + 'shared_experts.gate_proj.weight', MOE_LEAF + 'shared_experts/gate_proj'),
    Rule(MOE + 'shared_experts.up_proj.weight', MOE_LEAF + 'shared_experts/up_proj'),
    Rule(MOE + 'shared_experts.down_proj.weight', MOE_LEAF + 'shared_experts/down_proj'),
)

EXPERTS_BF16 = (
    Rule(EXPERT + 'w1.weight', EXPERT_LEAF + 'w1'),
    Rule(EXPERT + 'w2.weight', EXPERT_LEAF + 'w2'),
    Rule(EXPERT + 'w3.weight', EXPERT_LEAF + 'w3'),
)

EXPERTS_MXFP4 = (
    Rule(EXPERT + 'w1.weight_packed', EXPERT_LEAF + 'w1_packed'),
    Rule(EXPERT + 'w1.weight_scale', EXPERT_LEAF + 'w1_scale'),
    Rule(EXPERT + 'w2.weight_packed', EXPERT_LEAF + 'w2_packed'),
    Rule(EXPERT + 'w2.weight_scale', EXPERT_LEAF + 'w2_scale'),
    Rule(EXPERT + 'w3.weight_packed', EXPERT_LEAF + 'w3_packed'),
    Rule(EXPERT + 'w3.weight_scale', EXPERT_LEAF + 'w3_scale'),
)

EXPERTS_EXPANDED = (
    Rule(
        (EXPERT + 'w1.weight_packed', EXPERT + 'w1.weight_scale'), EXPERT_LEAF + 'w1', EXPAND_MXFP4
    ),
    Rule(
        (EXPERT + 'w2.weight_packed', EXPERT + 'w2.weight_scale'), EXPERT_LEAF + 'w2', EXPAND_MXFP4
    ),
    Rule(
        (EXPERT + 'w3.weight_packed', EXPERT + 'w3.weight_scale'), EXPERT_LEAF + 'w3', EXPAND_MXFP4
    ),
)

KIMI_K3 = Family(
    rules=RULES + VISION,
    experts={
        ('bf16', 'bf16'): EXPERTS_BF16,
        ('mxfp4', 'mxfp4'): EXPERTS_MXFP4,
        ('mxfp4', 'bf16'): EXPERTS_EXPANDED,
    },
    carried_prefixes=PREFIXES,  # where config.json says nothing of vision
)
