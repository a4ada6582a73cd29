"""Prefill and decode steps on a mesh, as a whole program or as the part of one chip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from k3jax.model.cache import Cache, cache_specs
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.model.param import param_specs


class Cuts(NamedTuple):
    """How what a step takes is cut by the mesh: PartitionSpecs, or one for a whole tree; tokens are
    those of a prefill."""

    params: Any
    cache: Cache
    rows: PartitionSpec
    tokens: PartitionSpec


def cuts_of(model: Kimi) -> Cuts:
    """Nothing is cut on a single chip."""
    config, plan, parallel = model.config, model.plan, model.run.parallel
    if parallel is None:
        return Cuts(*[PartitionSpec()] * 4)
    return Cuts(
        param_specs(config, plan, parallel),
        cache_specs(config, plan, parallel),
        PartitionSpec(parallel.rules.rows),
        parallel.batch_spec,
    )


def _on_mesh(function: Callable[..., Any], model: Kimi, mesh: Mesh, *given: PartitionSpec):
    """function(model, params, *given, cache) -> (logits, cache), on arrays of the whole mesh."""
    function, cuts = functools.partial(function, model), cuts_of(model)
    if model.run.parallel is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(cuts.params, *given, cuts.cache),
        out_specs=(cuts.rows, cuts.cache),
        check_vma=False,
    )


def prefill_step(model: Kimi, mesh: Mesh) -> Callable[..., tuple[jax.Array, Cache]]:
    """`prefill` without its model: (params, tokens, num_real, cache) -> (logits, cache)."""
    cuts = cuts_of(model)
    return _on_mesh(prefill, model, mesh, cuts.tokens, cuts.rows)


def decode_step(model: Kimi, mesh: Mesh) -> Callable[..., tuple[jax.Array, Cache]]:
    """`decode` without its model: (params, tokens, cache) -> (logits, cache)."""
    return _on_mesh(decode, model, mesh, cuts_of(model).rows)
