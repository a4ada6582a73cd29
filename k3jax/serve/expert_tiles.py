"""Packed experts in the order that the TPU kernels read: moved once, when a model is loaded.

Moved in every step, they would cost it several times the bytes of the experts themselves.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.model.layout import Leaf
from pallas_kernels.grouped_mlp import CHUNK, tile_codes, tile_scales


def in_tiles(config: ModelConfig, dtype: jnp.dtype) -> ModelConfig:
    """The model as a TPU serves it with activations in `dtype`; itself where no kernel takes it."""
    widths = config.expert_input_size, config.moe_intermediate_size
    whole = dtype == jnp.bfloat16 and not any(width % CHUNK for width in widths)
    if config.experts_format != 'mxfp4' or not whole:
        return config
    return dataclasses.replace(config, experts_format='mxfp4_tiles')


def as_held(leaf: Leaf, array: jax.Array) -> jax.Array:
    """An array that a release stores, as `leaf` of the served model holds it."""
    if leaf.packs is None or array.dtype == leaf.dtype:
        return array
    return jax.jit(tile_codes if leaf.packs == 'codes' else tile_scales)(array)
