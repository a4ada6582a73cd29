"""How a kernel walks rows sorted by expert: a tile of rows against its own expert's weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp.visits import Table, Visits

VMEM_LIMIT = 60 * 2**20  # of the 64 MiB that a v5p core has
SUB_TILE = 128  # rows of a tile that is shared between groups
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


class Weight(NamedTuple):
    """array: [E, .., ..]; N lies along `axis`, `packing` columns an element, or nowhere (None)."""

    array: jax.Array
    axis: int | None
    packing: int = 1


def product(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """Accumulated in float32; float32 operands are multiplied as such, not in one bfloat16 pass."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def rows_inside(visit: Visits, first: Any, count: int) -> jax.Array:
    """[count, 1] bool: which of the rows from `first` on are the visiting group's."""
    row = first + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return (row >= visit.low) & (row < visit.high)


def over_parts(visit: Visits, tile: int, whole: Callable, part: Callable) -> None:
    """whole() if the tile is the group's alone; else part(rows, first row) where it has rows.

    A group that has little of a tile costs its parts of SUB_TILE rows, not the tile.
    """
    start = visit.tile * tile
    is_full = (visit.low <= start) & (visit.high >= start + tile)
    pl.when(is_full)(whole)
    size = SUB_TILE if tile % SUB_TILE == 0 else tile

    def visit_part(i: jax.Array, carry: None) -> None:
        first = start + i * size
        touches = (visit.low < first + size) & (visit.high > first)
        where = pl.ds(pl.multiple_of(i * size, size), size)
        pl.when(touches)(functools.partial(part, where, first))
        return carry

    # A loop, not its parts one after the other: they were most of what compiling took.
    pl.when(jnp.logical_not(is_full))(lambda: lax.fori_loop(0, tile // size, visit_part, None))


def _kernel(*refs, table: Table, body: Callable, num_rows: int, num_inputs: int):
    scalars, inputs, outs = refs[:4], refs[4:num_inputs], refs[num_inputs:]
    rows, weights = inputs[:num_rows], inputs[num_rows:]
    column, index = pl.program_id(0), pl.program_id(1)
    visit = table.at(index, scalars)
    previous = table.tile(jnp.maximum(index - 1, 0), scalars)
    tile = outs[0].shape[0]
    is_full = (visit.low <= visit.tile * tile) & (visit.high >= (visit.tile + 1) * tile)

    @pl.when(((index == 0) | (previous != visit.tile)) & jnp.logical_not(is_full))
    def _():
        for out in outs:
            out[...] = jnp.zeros_like(out)

    def whole():
        results = body([ref[...] for ref in rows], weights, column)
        for out, result in zip(outs, results, strict=True):
            out[...] = result.astype(out.dtype)

    def part(where, first):
        results = body([ref[where, :] for ref in rows], weights, column)
        inside = rows_inside(visit, first, where.size)
        for out, result in zip(outs, results, strict=True):
            others = out[where, :].astype(jnp.float32)
            out[where, :] = jnp.where(inside, result, others).astype(out.dtype)

    over_parts(visit, tile, whole, part)


def over_rows(
    body: Callable,
    visits: Visits,
    *,
    whole: Sequence[jax.Array] = (),
    parts: Sequence[jax.Array] = (),
    weights: Sequence[Weight],
    num_products: int,
    num_columns: int,
    outs: Sequence[jnp.dtype],
    rows: int,
    columns: int,
    name: str,
    interpret: bool,
    table: Table,
) -> list[jax.Array]:
    """body(rows' values, weights' refs, column tile) -> float32 [rows, columns], one an output.

    Args:
      visits: `visits_by_tile` for tiles of `rows`.
      whole: [M, I], of which a tile has all columns. parts: [M, N], of which it has its own.
      weights: of the visiting group; the body has its own columns of them.
      num_products: of [M, I] with weights, for the CostEstimate.
      num_columns: N. outs: dtype of each [M, N] output.
      rows, columns: of a tile; N is cut for the two cores of a chip.

    Returns:
      [M, N] arrays; 0 in the rows of no group.
    """
    num_rows = (whole or parts)[0].shape[0]

    def row_block(a):
        return pl.BlockSpec((rows, a.shape[1]), lambda n, v, *s: (table.tile(v, s), 0))

    def part_block():
        return pl.BlockSpec((rows, columns), lambda n, v, *s: (table.tile(v, s), n))

    def weight_block(weight):
        _, *sizes = weight.array.shape
        own = [axis + 1 == weight.axis for axis in range(2)]
        block = [
            columns // weight.packing if mine else size
            for size, mine in zip(sizes, own, strict=True)
        ]

        def index(n, v, *s):
            return table.group(v, s), *(n if mine else 0 for mine in own)

        return pl.BlockSpec((None, *block), index)

    row_inputs = [*whole, *parts]
    out_shape = [jax.ShapeDtypeStruct((num_rows, num_columns), dtype) for dtype in outs]
    arrays = [*row_inputs, *(weight.array for weight in weights), *out_shape]
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            table=table,
            body=body,
            num_rows=len(row_inputs),
            num_inputs=4 + len(row_inputs) + len(weights),
        ),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(pl.cdiv(num_columns, columns), table.count),
            in_specs=[
                *(row_block(a) for a in whole),
                *(part_block() for _ in parts),
                *(weight_block(weight) for weight in weights),
            ],
            out_specs=[part_block() for _ in outs],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products * num_rows * whole[0].shape[1] * num_columns,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays),
            transcendentals=0,
        ),
        interpret=interpret,
        name=name,
    )
    return call(*visits, *row_inputs, *(weight.array for weight in weights))
