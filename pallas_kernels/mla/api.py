"""What attention computes in training: softmax over earlier tokens of a document."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.platform import Implementation, best_of, kernel_call
from pallas_kernels.common.segments import Runs, check_runs, runs_of
from pallas_kernels.mla.on_tpu import attention_on_tpu, gradients_on_tpu, unsupported
from pallas_kernels.mla.reference import attention_reference
from pallas_kernels.mla.xla import attention_xla, attention_xla_gradients


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
    with_max_logit: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """o_t = sum_s softmax_s(q_t . k_s / sqrt(qk)) v_s over s <= t in t's document.

    Softmax and its statistics in float32, probabilities in v's dtype.

    Args:
      q, k: [B, T, H, qk]. v: [B, T, H, V].
      segment_ids: [B, T] int32, runs of equal ids, 0 = padding, which may hold anything finite.
      implementation: 'reference' | 'xla' | 'pallas' | None (best for the platform lowered for).
      with_max_logit: also return the largest logit, which QK-Clip compares with its threshold.

    Returns:
      o: [B, T, H, V] in v's dtype, 0 on padding.
      max_logit, with `with_max_logit`: [H] float32, float64 for float64 input: the largest
        q_t . k_s / sqrt(qk) of any pair that is summed over, in the whole batch; -inf where
        everything is padding. No gradient flows through it.

    Raises:
      ValueError: shapes disagree, or there are no tokens.
      NotImplementedError: 'pallas' with a dtype or widths that it cannot take.

    Source: Kimi K3 Gated MLA (no rotation; the scale is that of q's whole width).
    """
    _check(q, k, v, segment_ids)
    check_runs('causal_attention', segment_ids)
    runs = None if segment_ids is None else runs_of(segment_ids)
    if implementation == 'reference':
        o, top = attention_reference(q, k, v, runs)
        return (o, top) if with_max_logit else o
    if implementation not in ('xla', 'pallas', None):
        raise ValueError(
            f'causal_attention: implementation is {implementation!r}, '
            "wanted 'reference', 'xla', 'pallas' or None"
        )
    problem = unsupported(q, v)
    if implementation == 'pallas' and problem:
        raise NotImplementedError(f"causal_attention: 'pallas' {problem}; use implementation='xla'")
    if problem:
        implementation = 'xla'
    o, top = _attend(_Static(implementation), q, k, v, runs)
    return (o, top) if with_max_logit else o


class _Static(NamedTuple):
    implementation: Implementation | None

    def choose(self, on_tpu: Callable[..., Any], on_xla: Callable[..., Any], *args: Any) -> Any:
        """on_tpu(interpret, *args) where it is wanted, else on_xla(*args)."""
        if self.implementation == 'xla':
            return on_xla(*args)
        if self.implementation == 'pallas':
            return kernel_call(lambda interpret: functools.partial(on_tpu, interpret), *args)
        return best_of('mla', functools.partial(on_tpu, False), on_xla, *args)


def _forward(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, runs: Runs | None):
    o, lse, top = static.choose(attention_on_tpu, attention_xla, q, k, v, runs)
    return o, lse, jnp.max(top, axis=(0, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, runs: Runs | None):
    o, _, top = _forward(static, q, k, v, runs)
    return o, top


def _attend_fwd(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, runs: Runs | None):
    o, lse, top = _forward(static, q, k, v, runs)
    return (o, top), (q, k, v, runs, o, lse)


def _attend_bwd(static: _Static, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]):
    do, _ = cotangents
    return *static.choose(gradients_on_tpu, attention_xla_gradients, *saved, do), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> None:
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        batch, length, heads = q.shape[:3] if q.ndim == 4 else 'BTH'
        raise ValueError(
            f'causal_attention: got q {q.shape}, k {k.shape}, v {v.shape}, wanted q and k alike '
            f'and v [{batch}, {length}, {heads}, V]'
        )
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f'causal_attention: q {q.shape} and v {v.shape} must not be empty')
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f'causal_attention: segment_ids has shape {segment_ids.shape}, wanted {q.shape[:2]}'
        )
