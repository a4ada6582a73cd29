"""What attention computes in training: softmax over earlier tokens of a document."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.checks import check_floating, check_integer, check_not_empty
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form
from pallas_kernels.common.segments import Runs, check_runs, runs_of
from pallas_kernels.mla.blocks import ONE_ROW, How
from pallas_kernels.mla.on_tpu import (
    PairOfRuns,
    attention_on_tpu,
    gradients_on_tpu,
    unsupported,
)
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
      segment_ids: [B, T] int32, runs of equal ids, 0 = padding, which may hold anything.
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
    check_implementation('causal_attention', implementation)
    check_runs('causal_attention', segment_ids)
    runs = None if segment_ids is None else runs_of(segment_ids)
    if implementation == 'reference':
        o, top = attention_reference(q, k, v, runs)
        return (o, top) if with_max_logit else o
    implementation = form_for('causal_attention', implementation, unsupported(q, v))
    o, top = _attend(_Static(implementation, ONE_ROW), q, k, v, runs)
    return (o, top) if with_max_logit else o


class Part(NamedTuple):
    """Attention of queries to a part of their keys.

    o: [B, T, H, V] float32, 0 on padding. lse: [B, H, T], log of the softmax's denominator, very
    low where no key is seen. top: [B, H, T], the largest logit.
    """

    o: jax.Array
    lse: jax.Array
    top: jax.Array


def attend_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: PairOfRuns | None,
    *,
    causal: bool,
    implementation: Implementation | None = None,
) -> Part:
    """What one part of the keys contributes; parts of all keys join by `merged`.

    Args:
      q, k: [B, T, H, qk]. v: [B, T, H, V].
      runs: of the queries and of the keys, numbered along the whole row; None for one document.
      causal: queries and keys are the same tokens; otherwise all keys come before all queries.

    Not differentiable by JAX: `part_gradients` is its backward pass.
    """
    static = _static_of_part('attend_part', q, v, causal, implementation)
    return Part(*static.choose(attention_on_tpu, attention_xla, q, k, v, runs))


def merged(a: Part, b: Part) -> Part:
    """Attention to the keys of both parts."""
    lse = jnp.logaddexp(a.lse, b.lse)

    def scaled(part: Part) -> jax.Array:
        return part.o * jnp.swapaxes(jnp.exp(part.lse - lse), 1, 2)[..., None]

    return Part(scaled(a) + scaled(b), lse, jnp.maximum(a.top, b.top))


def part_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: PairOfRuns | None,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    *,
    causal: bool,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v through one part of the keys, float32.

    Args: o [B, T, H, V] and lse of all parts together; the others as in `attend_part`.
    """
    static = _static_of_part('part_gradients', q, v, causal, implementation)
    return static.choose(gradients_on_tpu, attention_xla_gradients, q, k, v, runs, o, lse, do)


class _Static(NamedTuple):
    implementation: Implementation | None
    how: How

    def choose(self, on_tpu: Callable[..., Any], on_xla: Callable[..., Any], *args: Any) -> Any:
        """on_tpu(how, interpret, *args) where it is wanted, else on_xla(how, *args)."""
        forms = (functools.partial(form, self.how) for form in (on_tpu, on_xla))
        return run_form('mla', self.implementation, *forms, *args)


def _static_of_part(
    name: str, q: jax.Array, v: jax.Array, causal: bool, implementation: Implementation | None
) -> _Static:
    check_implementation(name, implementation, ('xla', 'pallas'))
    implementation = form_for(name, implementation, unsupported(q, v))
    return _Static(implementation, How(causal, jnp.promote_types(v.dtype, jnp.float32)))


def _forward(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, runs: Runs | None):
    pair = None if runs is None else (runs, runs)
    o, lse, top = static.choose(attention_on_tpu, attention_xla, q, k, v, pair)
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
    q, k, v, runs, *rest = saved
    pair = None if runs is None else (runs, runs)
    return *static.choose(gradients_on_tpu, attention_xla_gradients, q, k, v, pair, *rest, do), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> None:
    check_floating('causal_attention', q=q, k=k, v=v)
    check_integer('causal_attention', segment_ids=segment_ids)
    if k.dtype != q.dtype:
        raise ValueError(f'causal_attention: k is {k.dtype}, wanted that of q, {q.dtype}')
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        batch, length, heads = q.shape[:3] if q.ndim == 4 else 'BTH'
        raise ValueError(
            f'causal_attention: got q {q.shape}, k {k.shape}, v {v.shape}, wanted q and k alike '
            f'and v [{batch}, {length}, {heads}, V]'
        )
    check_not_empty('causal_attention', q=q, v=v)
    if segment_ids is not None and segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f'causal_attention: segment_ids has shape {segment_ids.shape}, wanted {q.shape[:2]}'
        )
