"""Kimi K3 trained at 8,192 tokens on 4,096 v5p chips: 16,384 tokens a chip and step.

Other slices and stages are --set away, such as `data.batch_size=512 data.num_streams=512` for 512.
"""

import dataclasses

from configs.kimi_k3 import get_config as get_kimi_k3
from k3jax.config import Config, DataConfig, MeshConfig, TrainConfig


def get_config() -> Config:
    return dataclasses.replace(
        get_kimi_k3(),
        mesh=MeshConfig(expert=64),  # 14 experts a chip; data: what is left
        data=DataConfig(sequence_length=8192, batch_size=8192, num_streams=8192),
        train=TrainConfig(num_steps=100_000, sample_tokens=0),
    )
