"""What waits in the host's memory between steps, and how it comes and goes."""

from __future__ import annotations

from typing import Any

import jax

from k3jax.config import StateMemory

HOST: StateMemory = 'pinned_host'


def placed_on_host(abstract: jax.ShapeDtypeStruct) -> bool:
    """Whether an abstract array is placed in the host's memory."""
    return abstract.sharding.memory_kind == HOST


def waits(x: jax.Array) -> bool:
    """Whether a traced array lies in the host's memory."""
    return jax.typeof(x).memory_space != jax.memory.Space.Device


def on_chip(tree: Any) -> Any:
    """Traced arrays, those that wait in the host's memory brought to the chip."""
    here = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, here) if waits(x) else x, tree)


def sent_home(tree: Any, placed: Any) -> Any:
    """Traced arrays of the state, those that wait in the host's memory sent there.

    placed: the same part of the abstract state.
    """

    def move(x: jax.Array, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(x, abstract.sharding) if placed_on_host(abstract) else x

    return jax.tree.map(move, tree, placed)
