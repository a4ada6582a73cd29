"""How the routed experts' weights become what four bits would hold of them, while training."""

from __future__ import annotations

from typing import Any

import jax

from k3jax.config import ConfigError, QuantisationConfig
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf, Tree
from k3jax.model.param import map_leaves
from k3jax.parallel.rules import axes_of
from k3jax.parallel.shard import Parallel
from pallas_kernels.grouped_mlp import fake_quantise_mxfp4
from pallas_kernels.grouped_mlp.mxfp4 import GROUP


def check_cut(leaf: Leaf, parallel: Parallel) -> None:
    """Raises ConfigError where the mesh cuts a group of 32 that shares a scale."""
    cut = axes_of(parallel.spec(leaf)[-1])
    size = leaf.shape[-1] // parallel.size(*cut)
    if size % GROUP:
        raise ConfigError(
            f'mesh: {" x ".join(cut)} cuts the rows of the experts {leaf.shape} to {size} weights, '
            f'wanted a multiple of {GROUP}, which train.quantisation.weights shares scales in'
        )


def quantised_leaves(leaves: Tree, params: Any, how: QuantisationConfig) -> Any:
    """`params`, like `leaves`, with the experts' weights as MXFP4 has them if `how` says so."""
    if how.weights is None:
        return params
    return jax.tree.map(
        lambda leaf, x: fake_quantise_mxfp4(x, how.scale_rule) if leaf.quantisable else x,
        leaves,
        params,
    )


def quantised(model: Kimi, params: Any) -> Any:
    """The parameters, with the routed experts' weights as MXFP4 has them if the run trains so.

    Args:
      params: the model's own tree of float32 masters, on the chips.

    Raises:
      ConfigError: the mesh cuts groups of weights that share a scale.
    """
    how, parallel = model.run.quantisation, model.run.parallel
    if how.weights is None:
        return params

    def checked(name: str, leaf: Leaf, lead: tuple[int, ...]) -> Leaf:
        del name, lead
        if leaf.quantisable and parallel is not None:
            check_cut(leaf, parallel)
        return leaf

    return quantised_leaves(map_leaves(checked, model.config, model.plan), params, how)
