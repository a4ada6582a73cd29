"""A K3 that trains on a laptop: every mechanism of the release, small widths, byte tokens."""

from k3jax.config import (
    Config,
    DataConfig,
    LinearAttnConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    model = ModelConfig(
        name='tiny_k3',
        family='kimi_k3',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=128,
        num_hidden_layers=5,
        intermediate_size=256,
        attn_res_block_size=2,  # two whole blocks and a partial one, as K3's last is partial
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=20,  # unlike q and k
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=3,  # unlike num_attention_heads; the release pads A_log past its heads
            head_dim=32,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 2, 3),
            full_attn_layers=(4, 5),  # two MLA layers at the end, as in K3
        ),
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=32,
        routed_expert_hidden_size=64,
        latent_moe_use_norm=True,
        initializer_range=0.08,  # about hidden_size**-0.5; 0.02 is for the release's width
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )
    # Small steps, many of them: learns most from the few tokens that minutes on a CPU allow.
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=30, b2=0.99),
        data=DataConfig(sequence_length=256, batch_size=4, shuffle_rows=4096),
        train=TrainConfig(
            num_steps=700,
            dtype='float32',
            remat='none',
            log_every=20,
            checkpoint_every=200,
            eval_batches=256,
        ),
    )
