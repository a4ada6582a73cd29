"""How parameters get to the chips: leaf by leaf, each chip reading the part that it holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from k3jax.config import Config, DataConfig, MeshConfig
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf, model_leaves
from k3jax.model.plan import gather_layers
from k3jax.parallel.mesh import check_fits, filled, make_mesh

Arrive = Callable[[Leaf, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A leaf of the model's own tree.

    sources: what it is read from, one a layer; arrays that give NumPy arrays when sliced.
    lead: the leading axes that the layers are stacked on.
    """

    leaf: Leaf
    sources: tuple[Any, ...]
    lead: tuple[int, ...] = ()


def serving_mesh(config: MeshConfig, model: Any, num_slots: int | None = None) -> Mesh:
    """The mesh over all devices, if a model's decode steps can be cut along it.

    Raises:
      ConfigError: names the numbers that do not divide.
    """
    count = len(jax.devices())
    mesh = filled(config, count)
    rows = num_slots or mesh.data * mesh.expert
    data = DataConfig(batch_size=rows, num_streams=rows)
    check_fits(Config(model=model, mesh=mesh, data=data), 'decode', count)
    return make_mesh(mesh)


@functools.cache
def _into(sharding: Sharding) -> Callable[[jax.Array, jax.Array, Any], jax.Array]:
    def put(stack: jax.Array, one: jax.Array, place: jax.Array) -> jax.Array:
        lead = stack.ndim - one.ndim
        starts = [place[axis] for axis in range(lead)] + [0] * one.ndim
        return lax.dynamic_update_slice(stack, one.reshape(*[1] * lead, *one.shape), starts)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def place_params(
    params: Any, model: Kimi, mesh: Mesh | None, arrive: Arrive = lambda leaf, x: x
) -> Any:
    """The parameters that the model's steps take, where they want them.

    No chip holds more than its part of them and one leaf of one layer, read a leaf at a time.

    Args:
      params: the on-disk tree (`layers_0` ...) of arrays that give NumPy arrays when sliced.
      mesh: None for the default device.
      arrive: what is done with a leaf of one layer once it is on its chips.
    """
    config, parallel = model.config, model.run.parallel

    def entry(leaf: Leaf, source: Any) -> _Entry:
        return _Entry(leaf, (source,))

    def join(entries: list[_Entry], lead: tuple[int, ...]) -> _Entry:
        sources = tuple(source for one in entries for source in one.sources)
        return _Entry(entries[0].leaf, sources, lead)

    def sharding_of(leaf: Leaf, lead: tuple[int, ...]) -> Sharding:
        if parallel is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(mesh, PartitionSpec(*[None] * len(lead), *parallel.spec(leaf)))

    def read(leaf: Leaf, source: Any) -> jax.Array:
        whole = jax.make_array_from_callback(
            tuple(source.shape), sharding_of(leaf, ()), lambda index: np.asarray(source[index])
        )
        return arrive(leaf, whole)

    def place(entry: _Entry) -> jax.Array:
        if not entry.lead:
            return read(entry.leaf, entry.sources[0])
        sharding, stack = sharding_of(entry.leaf, entry.lead), None
        for place, source in zip(np.ndindex(*entry.lead), entry.sources, strict=True):
            one = read(entry.leaf, source)
            if stack is None:
                shape = (*entry.lead, *one.shape)
                stack = jnp.zeros(shape, one.dtype, device=sharding)
            stack = _into(sharding)(stack, one, np.array(place, np.int32))
        return stack

    entries = jax.tree.map(entry, model_leaves(config), params)
    return jax.tree.map(place, gather_layers(entries, model.plan, join))
