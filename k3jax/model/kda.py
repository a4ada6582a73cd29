"""How KDA layers mix tokens: projections, short convolutions, gate, recurrence, gated output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import ModelConfig
from k3jax.model.cache import KDACache, KDAWindow
from k3jax.model.norms import project
from k3jax.model.run import Run
from k3jax.parallel.kda_cp import sequence_kda
from k3jax.parallel.sequence import Row, from_end, tokens_before
from pallas_kernels.kda import Gate, kda, kda_decode_step, kda_gate, l2_normalize
from pallas_kernels.short_conv import short_conv

Params = dict[str, Any]


def gated_head_norm(o: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """o / rms(o) * weight * sigmoid(z) over each head's channels, in float32, rounded once.

    Args: o, z [..., H, V]; weight [V].
    """
    wide = jnp.promote_types(o.dtype, jnp.float32)
    x = o.astype(wide)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(wide)
    return (x * jax.nn.sigmoid(z.astype(wide))).astype(o.dtype)


@jax.named_scope('kda_mixer')
def kda_mixer(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    segment_ids: jax.Array | None,
    cache: KDACache | KDAWindow | None,
    run: Run,
    row: Row | None = None,
) -> tuple[jax.Array, KDACache | KDAWindow | None]:
    """One KDA layer's attention output.

    Args:
      x: [B, T, D], normalised.
      segment_ids: [B, T] or None, 0 = padding.
      cache: what came before, or None; with T = 1 and no segment ids, one recurrent step. Of a
        `KDAWindow`, what came before it stays, and x is kept beside it.
      run: how the model runs; on a mesh that cuts heads, params hold this chip's.
      row: where chips share the tokens of a row, what is known of all of it.

    Returns:
      [B, T, D], and the cache after x (None without one).

    Source: Kimi K3 `linear_attn_config`; Kimi Linear (arXiv 2510.26692).
    """
    c = config.linear_attn_config
    batch, length, _ = x.shape
    heads = (batch, length, -1, c.head_dim)
    num_shards = 1 if row is None else run.parallel.num_shards
    window = isinstance(cache, KDAWindow)
    before = cache.before if window else cache

    def branch(name: str) -> tuple[jax.Array, jax.Array]:
        tail = None if before is None else getattr(before, f'{name}_tail')
        projected = project(x, params[f'{name}_proj'])
        if row is not None:
            count = c.short_conv_kernel_size - 1
            tail = tokens_before(projected, count, segment_ids, tail, num_shards)
        y, tail = short_conv(
            projected,
            params[f'{name}_conv1d'],
            tail=tail,
            segment_ids=segment_ids,
            implementation=run.implementation,
        )
        if row is not None and cache is not None:
            tail = from_end(tail, row)
        return y.reshape(heads), projected if window else tail

    (q, q_tail), (k, k_tail), (v, v_tail) = branch('q'), branch('k'), branch('v')
    f = project(project(x, params['f_a_proj']), params['f_b_proj']).reshape(heads)
    gate = Gate(params['A_log'], params['dt_bias'], c.gate_lower_bound)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    beta = jax.nn.sigmoid(project(x, params['b_proj']).astype(wide))
    state = None if before is None else before.state
    options = {'segment_ids': segment_ids, 'implementation': run.implementation}
    if window:
        q, k, g = l2_normalize(q) * c.head_dim**-0.5, l2_normalize(k), kda_gate(f, *gate)
        o, _ = kda(q, k, v, g, beta, initial_state=state, **options)
        left = KDAWindow(before, q_tail, k_tail, v_tail, k, v, g, beta)
    elif row is not None:
        o, state = sequence_kda(
            q,
            k,
            v,
            f,
            beta,
            gate,
            row,
            initial_state=state,
            **options,
        )
    elif cache is not None and length == 1 and segment_ids is None:
        q, k = l2_normalize(q) * c.head_dim**-0.5, l2_normalize(k)
        token = (a[:, 0] for a in (q, k, v, kda_gate(f, *gate), beta))
        o, state = kda_decode_step(*token, state)
        o = o[:, None]
    else:
        o, state = kda(q, k, v, f, beta, gate=gate, qk_l2norm=True, initial_state=state, **options)
    if c.use_full_rank_gate:
        z = project(x, params['g_proj'])
    else:
        z = project(project(x, params['g_a_proj']), params['g_b_proj'])
    y = gated_head_norm(o, z.reshape(heads), params['o_norm'], config.rms_norm_eps)
    out = project(y.reshape(batch, length, -1), params['o_proj'])
    if run.parallel is not None:
        out = run.parallel.total(out, 'kda_heads')
    if not window:
        left = None if cache is None else KDACache(state, q_tail, k_tail, v_tail)
    return out, left
