"""What a sublayer reads: the attention residual, normalised, by the implementation asked for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res.backward_kernel import backward
from pallas_kernels.attn_res.blocks import MAX_CANDIDATES, STATS, plan_for
from pallas_kernels.attn_res.forward_kernel import forward
from pallas_kernels.attn_res.reference import Count, Flag, attn_res_reference, attn_res_xla
from pallas_kernels.common.checks import check_floating, check_integer, check_not_empty
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form


def attn_res(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    out_norm: jax.Array,
    *,
    num_live: Count,
    use_prefix: Flag,
    eps: float,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The mixture of what earlier blocks left behind, normalised for the sublayer that reads it.

    p = softmax_i(V_i / rms(V_i) . (norm * proj));  M = sum_i p_i V_i;  y = M / rms(M) * out_norm

    The candidates V are the live snapshots and, if `use_prefix`, the running sum. What does not
    count is never read into the result, whatever it holds, and has gradient zero. Everything is
    computed in float32 (float64 for float64 input).

    Args:
      bank: [N, B, T, D] snapshots, of which the first `num_live` count.
      prefix: [B, T, D] running sum of the current block's sublayer outputs, in bank's dtype.
      norm, proj, out_norm: [D], key gain, pseudo-query and the weight of the final norm.
      num_live: 0 to N; may be traced, and is then clipped to that range.
      use_prefix: may be traced.
      eps: added to the mean squares of candidates and mixture.
      implementation: 'reference' | 'xla' | 'pallas' | None (best for the platform lowered for).

    Returns:
      [B, T, D] in prefix's dtype.

    Raises:
      ValueError: shapes or dtypes disagree, num_live is out of range, or nothing counts.
      NotImplementedError: 'pallas' with another dtype than bfloat16 or float32, or with more
        candidates than it has room for.

    Source: Kimi K3 `attn_res_block_size`, `*_res_norm`, `*_res_proj`.
    """
    _check(bank, prefix, norm, proj, out_norm, num_live, use_prefix)
    check_implementation('attn_res', implementation)
    args = (bank, prefix, norm, proj, out_norm)
    flags = {'num_live': num_live, 'use_prefix': use_prefix, 'eps': eps}
    if implementation == 'reference':
        return attn_res_reference(*args, **flags)
    implementation = form_for('attn_res', implementation, _unsupported(bank, prefix))
    if implementation == 'xla':
        return attn_res_xla(*args, **flags)
    static = _Static(
        eps,
        implementation,
        num_live if isinstance(num_live, int) else None,
        use_prefix if isinstance(use_prefix, bool) else None,
    )
    live = jnp.clip(jnp.asarray(num_live, jnp.int32), 0, bank.shape[0])
    live = jnp.stack([live, jnp.asarray(use_prefix, jnp.int32)])
    return _attn_res(static, *args, live)


class _Static(NamedTuple):
    """What is known while tracing; num_live and use_prefix are None where they are not."""

    eps: float
    implementation: Implementation | None
    num_live: int | None
    use_prefix: bool | None

    def xla(self, *args: jax.Array) -> jax.Array:
        *args, live = args
        return attn_res_xla(
            *args,
            num_live=live[0] if self.num_live is None else self.num_live,
            use_prefix=live[1] > 0 if self.use_prefix is None else self.use_prefix,
            eps=self.eps,
        )


def _rows(static: _Static, pass_name: str, bank: jax.Array, prefix: jax.Array, *vectors: jax.Array):
    """The plan, and everything as rows of a width that is a multiple of 128."""
    num, size = bank.shape[0], prefix.shape[-1]
    rows = prefix.size // size
    plan = plan_for(
        pass_name,
        rows,
        size,
        num,
        prefix.dtype,
        num_live=static.num_live,
        use_prefix=static.use_prefix,
        eps=static.eps,
    )
    arrays = (bank.reshape(num, rows, size), prefix.reshape(rows, size), *vectors)
    if plan.width != size:
        arrays = [jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, plan.width - size)]) for a in arrays]
    return plan, arrays


def _wide_vectors(norm: jax.Array, proj: jax.Array, out_norm: jax.Array) -> list[jax.Array]:
    norm, proj, out_norm = (v.astype(jnp.float32) for v in (norm, proj, out_norm))
    return [norm * proj, out_norm]


