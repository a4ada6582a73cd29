"""Kimi K3, all 2.78T parameters. Numbers: the release's config.json (`text_config`)."""

from k3jax.config import Config, LinearAttnConfig, ModelConfig

NUM_LAYERS = 93  # config.json: num_hidden_layers
# config.json: linear_attn_config.full_attn_layers, 1-based: every fourth, and the last one too
FULL_ATTN_LAYERS = (*range(4, 93, 4), 93)


def get_config() -> Config:
    model = ModelConfig(
        name='kimi_k3',
        family='kimi_k3',
        vocab_size=163840,  # config.json: vocab_size
        hidden_size=7168,  # config.json: hidden_size
        num_hidden_layers=NUM_LAYERS,
        intermediate_size=33792,  # config.json: intermediate_size (layer 0 only)
        rms_norm_eps=1e-5,  # config.json: rms_norm_eps
        initializer_range=0.02,  # config.json: initializer_range
        max_position_embeddings=1048576,  # config.json: max_position_embeddings
        hidden_act='situ',  # config.json: hidden_act
        activation_situ_beta=4.0,  # config.json: activation_situ_beta
        activation_situ_linear_beta=25.0,  # config.json: activation_situ_linear_beta
        attn_res_block_size=12,  # config.json: attn_res_block_size
        num_attention_heads=96,  # config.json: num_attention_heads
        q_lora_rank=1536,  # config.json: q_lora_rank
        kv_lora_rank=512,  # config.json: kv_lora_rank
        qk_nope_head_dim=128,  # config.json: qk_nope_head_dim
        qk_rope_head_dim=64,  # config.json: qk_rope_head_dim
        v_head_dim=128,  # config.json: v_head_dim
        mla_use_output_gate=True,  # config.json: mla_use_output_gate
        linear_attn_config=LinearAttnConfig(
            num_heads=96,  # config.json: linear_attn_config.num_heads
            head_dim=128,  # config.json: linear_attn_config.head_dim
            short_conv_kernel_size=4,  # config.json: linear_attn_config.short_conv_kernel_size
            gate_lower_bound=-5.0,  # config.json: linear_attn_config.gate_lower_bound
            use_full_rank_gate=True,  # config.json: linear_attn_config.use_full_rank_gate
            full_attn_layers=FULL_ATTN_LAYERS,
            # config.json: linear_attn_config.kda_layers, all the others
            kda_layers=tuple(n for n in range(1, NUM_LAYERS + 1) if n not in FULL_ATTN_LAYERS),
        ),
        num_experts=896,  # config.json: num_experts
        num_experts_per_token=16,  # config.json: num_experts_per_token
        num_shared_experts=2,  # config.json: num_shared_experts
        moe_intermediate_size=3072,  # config.json: moe_intermediate_size
        routed_expert_hidden_size=3584,  # config.json: routed_expert_hidden_size
        latent_moe_use_norm=True,  # config.json: latent_moe_use_norm
        moe_renormalize=True,  # config.json: moe_renormalize
        routed_scaling_factor=1.0,  # config.json: routed_scaling_factor
        first_k_dense_replace=1,  # config.json: first_k_dense_replace
        moe_layer_freq=1,  # config.json: moe_layer_freq
        bos_token_id=163584,  # config.json: bos_token_id
        eos_token_id=163586,  # config.json: eos_token_id
        pad_token_id=163839,  # config.json: pad_token_id
    )
    return Config(model=model)
