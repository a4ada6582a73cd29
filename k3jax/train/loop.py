"""How a run goes: restore or start, step, log, evaluate, save, stop cleanly."""

from __future__ import annotations

import contextlib
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
from jax.sharding import PartitionSpec

from k3jax.config import Config
from k3jax.data import loader
from k3jax.data.ngram import trigram_bits_per_byte
from k3jax.data.tokenizer import Tokenizer, load_tokenizer
from k3jax.model.flops import active_parameters, total_parameters
from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.parallel.mesh import check_fits, make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.train import metrics as metrics_lib
from k3jax.train.barrier import wait_for_all
from k3jax.train.checkpoint import Checkpoints, check_config, write_config
from k3jax.train.eval import HeldOut, evaluate
from k3jax.train.optim import learning_rate, make_optimizer
from k3jax.train.placement import Placement, joined_positions
from k3jax.train.quantise import quantised
from k3jax.train.state import (
    TrainState,
    abstract_state,
    check_state_fits,
    check_trainable,
    fresh_state,
)
from k3jax.train.step import Batch, Extra, losses_of, make_train_step
from pallas_kernels.common.platform import implementation_on


class NonFiniteLoss(ValueError):
    """The loss or its gradient is not a number any more; the message names the step."""


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
        mesh_config = check_fits(config, 'train', len(devices))
        self.mesh = make_mesh(mesh_config, devices)
        parallel = parallel_of(self.mesh, mesh_config, 'train')
        check_config(self.workdir, config)
        train = config.train
        self.model = Kimi(
            config.model,
            Run(
                jnp.dtype(train.dtype),
                jnp.dtype('float32'),
                train.remat,
                implementation_on(devices[0].platform),
                keep=train.keep,
                offload=train.offload,
                quantisation=train.quantisation,
                parallel=parallel,
            ),
            train.scan_layers,
        )
        cut = PartitionSpec() if parallel is None else parallel.batch_spec
        self.placement = Placement(config.data, self.mesh, cut)
        self.data = loader.train_iterator(
            config.data, self.tokenizer, streams=self.placement.streams
        )
        self.optimizer = make_optimizer(config.optimizer, train.num_steps, self.model, self.mesh)
        memory = config.optimizer.state_memory
        self._abstract = abstract_state(self.model, self.optimizer, self.mesh, memory)
        memory_stats = self.mesh.local_devices[0].memory_stats() or {}
        check_state_fits(self._abstract, self.model, memory_stats.get('bytes_limit'))
        with self._writing():
            self.workdir.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(self.workdir, keep=train.keep_checkpoints)
        self._step = jax.jit(
            make_train_step(
                self.model,
                self.optimizer,
                grad_accum_steps=train.grad_accum_steps,
                extra=Extra(train.z_loss, train.mtp_loss_weight),
                mesh=self.mesh,
                placed=self._abstract,
            ),
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda x: x.sharding, self._abstract), None),
        )
        self._losses = losses_of(self.model, self.mesh, train.grad_accum_steps)

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
        found = self.checkpoints.restore_newest(self._abstract)
        if found is not None:
            self.data.set_state(found[1])
        if jax.process_index() == 0:
            with self._writing():
                write_config(self.workdir, self.config)
        if found is None:
            shardings = jax.tree.map(lambda x: x.sharding, self._abstract)
            fresh = functools.partial(fresh_state, self.model, self.optimizer)
            key = jax.random.key(self.config.train.seed)
            # Each chip makes its own parts: no array is ever whole anywhere.
            return jax.jit(fresh, out_shardings=shardings)(key)
        state, _ = found
        logging.info('resumed from step %d', int(state.step))
        return state

    def _compiled_step(self, batch: Batch) -> Callable[..., Any]:
        """The step, compiled on every process before any runs it.

        On CPUs Gloo gives the slowest process 30 s to come to the first exchange.
        """
        step = self._step.lower(self._abstract, batch).compile()
        wait_for_all()
        return step

    def describe(self) -> None:
        """Prints what the run will do, before the first step."""
        model, train, data = self.config.model, self.config.train, self.config.data
        logging.info(
            '%s: %s parameters, %s active a token; %d layers; %s on %d x %s (%s)',
            model.name,
            f'{total_parameters(model):,}',
            f'{active_parameters(model):,}',
            model.num_hidden_layers,
            train.dtype,
            self.mesh.size,
            self.mesh.devices.flat[0].device_kind,
            ' '.join(f'{axis} {size}' for axis, size in self.mesh.shape.items() if size > 1)
            or 'one chip',
        )
        logging.info(
            '%d steps of %d x %d tokens from %s; workdir %s',
            train.num_steps,
            data.batch_size,
            data.sequence_length,
            data.source,
            self.workdir,
        )

    def save(self, state: TrainState, batch: Batch) -> None:
        """Starts to save, if the updated parameters still give `batch` a finite loss."""
        loss = float(jnp.sum(self._losses(state.params, batch)))
        self._check_finite(int(state.step), {'loss after the update': loss})
        self.checkpoints.save(state, joined_positions(self.data.get_state()))

    def trigram(self) -> float:
        """Held-out bits per byte of a trigram model counted on the training split."""
        config, tokenizer = self.config.data, self.tokenizer
        return trigram_bits_per_byte(
            loader.document_tokens(config, tokenizer, 'train'),
            loader.held_out_batches(config, tokenizer, self.config.train.eval_batches),
            tokenizer.token_byte_lengths(),
        )

    def evaluate(self, params: Any) -> HeldOut:
        """Held-out loss over `train.eval_batches` batches, the same every time."""
        num_batches = self.config.train.eval_batches
        batches = loader.held_out_batches(self.config.data, self.tokenizer, num_batches)
        lengths = self.tokenizer.token_byte_lengths()

        def losses(params: Any, batch: Batch) -> jax.Array:
            return self._losses(params, self.placement.place_whole(batch))

        return evaluate(self.model, params, batches, lengths, losses)

    def run(self, on_step: Callable[[int], None] | None = None) -> Outcome:
        """Trains to `num_steps`.

        Args:
          on_step: called after each step with its number.

        Raises:
          NonFiniteLoss: names the step; the newest checkpoint is from before it.
          OSError: a checkpoint could not be written.
        """
        self.describe()
        state = self.start()
        writer = metrics_lib.MetricsWriter(
            self.workdir, self.config.train.num_steps, int(state.step)
        )
        try:
            with _StopRequest() as stop:
                state, finished = self._steps(state, writer, stop, on_step or (lambda step: None))
        finally:
            writer.close()
        return Outcome(state, self.model, self.tokenizer, finished)

    def _steps(self, state, writer, stop, on_step) -> tuple[TrainState, bool]:
        train = self.config.train
        schedule = learning_rate(self.config.optimizer, train.num_steps)
        first = step = int(state.step)
        watch, started, tokens = metrics_lib.Stopwatch(), 0.0, 0
        saved, unchecked = step, None
        steps, stopped = {}, False  # compiled, by the number of rows
        while step < train.num_steps and not stopped:
            rows = self.config.data.batch_size_at(step)
            batch = self.placement.place(self.data.take(rows))
            if rows not in steps:
                steps[rows] = self._compiled_step(batch)
            state, metrics = steps[rows](state, batch)
            step += 1
            # Of the step before: the device is already busy with this one.
            self._check_finite(step - 1, unchecked)
            unchecked = metrics
            tokens += batch['tokens'].size
            if step % train.log_every == 0 or step == train.num_steps or step == first + 1:
                self._check_finite(step, metrics)
                seconds = watch.lap()
                values = {
                    'loss': float(metrics['loss']),
                    'grad_norm': float(metrics['grad_norm']),
                    'learning_rate': float(schedule(step - 1)),
                    'tokens_per_second': tokens / seconds,
                    'step_ms': 1000 * seconds / max(1, tokens) * batch['tokens'].size,
                }
                tokens = 0
                values |= {
                    name: np.asarray(x).tolist()
                    for name, x in metrics.items()
                    if x.ndim or name in ('z_loss', 'mtp_loss')
                }
                writer.write(step, values)
                if step == first + 1:  # it compiled; the others tell the pace
                    started, eta = time.perf_counter(), None
                else:
                    pace = (time.perf_counter() - started) / (step - first - 1)
                    eta = pace * (train.num_steps - step)
                writer.step_line(step, values, eta)
            if train.eval_every and step % train.eval_every == 0:
                self._check_finite(step, metrics)
                self._log_evaluation(state, writer)
            if step % train.checkpoint_every == 0:
                self._check_finite(step, metrics)
                self.save(state, batch)
                saved = step
            on_step(step)
            stopped = stop.asked(step)
        if saved != step:
            self._check_finite(step, unchecked)
            self.save(state, batch)
        self.checkpoints.wait()
        if stopped and step < train.num_steps:
            logging.info('SIGTERM: saved step %d; the same command goes on from there', step)
            return state, False
        return state, True

    def _check_finite(self, step: int, metrics: dict[str, Any] | None) -> None:
        """Raises NonFiniteLoss if a value of `step` is no number."""
        for name, value in jax.device_get(metrics or {}).items():  # one transfer
            values = np.atleast_1d(value)
            bad = values[~np.isfinite(values)]
            if bad.size:
                self.checkpoints.wait()
                raise NonFiniteLoss(
                    f'{name} is {bad[0]} at step {step}; the newest checkpoint is of step '
                    f'{next(iter(self.checkpoints.steps()), "none")}. Lower '
                    'optimizer.learning_rate, or look at the data of that step'
                )

    def _log_evaluation(self, state: TrainState, writer: metrics_lib.MetricsWriter) -> None:
        result, step = self.evaluate(state.params), int(state.step)
        writer.write(
            step, {'held_out_loss': result.loss, 'held_out_bits_per_byte': result.bits_per_byte}
        )
        logging.info(
            'step %d: held-out loss %.4f, %.3f bits a byte', step, result.loss, result.bits_per_byte
        )
