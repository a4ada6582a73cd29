"""Muon: a matrix moves along its momentum made orthogonal; heads and experts are matrices too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
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

    @property
    def is_single(self) -> bool:
        """Whether a matrix is one block."""
        return self.count == len(self.rows) == 1


class Cut(NamedTuple):
    """How many chips, along which mesh axes, share a dimension."""

    axes: tuple[str, ...]
    chips: int


WHOLE = Cut((), 1)


def newton_schulz(
    x: jax.Array, config: MuonConfig, rows: Cut = WHOLE, columns: Cut = WHOLE
) -> jax.Array:
    """Matrices with the same singular vectors and singular values near 1.

    X_0 = x / (|x|_F + 1e-7);  A = X X^T;  X <- a X + (b A + c A A) X, on the shorter side.

    Args:
      x: [..., n, m]; products in `config.dtype`, sums in float32.
      rows, columns: one of them may be cut, inside `shard_map`: x is then this chip's part, and the
        chips share the products. They exchange what the products take, in `config.dtype`, and
        sums.

    Returns:
      Like x, float32 (float64 for float64 x).

    Source: Muon; Kimi K2 report, algorithm 1.
    """
    assert 1 in (rows.chips, columns.chips), (rows, columns)
    exact = jnp.promote_types(x.dtype, jnp.float32)
    dtype = _product_dtype(x, config)
    x = x.astype(exact)
    if tall := x.shape[-2] * rows.chips > x.shape[-1] * columns.chips:
        x, rows, columns = jnp.swapaxes(x, -1, -2), columns, rows
    squares = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
    if cut := rows.axes + columns.axes:
        squares = lax.psum(squares, cut)
    x = x / (jnp.sqrt(squares) + EPSILON)
    a, b, c = config.coefficients
    # Of the Gram matrix of a cut longer side, the chips sum up a share of the rows each.
    scattered = columns.chips > 1 and x.shape[-2] % columns.chips == 0
    of_gram = columns if scattered else rows

    def product(p: jax.Array, q: jax.Array, of: str) -> jax.Array:
        return jnp.einsum(of, p, q, preferred_element_type=exact, precision=lax.Precision.HIGHEST)

    def gathered(x: jax.Array, cut: Cut) -> jax.Array:
        x = x.astype(dtype)
        return lax.all_gather(x, cut.axes, axis=x.ndim - 2, tiled=True) if cut.axes else x

    def improve(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        whole = gathered(x, rows)
        gram = product(x.astype(dtype), whole, '...ik,...jk->...ij')
        if scattered:
            dim = gram.ndim - 2
            gram = lax.psum_scatter(gram, columns.axes, scatter_dimension=dim, tiled=True)
        elif columns.axes:
            gram = lax.psum(gram, columns.axes)
        square = product(gram.astype(dtype), gathered(gram, of_gram), '...ij,...jk->...ik')
        polynomial = gathered(b * gram + c * square, columns if scattered else WHOLE)
        return a * x + product(polynomial, whole, '...ij,...jk->...ik'), None

    x, _ = lax.scan(improve, x, length=config.steps)
    return jnp.swapaxes(x, -1, -2) if tall else x


def _product_dtype(x: jax.Array, config: MuonConfig) -> jnp.dtype:
    if config.dtype == 'float32':
        return jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dtype(config.dtype)


def muon_direction(
    x: jax.Array, blocks: Blocks, config: MuonConfig, rows: Cut = WHOLE, columns: Cut = WHOLE
) -> jax.Array:
    """The update of momentum x [..., rows, columns]: each block orthogonal, of RMS `update_rms`.

    An orthogonal n x m block has an RMS of 1 / sqrt(max(n, m)); it is scaled to the RMS that an
    update of Adam has. Zeros stay zeros.

    rows, columns: how x is cut, as in `newton_schulz`; the rows of a single block only.
    """
    assert x.shape[-2] * rows.chips == blocks.num_rows, (x.shape, blocks, rows)
    assert rows.chips == 1 or blocks.is_single, (blocks, rows)
    lead = x.shape[:-2]
    heads = x.reshape(*lead, blocks.count, -1, x.shape[-1])
    starts = [sum(blocks.rows[:i]) for i in range(1, len(blocks.rows))]
    longest = [max(size, x.shape[-1] * columns.chips) for size in blocks.rows]
    moved = [
        newton_schulz(part, config, rows, columns) * (config.update_rms * math.sqrt(side))
        for part, side in zip(jnp.split(heads, starts, axis=-2), longest, strict=True)
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


def directions_on_mesh(
    xs: Sequence[jax.Array],
    blocks: Blocks,
    config: MuonConfig,
    mesh: Mesh | None = None,
    specs: Sequence[PartitionSpec] | None = None,
) -> list[jax.Array]:
    """`muon_direction` of arrays that a mesh has cut: each chip computes a share of the matrices.

    Of the cuts of rows and columns, the larger gives its chips a share each: a chip trades its
    parts of the other chips' matrices for the missing parts of its own (`all_to_all`). The products
    of these are shared along the other cut, unless that goes through blocks: then these matrices
    are gathered. A block of rows that lies whole on a chip counts as a matrix. The matrices of all
    arrays are shared out together. Chips along axes that cut neither do the same work.

    Momentum and directions are rounded to `config.dtype`, in which they are exchanged; on a single
    chip too.

    Args:
      xs: [..., rows, columns], alike in these two and in how they are cut; axes before them may be
        cut, and need no exchange.
      blocks: of all rows.
      mesh, specs: how each of xs is cut, and its result; None on a single chip.

    Returns:
      [..., rows, columns] float32 (float64 for float64) of each.
    """
    assert all(x.shape[-2] == blocks.num_rows for x in xs), ([x.shape for x in xs], blocks)
    if mesh is None:
        return _on_each_chip(xs, blocks, config, WHOLE, WHOLE)
    assert specs is not None and len({tuple(spec[-2:]) for spec in specs}) == 1, specs
    assert all(len(spec) == x.ndim for x, spec in zip(xs, specs, strict=True)), specs
    axes = [axes_of(cut) for cut in specs[0][-2:]]
    rows, columns = (Cut(names, math.prod(mesh.shape[a] for a in names)) for names in axes)
    return jax.shard_map(
        lambda xs: _on_each_chip(xs, blocks, config, rows, columns),
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=list(specs),
        check_vma=False,
    )(list(xs))


def _on_each_chip(
    xs: Sequence[jax.Array], blocks: Blocks, config: MuonConfig, rows: Cut, columns: Cut
) -> list[jax.Array]:
    """xs: this chip's parts [..., rows, columns] of arrays whose last two axes are cut so."""
    shapes, exact = [x.shape for x in xs], jnp.promote_types(xs[0].dtype, jnp.float32)
    matrix = shapes[0][-2:]
    if blocks.count % rows.chips == 0:
        blocks, rows = Blocks(1, blocks.rows), WHOLE
        matrix = blocks.num_rows, matrix[-1]
    flat = [x.reshape(-1, *matrix).astype(_product_dtype(x, config)) for x in xs]
    starts = list(itertools.accumulate(map(len, flat)))
    x = jnp.concatenate(flat)
    by_columns = columns.chips > rows.chips
    spread, dim = (columns, 2) if by_columns else (rows, 1)
    if spread.chips > 1:
        x = _padded(x, -len(x) % spread.chips)
        x = lax.all_to_all(x, spread.axes, 0, dim, tiled=True)
    x = _of_share(x, blocks, config, *((rows, WHOLE) if by_columns else (WHOLE, columns)))
    if spread.chips > 1:
        x = lax.all_to_all(x, spread.axes, dim, 0, tiled=True)
    parts = jnp.split(x[: starts[-1]], starts[:-1])
    return [part.reshape(shape).astype(exact) for part, shape in zip(parts, shapes, strict=True)]


