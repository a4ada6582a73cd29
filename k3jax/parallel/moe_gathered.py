"""How the experts of a decode step are shared: every chip sees all tokens and serves its own.

A step has few tokens and all experts' weights to read, so the tokens travel to every chip.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.shard import Parallel
from pallas_kernels.common.platform import Implementation
from pallas_kernels.grouped_mlp import (
    MAX_TOKENS,
    Experts,
    GatedActivation,
    Mxfp8,
    grouped_mlp,
    round_rows,
    token_mlp,
)


def gathered_mlp(
    z: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Experts,
    activation: GatedActivation,
    *,
    parallel: Parallel,
    quantise: Mxfp8 | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """sum_j weights[s, j] expert_{chosen[s, j]}(z[s]) of this chip's tokens.

    Args:
      z: [S, L], this chip's tokens, the same along mesh axes that do not cut rows.
      chosen, weights: [S, k], experts of the whole model.
      experts: this chip's share, in the order of the mesh axes that cut them.
      quantise, implementation: of `grouped_mlp`.

    Returns:
      [S, L] float32. Not to be differentiated.
    """
    rows = tuple(axis for axis in parallel.rules.rows if parallel.size(axis) > 1)
    homes = parallel.cut_of('expert')
    z, quantise = round_rows(z, quantise)
    if rows:
        z, chosen, weights = (
            lax.all_gather(x, rows, axis=0, tiled=True) for x in (z, chosen, weights)
        )
    wide = jnp.promote_types(z.dtype, jnp.float32)
    here = chosen - lax.axis_index(homes) * experts.num_experts
    elsewhere = (here < 0) | (here >= experts.num_experts)
    how = {'quantise': quantise, 'implementation': implementation}
    if z.shape[0] <= MAX_TOKENS:
        mixed = token_mlp(z, experts, here, weights, activation, **how).astype(wide)
    else:  # a piece of a prompt
        # Entries of other chips come last, in no group.
        flat = jnp.where(elsewhere, experts.num_experts, here).reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=experts.num_experts + 1)[:-1].astype(jnp.int32)
        rows = z[order // chosen.shape[1]]
        served = grouped_mlp(rows, experts, sizes, activation, **how)
        served = served[jnp.argsort(order)].reshape(*chosen.shape, -1).astype(wide)
        mixed = jnp.sum(jnp.where(elsewhere, 0, weights)[..., None] * served, axis=1)
    if rows:
        mixed = lax.psum_scatter(mixed, rows, scatter_dimension=0, tiled=True)
    others = tuple(axis for axis in homes if axis not in rows)
    return lax.psum(mixed, others) if others else mixed
