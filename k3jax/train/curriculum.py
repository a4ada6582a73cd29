"""Which stages a run goes through, and with which config each works."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from k3jax.config import Config, ConfigError, DataConfig, StageConfig


class Stage(NamedTuple):
    """A part of a run.

    Attributes:
      number: from 0, as in `train.stages`.
      first_step: updates done when it begins.
      end_step: updates done when the next one begins; `train.num_steps` for the last.
      config: of the run, with what the stage changes; it has no stages itself.
    """

    number: int
    first_step: int
    end_step: int
    config: Config


def _data_of(stage: StageConfig, number: int, data: DataConfig) -> dict[str, Any]:
    """What a stage changes of the run's data.

    Of a batch ramp only what is still ahead is left.
    """
    ramp = zip(data.ramp_steps, data.ramp_batch_sizes, strict=True)
    ahead = [(step, size) for step, size in ramp if step > stage.first_step]
    own = {
        'ramp_steps': tuple(step for step, _ in ahead),
        'ramp_batch_sizes': tuple(size for _, size in ahead),
        'shuffle_seed': (data.shuffle_seed + number) % 2**32,
    }
    return own | dict(stage.data)


def stages_of(config: Config) -> tuple[Stage, ...]:
    """The stages of a run, in order; without `train.stages` it is one.

    Raises:
      ConfigError: the config of a stage cannot work, or its rows are longer than the model's
        longest sequence; the message says which stage.
    """
    train = config.train
    given = train.stages or (StageConfig(first_step=0),)
    # A run may be told to end before its last stages.
    given = tuple(stage for stage in given if stage.first_step < train.num_steps)
    ends = [stage.first_step for stage in given[1:]] + [train.num_steps]
    stages = []
    for number, (stage, end) in enumerate(zip(given, ends, strict=True)):
        try:
            own = dataclasses.replace(
                config,
                data=dataclasses.replace(config.data, **_data_of(stage, number, config.data)),
                mesh=dataclasses.replace(config.mesh, **stage.mesh),
                train=dataclasses.replace(train, stages=(), **stage.train),
            )
            _check_length(own)
        except ConfigError as error:
            raise in_stage(config, number, error) from None
        stages.append(Stage(number, stage.first_step, end, own))
    return tuple(stages)


def stage_at(stages: tuple[Stage, ...], step: int) -> Stage:
    """The stage of the step after `step` updates; of the last step where none comes after."""
    num_steps = stages[-1].config.train.num_steps
    begun = min(step, num_steps - 1)
    return next(stage for stage in reversed(stages) if stage.first_step <= begun)


def in_stage(config: Config, number: int, error: ValueError) -> ValueError:
    """The error with the stage it is of, where the run has stages."""
    return ConfigError(f'train.stages.{number}: {error}') if config.train.stages else error


def _check_length(config: Config) -> None:
    length, most = config.data.sequence_length, config.model.max_position_embeddings
    if length > most:
        raise ConfigError(
            f'data.sequence_length: got {length}, wanted at most {most} '
            '(model.max_position_embeddings)'
        )
