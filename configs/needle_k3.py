"""A K3 that learns on a laptop to find facts anywhere in its context; see experiments.needles.

Four stages, each with windows eight or four times as long as the one before.
"""

from k3jax.config import (
    Config,
    DataConfig,
    LinearAttnConfig,
    ModelConfig,
    NeedlesConfig,
    OptimizerConfig,
    StageConfig,
    TrainConfig,
)


def get_config() -> Config:
    model = ModelConfig(
        name='needle_k3',
        family='kimi_k3',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=96,
        num_hidden_layers=4,
        intermediate_size=192,
        attn_res_block_size=2,
        num_attention_heads=2,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=2,
            head_dim=32,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 3),
            full_attn_layers=(2, 4),
        ),
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=48,
        latent_moe_use_norm=True,
        initializer_range=0.1,  # about hidden_size**-0.5
        max_position_embeddings=1 << 20,
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=30, b2=0.99),
        data=DataConfig(
            source='needles',
            needles=NeedlesConfig(facts=8, asked=8),
            sequence_length=128,
            batch_size=32,
            shuffle_rows=1,
        ),
        train=TrainConfig(
            num_steps=870,
            stages=(
                StageConfig(first_step=0),
                StageConfig(first_step=600, data={'sequence_length': 1024, 'batch_size': 8}),
                StageConfig(first_step=750, data={'sequence_length': 4096, 'batch_size': 4}),
                StageConfig(first_step=830, data={'sequence_length': 16384, 'batch_size': 2}),
            ),
            dtype='float32',
            remat='none',
            log_every=20,
            checkpoint_every=500,
            eval_batches=8,
            sample_tokens=0,
        ),
    )
