"""A K3 of 17 million parameters for comparing training recipes on a CPU: the real vocabulary.

Give it with `--set data.tokenizer=DIR`, DIR a released folder or one with its tiktoken.model. With
bytes, a fifth of all tokens is the space, which no bias can share out among experts.
experiments/README.md has the comparisons.
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
        name='small_k3',
        family='kimi_k3',
        vocab_size=163840,  # nearly all parameters are its embedding and its head
        hidden_size=48,
        num_hidden_layers=6,
        intermediate_size=192,
        attn_res_block_size=2,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=3,
            head_dim=16,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 2, 3, 5),
            full_attn_layers=(4, 6),
        ),
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=96,
        routed_expert_hidden_size=32,
        latent_moe_use_norm=True,
        initializer_range=0.14,  # about hidden_size**-0.5
    )
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=10),
        # 512 routed entries an expert and step, of many documents.
        data=DataConfig(sequence_length=128, batch_size=32, shuffle_rows=8192),
        train=TrainConfig(
            num_steps=80,
            dtype='float32',
            remat='none',
            log_every=1,
            checkpoint_every=1000,
            eval_batches=8,
            sample_tokens=0,
        ),
    )
