"""What a group's rows add up to: the outer products that are the gradient of its weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp.row_kernel import (
    TN,
    VMEM_LIMIT,
    over_parts,
    product,
    rows_inside,
)
from pallas_kernels.grouped_mlp.visits import Table, Visits


def _kernel(*refs, table: Table):
    scalars, (left, right, out, total) = refs[:4], refs[4:]
    index = pl.program_id(2)
    visit = table.at(index, scalars)
    is_first = (index == 0) | (table.group(jnp.maximum(index - 1, 0), scalars) != visit.group)
    following = table.group(jnp.minimum(index + 1, table.count - 1), scalars)
    is_last = (index == table.count - 1) | (following != visit.group)

    @pl.when(is_first)
    def _():
        total[...] = jnp.zeros_like(total)

    def whole():
        total[...] += product(left[...], right[...], TN)

    def part(where, first):
        inside = rows_inside(visit, first, where.size)

        def own(ref):
            # Other rows may be another group's, or lie past the array and hold anything.
            return jnp.where(inside, ref[where, :].astype(jnp.float32), 0.0).astype(ref.dtype)

        total[...] += product(own(left), own(right), TN)

    over_parts(visit, left.shape[0], whole, part)

    @pl.when(is_last)
    def _():
        out[...] = total[...].astype(out.dtype)


def weight_gradient(
    left: jax.Array,
    right: jax.Array,
    visits: Visits,
    *,
    num_groups: int,
    dtype: jnp.dtype,
    rows: int,
    left_columns: int,
    right_columns: int,
    interpret: bool,
    table: Table,
    name: str = 'weight_gradient',
) -> jax.Array:
    """sum_m left_m right_m^T over the rows of each group.

    Args:
      left, right: [M, A] and [M, B]. visits: `visits_by_group` for tiles of `rows`.
      left_columns, right_columns: of A and B that one step holds.

    Returns:
      [E, A, B] in `dtype`, summed in float32; 0 for groups without rows.
    """

    def row_block(columns, axis):
        return pl.BlockSpec((rows, columns), lambda *i: (table.tile(i[2], i[3:]), i[axis]))

    return pl.pallas_call(
        functools.partial(_kernel, table=table),
        out_shape=jax.ShapeDtypeStruct((num_groups, left.shape[1], right.shape[1]), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(
                pl.cdiv(left.shape[1], left_columns),
                pl.cdiv(right.shape[1], right_columns),
                table.count,
            ),
            in_specs=[row_block(left_columns, 0), row_block(right_columns, 1)],
            out_specs=pl.BlockSpec(
                (None, left_columns, right_columns),
                lambda a, b, v, *s: (table.group(v, s), a, b),
            ),
            scratch_shapes=[pltpu.VMEM((left_columns, right_columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * left.size * right.shape[1],
            bytes_accessed=left.size * left.dtype.itemsize
            + right.size * right.dtype.itemsize
            + num_groups * left.shape[1] * right.shape[1] * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name=name,
    )(*visits, left, right)
