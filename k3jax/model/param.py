"""How a module declares its parameters: one table of leaves in, one dict of arrays out."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.model.layout import Leaf, Tree


def init_leaf(key: jax.Array, leaf: Leaf, stddev: float, dtype: jnp.dtype | None) -> jax.Array:
    """A fresh array for `leaf`, in `dtype` (None: the dtype that the release stores)."""
    dtype = jnp.dtype(leaf.dtype) if dtype is None or leaf.dtype == 'uint8' else dtype
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


def declare(
    module: nn.Module, leaves: Tree, stddev: float, dtype: jnp.dtype | None
) -> dict[str, Any]:
    """Declares every leaf of the table on `module`, nested tables as nested dicts."""

    def init(key: jax.Array, entry: Leaf | Tree) -> Any:
        if isinstance(entry, Leaf):
            return init_leaf(key, entry, stddev, dtype)
        keys = jax.random.split(key, len(entry))
        return {name: init(k, child) for k, (name, child) in zip(keys, entry.items(), strict=True)}

    return {name: module.param(name, init, entry) for name, entry in leaves.items()}
