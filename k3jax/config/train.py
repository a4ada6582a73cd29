"""How a run goes, and its stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from k3jax.config.checks import check_seed, not_negative, positive, require
from k3jax.config.data import DataConfig
from k3jax.config.mesh import MeshConfig
from k3jax.config.precision import Dtype, QuantisationConfig

Remat = Literal['none', 'layer']
NonFinitePolicy = Literal['stop', 'skip', 'roll_back']
SpikePolicy = Literal['none', 'stop', 'skip', 'roll_back']
FailedSavePolicy = Literal['stop', 'go_on']
# Values inside a layer that a run may keep, or send to the host, where it recomputes the others.
ACTIVATIONS = ('layer_input', 'mixer_input', 'mixer_output', 'ffn_input', 'ffn_output')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, in what precision, and what to write."""

    num_steps: int = 1000
    stages: tuple[StageConfig, ...] = ()  # all of them, in order; (): the run has one, as it is
    grad_accum_steps: int = 1
    mtp_loss_weight: float = 0.1  # of a model with multi-token prediction; UNCONFIRMED for K3
    z_loss: float = 0.0  # times the mean squared log of the softmax's denominator, beside the loss
    seed: int = 0
    dtype: Dtype = 'bfloat16'  # of matmul operands and the residual stream; masters are float32
    remat: Remat = 'layer'  # 'layer': the backward pass recomputes each layer from its input
    keep: tuple[str, ...] = ()  # with 'layer': of ACTIVATIONS, kept instead of recomputed
    offload: tuple[str, ...] = ()  # with 'layer': of ACTIVATIONS, kept in the host's memory
    scan_layers: bool = True
    quantisation: QuantisationConfig = QuantisationConfig()  # of the routed experts
    log_every: int = 10
    eval_every: int = 0  # steps; 0: not during training
    eval_batches: int = 64  # of the held-out split
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    failed_save: FailedSavePolicy = 'stop'  # 'go_on': to the next save; the last must succeed
    # A loss or gradient that is no number: 'stop' ends the run before its next save; the others
    # undo that update: 'skip' goes on with the next batch, 'roll_back' does so from the newest
    # checkpoint.
    non_finite_policy: NonFinitePolicy = 'stop'
    # The same for a loss more than `spike_deviations` above the median of the last `spike_window`
    # losses that were no spikes; a deviation is 1.4826 times the median distance from the median.
    spike_policy: SpikePolicy = 'none'
    spike_window: int = 128
    spike_deviations: float = 10.0
    max_skipped_steps: int = 10  # in a row; one more ends the run
    max_roll_backs: int = 3  # to one checkpoint; one more ends the run
    # Seconds without a finished step after which the process ends with exit code 75, so that its
    # launcher starts it again; 0: never. The other is for compiling, restoring, saving, evaluating.
    watchdog_step_s: float = 0.0
    watchdog_pause_s: float = 3600.0
    sample_tokens: int = 128  # printed after the last step; 0: none
    sample_prompt: str = 'def '

    def __post_init__(self) -> None:
        positive(
            'train',
            num_steps=self.num_steps,
            grad_accum_steps=self.grad_accum_steps,
            log_every=self.log_every,
            eval_batches=self.eval_batches,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            spike_deviations=self.spike_deviations,
            max_skipped_steps=self.max_skipped_steps,
            max_roll_backs=self.max_roll_backs,
            watchdog_pause_s=self.watchdog_pause_s,
        )
        not_negative(
            'train',
            watchdog_step_s=self.watchdog_step_s,
            eval_every=self.eval_every,
            sample_tokens=self.sample_tokens,
            z_loss=self.z_loss,
            mtp_loss_weight=self.mtp_loss_weight,
        )
        check_seed('train.seed', self.seed)
        for name, choices in (
            ('non_finite_policy', get_args(NonFinitePolicy)),
            ('spike_policy', get_args(SpikePolicy)),
            ('failed_save', get_args(FailedSavePolicy)),
        ):
            value = getattr(self, name)
            require(value in choices, f'train.{name}', value, f'one of {", ".join(choices)}')
        window = self.spike_window
        require(4 <= window <= 1 << 16, 'train.spike_window', window, '4 to 2^16 losses')
        starts = [stage.first_step for stage in self.stages]
        require(
            not starts or starts[0] == 0 and all(a < b for a, b in itertools.pairwise(starts)),
            'train.stages: first_step',
            tuple(starts),
            '0 for the first stage, and each later than the one before',
        )
        require(
            bool(self.sample_prompt) or not self.sample_tokens,
            'train.sample_prompt',
            self.sample_prompt,
            'at least one character to go on from, or train.sample_tokens=0',
        )
        require(
            self.dtype in ('float32', 'bfloat16'),
            'train.dtype',
            self.dtype,
            "'float32' or 'bfloat16'",
        )
        require(self.remat in ('none', 'layer'), 'train.remat', self.remat, "'none' or 'layer'")
        for field in ('keep', 'offload'):
            for name in getattr(self, field):
                known = f'one of {", ".join(ACTIVATIONS)}'
                require(name in ACTIVATIONS, f'train.{field}', name, known)
        both = sorted(set(self.keep) & set(self.offload))
        require(not both, 'train.keep and train.offload', both, 'no name in both')
        named = self.keep + self.offload
        require(
            self.remat == 'layer' or not named,
            'train.keep and train.offload',
            named,
            "none, or train.remat='layer': without it nothing is recomputed",
        )


def _changes(of: type, names: Iterable[str]) -> Any:
    """A field that changes some fields of another config: name -> value."""
    return dataclasses.field(default_factory=dict, metadata={'of': of, 'names': tuple(names)})


def _names(of: type, *but: str) -> Iterable[str]:
    return (field.name for field in dataclasses.fields(of) if field.name not in but)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of a run: what it changes of the run's data, mesh and of what makes a step fit.

    State, schedule and the count of steps go on from the stage before. The data of a stage begin
    anew, in an order of their own: `data.shuffle_seed` is the run's plus the stage's number where
    it is not given.
    """

    first_step: int  # updates done when it begins; 0 for the first stage
    data: Mapping[str, Any] = _changes(
        DataConfig, _names(DataConfig, 'tokenizer', 'held_out_every')
    )
    mesh: Mapping[str, Any] = _changes(MeshConfig, _names(MeshConfig))
    train: Mapping[str, Any] = _changes(
        TrainConfig, ('grad_accum_steps', 'remat', 'keep', 'offload')
    )

    def __post_init__(self) -> None:
        not_negative('train.stages', first_step=self.first_step)
        for field in dataclasses.fields(self):
            if 'of' not in field.metadata:
                continue
            names, where = field.metadata['names'], f'train.stages: {field.name}'
            changes = getattr(self, field.name)
            require(isinstance(changes, Mapping), where, changes, 'a dict of fields and values')
            for name, value in changes.items():
                require(name in names, f'{where}.{name}', value, f'one of {", ".join(names)}')
