"""How KDA layers mix tokens: projections, short convolutions, gate, recurrence, gated output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import ModelConfig
from k3jax.model.cache import KDACache
from k3jax.model.norms import project
from pallas_kernels.common.platform import Implementation
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
    cache: KDACache | None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, KDACache | None]:
    """One KDA layer's attention output.

    Args:
      x: [B, T, D], normalised.
      segment_ids: [B, T] or None, 0 = padding.
      cache: what came before, or None; with T = 1 and no segment ids, one recurrent step.
      implementation: of the kernels; None for the best.

    Returns:
      [B, T, D], and the cache after x (None without one).

    Source: Kimi K3 `linear_attn_config`; Kimi Linear (arXiv 2510.26692).
    """
    c = config.linear_attn_config
    batch, length, _ = x.shape
    heads = (batch, length, c.num_heads, c.head_dim)

    def branch(name: str) -> tuple[jax.Array, jax.Array]:
        tail = None if cache is None else getattr(cache, f'{name}_tail')
        y, tail = short_conv(
            project(x, params[f'{name}_proj']),
            params[f'{name}_conv1d'],
            tail=tail,
            segment_ids=segment_ids,
            implementation=implementation,
        )
        return y.reshape(heads), tail

    (q, q_tail), (k, k_tail), (v, v_tail) = branch('q'), branch('k'), branch('v')
    f = project(project(x, params['f_a_proj']), params['f_b_proj']).reshape(heads)
    gate = Gate(params['A_log'], params['dt_bias'], c.gate_lower_bound)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    beta = jax.nn.sigmoid(project(x, params['b_proj']).astype(wide))
    if cache is not None and length == 1 and segment_ids is None:
        q, k = l2_normalize(q) * c.head_dim**-0.5, l2_normalize(k)
        row = (a[:, 0] for a in (q, k, v, kda_gate(f, *gate), beta))
        o, state = kda_decode_step(*row, cache.state)
        o = o[:, None]
    else:
        o, state = kda(
            q,
            k,
            v,
            f,
            beta,
            gate=gate,
            qk_l2norm=True,
            initial_state=None if cache is None else cache.state,
            segment_ids=segment_ids,
            implementation=implementation,
        )
    if c.use_full_rank_gate:
        z = project(x, params['g_proj'])
    else:
        z = project(project(x, params['g_a_proj']), params['g_b_proj'])
    y = gated_head_norm(o, z.reshape(heads), params['o_norm'], config.rms_norm_eps)
    out = project(y.reshape(batch, length, -1), params['o_proj'])
    return out, None if cache is None else KDACache(state, q_tail, k_tail, v_tail)
