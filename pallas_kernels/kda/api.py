"""KDA for callers: one function, three implementations, checked arguments."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.checks import check_floating, check_integer, check_not_empty
from pallas_kernels.common.platform import Implementation, check_implementation, run_form
from pallas_kernels.common.segments import Runs, check_runs, runs_of
from pallas_kernels.kda.chunked import chunked_kda
from pallas_kernels.kda.gate import Gate, GateArrays, check_gate, kda_gate
from pallas_kernels.kda.reference import l2_normalize, recurrent_kda
from pallas_kernels.kda.tpu import tpu_kda, why_unsupported

LOWEST_G = -1e30  # of the plain forms: e^g is 0 long before, and sums of g stay finite


def _check_shapes(q, k, v, g, beta, initial_state, segment_ids) -> None:
    if q.ndim != 4:
        raise ValueError(f'kda: q has shape {q.shape}, wanted [B, T, H, K]')
    batch, length, heads, width = q.shape
    if length == 0:
        raise ValueError(f'kda: q has shape {q.shape}, wanted at least one token (T >= 1)')
    check_not_empty('kda', q=q, v=v)
    check_floating('kda', q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    check_integer('kda', segment_ids=segment_ids)
    wanted = {
        'k': (k, (batch, length, heads, width)),
        'g': (g, (batch, length, heads, width)),
        'beta': (beta, (batch, length, heads)),
        'v': (v, (batch, length, heads, v.shape[-1])),
    }
    if initial_state is not None:
        wanted['initial_state'] = (initial_state, (batch, heads, width, v.shape[-1]))
    if segment_ids is not None:
        wanted['segment_ids'] = (segment_ids, (batch, length))
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f'kda: {name} has shape {array.shape}, wanted {shape} for q {q.shape}')


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    gate: Gate | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    qk_l2norm: bool = False,
    g_lower_bound: float | None = None,
    precision: Literal['default', 'precise'] = 'default',
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention outputs and final state.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T;   o_t = S_t^T q_t

    Args:
      q, k: [B, T, H, K], L2-normalised and q scaled by K**-0.5; raw with `qk_l2norm=True`, which
        does both.
      v: [B, T, H, V].
      g: [B, T, H, K], log decay, at most 0; with `gate`, the raw projection f.
      beta: [B, T, H], in [0, 1].
      gate: turns f into g (see `kda_gate`).
      initial_state: [B, H, K, V] float32, or None for zeros; belongs to the first segment.
      segment_ids: [B, T] int32, runs of equal ids, 0 = padding. Padded rows give o = 0, leave the
        state unchanged and get zero gradients. The final state is that of the last real segment.
      g_lower_bound: a promise that a ready-made g is nowhere below it; from -5 on, the TPU kernel
        then scores whole tiles of tokens at once. A gate brings its own bound.
      precision: 'default' follows the inputs: float32 ones are computed in float32, bfloat16 ones
        are matmul operands as they are. 'precise' rounds less: the TPU kernel keeps the operands
        that meet U in two bfloat16 parts, the other forms compute in float32.
      implementation: 'reference' (token recurrence), 'xla' (chunked), 'pallas' (TPU), or None, the
        best for the platform lowered for.

    Returns:
      o: [B, T, H, V] in v's dtype; final_state: [B, H, K, V] float32.

    Raises:
      ValueError: shapes or names disagree, or known values of g break the promise.
      NotImplementedError: the named implementation does not support this platform or shape.

    Source: Kimi Linear (arXiv 2510.26692), sections on KDA and its chunk form.
    """
    _check_shapes(q, k, v, g, beta, initial_state, segment_ids)
    if precision not in ('default', 'precise'):
        raise ValueError(f"kda: precision is {precision!r}, wanted 'default' or 'precise'")
    check_implementation('kda', implementation)
    _check_bound(gate, g, segment_ids, g_lower_bound)
    check_runs('kda', segment_ids)
    if gate is not None:
        check_gate('kda', g, *gate)
    runs = None if segment_ids is None else runs_of(segment_ids)
    gate_arrays = None if gate is None else GateArrays(gate.A_log, gate.dt_bias)
    arrays = (q, k, v, g, beta, gate_arrays, initial_state, runs)
    options = {
        'lower_bound': g_lower_bound if gate is None else gate.lower_bound,
        'qk_l2norm': qk_l2norm,
        'precise': precision == 'precise',
    }
    if implementation == 'reference':
        return _plain(*arrays, chunked=False, **options)
    reason = why_unsupported(q, v)
    if reason is not None:
        if implementation == 'pallas':
            raise NotImplementedError(f"kda: implementation 'pallas': {reason}; use 'xla' or None")
        implementation = 'xla'

    def on_tpu(interpret, *arrays):
        return tpu_kda(*arrays, interpret=interpret, **options)

    xla = functools.partial(_plain, chunked=True, **options)
    if implementation == 'pallas':
        # Chosen inside the custom gradient, so that JAX does not differentiate the choice.
        return on_tpu(None, *arrays)
    return run_form('kda', implementation, on_tpu, xla, *arrays)


def _check_bound(gate, g, segment_ids, g_lower_bound) -> None:
    """What can be told of a promise about g, where values are known."""
    if g_lower_bound is None:
        return
    if gate is not None:
        raise ValueError('kda: g_lower_bound is for a ready-made g; the gate has its own bound')
    if not g_lower_bound < 0:
        raise ValueError(f'kda: g_lower_bound is {g_lower_bound}, wanted a negative number or None')
    known = not isinstance(g, jax.core.Tracer) and not isinstance(segment_ids, jax.core.Tracer)
    if not known:
        return
    real = True if segment_ids is None else (jnp.asarray(segment_ids) > 0)[:, :, None, None]
    lowest = float(jnp.min(g, where=real, initial=0.0))
    if not lowest >= g_lower_bound:
        raise ValueError(
            f'kda: g goes down to {lowest}, below g_lower_bound {g_lower_bound}; '
            'pass None for a gate without a bound'
        )


def _plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    gate: GateArrays | None,
    initial_state: jax.Array | None,
    runs: Runs | None,
    *,
    lower_bound: float | None,
    chunked: bool,
    qk_l2norm: bool,
    precise: bool,
) -> tuple[jax.Array, jax.Array]:
    """KDA in plain JAX, by chunks or token by token."""
    if runs is not None:
        # Before gate and norms, whose gradients whatever padding holds would reach.
        real = runs.real[:, :, None]
        q, k, v, g = (jnp.where(real[..., None], x, 0) for x in (q, k, v, g))
        beta = jnp.where(real, beta, 0)
    if gate is not None:
        g = kda_gate(g, *gate, lower_bound)
    g = jnp.maximum(g, LOWEST_G)
    if qk_l2norm:
        q = l2_normalize(q) * q.shape[-1] ** -0.5
        k = l2_normalize(k)
    wide = jnp.promote_types(v.dtype, jnp.float32)
    if initial_state is None:
        shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        initial_state = jnp.zeros(shape, wide)
    initial_state = initial_state.astype(wide)
    if chunked:
        exact = precise or v.dtype != jnp.bfloat16
        chosen = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
        o, final = chunked_kda(q, k, v, g, beta, initial_state, runs, chosen)
    else:
        o, final = recurrent_kda(q, k, v, g, beta, initial_state, runs)
    return o.astype(v.dtype), final
