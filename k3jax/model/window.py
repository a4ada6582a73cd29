"""Tokens that a model looks at before it is known how many of them stand.

`model.apply(..., cache=looking_ahead(cache))` gives what it would say after each; `committed` then
is the cache after the first few, as if the others had never been there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.model.cache import Cache, KDACache, KDAWindow, MLACache
from pallas_kernels.common.platform import Implementation
from pallas_kernels.kda import kda


def _by_layer(function: Any, layers: Any) -> Any:
    kinds = KDACache, KDAWindow, MLACache
    return jax.tree.map(function, layers, is_leaf=lambda x: isinstance(x, kinds))


def looking_ahead(cache: Cache) -> Cache:
    """A cache that remembers what it is given beside what it has."""

    def wrapped(layer: KDACache | MLACache) -> KDAWindow | MLACache:
        return KDAWindow(layer) if isinstance(layer, KDACache) else layer

    return cache._replace(layers=_by_layer(wrapped, cache.layers))


def _replayed(
    window: KDAWindow, count: jax.Array, implementation: Implementation | None
) -> KDACache:
    """The cache of one layer after `count` [B] tokens of its window."""
    before, width = window.before, window.k.shape[1]
    valid = (jnp.arange(width) < count[:, None]).astype(jnp.int32)
    _, state = kda(
        window.k,  # for queries, whose outputs nobody reads
        window.k,
        window.v,
        window.g,
        window.beta,
        initial_state=before.state,
        segment_ids=valid,
        implementation=implementation,
    )

    def tail(old: jax.Array, projected: jax.Array) -> jax.Array:
        both = jnp.concatenate([old, projected.astype(old.dtype)], axis=1)
        places = count[:, None] + jnp.arange(old.shape[1])
        return jnp.take_along_axis(both, places[..., None], axis=1)

    return KDACache(
        state,
        tail(before.q_tail, window.projected_q),
        tail(before.k_tail, window.projected_k),
        tail(before.v_tail, window.projected_v),
    )


def committed(
    cache: Cache, after: Cache, count: jax.Array, implementation: Implementation | None
) -> Cache:
    """The cache after the first `count` tokens of a window.

    Args:
      cache: before the window. after: what the model left of `looking_ahead(cache)`; the latents
        of tokens that do not stand stay in it, past its length, until others take their places.
      count: [B] int32, 1 to W.
      implementation: of `kda`.
    """

    def commit(layer: KDAWindow | MLACache) -> KDACache | MLACache:
        if isinstance(layer, MLACache):
            return layer
        function = functools.partial(_replayed, count=count, implementation=implementation)
        for _ in range(layer.k.ndim - 4):  # layers are stacked on the leading axes
            function = jax.vmap(function)
        return function(layer)

    return Cache(cache.length + count, _by_layer(commit, after.layers))
