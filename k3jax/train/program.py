"""With what the steps of a stage are made: mesh, model, optimizer, data, compiled programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import Config
from k3jax.data import loader
from k3jax.data.tokenizer import Tokenizer
from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.parallel.mesh import check_fits, make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.train import spikes
from k3jax.train.barrier import wait_for_all
from k3jax.train.host_memory import placed_on_host
from k3jax.train.media import check_media
from k3jax.train.optim import make_optimizer
from k3jax.train.placement import Placement
from k3jax.train.spikes import limits_of
from k3jax.train.state import TrainState, abstract_state, check_state_fits, fresh_state
from k3jax.train.step import Batch, Extra, Metrics, losses_of, make_train_step
from pallas_kernels.common.platform import implementation_on


class Program:
    """What a config without stages is trained with; nothing is compiled before it is needed.

    Raises:
      ConfigError: the work cannot be cut along the mesh, or the state cannot lie on it.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, devices: Sequence[jax.Device]):
        self.config, self._tokenizer = config, tokenizer
        train, optimizer = config.train, config.optimizer
        check_media(config, tokenizer)
        mesh_config = check_fits(config, 'train', len(devices))
        self.mesh = make_mesh(mesh_config, devices)
        parallel = parallel_of(self.mesh, mesh_config, 'train')
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
        self._optimizer = make_optimizer(optimizer, train.num_steps, self.model, self.mesh)
        self.limits = limits_of(train)
        memory = optimizer.state_memory
        self.abstract = abstract_state(
            self.model, self._optimizer, self.mesh, memory, limits=self.limits
        )
        memory_stats = self.mesh.local_devices[0].memory_stats() or {}
        check_state_fits(self.abstract, self.model, memory_stats.get('bytes_limit'))
        self.losses = losses_of(self.model, self.mesh, train.grad_accum_steps)
        self._compiled: dict[Any, Callable[..., Any]] = {}  # steps, by the shapes of a batch

    @property
    def shape(self) -> str:
        """The mesh, for a person to read."""
        axes = (f'{axis} {size}' for axis, size in self.mesh.shape.items() if size > 1)
        return ' '.join(axes) or 'one chip'

    def open_data(self) -> loader.TrainIterator:
        """Batches from the first on: the rows of them that this process reads."""
        streams = self.placement.streams
        return loader.train_iterator(self.config.data, self._tokenizer, streams=streams)

    def held_out(self) -> Iterable[dict[str, Any]]:
        """The batches of an evaluation."""
        num_batches = self.config.train.eval_batches
        return loader.held_out_batches(self.config.data, self._tokenizer, num_batches)

    def fresh(self) -> TrainState:
        """The state before the first step."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        fresh = functools.partial(fresh_state, self.model, self._optimizer, limits=self.limits)
        key = jax.random.key(self.config.train.seed)
        # Each chip makes its own parts: no array is ever whole anywhere.
        return jax.jit(fresh, out_shardings=shardings)(key)

    def moved_here(self, state: TrainState) -> TrainState:
        """The state, without its guard, of another mesh over the same chips; given up there."""

        def move(x: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
            # JAX cuts anew and goes between memories one after the other only.
            ways = [to.sharding]
            if placed_on_host(to):
                ways = [way.with_memory_kind('device') for way in (x.sharding, to.sharding)] + ways
            for way in ways:
                if x.sharding != way:
                    # No part is shared with the old array, which can hence be given up at once.
                    new = jax.block_until_ready(jax.device_put(x, way, may_alias=False))
                    x.delete()
                    x = new
            return x

        return TrainState(*jax.tree.map(move, state[:3], self.abstract[:3]))

    def placed_guard(self, stored: dict[str, Any] | None) -> Any:
        """What `spikes.to_json` stored, or a fresh one for None; () where steps are not judged."""
        if self.limits is None:
            return ()
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract.guard)
        # The step will overwrite them, so each must have its own memory.
        return jax.device_put(spikes.from_json(stored, self.limits), shardings, may_alias=False)

    def is_compiled(self, batch: Batch) -> bool:
        return _shapes(batch) in self._compiled

    def compile(self, batch: Batch) -> None:
        """Makes the step for batches like this, on every process before any runs it.

        On CPUs Gloo gives the slowest process 30 s to come to the first exchange.
        """
        train = self.config.train
        step = make_train_step(
            self.model,
            self._optimizer,
            grad_accum_steps=train.grad_accum_steps,
            extra=Extra(train.z_loss, train.mtp_loss_weight),
            mesh=self.mesh,
            placed=self.abstract,
            limits=self.limits,
        )
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        self._compiled[_shapes(batch)] = jitted.lower(self.abstract, batch).compile()
        wait_for_all()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The state after a step, which takes the old one's place; compiled for such a batch."""
        return self._compiled[_shapes(batch)](state, batch)

    def forget(self) -> None:
        """Gives up what is compiled."""
        self._compiled.clear()


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in jax.tree.leaves(batch))
