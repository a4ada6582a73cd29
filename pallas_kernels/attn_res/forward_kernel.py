"""How the mixture and its norm are computed on the TPU with one read of each candidate."""

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

F32 = jnp.float32


def _partial_sums(x_ref, query_ref, square_ref, dot_ref, plan: Plan) -> None:
    """Lane-wise sums of x^2 and x * query over the 128-lane pieces of each row of the tile."""

    def body(group, carry):
        rows = group_rows(group)
        square, dot = [jnp.zeros((GROUP, LANES), F32)] * 2, [jnp.zeros((GROUP, LANES), F32)] * 2
        for i, columns in enumerate(plan.columns()):
            x = x_ref[rows, columns].astype(F32)
            square[i % 2] += x * x
            dot[i % 2] += x * query_ref[:, columns]
        square_ref[rows, :] = square[0] + square[1]
        dot_ref[rows, :] = dot[0] + dot[1]
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _weights(live_ref, square_ref, dot_ref, stats_ref, plan: Plan) -> None:
    """Softmax over the candidates; weights replace the sums of x * query, on every lane."""
    candidates = plan.num + 1

    def body(group, carry):
        rows = group_rows(group)
        shape = (GROUP, LANES)
        scores, rms = [], []
        for n in range(candidates):
            square = jnp.sum(square_ref[n, rows, :], axis=1, keepdims=True)
            scale = lax.rsqrt(square * (1.0 / plan.size) + plan.eps)
            score = jnp.sum(dot_ref[n, rows, :], axis=1, keepdims=True) * scale
            score = where_counts(live_ref, n, plan, score, -jnp.inf)
            scores.append(jnp.broadcast_to(score, shape))
            rms.append(jnp.broadcast_to(scale, shape))
        top = functools.reduce(jnp.maximum, scores)
        powers = [jnp.exp(s - top) for s in scores]
        share = 1.0 / functools.reduce(jnp.add, powers)
        for n in range(candidates):
            dot_ref[n, rows, :] = powers[n] * share
        if stats_ref is not None:
            lane = lax.broadcasted_iota(jnp.int32, shape, 1)
            stats = jnp.zeros(shape, F32)
            for n in range(candidates):
                stats = jnp.where(lane == n, scores[n], stats)
                stats = jnp.where(lane == RMS_LANE + n, rms[n], stats)
            stats_ref[rows, :] = stats
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def mix(live_ref, candidates, weight_ref, mix_ref, plan: Plan) -> None:
    """mix_ref = sum_n weight_n x_n; rows of weight_ref hold one weight each, on every lane."""

    def add(n: int, is_first: bool) -> None:
        def body(group, carry):
            rows = group_rows(group)
            weight = weight_ref[n, rows, :]
            for columns in plan.columns():
                part = weight * candidates[n][rows, columns].astype(F32)
                if is_first:
                    part = where_counts(live_ref, n, plan, part, 0.0)
                else:
                    part = mix_ref[rows, columns] + part
                mix_ref[rows, columns] = part
            return carry

        lax.fori_loop(0, plan.groups, body, 0)

    # Where it is not known what counts, the running sum is the first to be added, or zeros.
    add(plan.num, True)
    for n in range(plan.num):
        when(counts(live_ref, n, plan), functools.partial(add, n, False))


def _normalise(mix_ref, gain_ref, y_ref, stats_ref, plan: Plan) -> None:
    def body(group, carry):
        rows = group_rows(group)
        square = [jnp.zeros((GROUP, LANES), F32)] * 2
        for i, columns in enumerate(plan.columns()):
            mix = mix_ref[rows, columns]
            square[i % 2] += mix * mix
        total = jnp.sum(square[0] + square[1], axis=1, keepdims=True)
        scale = lax.rsqrt(total * (1.0 / plan.size) + plan.eps)
        scale = jnp.broadcast_to(scale, (GROUP, LANES))
        for columns in plan.columns():
            y = mix_ref[rows, columns] * scale * gain_ref[:, columns]
            y_ref[rows, columns] = y.astype(y_ref.dtype)
        if stats_ref is not None:
            lane = lax.broadcasted_iota(jnp.int32, (GROUP, LANES), 1)
            stats_ref[rows, :] = jnp.where(lane == OUT_RMS_LANE, scale, stats_ref[rows, :])
        return carry

    lax.fori_loop(0, plan.groups, body, 0)


def _kernel(live_ref, *refs, plan: Plan, with_stats: bool) -> None:
    candidates = refs[: plan.num + 1]
    query_ref, gain_ref, y_ref, *rest = refs[plan.num + 1 :]
    stats_ref = rest.pop(0) if with_stats else None
    square_ref, dot_ref, mix_ref = rest
    for n, x_ref in enumerate(candidates):
        when(
            counts(live_ref, n, plan),
            functools.partial(
                _partial_sums, x_ref, query_ref, square_ref.at[n], dot_ref.at[n], plan
            ),
        )
    _weights(live_ref, square_ref, dot_ref, stats_ref, plan)
    mix(live_ref, candidates, dot_ref, mix_ref, plan)
    _normalise(mix_ref, gain_ref, y_ref, stats_ref, plan)


def forward(
    live: jax.Array,
    bank: jax.Array,
    prefix: jax.Array,
    query: jax.Array,
    gain: jax.Array,
    *,
    plan: Plan,
    with_stats: bool,
    interpret: bool,
) -> list[jax.Array]:
    """y [R, W] and, if asked, row statistics [R, 128] float32.

    Args:
      live: [2] int32, how many snapshots count and whether the running sum does.
      bank: [N, R, W]; prefix: [R, W], W the plan's width.
      query, gain: [W] float32, norm * proj and the norm's weight.
    """
    rows, width = prefix.shape
    out_shape = [jax.ShapeDtypeStruct((rows, width), prefix.dtype)]
    out_specs = [row_spec(plan, width)]
    if with_stats:
        out_shape.append(jax.ShapeDtypeStruct((rows, STATS), F32))
        out_specs.append(row_spec(plan, STATS))
    candidates = plan.num + 1
    moved = ((candidates + 1) * prefix.dtype.itemsize * width + with_stats * 4 * STATS) * rows
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, with_stats=with_stats),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=plan.grid,
            in_specs=[*candidate_specs(plan), gain_spec(plan), gain_spec(plan)],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((candidates, plan.tile, LANES), F32),
                pltpu.VMEM((candidates, plan.tile, LANES), F32),
                pltpu.VMEM((plan.tile, width), F32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=moved, transcendentals=rows * candidates
        ),
        interpret=interpret,
        name='attn_res_forward',
    )(live, *[bank] * plan.num, prefix, repeated(query), repeated(gain))
