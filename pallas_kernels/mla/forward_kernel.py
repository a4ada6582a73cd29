"""How training attention is computed on the TPU: an online softmax over blocks of keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla.blocks import LOG2_E, LOWEST, VMEM_LIMIT, Plan, own_lanes, parts, seen

F32 = jnp.float32


def _folded(plan: Plan, group: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Query block i and key block j of a step; j <= i where causal.

    Row p of the triangle and row n - 1 - p, one after the other, are as long as any other such
    pair, so no step lies above the diagonal.
    """
    if not plan.causal:
        return group, step
    first = group + 1 - plan.num_blocks % 2  # steps of the shorter row
    in_second = step >= first
    i = jnp.where(in_second, plan.num_blocks - 1 - group, first - 1)
    return i, jnp.where(in_second, step - first, step)


def _grid(plan: Plan) -> tuple[int, int]:
    if not plan.causal:
        return plan.num_blocks, plan.num_blocks
    return (plan.num_blocks + 1) // 2, plan.num_blocks + 1 - plan.num_blocks % 2


def _kernel(first_key, q_ref, k_ref, v_ref, *refs, plan: Plan, groups: int):
    if plan.packed:
        query_run_ref, key_run_ref, *refs = refs
    o_ref, lse_ref, top_ref, own_ref, m_ref, l_ref, acc_ref = refs
    i, j = _folded(plan, pl.program_id(1), pl.program_id(2))
    exponent = plan.scale * LOG2_E

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, LOWEST, F32)
        l_ref[...] = jnp.zeros(l_ref.shape, F32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, F32)
        for h, window in enumerate(plan.windows):
            own_ref[h] = own_lanes(q_ref[0, :, window.lanes], window, plan.key_width)

    def block(on_diagonal: bool):
        runs = (query_run_ref[0], key_run_ref[0]) if plan.packed else (None, None)
        mask = seen(plan, on_diagonal, *runs)
        # All scores come first: each softmax then has products beside it to overlap with.
        pieces = []
        for part in parts(plan, on_diagonal):
            for h, window in enumerate(plan.windows):
                key = k_ref[0, : part.keys, window.lanes]
                pieces.append((part, h, plan.dot(key, own_ref[h, part.queries], (1, 1))))
        for (at, keys), h, s in pieces:
            if mask is not None:
                s = jnp.where(mask[:keys, at], s, LOWEST)
            m_old = m_ref[h, :, at]
            m = jnp.maximum(m_old, jnp.max(s, axis=0, keepdims=True))
            p = jnp.exp2((s - m) * exponent)
            shrink = jnp.exp2((m_old - m) * exponent)
            read = plan.dot(v_ref[0, :keys, plan.values(h)], p.astype(v_ref.dtype), (0, 0))
            m_ref[h, :, at] = m
            l_ref[h, :, at] = l_ref[h, :, at] * shrink + jnp.sum(p, axis=0, keepdims=True)
            acc_ref[h, :, at] = acc_ref[h, :, at] * shrink + read

    live = True if not plan.skips else j >= first_key[pl.program_id(0) // groups, i]
    last = i if plan.causal else plan.num_blocks - 1
    pl.when((j < last) & live)(functools.partial(block, False))

    @pl.when(j == last)
    def _():
        block(plan.causal)
        for h in range(plan.heads):
            m, total = m_ref[h], l_ref[h]
            o, logit = acc_ref[h] / total, m * plan.scale
            lse = logit + jnp.log(total)
            if plan.packed:
                real = query_run_ref[0] >= 0
                o, logit = jnp.where(real, o, 0.0), jnp.where(real, logit, -jnp.inf)
                lse = jnp.where(real, lse, -LOWEST)
            o_ref[0, :, plan.values(h)] = jnp.transpose(o).astype(o_ref.dtype)
            lse_ref[0, h : h + 1, :] = lse
            top_ref[0, h : h + 1, :] = logit


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: tuple[jax.Array, ...],
    *,
    plan: Plan,
    interpret: bool,
) -> list[jax.Array]:
    """o [B, T, H * value_width], lse and top [B * H / heads, heads, T] float32.

    Args:
      q, k: [B, T, H * key_width]; v: [B, T, H * value_width]; T a multiple of the plan's block.
      runs: () or query runs and key runs, [B, 1, T] int32 each, and the first key block
        [B, num_blocks] int32 of each query block.
    """
    batch, length, _ = q.shape
    groups = q.shape[2] // (plan.heads * plan.key_width)
    keys, values, size = plan.heads * plan.key_width, plan.heads * plan.value_width, plan.block
    *runs, first_key = runs or (jnp.zeros((1, 1), jnp.int32),)

    def query(program, group, step, first_key):
        i, _ = _folded(plan, group, step)
        return program // groups, i, program % groups

    def key(program, group, step, first_key):
        i, j = _folded(plan, group, step)
        if plan.skips:
            j = jnp.maximum(j, first_key[program // groups, i])
        return program // groups, j, program % groups

    def in_row(index_map):
        def run(*at):
            b, block, _ = index_map(*at)
            return b, 0, block

        return pl.BlockSpec((1, 1, size), run)

    def stats(program, group, step, first_key):
        return program, 0, _folded(plan, group, step)[0]

    stat = jax.ShapeDtypeStruct((batch * groups, plan.heads, length), F32)
    pairs = batch * groups * plan.heads * length * length
    if plan.causal:
        pairs = pairs * (length + size) // (2 * length)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, groups=groups),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch * groups, *_grid(plan)),
            in_specs=[
                pl.BlockSpec((1, size, keys), query),
                pl.BlockSpec((1, size, keys), key),
                pl.BlockSpec((1, size, values), key),
                *([in_row(query), in_row(key)] if plan.packed else []),
            ],
            out_specs=[
                pl.BlockSpec((1, size, values), query),
                pl.BlockSpec((1, plan.heads, size), stats),
                pl.BlockSpec((1, plan.heads, size), stats),
            ],
            scratch_shapes=[
                pltpu.VMEM((plan.heads, size, plan.windows[0].stop), plan.dtype),
                pltpu.VMEM((plan.heads, 1, size), F32),
                pltpu.VMEM((plan.heads, 1, size), F32),
                pltpu.VMEM((plan.heads, plan.value_width, size), F32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(v.shape, plan.out_dtype), stat, stat],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (plan.key_width + plan.value_width),
            bytes_accessed=2 * (q.size + v.size) * q.dtype.itemsize,
            transcendentals=pairs,
        ),
        interpret=interpret,
        name='mla_forward',
    )(first_key, q, k, v, *runs)
