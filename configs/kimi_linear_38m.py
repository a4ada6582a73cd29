"""A Kimi Linear of 38M parameters, for speed comparisons on a CPU (`make bench`)."""

from k3jax.config import Config, LinearAttnConfig, ModelConfig


def get_config() -> Config:
    model = ModelConfig(
        name='kimi_linear_38m',
        family='kimi_linear',
        vocab_size=1024,
        hidden_size=384,
        num_hidden_layers=9,
        intermediate_size=1024,
        hidden_act='silu',
        num_attention_heads=6,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_attn_config=LinearAttnConfig(
            num_heads=6,
            head_dim=64,
            kda_layers=(1, 2, 3, 5, 6, 7),
            full_attn_layers=(4, 8, 9),
        ),
        num_experts=16,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=192,
        routed_scaling_factor=2.446,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Config(model=model)
