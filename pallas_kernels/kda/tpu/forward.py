"""Forward kernel: outputs and final state, chunk after chunk with the state in VMEM.

Every stage is written for all heads of a program before the next stage: the matrix unit answers
after hundreds of cycles, which the other heads fill.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kda.tpu.inverse import inverses
from pallas_kernels.kda.tpu.plan import (
    ChunkRuns,
    HeadChunk,
    KernelPlan,
    column,
    load,
    read_head,
    read_masks,
    read_runs,
)
from pallas_kernels.kda.tpu.words import CHUNK, dot, high_half, masked_words, matrix, pack, stack

TILE = {'bfloat16': 32, 'float32': 16}  # rows of the dense score tiles; see scores.py


class Parts(NamedTuple):
    """Words of an operand and, in the precise plan, of what rounding took from it."""

    words: jax.Array
    rest: jax.Array | None


class _Intra(NamedTuple):
    """What a head's chunk knows without the state.

    negated: words [C, C], -L Diag(beta). reads: words [2 C, K], K_in over Q_in. a: A
    Diag(beta), masked. k_out: float32 [C, K]. total: [1, K] float32.
    """

    negated: jax.Array
    reads: jax.Array
    a: Parts
    k_out: jax.Array
    total: jax.Array


def _intra(
    plan: KernelPlan, chunk: HeadChunk, beta: jax.Array, masks: dict, runs: ChunkRuns | None
) -> _Intra:
    """beta: [1, C]."""
    dtype, form = plan.dtype, plan.form
    factors = form.factors(chunk.q, chunk.k, chunk.g, dtype, TILE[dtype.name])
    low, a = form.scores(factors.own, masks, dtype)
    negated = masked_words([x * -beta for x in low], masks['strict'], dtype)
    a, rest = [x * beta for x in a], None
    if plan.precise:
        upper = [high_half(x) for x in a]
        lower = [x - u for x, u in zip(a, upper, strict=True)]
        a, rest = upper, masked_words(lower, masks['causal'], dtype)
    a = masked_words(a, masks['causal'], dtype)
    reads, total = factors.reads, factors.total
    if runs is not None:
        reads, total = reads & runs.reads, total * runs.goes_on
    return _Intra(negated, reads, Parts(a, rest), factors.k_out, total)


def _written_keys(plan: KernelPlan, k_out: jax.Array, beta: jax.Array) -> Parts:
    """K_out^T Diag(beta), words [K, C]."""
    k_out = k_out.T * beta
    if not plan.precise:
        return Parts(pack(k_out, plan.dtype), None)
    upper = high_half(k_out)
    return Parts(pack(upper, plan.dtype), pack(k_out - upper, plan.dtype))


def _times_u(
    plan: KernelPlan, a: list[Parts], keys: list[Parts], us: list[jax.Array]
) -> list[jax.Array]:
    """[A; K_out^T] Diag(beta) u, float32 [C + K, V] a head."""
    dtype, pairs = plan.dtype, list(zip(a, keys, strict=True))

    def times(x: jax.Array, y: jax.Array, u: jax.Array) -> jax.Array:
        return dot(matrix(stack([x, y]), dtype), u)

    if not plan.precise:
        return [
            times(x.words, y.words, u.astype(dtype)) for (x, y), u in zip(pairs, us, strict=True)
        ]
    upper = [high_half(u) for u in us]
    lower = [(u - h).astype(dtype) for u, h in zip(us, upper, strict=True)]
    upper = [u.astype(dtype) for u in upper]
    sums = [
        times(x.words, y.words, u) + times(x.words, y.words, w)
        for (x, y), u, w in zip(pairs, upper, lower, strict=True)
    ]
    return [s + times(x.rest, y.rest, u) for s, (x, y), u in zip(sums, pairs, upper, strict=True)]


def forward_kernel(plan: KernelPlan, names: list[str], *refs) -> None:
    """Grid (B, H / heads, T / C); `names` are those of the refs: inputs, outputs, scratch."""
    ref = dict(zip(names, refs, strict=True))
    step, heads, dtype = pl.program_id(2), range(plan.heads), plan.dtype

    @pl.when(step == 0)
    def _start():
        initial = ref['initial'][0] if plan.initial else jnp.zeros_like(ref['state'])
        ref['state'][...] = initial

    runs, masks = read_runs(plan, ref, read_masks(plan, ref))
    betas = [ref['beta'][0, 0, 0, h : h + 1] for h in heads]
    intra = [
        _intra(plan, read_head(plan, ref, runs, h), beta, masks, runs)
        for h, beta in zip(heads, betas, strict=True)
    ]
    keys = [
        _written_keys(plan, x.k_out, beta if runs is None else beta * runs.last)
        for x, beta in zip(intra, betas, strict=True)
    ]
    solved = inverses([x.negated for x in intra], masks, dtype)
    states = [ref['state'][h] for h in heads]
    read = [
        dot(matrix(x.reads, dtype), state.astype(dtype))
        for x, state in zip(intra, states, strict=True)
    ]
    errors = [load(ref, 'v', plan.value(h), runs) - read[h][:CHUNK] for h in heads]
    us = [dot(matrix(t, dtype), e.astype(dtype)) for t, e in zip(solved, errors, strict=True)]
    written = _times_u(plan, [x.a for x in intra], keys, us)
    for h in heads:
        # 0 on padding, whose q is 0.
        o = read[h][CHUNK:] + written[h][:CHUNK]
        ref['o'][0, :, plan.value(h)] = o.astype(ref['o'].dtype)
        if plan.residuals:
            ref['states'][0, 0, h] = states[h].astype(dtype)
            ref['inverse'][0, 0, h] = matrix(solved[h], dtype)
            ref['u'][0, :, plan.value(h)] = us[h].astype(dtype)
        ref['state'][h] = states[h] * column(intra[h].total) + written[h][CHUNK:]

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        ref['final'][0] = ref['state'][...]
