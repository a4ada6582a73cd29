"""Where a run is: its stage, the program of that stage, the place in its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from k3jax.config import Config
from k3jax.data.tokenizer import Tokenizer
from k3jax.train import spikes
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.curriculum import Stage, in_stage, stage_at, stages_of
from k3jax.train.placement import joined_positions
from k3jax.train.program import Program
from k3jax.train.state import TrainState
from k3jax.train.step import Batch


class Course:
    """A run on its way through its stages; what none of them could do is refused at once.

    Attributes:
      stages: all of them.
      stage: where the run is. program: with which its steps are made. data: its batches.

    Raises:
      ValueError: a stage does not fit the model or the devices, or its data cannot be used.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, devices: Sequence[jax.Device]):
        self._config = config
        self.stages = stages_of(config)
        self._programs, opened = [], []
        for stage in self.stages:
            try:
                program = Program(stage.config, tokenizer, devices)
                opened.append(program.open_data() if not opened else None)
                if stage.number:
                    program.open_data()  # whether it can be; kept it would only take memory
            except ValueError as error:
                raise in_stage(config, stage.number, error) from None
            self._programs.append(program)
        self._enter(self.stages[0], opened[0])

    def _enter(self, stage: Stage, data: Any = None) -> None:
        """Goes to the first batch of a stage."""
        self.stage, self.program = stage, self._programs[stage.number]
        self.data = self.program.open_data() if data is None else data
        self._first = self.data.get_state()

    def _go_to(self, stage: Stage) -> None:
        if stage.number == self.stage.number:
            self.data.set_state(self._first)
            return
        self.program.forget()
        self._enter(stage)

    def fresh(self) -> TrainState:
        """The state before the first step, at the first batch."""
        self._go_to(self.stages[0])
        return self.program.fresh()

    def restored(self, checkpoints: Checkpoints, at_most: int | None = None) -> TrainState | None:
        """The state of the newest checkpoint that can be read, its stage and its place in the data.

        At the end of a stage that is the first batch of the next.

        Args:
          at_most: the newest step to take; None: any.

        Returns:
          None if there is no checkpoint.

        Raises:
          ValueError: none can be read, or it is of other data or another stage.
        """
        steps = [step for step in checkpoints.steps() if at_most is None or step <= at_most]
        self._go_to(stage_at(self.stages, steps[0] if steps else 0))
        found = checkpoints.restore_newest(self.program.abstract, at_most)
        if found is None:
            return None
        state, position = found
        step = int(state.step)
        stage = stage_at(self.stages, step)
        if stage.number != self.stage.number:  # the newest, of a later stage, could not be read
            self._go_to(stage)
            state = self.program.moved_here(state)
        guard, saved_in = position.get('guard'), position.get('stage', 0)
        if saved_in == stage.number:
            self.data.set_state(position)
        elif saved_in == stage.number - 1 and step == stage.first_step:
            self._announce()
            guard = spikes.of_next_stage(guard)
        else:
            raise ValueError(
                f'train.stages: the checkpoint of step {step} is of stage {saved_in}, but here '
                f'that step is of stage {stage.number}, from step {stage.first_step}; let stages '
                'that are over end where they did, and the next begin at the checkpoint or later'
            )
        return state._replace(guard=self.program.placed_guard(guard))

    def at(self, step: int, state: TrainState) -> TrainState:
        """The state after `step` steps where the next one is made: in the next stage, if it is due.

        The old state is then given up, leaf by leaf.
        """
        stage = stage_at(self.stages, step)
        if stage.number == self.stage.number:
            return state
        self._go_to(stage)
        self._announce()
        guard = spikes.to_json(state.guard) if state.guard else None
        state = self.program.moved_here(state)
        return state._replace(guard=self.program.placed_guard(spikes.of_next_stage(guard)))

    def _announce(self) -> None:
        data = self.stage.config.data
        logging.info(
            'stage %d from step %d: %d x %d tokens from %s on %s',
            self.stage.number,
            self.stage.first_step,
            data.batch_size,
            data.sequence_length,
            ', '.join(data.shares),
            self.program.shape,
        )

    def ends(self, step: int) -> bool:
        """Whether the stage is over after `step` steps, and another one follows."""
        return step == self.stage.end_step and self.stage.number + 1 < len(self.stages)

    def rows(self, step: int) -> int:
        """Of the batch after `step` steps."""
        return self.stage.config.data.batch_size_at(step)

    def batch(self, step: int) -> Batch:
        """The next batch, on the mesh; `step` steps are done.

        Raises:
          OSError, ValueError: the data cannot be read any more, or are at their end.
        """
        return self.program.placement.place(self._take(self.rows(step), step))

    def pass_over(self, rows: int, step: int) -> None:
        """Goes past so many rows that belong to batches before the next one."""
        least = self.stage.config.data.num_streams
        for _ in range(rows // least):
            self._take(least, step)

    def _take(self, rows: int, step: int) -> dict[str, Any]:
        where = f'data.source: {self.stage.config.data.source!r}'
        try:
            return self.data.take(rows)
        except OSError as error:
            raise OSError(
                f'{where} cannot be read any more, at step {step + 1} ({error}); bring it back, '
                'then run the same command again'
            ) from error
        except StopIteration:
            raise ValueError(
                f'{where} has no rows left for step {step + 1} of {self._config.train.num_steps} '
                '(train.num_steps); give more data, or train fewer steps'
            ) from None

    def position(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays of `state`; JSON. To be called by all."""
        position = joined_positions(self.data.get_state()) | {'stage': self.stage.number}
        return position | {'guard': spikes.to_json(state.guard)} if state.guard else position
