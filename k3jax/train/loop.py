"""How a run goes: restore or start, step, log, evaluate, save, go back, stop cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from k3jax.config import Config
from k3jax.data import loader
from k3jax.data.ngram import trigram_bits_per_byte
from k3jax.data.tokenizer import Tokenizer, load_tokenizer
from k3jax.model.flops import active_parameters, total_parameters
from k3jax.model.kimi import Kimi
from k3jax.train import metrics as metrics_lib
from k3jax.train.checkpoint import Checkpoints, check_config, write_config
from k3jax.train.course import Course
from k3jax.train.eval import HeldOut, evaluate
from k3jax.train.optim import learning_rate
from k3jax.train.quantise import quantised
from k3jax.train.spikes import FINE, NON_FINITE, SPIKE, Judgement
from k3jax.train.state import TrainState, check_trainable
from k3jax.train.step import Batch
from k3jax.train.watchdog import Watchdog


class NonFiniteLoss(ValueError):
    """The loss or its gradient is not a number any more; the message names the step."""


class LossSpike(ValueError):
    """The loss is far above those before it; the message names the step."""


class _RollBack(Exception):
    """Asks to go back to the newest checkpoint; of which class an error is if that cannot be."""

    def __init__(self, step: int, reason: str, error_class: type[ValueError]):
        super().__init__(step, reason)
        self.step, self.reason, self.error_class = step, reason, error_class


@dataclasses.dataclass
class _Made:
    """A step that was begun; verdict: None until somebody has looked at what came out."""

    step: int
    batch: Batch
    metrics: dict[str, Any]
    verdict: int | None = None


class Outcome(NamedTuple):
    """How a run ended. finished: False after SIGTERM, which saved and stopped early."""

    state: TrainState
    model: Kimi
    tokenizer: Tokenizer
    finished: bool

    def on_one_chip(self) -> tuple[Kimi, Any]:
        """The model and its parameters, quantised as a step has them, on the first chip.

        For a single process.
        """
        model = self.model.clone(run=self.model.run._replace(parallel=None))

        def move(x: jax.Array) -> jax.Array:
            # From the host's memory first to the chips' as it is cut: JAX does not do both at once.
            x = jax.device_put(x, x.sharding.with_memory_kind('device'))
            return jax.device_put(x, jax.devices()[0])

        params = jax.tree.map(move, self.state.params)
        return model, jax.jit(functools.partial(quantised, model))(params)


class _StopRequest:
    """Remembers a SIGTERM until the current step is done."""

    def __enter__(self) -> _StopRequest:
        self._noted, self._alone = False, jax.process_count() == 1
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def asked(self, step: int) -> bool:
        """Whether to stop after `step`; several processes agree on it, whichever got the signal."""
        return self._noted if self._alone else multihost_utils.reached_preemption_sync_point(step)

    def _note(self, *_: Any) -> None:
        self._noted = True

    def __exit__(self, *_: Any) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)


def _check(config: Config, tokenizer: Tokenizer) -> None:
    """Raises for what would only go wrong later, or silently."""
    model, train = config.model, config.train
    check_trainable(model)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f'data.tokenizer: {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, wanted '
            f'at most {model.vocab_size} (model.vocab_size)'
        )
    sample = len(tokenizer.encode(train.sample_prompt)) + train.sample_tokens
    if sample > model.max_position_embeddings:
        raise ValueError(
            f'train.sample_tokens: the sample would have {sample} tokens, wanted at most '
            f'{model.max_position_embeddings} (model.max_position_embeddings)'
        )


class Trainer:
    """One run in one workdir; nothing is written there before the config is found to work.

    On several processes, each makes a Trainer and calls the same methods in the same order.
    """

    def __init__(self, config: Config, workdir: str, devices: Sequence[jax.Device] | None = None):
        """devices: to train on; None for all there are."""
        self.config, self.workdir = config, epath.Path(workdir)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        _check(config, self.tokenizer)
        devices = jax.devices() if devices is None else list(devices)
        check_config(self.workdir, config)
        self._course = Course(config, self.tokenizer, devices)
        with self._writing():
            self.workdir.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(self.workdir, keep=config.train.keep_checkpoints)
        # To which checkpoint the run went back: how often, and past how many rows of data.
        self._went_back: dict[int, tuple[int, int]] = {}
        self._counted: Batch | None = None  # of the last step whose update was kept

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f'--workdir: {self.workdir} cannot be written ({error.strerror}); take another '
                'folder'
            ) from None

    def start(self) -> TrainState:
        """The newest whole checkpoint, with the data put where it was; or a fresh state.

        The config is stored once the data is found to be that of the checkpoint.
        """
        state = self._course.restored(self.checkpoints)
        if jax.process_index() == 0:
            with self._writing():
                write_config(self.workdir, self.config)
        if state is None:
            return self._course.fresh()
        logging.info('resumed from step %d', int(state.step))
        return state

    def describe(self) -> None:
        """Prints what the run will do, before the first step."""
        model, train = self.config.model, self.config.train
        mesh = self._course.program.mesh
        logging.info(
            '%s: %s parameters, %s active a token; %d layers; %s on %d x %s (%s)',
            model.name,
            f'{total_parameters(model):,}',
            f'{active_parameters(model):,}',
            model.num_hidden_layers,
            train.dtype,
            mesh.size,
            mesh.devices.flat[0].device_kind,
            self._course.program.shape,
        )
        for stage in self._course.stages:
            data = stage.config.data
            logging.info(
                '%d steps of %d x %d tokens from %s; workdir %s',
                stage.end_step - stage.first_step,
                data.batch_size,
                data.sequence_length,
                ', '.join(data.shares),
                self.workdir,
            )

    def save(self, state: TrainState, batch: Batch | None) -> None:
        """Starts to save, if the parameters give a finite loss.

        batch: of the last step that changed them, whose loss that is; None if none did.
        """
        if batch is not None:
            loss = float(jnp.sum(self._course.program.losses(state.params, batch)))
            self._check_finite(int(state.step), {'loss after the update': loss})
        self.checkpoints.save(state, self._course.position(state))

    def trigram(self) -> float:
        """Held-out bits per byte of a trigram model counted on the training split."""
        config, tokenizer = self._course.stage.config.data, self.tokenizer
        return trigram_bits_per_byte(
            loader.document_tokens(config, tokenizer, 'train'),
            self._course.program.held_out(),
            tokenizer.token_byte_lengths(),
        )

    def evaluate(self, params: Any) -> HeldOut:
        """Held-out loss over `train.eval_batches` batches, the same every time in a stage."""
        program, lengths = self._course.program, self.tokenizer.token_byte_lengths()

        def losses(params: Any, batch: Batch) -> jax.Array:
            return program.losses(params, program.placement.place_whole(batch))

        return evaluate(program.model, params, program.held_out(), lengths, losses)

    def run(self, on_step: Callable[[int], None] | None = None) -> Outcome:
        """Trains to `num_steps`.

        Args:
          on_step: called after each step with its number.

        Raises:
          NonFiniteLoss, LossSpike: names the step; the newest checkpoint is from before it.
          OSError: a checkpoint could not be written, or the data cannot be read any more.
        """
        self.describe()
        train, on_step = self.config.train, on_step or (lambda step: None)
        with Watchdog(train.watchdog_step_s, train.watchdog_pause_s) as watchdog:
            with watchdog.pause('restoring a checkpoint'):
                state = self.start()
            writer = metrics_lib.MetricsWriter(
                self.workdir, train.num_steps, int(state.step), train.failed_save
            )
            try:
                with _StopRequest() as stop:
                    finished = None
                    while finished is None:
                        state, finished = self._steps_or_back(
                            state, writer, stop, watchdog, on_step
                        )
            except BaseException:
                self._finish_saving()
                raise
            finally:
                writer.close()
        return Outcome(state, self._course.program.model, self.tokenizer, finished)

    def _finish_saving(self) -> None:
        """Makes what was begun a whole checkpoint, for the run that goes on."""
        try:
            self.checkpoints.wait()
        except OSError as error:
            logging.error('%s', error)

    def _steps_or_back(
        self, state, writer, stop, watchdog, on_step
    ) -> tuple[TrainState, bool | None]:
        """As `_steps`, or the state that the run went back to and None."""
        try:
            return self._steps(state, writer, stop, watchdog, on_step)
        except _RollBack as caught:
            asked = caught.with_traceback(None)  # which holds the arrays of the state
        del state
        with watchdog.pause('restoring a checkpoint'):
            return self._gone_back(asked, writer), None

    def _steps(self, state, writer, stop, watchdog, on_step) -> tuple[TrainState, bool]:
        train, course = self.config.train, self._course
        schedule = learning_rate(self.config.optimizer, train.num_steps)
        first = step = int(state.step)
        watch, started, tokens = metrics_lib.Stopwatch(), 0.0, 0
        saved, stopped = step, False
        before: _Made | None = None
        while step < train.num_steps and not stopped:
            if course.ends(step):
                with watchdog.pause('going to the next stage'):
                    state, first = course.at(step, state), step
            batch = course.batch(step)
            if not course.program.is_compiled(batch):
                with watchdog.pause('compiling'):
                    course.program.compile(batch)
            state, metrics = course.program.step(state, batch)
            step += 1
            # Of the step before: the device is already busy with this one.
            self._look_at(before, writer)
            before = made = _Made(step, batch, metrics)
            tokens += batch['tokens'].size
            if step % train.log_every == 0 or step == train.num_steps or step == first + 1:
                self._look_at(made, writer)
                seconds = watch.lap()
                values = self._values(made) | {
                    'learning_rate': float(schedule(step - 1)),
                    'tokens_per_second': tokens / seconds,
                    'step_ms': 1000 * seconds / max(1, tokens) * batch['tokens'].size,
                }
                tokens = 0
                if step == first + 1:  # it compiled; the others tell the pace
                    started, eta = time.perf_counter(), None
                else:
                    pace = (time.perf_counter() - started) / (step - first - 1)
                    eta = pace * (train.num_steps - step)
                if made.verdict != NON_FINITE:
                    writer.write(step, values)
                    writer.step_line(step, values, eta)
            if train.eval_every and step % train.eval_every == 0:
                self._look_at(made, writer)
                with watchdog.pause('an evaluation'):
                    self._log_evaluation(state, writer)
            if step % train.checkpoint_every == 0 or course.ends(step):
                self._look_at(made, writer)
                with watchdog.pause('saving'):
                    self._try_to_save(state, writer)
                saved = step  # or about to fail, which the end of the run will see
            watchdog.beat()
            on_step(step)
            stopped = stop.asked(step)
        with watchdog.pause('saving'):
            if saved != step:
                self._look_at(before, writer)
                self.save(state, self._counted)
            self.checkpoints.wait()
        if stopped and step < train.num_steps:
            logging.info('SIGTERM: saved step %d; the same command goes on from there', step)
            return state, False
        return state, True

    def _values(self, made: _Made) -> dict[str, Any]:
        """What is logged of a step's metrics."""
        metrics = made.metrics
        values = {'stage': self._course.stage.number} if self.config.train.stages else {}
        values |= {'loss': float(metrics['loss']), 'grad_norm': float(metrics['grad_norm'])}
        for name, x in metrics.items():
            if name == 'judgement':
                values['skipped_steps'] = int(x.skipped)
                if np.isfinite(x.threshold):
                    values['spike_threshold'] = float(x.threshold)
            elif name not in ('loss', 'grad_norm', 'targets'):
                values[name] = np.asarray(x).tolist()
        return values

    def _look_at(self, made: _Made | None, writer: metrics_lib.MetricsWriter) -> None:
        """Waits for a step's metrics, and acts where something is wrong with them; once a step.

        Raises:
          NonFiniteLoss, LossSpike: the run must end. _RollBack: it must go back.
        """
        if made is None or made.verdict is not None:
            return
        values = jax.device_get(made.metrics)  # one transfer
        judgement = values.pop('judgement', None)
        made.verdict = FINE if judgement is None else int(judgement.verdict)
        if made.verdict == FINE:
            self._check_finite(made.step, values)
            self._counted = made.batch
        else:
            self._act_on(made, values, judgement, writer)

    def _act_on(
        self,
        made: _Made,
        values: dict[str, Any],
        judgement: Judgement,
        writer: metrics_lib.MetricsWriter,
    ) -> None:
        """Decides what becomes of a run whose last update was undone."""
        train, step, loss = self.config.train, made.step, float(values['loss'])
        norm, in_a_row = float(values['grad_norm']), int(judgement.in_a_row)
        if made.verdict == SPIKE:
            policy, error_class = train.spike_policy, LossSpike
            reason = (
                f'loss {loss:.4f} at step {step} is a spike: above {judgement.threshold:.4f}, '
                f'{train.spike_deviations:g} deviations above the median of the last '
                f'{train.spike_window} losses'
            )
        else:
            policy, error_class = train.non_finite_policy, NonFiniteLoss
            reason = f'loss is {loss} and grad_norm {norm} at step {step}'
        if policy == 'skip' and in_a_row > train.max_skipped_steps:
            policy = 'stop'
            reason += (
                f'; {in_a_row} steps in a row are undone, wanted at most {train.max_skipped_steps} '
                '(train.max_skipped_steps)'
            )
        if policy == 'skip':
            facts = {'skipped_steps': int(judgement.skipped)}
            writer.decide(step, 'skip', f'{reason}; its update is undone', **facts)
            return
        if policy == 'roll_back':
            raise _RollBack(step, reason, error_class)
        raise error_class(f'{reason}; {self._advice(step)}')

    def _advice(self, step: int) -> str:
        self.checkpoints.wait()
        newest = next(iter(self.checkpoints.steps()), 'none')
        return (
            f'the newest checkpoint is of step {newest}. Lower optimizer.learning_rate, or look at '
            f'the data of that step: python -m experiments.replay --workdir={self.workdir} '
            f'--step={step}'
        )

    def _gone_back(self, asked: _RollBack, writer: metrics_lib.MetricsWriter) -> TrainState:
        """The newest checkpoint, with the data after those of the step that asked.

        Where the run is killed before its next save, it comes here again in the same way.

        Raises:
          NonFiniteLoss, LossSpike: the run went back to that checkpoint too often.
        """
        course, step = self._course, asked.step
        stage = course.stage
        self.checkpoints.wait()
        state = course.restored(self.checkpoints)
        if state is None:
            state = course.fresh()
        begun = int(state.step)
        times, rows = self._went_back.get(begun, (0, 0))
        most = self.config.train.max_roll_backs
        if times == most:
            raise asked.error_class(
                f'{asked.reason}; the run went back to step {begun} {times} times, wanted at most '
                f'{most} (train.max_roll_backs); {self._advice(step)}'
            )
        if stage == course.stage:
            rows += sum(map(course.rows, range(begun, step)))
            course.pass_over(rows, begun)
        self._went_back[begun] = times + 1, rows
        self._counted = None
        writer.go_back(begun)
        reason = f'{asked.reason}; back to step {begun}, past the data up to that step'
        writer.decide(begun + 1, 'roll_back', reason, from_step=step, passed_rows=rows)
        return state

    def _try_to_save(self, state: TrainState, writer: metrics_lib.MetricsWriter) -> None:
        """Starts to save; what fails ends the run only where the config says so."""
        try:
            self.save(state, self._counted)
        except OSError as error:  # mostly of the save before
            if self.config.train.failed_save == 'stop':
                raise
            writer.decide(int(state.step), 'go_on', f'{error}')
            self.checkpoints.drop_unfinished()
            self.save(state, self._counted)

    def _check_finite(self, step: int, metrics: dict[str, Any]) -> None:
        """Raises NonFiniteLoss if a value of `step` is no number."""
        for name, value in metrics.items():
            values = np.atleast_1d(value)
            bad = values[~np.isfinite(values)]
            if bad.size:
                raise NonFiniteLoss(f'{name} is {bad[0]} at step {step}; {self._advice(step)}')

    def _log_evaluation(self, state: TrainState, writer: metrics_lib.MetricsWriter) -> None:
        result, step = self.evaluate(state.params), int(state.step)
        writer.write(
            step, {'held_out_loss': result.loss, 'held_out_bits_per_byte': result.bits_per_byte}
        )
        logging.info(
            'step %d: held-out loss %.4f, %.3f bits a byte', step, result.loss, result.bits_per_byte
        )
