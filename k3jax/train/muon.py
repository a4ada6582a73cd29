"""Muon: a matrix moves along its momentum made orthogonal; heads and experts are matrices too."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import MuonConfig
from k3jax.parallel.rules import axes_of

EPSILON = 1e-7  # beside the norm that the momentum is divided by
TEMPORARY_BYTES = 2**30  # of Newton-Schulz on a chip; one matrix may need more


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the rows of a matrix [..., rows, columns] are cut: `count` times blocks of `rows` each.

    One block of all rows is the whole matrix. Axes before the last two number matrices.
    """

    count: int
    rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.count * sum(self.rows)


def newton_schulz(x: jax.Array, config: MuonConfig) -> jax.Array:
    """Matrices with the same singular vectors and singular values near 1.

    X_0 = x / (|x|_F + 1e-7);  A = X X^T;  X <- a X + (b A + c A A) X, on the shorter side.

    Args:
      x: [..., n, m]; products in `config.dtype`, sums in float32.

    Returns:
      [..., n, m] float32 (float64 for float64 x).

    Source: Muon; Kimi K2 report, algorithm 1.
    """
    exact = jnp.promote_types(x.dtype, jnp.float32)
    dtype = exact if config.dtype == 'float32' else jnp.dtype(config.dtype)
    x = x.astype(exact)
    if wide := x.shape[-2] > x.shape[-1]:
        x = jnp.swapaxes(x, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + EPSILON)
    a, b, c = config.coefficients

    def product(p: jax.Array, q: jax.Array, of: str) -> jax.Array:
        args = (p.astype(dtype), q.astype(dtype))
        return jnp.einsum(of, *args, preferred_element_type=exact, precision=lax.Precision.HIGHEST)

    def improve(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gram = product(x, x, '...ik,...jk->...ij')
        polynomial = b * gram + c * product(gram, gram, '...ij,...jk->...ik')
        return a * x + product(polynomial, x, '...ij,...jk->...ik'), None

    x, _ = lax.scan(improve, x, length=config.steps)
    return jnp.swapaxes(x, -1, -2) if wide else x


def muon_direction(x: jax.Array, blocks: Blocks, config: MuonConfig) -> jax.Array:
    """The update of momentum x [..., rows, columns]: each block orthogonal, of RMS `update_rms`.

    An orthogonal n x m block has an RMS of 1 / sqrt(max(n, m)); it is scaled to the RMS that an
    update of Adam has. Zeros stay zeros.
    """
    assert x.shape[-2] == blocks.num_rows, (x.shape, blocks)
    lead, columns = x.shape[:-2], x.shape[-1]
    heads = x.reshape(*lead, blocks.count, -1, columns)
    starts = [sum(blocks.rows[:i]) for i in range(1, len(blocks.rows))]
    moved = [
        newton_schulz(part, config) * (config.update_rms * math.sqrt(max(part.shape[-2:])))
        for part in jnp.split(heads, starts, axis=-2)
    ]
    return jnp.concatenate(moved, axis=-2).reshape(x.shape)


class MuonState(NamedTuple):
    """momentum: float32, like the parameter."""

    momentum: jax.Array


def accumulated(
    grad: jax.Array, state: MuonState, config: MuonConfig
) -> tuple[jax.Array, MuonState]:
    """What Muon's direction is taken of, and the new momentum.

    M <- mu M + G; of M, or of G + mu M with Nesterov's.
    """
    momentum = config.momentum * state.momentum + grad
    ahead = grad + config.momentum * momentum if config.nesterov else momentum
    return ahead, MuonState(momentum)


class _Cut(NamedTuple):
    """How many chips, along which mesh axes, share a dimension."""

    axes: tuple[str, ...]
    chips: int


def direction_on_mesh(
    x: jax.Array,
    blocks: Blocks,
    config: MuonConfig,
    mesh: Mesh | None = None,
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """`muon_direction` of an array that a mesh has cut: each chip computes a share of the matrices.

    Of the cuts of rows and columns, the larger gives its chips a share each: a chip trades its
    parts of the other chips' matrices for the missing parts of its own (`all_to_all`). Only these
    are then gathered along the other cut. A block of rows that lies whole on a chip counts as a
    matrix.

    Args:
      x: [..., rows, columns]; axes before these two may be cut, and need no exchange.
      blocks: of all rows.
      mesh, spec: how x is cut, and the result; None on a single chip.

    Returns:
      [..., rows, columns] float32.
    """
    assert x.shape[-2] == blocks.num_rows, (x.shape, blocks)
    if mesh is None:
        return _on_each_chip(x, blocks, config, _Cut((), 1), _Cut((), 1))
    assert spec is not None and len(spec) == x.ndim, (spec, x.shape)
    axes = [axes_of(cut) for cut in spec[-2:]]
    rows, columns = (_Cut(names, math.prod(mesh.shape[a] for a in names)) for names in axes)
    return jax.shard_map(
        lambda x: _on_each_chip(x, blocks, config, rows, columns),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(x)


def _on_each_chip(
    x: jax.Array, blocks: Blocks, config: MuonConfig, rows: _Cut, columns: _Cut
) -> jax.Array:
    """x: this chip's part [..., rows, columns] of an array whose last two axes are cut so."""
    shape = x.shape
    if blocks.count % rows.chips == 0:
        blocks, rows = Blocks(1, blocks.rows), _Cut((), 1)
        x = x.reshape(-1, blocks.num_rows, shape[-1])
    else:
        x = x.reshape(-1, *shape[-2:])
    order = sorted(((rows, 1), (columns, 2)), key=lambda cut: cut[0].chips, reverse=True)
    (spread, dim), (other, other_dim) = order
    count, part = x.shape[0], x.shape[other_dim]
    if spread.chips > 1:
        x = jnp.pad(x, ((0, -count % spread.chips), (0, 0), (0, 0)))
        x = lax.all_to_all(x, spread.axes, 0, dim, tiled=True)
    if other.chips > 1:
        x = lax.all_gather(x, other.axes, axis=other_dim, tiled=True)
    x = _by_batches(x, blocks, config)
    if other.chips > 1:
        start = lax.axis_index(other.axes) * part
        x = lax.dynamic_slice_in_dim(x, start, part, other_dim)
    if spread.chips > 1:
        x = lax.all_to_all(x, spread.axes, dim, 0, tiled=True)[:count]
    return x.reshape(shape)


def _by_batches(x: jax.Array, blocks: Blocks, config: MuonConfig) -> jax.Array:
    """`muon_direction` of x [N, rows, columns], as many matrices at a time as memory is given."""
    columns = x.shape[-1]
    # Of each block three arrays like it, and three Gram matrices.
    elements = sum(3 * rows * columns + 3 * min(rows, columns) ** 2 for rows in blocks.rows)
    at_once = max(1, TEMPORARY_BYTES // (4 * blocks.count * elements))
    if len(x) <= at_once:
        return muon_direction(x, blocks, config)
    return lax.map(lambda one: muon_direction(one, blocks, config), x, batch_size=at_once)
