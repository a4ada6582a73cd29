"""Backward kernel: gradients of all inputs, chunks in reverse with the state's gradient in VMEM.

The forward pass left the state that entered each chunk, the inverse (I + L Diag(beta))^-1 and
u = its product with the error; decays and A are computed again. Stages follow one another as in the
forward kernel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.tpu.decay import LOG2E
from pallas_kernels.kda.tpu.plan import (
    ChunkRuns,
    HeadChunk,
    KernelPlan,
    clear,
    column,
    load,
    read_gate,
    read_head,
    read_masks,
    read_runs,
    row,
)
from pallas_kernels.kda.tpu.scores import CUT, FactorGrads, row_tiles
from pallas_kernels.kda.tpu.words import CHUNK, dot, masked_words, matrix, pack, stack

TILE = 16  # rows of the dense score tiles; see scores.py


def _unnormalized(d: jax.Array, x: jax.Array, factor: jax.Array, scale: float) -> jax.Array:
    """Gradient of the raw rows, given that of x = raw * factor, factor = scale / |raw|."""
    along = jnp.sum(x * d, axis=1, keepdims=True) * scale**-2
    return (d - x * along) * factor


def _gate_backward(
    plan: KernelPlan, ref: dict, head: int, chunk: HeadChunk, dg: jax.Array
) -> jax.Array:
    """Gradient of f; adds those of the gate's rows (rate or scale, and shift) to their output."""
    gate, g = read_gate(plan, ref, head), chunk.g * (1.0 / LOG2E)
    if plan.gate == 'bounded':
        dx = dg * g * (1.0 - g * (1.0 / plan.lower_bound))
        factor = jnp.sum(dx * chunk.f, axis=0, keepdims=True)
    else:
        x = chunk.f * gate.rate + gate.shift
        dx = -dg * gate.scale * jax.nn.sigmoid(x)
        # Of the scale, times the scale.
        factor = jnp.sum(dg * g, axis=0, keepdims=True)
    columns = plan.key(head)
    ref['d_gate'][0, 0:1, columns] += factor
    ref['d_gate'][0, 1:2, columns] += jnp.sum(dx, axis=0, keepdims=True)
    return dx * gate.rate


def _write(
    plan: KernelPlan,
    ref: dict,
    head: int,
    chunk: HeadChunk,
    grads: tuple[jax.Array, jax.Array, jax.Array],
    runs: ChunkRuns | None,
) -> None:
    dq, dk, dg = grads
    # The other gradients of padding are 0 by themselves, since its q, k, v and do are.
    dg = clear(dg, runs)
    if plan.gate != 'given':
        dg = _gate_backward(plan, ref, head, chunk, dg)
    if plan.l2norm:
        dq = _unnormalized(dq, chunk.q, chunk.norm.q, plan.scale)
        dk = _unnormalized(dk, chunk.k, chunk.norm.k, 1.0)
    for name, x in (('dq', dq), ('dk', dk), ('dg', dg)):
        ref[name][0, :, plan.key(head)] = x.astype(ref[name].dtype)


def backward_kernel(plan: KernelPlan, names: list[str], *refs) -> None:
    """Grid (B, H / heads, T / C), the last axis from the end; `names` are those of the refs."""
    ref = dict(zip(names, refs, strict=True))
    step, heads, dtype, form = pl.program_id(2), range(plan.heads), plan.dtype, plan.form

    @pl.when(step == 0)
    def _start():
        ref['state'][...] = ref['d_final'][0]
        if plan.gate != 'given':
            ref['d_gate'][...] = jnp.zeros_like(ref['d_gate'])

    runs, masks = read_runs(plan, ref, read_masks(plan, ref))
    betas = [ref['beta'][0, 0, 0, h : h + 1] for h in heads]
    chunks = [read_head(plan, ref, runs, h) for h in heads]
    factors = [form.factors(c.q, c.k, c.g, dtype, TILE) for c in chunks]
    a = [masked_words(form.only_a(f.own, masks, dtype), masks['causal'], dtype) for f in factors]
    d_outs = [pack(load(ref, 'do', plan.value(h), runs), dtype) for h in heads]
    d_states = [ref['state'][h] for h in heads]
    small_d_states = [d.astype(dtype) for d in d_states]
    columns = [column(beta) for beta in betas]
    k_outs = [pack(f.k_out if runs is None else f.k_out * runs.last_column, dtype) for f in factors]

    # Y = A^T dO + K_out dS', then the error's gradient, which is also v's.
    from_o = [
        dot(matrix(x, dtype), matrix(d, dtype), (0, 0)) for x, d in zip(a, d_outs, strict=True)
    ]
    from_s = [dot(matrix(k, dtype), d) for k, d in zip(k_outs, small_d_states, strict=True)]
    scaled = [
        ((x + y) * beta).astype(dtype) for x, y, beta in zip(from_o, from_s, columns, strict=True)
    ]
    d_errors = [dot(ref['inverse'][0, 0, h], scaled[h], (0, 0)) for h in heads]

    # z holds -dE over dO: what reaches L U and A U, and K_in S and Q_in S.
    zs = [stack([pack(-d, dtype), o]) for d, o in zip(d_errors, d_outs, strict=True)]
    us = [ref['u'][0, :, plan.value(h)] for h in heads]
    if runs is not None:
        # Rows past T are whatever the buffer held.
        us = [clear(u.astype(jnp.float32), runs).astype(dtype) for u in us]
    d_scores = [dot(matrix(z, dtype), u, (1, 1)) for z, u in zip(zs, us, strict=True)]
    d_reads = [dot(matrix(zs[h], dtype), ref['states'][0, 0, h], (1, 1)) for h in heads]
    d_k_outs = [dot(u, d, (1, 1)) for u, d in zip(us, small_d_states, strict=True)]

    for h in heads:
        f, beta = factors[h], betas[h]
        reads, total, d_read, d_k_out = f.reads, f.total, d_reads[h], d_k_outs[h] * columns[h]
        if runs is not None:
            reads = reads & runs.reads
            total = total * runs.goes_on
            d_read = jnp.where(stack([runs.cont, runs.cont]), d_read, 0.0)
            d_k_out = d_k_out * runs.last_column
        state = ref['states'][0, 0, h].astype(jnp.float32)
        d_total = row(jnp.sum(d_states[h] * state, axis=1, keepdims=True))
        if runs is not None:
            d_total = d_total * runs.goes_on
        ref['state'][h] = d_states[h] * column(total) + dot(
            matrix(reads, dtype), matrix(zs[h], dtype), (0, 0)
        )
        scores = d_scores[h] * beta
        low, own_a = (
            masked_words([half[tile] for tile in row_tiles(CUT)], masks[name], dtype)
            for half, name in ((scores[:CHUNK], 'strict'), (scores[CHUNK:], 'causal'))
        )
        grads = FactorGrads(low, own_a, d_read, d_k_out, d_total)
        u = us[h].astype(jnp.float32)
        dq, dk, dg = form.backward(f, grads, masks, dtype)
        dv = d_errors[h]
        ref['dv'][0, :, plan.value(h)] = dv.astype(ref['dv'].dtype)
        # beta scales u, and everything that u's gradient is made of.
        d_beta = jnp.sum(dv * u, axis=1, keepdims=True) / columns[h]
        ref['d_beta'][0, 0, 0, h : h + 1] = row(d_beta)
        _write(plan, ref, h, chunks[h], (dq, dk, dg), runs)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        ref['d_initial'][0] = ref['state'][...]
