"""Kimi Linear: which tensor of the release is which leaf.

`{N}` counts layers from 0; `{E}` counts experts, whose tensors are stacked on the leaf's first
axis.
"""

from k3jax.convert.rules import Family, Rule
from k3jax.convert.transforms import SQUEEZE_A_LOG, SQUEEZE_CONV

SOURCE, LEAF = 'model.layers.{N}.', 'layers_{N}/'
ATTN, ATTN_LEAF = SOURCE + 'self_attn.', LEAF + 'self_attn/'
MOE, MOE_LEAF = SOURCE + 'block_sparse_moe.', LEAF + 'block_sparse_moe/'
EXPERT, EXPERT_LEAF = MOE + 'experts.{E}.', MOE_LEAF + 'experts/'

RULES = (
    Rule('model.embed_tokens.weight', 'embed_tokens'),
    Rule('model.norm.weight', 'norm'),
    Rule('lm_head.weight', 'lm_head'),
    # Every layer.
    Rule(SOURCE + 'input_layernorm.weight', LEAF + 'input_layernorm'),
    Rule(SOURCE + 'post_attention_layernorm.weight', LEAF + 'post_attention_layernorm'),
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
    Rule(ATTN + 'A_log', ATTN_LEAF + 'A_log', SQUEEZE_A_LOG),
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
    Rule(MOE + 'shared_experts.gate_proj.weight', MOE_LEAF + 'shared_experts/gate_proj'),
    Rule(MOE + 'shared_experts.up_proj.weight', MOE_LEAF + 'shared_experts/up_proj'),
    Rule(MOE + 'shared_experts.down_proj.weight', MOE_LEAF + 'shared_experts/down_proj'),
)

EXPERTS_BF16 = (
    Rule(EXPERT + 'w1.weight', EXPERT_LEAF + 'w1'),
    Rule(EXPERT + 'w2.weight', EXPERT_LEAF + 'w2'),
    Rule(EXPERT + 'w3.weight', EXPERT_LEAF + 'w3'),
)

KIMI_LINEAR = Family(
    rules=RULES,
    experts={('bf16', 'bf16'): EXPERTS_BF16},
    carried_prefixes=(),
)
