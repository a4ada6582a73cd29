"""What the attention residual computes: plainly, and in the form that XLA compiles well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Flag = jax.Array | bool  # a Python bool where it is known while tracing
Count = jax.Array | int
LOWEST = -1e30  # score of what does not count; finite, so that nothing at all mixes to 0


def attn_res_reference(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    out_norm: jax.Array,
    *,
    num_live: Count,
    use_prefix: Flag,
    eps: float,
) -> jax.Array:
    """The definition: all candidates side by side, one rounding at the end. See `attn_res`."""
    wide = jnp.promote_types(prefix.dtype, jnp.float32)
    counts = jnp.append(jnp.arange(bank.shape[0]) < num_live, use_prefix)[:, None, None, None]
    values = jnp.concatenate([bank, prefix[None]]).astype(wide)
    values = jnp.where(counts, values, 0)
    rms = jnp.sqrt(jnp.mean(values**2, axis=-1, keepdims=True) + eps)
    scores = jnp.sum(values / rms * norm.astype(wide) * proj.astype(wide), axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(counts, scores, LOWEST), axis=0)
    mixture = jnp.sum(weights * values, axis=0)
    rms = jnp.sqrt(jnp.mean(mixture**2, axis=-1, keepdims=True) + eps)
    return (mixture / rms * out_norm.astype(wide)).astype(prefix.dtype)


def _mixture(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    num_live: Count,
    use_prefix: Flag,
    eps: float,
) -> jax.Array:
    """[B, T, D] in float32, or float64 where the input is."""
    wide = jnp.promote_types(prefix.dtype, jnp.float32)
    query = norm.astype(wide) * proj.astype(wide)

    def score(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = values.astype(wide)
        scale = lax.rsqrt(jnp.mean(values * values, axis=-1) + eps)
        return values, jnp.sum(values * query, axis=-1) * scale

    live = None
    if isinstance(num_live, int):
        bank = bank[:num_live]
    else:
        live = jnp.arange(bank.shape[0]) < num_live
        # Rows that do not count may hold anything, and 0 * NaN would count.
        bank = jnp.where(live[:, None, None, None], bank, 0)
    snapshots, bank_scores = score(bank)
    if live is not None:
        bank_scores = jnp.where(live[:, None, None], bank_scores, LOWEST)
    if use_prefix is False:
        weights = jax.nn.softmax(bank_scores, axis=0)
        return jnp.sum(weights[..., None] * snapshots, axis=0)
    if use_prefix is not True:
        prefix = jnp.where(use_prefix, prefix, 0)
    running, prefix_score = score(prefix)
    prefix_score = jnp.where(use_prefix, prefix_score, LOWEST)
    weights = jax.nn.softmax(jnp.concatenate([bank_scores, prefix_score[None]]), axis=0)
    mixture = jnp.sum(weights[:-1, ..., None] * snapshots, axis=0)
    return mixture + weights[-1][..., None] * running


def attn_res_mix(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    *,
    num_live: Count,
    use_prefix: Flag,
    eps: float,
) -> jax.Array:
    """sum_i p_i V_i, the mixture of `attn_res` without its norm: [B, T, D] in prefix's dtype."""
    return _mixture(bank, prefix, norm, proj, num_live, use_prefix, eps).astype(prefix.dtype)


def attn_res_xla(
    bank: jax.Array,
    prefix: jax.Array,
    norm: jax.Array,
    proj: jax.Array,
    out_norm: jax.Array,
    *,
    num_live: Count,
    use_prefix: Flag,
    eps: float,
) -> jax.Array:
    """`attn_res` with the sums over candidates kept apart, as XLA fuses them best."""
    mixture = _mixture(bank, prefix, norm, proj, num_live, use_prefix, eps)
    scale = lax.rsqrt(jnp.mean(mixture * mixture, axis=-1, keepdims=True) + eps)
    return (mixture * scale * out_norm.astype(mixture.dtype)).astype(prefix.dtype)