def _forward_on_tpu(static: _Static, with_stats: bool, interpret: bool, *args: jax.Array):
    bank, prefix, norm, proj, out_norm, live = args
    plan, arrays = _rows(static, 'forward', bank, prefix, *_wide_vectors(norm, proj, out_norm))
    y, *stats = forward(live, *arrays, plan=plan, with_stats=with_stats, interpret=interpret)
    return y[:, : plan.size].reshape(prefix.shape), *stats


def _backward_on_tpu(static: _Static, interpret: bool, *args: jax.Array):
    bank, prefix, norm, proj, out_norm, live, stats, dy = args
    vectors = _wide_vectors(norm, proj, out_norm)
    dy = dy.reshape(-1, prefix.shape[-1])
    plan, (*arrays, dy) = _rows(static, 'backward', bank, prefix, *vectors, dy)
    d_bank, d_prefix, *sums = backward(live, *arrays, dy, stats, plan=plan, interpret=interpret)
    d_query, d_gain = (s[: plan.size] for s in sums)
    return (
        d_bank[..., : plan.size].reshape(bank.shape),
        d_prefix[:, : plan.size].reshape(prefix.shape),
        (d_query * proj.astype(jnp.float32)).astype(norm.dtype),
        (d_query * norm.astype(jnp.float32)).astype(proj.dtype),
        d_gain.astype(out_norm.dtype),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attn_res(static: _Static, *args: jax.Array) -> jax.Array:
    on_tpu = functools.partial(_forward_on_tpu, static, False)

    def on_xla(*args):
        return (static.xla(*args),)

    (y,) = run_form('attn_res', static.implementation, on_tpu, on_xla, *args)
    return y


def _attn_res_fwd(static: _Static, *args: jax.Array):
    def on_xla(*args):
        rows = args[1].size // args[1].shape[-1]
        return static.xla(*args), jnp.zeros((rows, STATS), jnp.float32)

    on_tpu = functools.partial(_forward_on_tpu, static, True)
    y, stats = run_form('attn_res', static.implementation, on_tpu, on_xla, *args)
    return y, (*args, stats)


def _attn_res_bwd(static: _Static, saved: tuple[jax.Array, ...], dy: jax.Array):
    def on_xla(*args):
        *args, live, _, dy = args
        return jax.vjp(lambda *args: static.xla(*args, live), *args)[1](dy)

    on_tpu = functools.partial(_backward_on_tpu, static)
    grads = run_form('attn_res', static.implementation, on_tpu, on_xla, *saved, dy)
    return *grads, None


_attn_res.defvjp(_attn_res_fwd, _attn_res_bwd)


def _unsupported(bank: jax.Array, prefix: jax.Array) -> str | None:
    """Why the TPU kernel cannot take these arguments."""
    if prefix.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes bfloat16 or float32, got {prefix.dtype}'
    if bank.shape[0] >= MAX_CANDIDATES:
        return f'takes fewer than {MAX_CANDIDATES} snapshots, got {bank.shape[0]}'
    return None


def _check(bank, prefix, norm, proj, out_norm, num_live, use_prefix) -> None:
    if bank.ndim != 4 or bank.shape[1:] != prefix.shape:
        raise ValueError(
            f'attn_res: bank has shape {bank.shape}, '
            f"wanted N snapshots of prefix's shape {prefix.shape}"
        )
    if bank.dtype != prefix.dtype:
        raise ValueError(f'attn_res: bank is {bank.dtype} and prefix {prefix.dtype}; cast one')
    check_not_empty('attn_res', prefix=prefix)
    check_floating('attn_res', prefix=prefix, norm=norm, proj=proj, out_norm=out_norm)
    check_integer('attn_res', num_live=jnp.asarray(num_live))
    for name, vector in (('norm', norm), ('proj', proj), ('out_norm', out_norm)):
        if vector.shape != prefix.shape[-1:]:
            raise ValueError(
                f'attn_res: {name} has shape {vector.shape}, wanted {prefix.shape[-1:]}'
            )
    if isinstance(num_live, jax.core.Tracer):
        return
    if not 0 <= int(num_live) <= bank.shape[0]:
        raise ValueError(
            f"attn_res: num_live is {int(num_live)}, wanted 0 to {bank.shape[0]}, bank's snapshots"
        )
    if int(num_live) == 0 and not isinstance(use_prefix, jax.core.Tracer) and not use_prefix:
        raise ValueError('attn_res: nothing counts: num_live is 0 and use_prefix is false')
