"""A K3 of 20 million parameters, byte tokens, with multi-token prediction: a model for a draft.

Of 128 experts, a token meets four.
"""

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
        name='draft_k3',
        family='kimi_k3',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=192,
        num_hidden_layers=6,
        intermediate_size=512,
        attn_res_block_size=2,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=4,
            head_dim=32,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 2, 3, 5),
            full_attn_layers=(4, 6),
        ),
        num_experts=128,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=96,
        routed_expert_hidden_size=96,
        latent_moe_use_norm=True,
        num_nextn_predict_layers=1,
        initializer_range=0.07,  # about hidden_size**-0.5
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40, b2=0.99),
        data=DataConfig(sequence_length=256, batch_size=8, shuffle_rows=4096),
        train=TrainConfig(
            num_steps=300,
            dtype='float32',
            remat='none',
            log_every=20,
            checkpoint_every=200,
            eval_batches=64,
        ),
    )
