"""How a module declares its parameters: one table of leaves in, one dict of arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig
from k3jax.model.layout import Leaf, Tree, model_leaves
from k3jax.model.plan import Plan, gather_layers
from k3jax.model.run import Run
from k3jax.parallel.shard import Parallel


def init_leaf(key: jax.Array, leaf: Leaf, stddev: float, dtype: jnp.dtype | None) -> jax.Array:
    """A fresh array for `leaf`, in `dtype` (None: the dtype that the release stores)."""
    dtype = jnp.dtype(leaf.dtype) if dtype is None or leaf.packs is not None else dtype
    shape = leaf.shape
    match leaf.init:
        case 'normal':
            value = stddev * jax.random.normal(key, shape)
        case 'ones':
            value = jnp.ones(shape)
        case 'zeros':
            value = jnp.zeros(shape)
        case 'A_log':
            value = jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
        case 'dt_bias':
            # softplus(dt_bias) is log-uniform in [1e-3, 1e-1]: slow decay at the start.
            log_step = jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1))
            value = jnp.log(jnp.expm1(jnp.exp(log_step)))
        case 'conv':
            bound = shape[-1] ** -0.5
            value = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
        case _:
            raise AssertionError(leaf.init)
    return value.astype(dtype)


def _rounded(leaf: Leaf) -> bool:
    """Whether the computation takes a leaf in its own dtype, whatever it is held in."""
    return leaf.init == 'normal' and not leaf.exact and leaf.packs is None


def computed_dtypes(params: Any, config: ModelConfig, plan: Plan, run: Run) -> Any:
    """The dtype that the computation takes each parameter in, as a tree like the model's own."""
    rounded = map_leaves(lambda name, leaf, lead: _rounded(leaf), config, plan)
    return jax.tree.map(lambda x, to: jnp.dtype(run.dtype) if to else x.dtype, params, rounded)


def declare(module: nn.Module, leaves: Tree, stddev: float, run: Run) -> dict[str, Any]:
    """Declares every leaf of the table on `module`, nested tables as nested dicts.

    On a mesh, what is declared is one chip's part of each leaf, and what is returned is whole, but
    for the axes that the computation keeps cut.
    """
    parallel = run.parallel

    def init(key: jax.Array, entry: Leaf | Tree) -> Any:
        if isinstance(entry, Leaf):
            held = entry if parallel is None else parallel.local(entry)
            return init_leaf(key, held, stddev, run.param_dtype)
        keys = jax.random.split(key, len(entry))
        return {name: init(k, child) for k, (name, child) in zip(keys, entry.items(), strict=True)}

    held = {name: module.param(name, init, entry) for name, entry in leaves.items()}
    return gathered(held, leaves, run)


@jax.named_scope('gather_parameters')
def gathered(held: dict[str, Any], leaves: Tree, run: Run) -> dict[str, Any]:
    """What one chip holds of the table's parameters, whole but for the axes that stay cut."""
    parallel = run.parallel
    if parallel is None:
        return held

    def gather(held: Any, entry: Leaf | Tree) -> Any:
        if isinstance(entry, Leaf):
            return parallel.gather(held.astype(run.dtype) if _rounded(entry) else held, entry)
        return {name: gather(held[name], child) for name, child in entry.items()}

    return gather(held, leaves)


def map_leaves(
    function: Callable[[str, Leaf, tuple[int, ...]], Any], config: ModelConfig, plan: Plan
) -> dict[str, Any]:
    """function(name, leaf, leading axes) of each parameter, as a tree like the model's own.

    The name of a `weight` or a `bias` has that of its parent before it: `wqkv.weight`.
    """
    tree = gather_layers(model_leaves(config), plan, lambda leaves, lead: (leaves[0], lead))

    def walk(name: str, entry: Any) -> Any:
        if isinstance(entry, dict):
            return {child: walk(_called(name, child), entry[child]) for child in entry}
        return function(name, *((entry, ()) if isinstance(entry, Leaf) else entry))

    return walk('', tree)


def _called(parent: str, name: str) -> str:
    return f'{parent}.{name}' if name in ('weight', 'bias') else name


def param_specs(config: ModelConfig, plan: Plan, parallel: Parallel) -> dict[str, Any]:
    """How each parameter is cut by the mesh: the model's own tree of PartitionSpec."""

    def spec(name: str, leaf: Leaf, lead: tuple[int, ...]) -> PartitionSpec:
        del name
        return PartitionSpec(*[None] * len(lead), *parallel.spec(leaf))

    return map_leaves(spec, config, plan)
