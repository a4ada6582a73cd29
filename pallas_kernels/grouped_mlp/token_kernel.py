"""How few tokens meet the experts they chose: one expert a step, all tokens at once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.dense_kernels import column_tile
from pallas_kernels.grouped_mlp.experts import Experts, is_packed
from pallas_kernels.grouped_mlp.mxfp4_kernels import times_packed
from pallas_kernels.grouped_mlp.mxfp4_tiles import CHUNK
from pallas_kernels.grouped_mlp.row_kernel import NT, VMEM_LIMIT, product


def _column(row: jax.Array) -> jax.Array:
    """[1, T] -> [T, 1]."""
    size = row.shape[1]
    same = lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )
    return jnp.sum(jnp.where(same, row, 0.0), axis=1, keepdims=True)


def _kernel(ids, count, x, chosen, *refs, activation: GatedActivation, interpret: bool):
    del ids  # the index maps'
    *weights, out = refs
    index = pl.program_id(1)
    first = pl.program_id(0)

    @pl.when(index == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(index < count[0])
    def _():
        rows = x[...]
        if len(weights) == 3:
            a, b = (product(rows, w[...], NT) for w in weights[:2])
            hidden = activation(a, b).astype(rows.dtype)
            y = product(hidden, weights[2][...], NT)
        else:
            a = times_packed(rows, *weights[:2], interpret)
            b = times_packed(rows, *weights[2:4], interpret)
            hidden = activation(a, b).astype(rows.dtype)
            y = times_packed(hidden, *weights[4:], interpret, first * (a.shape[1] // CHUNK))
        weight = _column(chosen[...])
        # One broken expert must not reach the tokens that did not choose it.
        out[...] += jnp.where(weight != 0, weight * y, 0)


def run(
    x: jax.Array,
    experts: Experts,
    ids: jax.Array,
    count: jax.Array,
    weights: jax.Array,
    *,
    activation: GatedActivation,
    interpret: bool,
    columns: int | None = None,
    fixed: bool = False,
) -> jax.Array:
    """[T, L] in x's dtype; ids, count and weights as in `token.Needed`.

    fixed: experts 0 to A - 1, known while tracing: a static simulator cannot follow `ids`.
    """
    packed = is_packed(experts.w1)
    num_tokens, width = x.shape
    shape = {'T': num_tokens, 'E': experts.num_experts, 'L': width, 'F': experts.inner}
    pass_name = 'decode_mxfp4' if packed else 'decode'
    default = {'inner': 1536 if packed else 512 if x.dtype == jnp.bfloat16 else 256}
    wanted = columns or tiles_for('grouped_mlp', pass_name, shape, str(x.dtype), default)['inner']
    inner = column_tile(experts.inner, wanted)
    if experts.inner % inner:
        inner = experts.inner if packed else 128 if experts.inner % 128 == 0 else experts.inner

    def expert(step, scalars):
        return step if fixed else scalars[0][step]

    def block(array: jax.Array, axis: int | None, packing: int = 1) -> tuple[Any, pl.BlockSpec]:
        own = [axis == a for a in (1, 2)]
        sizes = [
            inner // packing if mine else size
            for mine, size in zip(own, array.shape[1:], strict=True)
        ]

        def index(f, a, *scalars):
            return expert(a, scalars), *(f if mine else 0 for mine in own)

        return array, pl.BlockSpec((None, *sizes), index)

    w1, w3, w2 = experts
    if packed:
        inputs = [block(part, 2) for part in (*w1, *w3)]
        inputs += [block(w2.words, 1, 8), block(w2.scales, None)]
    else:
        inputs = [block(w1, 1), block(w3, 1), block(w2, 2)]
    parts = experts.inner // inner
    partial = pl.pallas_call(
        functools.partial(_kernel, activation=activation, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((parts, num_tokens, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(parts, ids.shape[0]),
            in_specs=[
                pl.BlockSpec((num_tokens, width), lambda f, a, *s: (0, 0)),
                pl.BlockSpec((None, 1, num_tokens), lambda f, a, *s: (a, 0, 0)),
                *(spec for _, spec in inputs),
            ],
            out_specs=pl.BlockSpec((None, num_tokens, width), lambda f, a, *s: (f, 0, 0)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * num_tokens * ids.shape[0] * experts.inner * width,
            bytes_accessed=sum(array.size * array.dtype.itemsize for array, _ in inputs)
            * ids.shape[0]
            // inputs[0][0].shape[0],
            transcendentals=0,
        ),
        interpret=interpret,
        name='token_mlp' + ('_mxfp4' if packed else ''),
    )(ids, count, x, weights, *(array for array, _ in inputs))
    return jnp.sum(partial, axis=0).astype(x.dtype)
