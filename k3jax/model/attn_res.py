"""What a sublayer reads: the attention residual over block snapshots and the running sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Flag = jax.Array | bool  # a Python bool where it is known while tracing


def push_snapshot(bank: jax.Array, snapshot: jax.Array, index: jax.Array | int) -> jax.Array:
    """bank [N, B, T, D] with row `index` set to snapshot [B, T, D]."""
    return lax.dynamic_update_index_in_dim(bank, snapshot, index, 0)


def attn_res_mix(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    *,
    num_live: jax.Array | int,
    use_prefix: Flag,
    eps: float,
) -> jax.Array:
    """sum_i p_i V_i with p = softmax_i(sum_d V_i[d] norm[d] proj[d] / rms(V_i)).

    The candidates V are the live snapshots and, if `use_prefix`, the running sum; scores, softmax
    and mixture are in float32, and the values are the raw candidates.

    Args:
      bank: [N, B, T, D] snapshots, of which the first `num_live` count.
      prefix: [B, T, D] running sum of the current block's sublayer outputs.
      norm, proj: [D], key gain and pseudo-query.

    Returns:
      [B, T, D] in prefix's dtype.

    Source: Kimi K3 `attn_res_block_size`, `*_res_norm`, `*_res_proj`.
    """
    wide = jnp.promote_types(prefix.dtype, jnp.float32)
    query = norm.astype(wide) * proj.astype(wide)

    def score(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = values.astype(wide)
        scale = lax.rsqrt(jnp.mean(values * values, axis=-1) + eps)
        return values, jnp.sum(values * query, axis=-1) * scale

    snapshots, bank_scores = score(bank)
    running, prefix_score = score(prefix)
    if not isinstance(num_live, int) or num_live < bank.shape[0]:
        live = jnp.arange(bank.shape[0]) < num_live
        bank_scores = jnp.where(live[:, None, None], bank_scores, -jnp.inf)
    if use_prefix is False:
        weights = jax.nn.softmax(bank_scores, axis=0)
        return jnp.sum(weights[..., None] * snapshots, axis=0).astype(prefix.dtype)
    prefix_score = jnp.where(use_prefix, prefix_score, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([bank_scores, prefix_score[None]]), axis=0)
    mixture = jnp.sum(weights[:-1, ..., None] * snapshots, axis=0)
    return (mixture + weights[-1][..., None] * running).astype(prefix.dtype)
