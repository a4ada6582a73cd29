"""A Kimi Linear that trains on a laptop: every mechanism, small widths, byte tokens."""

from k3jax.config import Config, LinearAttnConfig, ModelConfig


def get_config() -> Config:
    model = ModelConfig(
        name='tiny_kimi_linear',
        family='kimi_linear',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=128,
        num_hidden_layers=5,
        intermediate_size=256,
        hidden_act='silu',
        attn_res_block_size=None,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,  # unlike q and k
        linear_attn_config=LinearAttnConfig(
            num_heads=3,
            head_dim=32,
            kda_layers=(1, 2, 3),
            full_attn_layers=(4, 5),  # the last one out of step, as in the 48B
        ),
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=64,
        routed_scaling_factor=2.446,  # config.json: routed_scaling_factor of the 48B
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )
    return Config(model=model)
