"""Kimi Linear 48B trained at 8,192 tokens on 16 v5p chips, 8,192 tokens a chip and step."""

import dataclasses

from configs.kimi_linear_48b import get_config as get_kimi_linear
from k3jax.config import Config, DataConfig, MeshConfig, TrainConfig


def get_config() -> Config:
    return dataclasses.replace(
        get_kimi_linear(),
        mesh=MeshConfig(expert=16),  # 16 experts a chip
        data=DataConfig(sequence_length=8192, batch_size=16, num_streams=16),
        train=TrainConfig(num_steps=100_000, sample_tokens=0),
    )