def _of_share(
    x: jax.Array, blocks: Blocks, config: MuonConfig, rows: Cut, columns: Cut
) -> jax.Array:
    """The directions of a share of the matrices, which the chips along the other cut have too."""
    if rows.chips == 1 or blocks.is_single:
        return _by_batches(x, blocks, config, rows, columns)
    part = x.shape[1]
    x = _by_batches(
        lax.all_gather(x, rows.axes, axis=1, tiled=True), blocks, config, WHOLE, columns
    )
    return lax.dynamic_slice_in_dim(x, lax.axis_index(rows.axes) * part, part, 1)


def _padded(x: jax.Array, more: int) -> jax.Array:
    """x with as many matrices of zeros behind."""
    return jnp.pad(x, ((0, more), (0, 0), (0, 0)))


def _by_batches(
    x: jax.Array, blocks: Blocks, config: MuonConfig, rows: Cut, columns: Cut
) -> jax.Array:
    """`muon_direction` of x [N, rows, columns], as many matrices at a time as memory is given."""

    def direction(x: jax.Array) -> jax.Array:
        return muon_direction(x, blocks, config, rows, columns).astype(x.dtype)

    width = x.shape[-1] * columns.chips
    # Of each block three arrays like it, and three Gram matrices.
    elements = sum(3 * size * width + 3 * min(size, width) ** 2 for size in blocks.rows)
    most = max(1, TEMPORARY_BYTES // (4 * blocks.count * elements))
    count = len(x)
    if count <= most:
        return direction(x)
    # All batches are of one size: the one that leaves the least of the last one empty.
    size = min(range(most, most // 2, -1), key=lambda size: -count % size)
    x = _padded(x, -count % size)
    batches = x.reshape(-1, size, *x.shape[1:])
    return lax.map(direction, batches).reshape(x.shape)[:count]
