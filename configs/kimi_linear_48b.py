"""Kimi Linear 48B-A3B. Numbers: the release's config.json."""

from k3jax.config import Config, LinearAttnConfig, ModelConfig

NUM_LAYERS = 27  # config.json: num_hidden_layers
# config.json: linear_attn_config.full_attn_layers, 1-based
FULL_ATTN_LAYERS = (4, 8, 12, 16, 20, 24, 27)


def get_config() -> Config:
    model = ModelConfig(
        name='kimi_linear_48b',
        family='kimi_linear',
        vocab_size=163840,  # config.json: vocab_size
        hidden_size=2304,  # config.json: hidden_size
        num_hidden_layers=NUM_LAYERS,
        intermediate_size=9216,  # config.json: intermediate_size (layer 0 only)
        rms_norm_eps=1e-5,  # config.json: rms_norm_eps
        max_position_embeddings=1048576,  # config.json: model_max_length
        hidden_act='silu',  # config.json: hidden_act
        attn_res_block_size=None,
        num_attention_heads=32,  # config.json: num_attention_heads
        q_lora_rank=None,  # config.json: q_lora_rank
        kv_lora_rank=512,  # config.json: kv_lora_rank
        qk_nope_head_dim=128,  # config.json: qk_nope_head_dim
        qk_rope_head_dim=64,  # config.json: qk_rope_head_dim
        v_head_dim=128,  # config.json: v_head_dim
        linear_attn_config=LinearAttnConfig(
            num_heads=32,  # config.json: linear_attn_config.num_heads
            head_dim=128,  # config.json: linear_attn_config.head_dim
            short_conv_kernel_size=4,  # config.json: linear_attn_config.short_conv_kernel_size
            full_attn_layers=FULL_ATTN_LAYERS,
            # config.json: linear_attn_config.kda_layers, all the others
            kda_layers=tuple(n for n in range(1, NUM_LAYERS + 1) if n not in FULL_ATTN_LAYERS),
        ),
        num_experts=256,  # config.json: num_experts
        num_experts_per_token=8,  # config.json: num_experts_per_token
        num_shared_experts=1,  # config.json: num_shared_experts
        moe_intermediate_size=1024,  # config.json: moe_intermediate_size
        moe_renormalize=True,  # config.json: moe_renormalize
        routed_scaling_factor=2.446,  # config.json: routed_scaling_factor
        first_k_dense_replace=1,  # config.json: first_k_dense_replace
        moe_layer_freq=1,  # config.json: moe_layer_freq
        bos_token_id=163584,  # config.json: bos_token_id
        eos_token_id=163586,  # config.json: eos_token_id
        pad_token_id=163839,  # config.json: pad_token_id
    )
    return Config(model=model)
