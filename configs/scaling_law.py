"""Tiny models of two recipes, K2's and K3's, at equal widths: the grid of experiments.scaling_law.

`recipe` is 'k2', 'k3', or one of `ABLATIONS`, K3 without one of its parts. What a recipe's experts
cost a token is the same in both: four of 32 at half the width, or two of 16 at the full one.
K2's rotary positions are missing, here as everywhere in this code: its attention has none.
"""

import dataclasses

from k3jax.config import (
    Config,
    DataConfig,
    LinearAttnConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    QuantileBalanceConfig,
    TrainConfig,
)

WIDTHS = (64, 80, 96, 112)
SEQUENCE_LENGTH, BATCH_SIZE = 256, 8
TOKENS = 1 << 18  # of the smallest width
RATE = 1e-2

_HEAD = 16


def _model(width: int) -> ModelConfig:
    """K3's."""
    return ModelConfig(
        name=f'k3_{width}',
        family='kimi_k3',
        vocab_size=512,  # 256 bytes and 256 special tokens
        hidden_size=width,
        num_hidden_layers=5,
        intermediate_size=2 * width,
        attn_res_block_size=2,
        num_attention_heads=width // _HEAD,
        q_lora_rank=width // 2,
        kv_lora_rank=width // 2,
        qk_nope_head_dim=_HEAD,
        qk_rope_head_dim=8,
        v_head_dim=_HEAD,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttnConfig(
            num_heads=width // _HEAD,
            head_dim=_HEAD,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            kda_layers=(1, 2, 3),
            full_attn_layers=(4, 5),
        ),
        num_experts=32,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=width // 2,
        routed_expert_hidden_size=width // 2,
        latent_moe_use_norm=True,
        initializer_range=width**-0.5,
        bos_token_id=256,  # special slot 0
        eos_token_id=257,  # special slot 1, [EOS]
        pad_token_id=511,  # special slot 255
    )


def tokens_of(width: int) -> int:
    """As many a parameter at every width, nearly: both grow as its square."""
    return TOKENS * width**2 // WIDTHS[0] ** 2


def _linear(model: ModelConfig, **fields: object) -> ModelConfig:
    changed = dataclasses.replace(model.linear_attn_config, **fields)
    return dataclasses.replace(model, linear_attn_config=changed)


def _k2_model(model: ModelConfig) -> ModelConfig:
    layers = tuple(range(1, model.num_hidden_layers + 1))
    return dataclasses.replace(
        _linear(model, kda_layers=(), full_attn_layers=layers),
        name=f'k2_{model.hidden_size}',
        family='kimi_linear',
        hidden_act='silu',
        attn_res_block_size=None,
        mla_use_output_gate=False,
        num_experts=16,
        num_experts_per_token=2,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=False,
    )


# Ten times DeepSeek-V3's step: these runs have hundreds of steps, not thousands.
_BY_SIGNS = {'quantile_balance': QuantileBalanceConfig(enabled=False), 'sign_balance_step': 1e-2}
_MUON = MuonConfig(update_rms=0.4)
_WHOLE = dataclasses.replace(_MUON, per_head=False)

# Name -> what takes the part out of K3.
ABLATIONS = {
    'attn_res': lambda model: dataclasses.replace(model, attn_res_block_size=None),
    'gate_bound': lambda model: _linear(model, gate_lower_bound=None),
    'latent_norm': lambda model: dataclasses.replace(model, latent_moe_use_norm=False),
    'situ': lambda model: dataclasses.replace(model, hidden_act='silu'),
    'quantile_balance': _BY_SIGNS,
    'per_head_muon': {'muon': _WHOLE},
}


def recipe_config(recipe: str, width: int, num_tokens: int, rate: float = RATE) -> Config:
    """A run of one recipe; its batches depend on nothing but their number.

    Raises:
      ValueError: there is no such recipe.
    """
    if recipe not in ('k2', 'k3', *ABLATIONS):
        raise ValueError(f'recipe: got {recipe!r}, wanted k2, k3 or one of {", ".join(ABLATIONS)}')
    model, optimizer = _model(width), {}
    if recipe == 'k2':
        model, optimizer = _k2_model(model), _BY_SIGNS | {'muon': _WHOLE}
    elif callable(change := ABLATIONS.get(recipe, {})):
        model = change(model)
    else:
        optimizer = change
    num_steps = max(2, num_tokens // (SEQUENCE_LENGTH * BATCH_SIZE))
    return Config(
        model=model,
        optimizer=OptimizerConfig(
            **({'name': 'muon', 'muon': _MUON, 'learning_rate': rate} | optimizer),
            warmup_steps=max(1, num_steps // 20),
            b2=0.99,
        ),
        data=DataConfig(sequence_length=SEQUENCE_LENGTH, batch_size=BATCH_SIZE, shuffle_rows=4096),
        train=TrainConfig(
            num_steps=num_steps,
            dtype='float32',
            remat='none',
            log_every=20,
            checkpoint_every=200,
            keep_checkpoints=1,
            eval_batches=64,
            sample_tokens=0,
        ),
    )


def get_config() -> Config:
    return recipe_config('k3', WIDTHS[0], TOKENS)
