"""A K3 that reads text and sees: three rows in four are Python, one is handwritten digits.

`python -m experiments.digits` writes the digits; minutes on a CPU.
"""

from k3jax.config import (
    Config,
    DataConfig,
    LinearAttnConfig,
    MediaDataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    VisionConfig,
)

DIGITS = 'runs/digits/train'


def get_config() -> Config:
    model = ModelConfig(
        name='digits_k3',
        family='kimi_k3',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=96,
        num_hidden_layers=4,
        intermediate_size=192,
        attn_res_block_size=2,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=3,
            head_dim=32,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 2, 3),
            full_attn_layers=(4,),
        ),
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        routed_expert_hidden_size=48,
        latent_moe_use_norm=True,
        initializer_range=0.1,  # about hidden_size**-0.5
        vision=VisionConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            qkv_hidden_size=64,
            intermediate_size=128,
            pos_emb_height=8,
            pos_emb_width=8,
        ),
        media_placeholder_token_id=277,  # special slot 21, <|media_pad|>
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )
    return Config(
        model=model,
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=30, b2=0.99),
        data=DataConfig(
            mixture=('python_stdlib', DIGITS),
            mixture_weights=(3, 1),
            media=MediaDataConfig(sources=(DIGITS,), patches_per_row=192),
            sequence_length=256,
            batch_size=8,
            shuffle_rows=2048,
        ),
        train=TrainConfig(
            num_steps=320,
            dtype='float32',
            remat='none',
            log_every=20,
            checkpoint_every=200,
            eval_every=0,
            eval_batches=16,
            sample_tokens=0,
        ),
    )
