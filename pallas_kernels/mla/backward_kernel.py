"""How gradients of training attention are computed on the TPU: each score is made once.

With P = exp(scale S - lse), S = q . k, delta = sum_V do * o, a block of queries and keys adds

    dv += P^T do      dP = do v^T      dS = scale P (dP - delta)      dk += dS^T q      dq += dS k

One key block stays while the queries pass by. dq of all queries of a call waits in VMEM, so a long
row is cut into several calls, each adding to what the others found for dk and dv.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.blocks import LOG2_E, LOWEST, VMEM_LIMIT, Plan, own_lanes, parts, seen

F32 = jnp.float32
RESIDENT = 8192  # queries whose dq waits in VMEM


def _kernel(last_query, *refs, plan: Plan, groups: int, first: int, num: int, adds: bool):
    q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref, *refs = refs
    if plan.packed:
        query_run_ref, key_run_ref, *refs = refs
    if adds:
        dk_before_ref, dv_before_ref, *refs = refs
    dq_ref, dk_ref, dv_ref, own_ref, turned_ref, dq_sum_ref, dk_sum_ref, dv_sum_ref = refs
    j, local = pl.program_id(1), pl.program_id(2)
    i = local + first
    width = plan.key_width

    @pl.when(local == 0)
    def _():
        dk_sum_ref[...] = jnp.zeros(dk_sum_ref.shape, F32)
        dv_sum_ref[...] = jnp.zeros(dv_sum_ref.shape, F32)
        turned_ref[...] = jnp.transpose(k_ref[0].astype(F32)).astype(turned_ref.dtype)
        for h, window in enumerate(plan.windows):
            own_ref[h] = own_lanes(k_ref[0, :, window.lanes], window, width)

    @pl.when(j == 0)
    def _():
        dq_sum_ref[local] = jnp.zeros(dq_sum_ref.shape[1:], F32)

    def block(on_diagonal: bool):
        runs = (query_run_ref[0], key_run_ref[0]) if plan.packed else (None, None)
        mask = seen(plan, on_diagonal, *runs)
        for at, keys in parts(plan, on_diagonal):
            for h, window in enumerate(plan.windows):
                q, do = q_ref[0, at, window.lanes], do_ref[0, at, plan.values(h)]
                s = plan.dot(own_ref[h, :keys], q, (1, 1))
                dp = plan.dot(v_ref[0, :keys, plan.values(h)], do, (1, 1))
                if mask is not None:
                    s = jnp.where(mask[:keys, at], s, LOWEST)
                lse, delta = lse_ref[0, h : h + 1, at], delta_ref[0, h : h + 1, at]
                p = jnp.exp2(s * (plan.scale * LOG2_E) - lse * LOG2_E)
                ds = (p * (dp - delta)).astype(q.dtype)
                rows = slice(h * width, (h + 1) * width)
                dv_sum_ref[h, :keys] += plan.dot(p.astype(do.dtype), do, (1, 0))
                dk_sum_ref[h, :keys] += plan.dot(ds, q, (1, 0))
                dq_sum_ref[local, rows, at] += plan.dot(turned_ref[rows, :keys], ds, (1, 0))

    live = True if not plan.skips else i <= last_query[pl.program_id(0) // groups, j]
    last = i if plan.causal else plan.num_blocks - 1
    pl.when((j < last) & live)(functools.partial(block, False))

    @pl.when(j == last)
    def _():
        block(plan.causal)
        dq_ref[0] = jnp.transpose(dq_sum_ref[local] * plan.scale).astype(dq_ref.dtype)

    @pl.when(local == num - 1)
    def _():
        dk_ref[0] = dk_before_ref[0] if adds else jnp.zeros(dk_ref.shape[1:], dk_ref.dtype)
        for h, window in enumerate(plan.windows):
            own = own_lanes(dk_sum_ref[h] * plan.scale, window, width)
            dk = dk_ref[0, :, window.lanes].astype(F32) + own
            dk_ref[0, :, window.lanes] = dk.astype(dk_ref.dtype)
            lanes = plan.values(h)
            dv = dv_sum_ref[h] + dv_before_ref[0, :, lanes] if adds else dv_sum_ref[h]
            dv_ref[0, :, lanes] = dv.astype(dv_ref.dtype)


def _call(plan: Plan, interpret: bool, first: int, num: int, arrays, runs, before, dtype):
    """Gradients from query blocks first to first + num: dq of those, dk and dv of all keys."""
    q, do, lse, delta, k, v = arrays
    *runs, last_query = runs or (jnp.zeros((1, 1), jnp.int32),)
    keys, values, size = plan.heads * plan.key_width, plan.heads * plan.value_width, plan.block
    groups, batch = q.shape[2] // keys, q.shape[0]

    def query_block(program, j, local, last_query):
        # A step that is left out keeps the block of the next or last step that is not.
        i = jnp.maximum(local + first, j) if plan.causal else local + first
        if plan.skips:
            i = jnp.clip(last_query[program // groups, j], first, i)
        return i

    def query(program, *at):
        return program // groups, query_block(program, *at), program % groups

    def query_row(program, *at):
        return program // groups, 0, query_block(program, *at)

    def stats(program, *at):
        return program, 0, query_block(program, *at)

    def key(program, j, *_):
        return program // groups, j, program % groups

    def key_row(program, j, *_):
        return program // groups, 0, j

    def own_query(program, j, local, _):
        # Of the query block whose last key block this is.
        if plan.causal:
            i = jnp.maximum(j - first, 0)
        else:
            i = jnp.where(j == plan.num_blocks - 1, local, 0)
        return program // groups, i, program % groups

    dk_spec, dv_spec = pl.BlockSpec((1, size, keys), key), pl.BlockSpec((1, size, values), key)
    row = (1, 1, size)
    in_specs = [
        pl.BlockSpec((1, size, keys), query),
        pl.BlockSpec((1, size, values), query),
        *[pl.BlockSpec((1, plan.heads, size), stats)] * 2,
        dk_spec,
        dv_spec,
        *([pl.BlockSpec(row, query_row), pl.BlockSpec(row, key_row)] if plan.packed else []),
        *([dk_spec, dv_spec] if before else []),
    ]
    window = plan.windows[0].stop
    num_keys = first + num if plan.causal else plan.num_blocks
    pairs = batch * groups * plan.heads * num * size**2
    pairs *= first + (num + 1) / 2 if plan.causal else num_keys
    return pl.pallas_call(
        functools.partial(
            _kernel, plan=plan, groups=groups, first=first, num=num, adds=bool(before)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch * groups, num_keys, num),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((1, size, keys), own_query), dk_spec, dv_spec],
            scratch_shapes=[
                pltpu.VMEM((plan.heads, size, window), plan.dtype),
                pltpu.VMEM((keys, size), plan.dtype),
                pltpu.VMEM((num, keys, size), F32),
                pltpu.VMEM((plan.heads, size, window), F32),
                pltpu.VMEM((plan.heads, size, plan.value_width), F32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, num * size, q.shape[2]), plan.out_dtype),
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
        ],
        input_output_aliases={len(in_specs) - 1: 1, len(in_specs): 2} if before else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary', 'arbitrary'),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(2 * pairs * (3 * plan.key_width + 2 * plan.value_width)),
            bytes_accessed=3 * (q.size + v.size) * q.dtype.itemsize,
            transcendentals=int(pairs),
        ),
        interpret=interpret,
        name='mla_backward',
    )(last_query, *arrays, *runs, *before)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    runs: tuple[jax.Array, ...],
    *,
    plan: Plan,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk [B, T, H * key_width] and dv [B, T, H * value_width] in the plan's out_dtype.

    Args:
      do: as v. lse, delta: [B * H / heads, heads, T] float32.
      runs: () or query runs and key runs, [B, 1, T] int32 each, and the last query block
        [B, num_blocks] int32 of each key block.
    """
    most = max(RESIDENT // plan.block, 1)
    starts = range(0, plan.num_blocks, most)
    dtype = plan.out_dtype if len(starts) == 1 else F32
    arrays, before, parts = (q, do, lse, delta, k, v), (), []
    # The last queries come first: they alone see every key, so they start each sum.
    for first in reversed(starts):
        num = min(most, plan.num_blocks - first)
        dq, *before = _call(plan, interpret, first, num, arrays, runs, before, dtype)
        parts.insert(0, dq)
    dq = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    return dq, *(x.astype(plan.out_dtype) for x in before)
