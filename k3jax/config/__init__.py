"""What can be configured: frozen dataclasses; validation says got, wanted and where."""

from k3jax.config.checks import ConfigError, require
from k3jax.config.data import DataConfig, MediaDataConfig, NeedlesConfig
from k3jax.config.mesh import ExpertParallel, MeshConfig
from k3jax.config.model import (
    ExpertsFormat,
    Family,
    HiddenAct,
    LinearAttnConfig,
    Mixer,
    ModelConfig,
    VisionConfig,
)
from k3jax.config.optimizer import (
    MuonConfig,
    OptimizerConfig,
    OptimizerName,
    QuantileBalanceConfig,
    StateMemory,
)
from k3jax.config.precision import Dtype, QuantisationConfig, ScaleRule, check_quantisation
from k3jax.config.run import Config
from k3jax.config.train import (
    ACTIVATIONS,
    FailedSavePolicy,
    NonFinitePolicy,
    Remat,
    SpikePolicy,
    StageConfig,
    TrainConfig,
)

__all__ = [
    'ACTIVATIONS',
    'Config',
    'ConfigError',
    'DataConfig',
    'Dtype',
    'ExpertParallel',
    'ExpertsFormat',
    'FailedSavePolicy',
    'Family',
    'HiddenAct',
    'LinearAttnConfig',
    'MeshConfig',
    'Mixer',
    'ModelConfig',
    'MuonConfig',
    'MediaDataConfig',
    'NeedlesConfig',
    'NonFinitePolicy',
    'OptimizerConfig',
    'OptimizerName',
    'QuantileBalanceConfig',
    'QuantisationConfig',
    'Remat',
    'ScaleRule',
    'SpikePolicy',
    'StageConfig',
    'StateMemory',
    'TrainConfig',
    'VisionConfig',
    'check_quantisation',
    'require',
]
