"""Models small enough to compile in seconds, with every mechanism, and random parameters."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from k3jax.config import LinearAttnConfig, ModelConfig
from k3jax.model.layout import Leaf, model_leaves

_COMMON: dict[str, Any] = {
    'vocab_size': 40,
    'hidden_size': 24,
    'intermediate_size': 28,
    'num_attention_heads': 2,
    'kv_lora_rank': 10,
    'qk_nope_head_dim': 8,
    'qk_rope_head_dim': 4,
    'v_head_dim': 6,
    'num_experts': 6,
    'num_experts_per_token': 2,
    'moe_intermediate_size': 9,
    'max_position_embeddings': 64,
    'bos_token_id': 1,
    'eos_token_id': 2,
    'pad_token_id': 0,
}


def _linear(kda_layers: tuple[int, ...], full_attn_layers: tuple[int, ...], **fields: Any):
    return LinearAttnConfig(
        num_heads=3, head_dim=8, kda_layers=kda_layers, full_attn_layers=full_attn_layers, **fields
    )


def k3(
    kda_layers: tuple[int, ...] = (1, 2, 3),
    full_attn_layers: tuple[int, ...] = (4, 5),
    **fields: Any,
) -> ModelConfig:
    """Five layers: two attention-residual blocks and a partial one, two MLA layers at the end."""
    linear = _linear(kda_layers, full_attn_layers, gate_lower_bound=-5.0, use_full_rank_gate=True)
    own = {
        'name': 'test_k3',
        'family': 'kimi_k3',
        'num_hidden_layers': len(kda_layers + full_attn_layers),
        'attn_res_block_size': 2,
        'q_lora_rank': 12,
        'mla_use_output_gate': True,
        'num_shared_experts': 2,
        'routed_expert_hidden_size': 16,
        'latent_moe_use_norm': True,
    }
    return ModelConfig(linear_attn_config=linear, **(_COMMON | own | fields))


def k3_deep(**fields: Any) -> ModelConfig:
    """Seven layers that fold: two equal blocks of a run of KDA layers and an MLA layer; a tail."""
    own = {'attn_res_block_size': 3, 'first_k_dense_replace': 0}
    return k3((1, 2, 4, 5), (3, 6, 7), **(own | fields))


def kimi_linear(
    kda_layers: tuple[int, ...] = (1, 2, 3),
    full_attn_layers: tuple[int, ...] = (4, 5),
    **fields: Any,
) -> ModelConfig:
    """Plain residuals; by default five layers: KDA, KDA, KDA, MLA, MLA."""
    own = {
        'name': 'test_kimi_linear',
        'family': 'kimi_linear',
        'num_hidden_layers': len(kda_layers + full_attn_layers),
        'hidden_act': 'silu',
        'q_lora_rank': None,
        'num_shared_experts': 1,
        'routed_scaling_factor': 2.446,
    }
    linear = _linear(kda_layers, full_attn_layers)
    return ModelConfig(linear_attn_config=linear, **(_COMMON | own | fields))


def _fill(rng: np.random.Generator, leaf: Leaf) -> np.ndarray:
    shape = leaf.shape
    if leaf.dtype == 'uint8':
        # Scales around 2^-4 and any code.
        low, high = (121, 125) if leaf.packs == 'scales' else (0, 256)
        return rng.integers(low, high, shape).astype(np.uint8)
    match leaf.init:
        case 'ones':
            return 1 + 0.3 * rng.standard_normal(shape)
        case 'zeros':
            return 0.2 * rng.standard_normal(shape)
        case 'A_log':
            return rng.uniform(-1, 1, shape)
        case 'dt_bias':
            return rng.standard_normal(shape) - 1
        case 'conv':
            return 0.5 * rng.standard_normal(shape)
    return rng.standard_normal(shape) * (1.5 / shape[-1] ** 0.5)


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """The per-layer tree (`layers_0` ...) in float64, nothing at its initial value."""

    def walk(path: str, entry: Any) -> Any:
        if isinstance(entry, Leaf):
            return _fill(np.random.default_rng([seed, zlib.crc32(path.encode())]), entry)
        return {name: walk(f'{path}/{name}', child) for name, child in entry.items()}

    return walk('', model_leaves(config))
