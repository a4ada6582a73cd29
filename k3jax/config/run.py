"""Everything one run needs."""

from __future__ import annotations

import dataclasses

from k3jax.config.checks import require
from k3jax.config.data import DataConfig
from k3jax.config.mesh import MeshConfig
from k3jax.config.model import ModelConfig
from k3jax.config.optimizer import OptimizerConfig
from k3jax.config.precision import check_quantisation
from k3jax.config.train import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything one run needs."""

    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        for size in self.data.batch_sizes:
            require(
                size % self.train.grad_accum_steps == 0,
                'data.batch_size' if size == self.data.batch_size else 'data.ramp_batch_sizes',
                size,
                f'a multiple of train.grad_accum_steps ({self.train.grad_accum_steps})',
            )
        require(
            self.optimizer.warmup_steps < self.train.num_steps,
            'optimizer.warmup_steps',
            self.optimizer.warmup_steps,
            f'fewer than train.num_steps ({self.train.num_steps})',
        )
        check_quantisation(self.model, self.train.quantisation)
