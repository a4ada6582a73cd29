"""What training carries from step to step, where it lies on a mesh, and whether it fits there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError, ModelConfig, StateMemory
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.param import param_specs

HOST: StateMemory = 'pinned_host'


class TrainState(NamedTuple):
    """step: int32, updates done. params: float32 masters. opt_state: optax's."""

    step: jax.Array
    params: Any
    opt_state: Any


def check_trainable(config: ModelConfig) -> None:
    """Raises ConfigError for a model that has no gradient."""
    if config.experts_format != 'bf16':
        raise ConfigError(
            f'model.experts_format: got {config.experts_format!r}, wanted bf16: packed experts '
            'have no gradient'
        )


def moved(opt_state: Any, placed: TrainState | None, kind: str | None) -> Any:
    """The optimizer's arrays in memory of a kind; None: where `placed` says they wait."""
    if placed is None:
        return opt_state

    def move(x: jax.Array, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        home = abstract.sharding
        if home.memory_kind != HOST:
            return x
        return jax.device_put(x, home if kind is None else home.with_memory_kind(kind))

    return jax.tree.map(move, opt_state, placed.opt_state)


def fresh_state(model: Kimi, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step; under `jax.eval_shape`, its shapes only."""
    params = init_params(model, key)
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def abstract_state(
    model: Kimi,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state_memory: StateMemory = 'device',
) -> TrainState:
    """Shapes, dtypes and placement of the state; the optimizer's arrays lie as their parameters.

    state_memory: where those arrays wait between steps.
    """
    shapes = jax.eval_shape(lambda: fresh_state(model, optimizer, jax.random.key(0)))
    parallel, specs = model.run.parallel, {}
    if parallel is not None:
        tree = param_specs(model.config, model.plan, parallel)
        specs = {
            _names(path): spec
            for path, spec in jax.tree_util.tree_leaves_with_path(
                tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
        }

    def place(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = _names(path)
        tails = (names[start:] for start in range(len(names)))
        spec = next((specs[tail] for tail in tails if tail in specs), PartitionSpec())
        sharding = NamedSharding(mesh, spec)
        if state_memory == HOST and x.ndim and path[0].name == 'opt_state':
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, shapes)


def chip_bytes(abstract: Any) -> int:
    """Bytes that one chip holds of arrays placed on a mesh, but for those in the host's memory."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
        if x.sharding.memory_kind != HOST
    )


def check_state_fits(abstract: TrainState, limit: int | None) -> None:
    """Refuses a state that, with its gradient, cannot lie on a chip.

    limit: the chip's bytes; None where they are not known.

    Raises:
      ConfigError: with the numbers.
    """
    state, gradient = chip_bytes(abstract), chip_bytes(abstract.params)
    if limit is not None and state + gradient > limit:
        gib = 2**30
        raise ConfigError(
            f'mesh: a chip would hold {state / gib:.1f} GiB of parameters and optimizer state and '
            f'{gradient / gib:.1f} GiB of gradients, wanted at most {limit / gib:.1f} GiB; take '
            f'at least {-(-(state + gradient) // limit)} times the chips (mesh.data)'
        )


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
