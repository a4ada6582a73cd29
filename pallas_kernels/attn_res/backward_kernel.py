"""How gradients of every candidate are computed on the TPU with one read and one write of each.

With r_n = 1 / rms(V_n), s_n = r_n (V_n . query), p = softmax(s), M = sum_n p_n V_n, r = 1 / rms(M):

    h = dy * gain          dM = r (h - M r^2 mean(h * M))     d gain = sum_rows dy * M * r
    dp_n = dM . V_n        ds_n = p_n (dp_n - sum_m p_m dp_m)
    dV_n = p_n dM + ds_n r_n query - (ds_n s_n r_n^2 / D) V_n  d query = sum_rows,n ds_n r_n V_n
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attn_res.blocks import (
    GROUP,
    LANES,
    OUT_RMS_LANE,
    RMS_LANE,
    STATS,
    Plan,
    candidate_specs,
    compiler_params,
    counts,
    gain_spec,
    group_rows,
    repeated,
    row_spec,
    when,
    where_counts,
)
from pallas_kernels.attn_res.forward_kernel import mix

F32 = jnp.float32


def _inside(value: jax.Array, first: jax.Array, plan: Plan) -> jax.Array:
    """value [GROUP, 128], zero in rows past the end of the input, which may hold anything."""
    if not plan.is_ragged:
        return value
    row = first + lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 0)
    return jnp.where(row < plan.rows, value, 0.0)


def _lane(stats: jax.Array, lane: int) -> jax.Array:
    return jnp.broadcast_to(stats[:, lane : lane + 1], (GROUP, LANES))


def _softmax(live_ref, stats_ref, weight_ref, plan: Plan) -> None:
    """Weights of all candidates from their saved scores, on every lane."""

    def body(group, carry):
        rows = group_rows(group)
        stats = stats_ref[rows, :]
        scores = [
            where_counts(live_ref, n, plan, _lane(stats, n), -jnp.inf) for n in range(plan.num + 1)
        ]
        top = functools.reduce(jnp.maximum, scores)
        powers = [jnp.exp(s - top) for s in scores]
        share = 1.0 / functools.reduce(jnp.add, powers)
        for n, power in enumerate(powers):
            weight_ref[n, rows, :] = power * share
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _mixture_gradient(
    mix_ref, dy_ref, gain_ref, stats_ref, d_gain_ref, plan: Plan, first_row
) -> None:
    """mix_ref: M -> dM; adds this tile to d_gain."""

    def body(group, carry):
        rows = group_rows(group)
        scale = _lane(stats_ref[rows, :], OUT_RMS_LANE)
        total = [jnp.zeros((GROUP, LANES), F32)] * 2
        for i, columns in enumerate(plan.columns()):
            mix, dy = mix_ref[rows, columns], dy_ref[rows, columns].astype(F32)
            product = dy * mix
            total[i % 2] += product * gain_ref[:, columns]
            d_gain_ref[:, columns] += _inside(product * scale, first_row + group * GROUP, plan)
        mean = jnp.sum(total[0] + total[1], axis=1, keepdims=True) * (1.0 / plan.size)
        along = scale * scale * scale * mean
        for columns in plan.columns():
            h = dy_ref[rows, columns].astype(F32) * gain_ref[:, columns]
            mix_ref[rows, columns] = scale * h - along * mix_ref[rows, columns]
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _products(x_ref, d_mix_ref, out_ref, plan: Plan) -> None:
    """Lane-wise sums of dM * x over the 128-lane pieces of each row."""

    def body(group, carry):
        rows = group_rows(group)
        total = [jnp.zeros((GROUP, LANES), F32)] * 2
        for i, columns in enumerate(plan.columns()):
            total[i % 2] += x_ref[rows, columns].astype(F32) * d_mix_ref[rows, columns]
        out_ref[rows, :] = total[0] + total[1]
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _score_gradients(live_ref, product_ref, weight_ref, stats_ref, along_ref, plan: Plan) -> None:
    """Products become ds_n r_n, along_ref gets ds_n s_n r_n^2 / D; both on every lane."""
    candidates = plan.num + 1

    def body(group, carry):
        rows = group_rows(group)
        stats = stats_ref[rows, :]
        weights, d_weights = [], []
        for n in range(candidates):
            weights.append(weight_ref[n, rows, :])
            d_weight = jnp.sum(product_ref[n, rows, :], axis=1, keepdims=True)
            d_weight = where_counts(live_ref, n, plan, d_weight, 0.0)
            d_weights.append(jnp.broadcast_to(d_weight, (GROUP, LANES)))
        mean = functools.reduce(jnp.add, (p * d for p, d in zip(weights, d_weights, strict=True)))
        for n in range(candidates):
            scale = _lane(stats, RMS_LANE + n)
            d_score = weights[n] * (d_weights[n] - mean) * scale
            product_ref[n, rows, :] = d_score
            along_ref[n, rows, :] = d_score * _lane(stats, n) * scale * (1.0 / plan.size)
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _candidate_gradient(
    x_ref,
    d_mix_ref,
    query_ref,
    weight_ref,
    d_score_ref,
    along_ref,
    dx_ref,
    d_query_ref,
    plan: Plan,
    first_row: jax.Array,
) -> None:
    def body(group, carry):
        rows = group_rows(group)
        weight, d_score, along = (r[rows, :] for r in (weight_ref, d_score_ref, along_ref))
        for columns in plan.columns():
            x = x_ref[rows, columns].astype(F32)
            dx = weight * d_mix_ref[rows, columns] + d_score * query_ref[:, columns] - along * x
            dx_ref[rows, columns] = dx.astype(dx_ref.dtype)
            d_query_ref[:, columns] += _inside(d_score * x, first_row + group * GROUP, plan)
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _zero(ref) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _kernel(live_ref, *refs, plan: Plan, separate: bool) -> None:
    candidates, refs = refs[: plan.num + 1], refs[plan.num + 1 :]
    query_ref, gain_ref, dy_ref, stats_ref, *refs = refs
    *d_bank_refs, d_prefix_ref, d_query_ref, d_gain_ref = refs[:-4]
    weight_ref, product_ref, along_ref, mix_ref = refs[-4:]
    if plan.num and not separate:
        d_bank_refs = [d_bank_refs[0].at[n] for n in range(plan.num)]
    first_row = (pl.program_id(0) * plan.steps + pl.program_id(1)) * plan.tile
    outputs = [*d_bank_refs, d_prefix_ref]

    @pl.when(pl.program_id(1) == 0)
    def _():
        _zero(d_query_ref)
        _zero(d_gain_ref)

    _softmax(live_ref, stats_ref, weight_ref, plan)
    mix(live_ref, candidates, weight_ref, mix_ref, plan)
    _mixture_gradient(mix_ref, dy_ref, gain_ref, stats_ref, d_gain_ref, plan, first_row)
    for n, x_ref in enumerate(candidates):
        when(
            counts(live_ref, n, plan),
            functools.partial(_products, x_ref, mix_ref, product_ref.at[n], plan),
        )
    _score_gradients(live_ref, product_ref, weight_ref, stats_ref, along_ref, plan)
    for n, (x_ref, dx_ref) in enumerate(zip(candidates, outputs, strict=True)):
        rows = (weight_ref.at[n], product_ref.at[n], along_ref.at[n])
        run = functools.partial(
            _candidate_gradient, x_ref, mix_ref, query_ref, *rows, dx_ref, d_query_ref, plan
        )
        on = counts(live_ref, n, plan)
        when(on, functools.partial(run, first_row))
        when(
            not on if isinstance(on, bool) else jnp.logical_not(on),
            functools.partial(_zero, dx_ref),
        )


def backward(
    live: jax.Array,
    bank: jax.Array,
    prefix: jax.Array,
    query: jax.Array,
    gain: jax.Array,
    dy: jax.Array,
    stats: jax.Array,
    *,
    plan: Plan,
    interpret: bool,
    separate: bool = False,
) -> tuple[jax.Array | list[jax.Array], jax.Array, jax.Array, jax.Array]:
    """d_bank [N, R, W], d_prefix [R, W], d_query [W] and d_gain [W] float32.

    Arguments as in `forward`, dy [R, W] and the statistics [R, 128] that it returned.
    separate: d_bank as a list of N arrays [R, W]; the static simulator has no figure for copies of
    three dimensions.
    """
    rows, width = prefix.shape
    candidates, dtype = plan.num + 1, prefix.dtype
    partial_sums = pl.BlockSpec((None, GROUP, width), lambda core, step, live: (core, 0, 0))
    out_specs = [row_spec(plan, width), partial_sums, partial_sums]
    out_shape = [
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((plan.cores, GROUP, width), F32),
        jax.ShapeDtypeStruct((plan.cores, GROUP, width), F32),
    ]
    if separate:
        out_shape = [out_shape[0]] * plan.num + out_shape
        out_specs = [out_specs[0]] * plan.num + out_specs
    elif plan.num:
        block = (plan.num, plan.tile, width)
        index = lambda core, step, live: (0, core * plan.steps + step, 0)  # noqa: E731
        out_shape.insert(0, jax.ShapeDtypeStruct((plan.num, rows, width), dtype))
        out_specs.insert(0, pl.BlockSpec(block, index))
    moved = ((2 * candidates + 1) * dtype.itemsize * width + 4 * STATS) * rows
    per_row = pltpu.VMEM((candidates, plan.tile, LANES), F32)
    *d_bank, d_prefix, d_query, d_gain = pl.pallas_call(
        functools.partial(_kernel, plan=plan, separate=separate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=plan.grid,
            in_specs=[
                *candidate_specs(plan),
                gain_spec(plan),
                gain_spec(plan),
                row_spec(plan, width),
                row_spec(plan, STATS),
            ],
            out_specs=out_specs,
            scratch_shapes=[per_row, per_row, per_row, pltpu.VMEM((plan.tile, width), F32)],
        ),
        out_shape=out_shape,
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=moved, transcendentals=rows * candidates
        ),
        interpret=interpret,
        name='attn_res_backward',
    )(live, *[bank] * plan.num, prefix, repeated(query), repeated(gain), dy, stats)
    if not separate:
        d_bank = d_bank[0] if d_bank else jnp.zeros((0, rows, width), dtype)
    return d_bank, d_prefix, d_query.sum((0, 1)), d_gain.sum((0, 1))
