"""What training carries from step to step, where it lies on a mesh, and whether it fits there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError, ModelConfig, StateMemory
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.param import computed_dtypes, param_specs
from k3jax.train.host_memory import HOST, on_chip, placed_on_host
from k3jax.train.optim import Optimizer
from k3jax.train.quantise import quantised
from k3jax.train.spikes import Limits, fresh_guard


class TrainState(NamedTuple):
    """What a step starts from.

    Attributes:
      step: int32, steps done.
      params: float32 masters.
      opt_state: the optimizer's.
      guard: spikes.Guard where steps are judged by it; () where they are not.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    guard: Any = ()


def check_trainable(config: ModelConfig) -> None:
    """Raises ConfigError for a model that has no gradient."""
    if config.experts_format != 'bf16':
        raise ConfigError(
            f'model.experts_format: got {config.experts_format!r}, wanted bf16: packed experts '
            'have no gradient'
        )


def working_copy(model: Kimi, params: Any) -> Any:
    """The parameters as a step takes them: on the chip, rounded as the computation rounds them.

    In quantisation-aware training the experts' weights are first quantised, straight from the
    masters: the gradient of these values is that of the masters.
    Their gradient has the same dtypes. For use under `jit`.
    """
    dtypes = computed_dtypes(params, model.config, model.plan, model.run)
    params = quantised(model, on_chip(params))
    return jax.tree.map(lambda x, to: x.astype(to), params, dtypes)


def fresh_state(
    model: Kimi, optimizer: Optimizer, key: jax.Array, limits: Limits | None = None
) -> TrainState:
    """The state before the first step; under `jax.eval_shape`, its shapes only.

    limits: by which steps will be judged.
    """
    params, guard = init_params(model, key), () if limits is None else fresh_guard(limits)
    return TrainState(jnp.int32(0), params, optimizer.init(params), guard)


def abstract_state(
    model: Kimi,
    optimizer: Optimizer,
    mesh: Mesh,
    state_memory: StateMemory = 'device',
    limits: Limits | None = None,
) -> TrainState:
    """Shapes, dtypes and placement of the state; the optimizer's arrays lie as their parameters.

    state_memory: where parameters and those arrays wait between steps. limits: of `fresh_state`.
    """
    shapes = jax.eval_shape(lambda: fresh_state(model, optimizer, jax.random.key(0), limits))
    parallel, specs = model.run.parallel, {}
    if parallel is not None:
        tree = param_specs(model.config, model.plan, parallel)
        paths = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        specs = {_names(path): spec for path, spec in paths}

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = specs.get(_names(path), PartitionSpec())
        sharding = NamedSharding(mesh, spec)
        if state_memory == HOST and x.ndim:
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    guard, whole = shapes.guard, NamedSharding(mesh, PartitionSpec())
    guard = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), guard)
    placed = jax.tree_util.tree_map_with_path(place, shapes._replace(guard=()))
    return placed._replace(guard=guard)


def chip_bytes(abstract: Any) -> int:
    """Bytes that one chip holds of arrays placed on a mesh, but for those in the host's memory."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
        if not placed_on_host(x)
    )


def check_state_fits(abstract: TrainState, model: Kimi, limit: int | None) -> None:
    """Refuses a state that, with the working copy and its gradient, cannot lie on a chip.

    Activations and temporaries, among them the sum that gradient accumulation keeps, are not in it.

    limit: the chip's bytes; None where they are not known.

    Raises:
      ConfigError: with the numbers.
    """
    dtypes = computed_dtypes(abstract.params, model.config, model.plan, model.run)
    gradient = copies = 0
    for x, dtype in zip(jax.tree.leaves(abstract.params), jax.tree.leaves(dtypes), strict=True):
        size = math.prod(x.sharding.shard_shape(x.shape)) * dtype.itemsize
        gradient += size
        copies += size if placed_on_host(x) or x.dtype != dtype else 0
    state = chip_bytes(abstract) + copies
    if limit is not None and state + gradient > limit:
        gib = 2**30
        waits = all(map(placed_on_host, jax.tree.leaves(abstract.params)))
        # With all of the state on the host, the working copy and its gradient are left.
        helps = not waits and 2 * gradient <= limit
        more = ', or optimizer.state_memory=pinned_host' if helps else ''
        raise ConfigError(
            f'mesh: a chip would hold {state / gib:.1f} GiB of parameters and optimizer state and '
            f'{gradient / gib:.1f} GiB of gradients, wanted at most {limit / gib:.1f} GiB; take '
            f'at least {-(-(state + gradient) // limit)} times the chips (mesh.data){more}'
        )


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
