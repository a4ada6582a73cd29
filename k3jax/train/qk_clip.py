"""QK-Clip: heads whose attention logits grew past a threshold get smaller queries and keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig


def clip_factor(max_logit: jax.Array, threshold: float) -> jax.Array:
    """min(1, threshold / max_logit) for each head; exactly 1 where nothing is to be done.

    So is it for a head that saw no token (-inf), or whose logit is infinite or no number, which the
    training loop refuses.
    """
    over = (max_logit > threshold) & jnp.isfinite(max_logit)
    return jnp.where(over, threshold / max_logit, 1.0)


def row_factors(name: str, factor: jax.Array, config: ModelConfig) -> jax.Array | None:
    """What the rows of an MLA parameter are multiplied by, or None for one that is not touched.

    The logit is the sum of a part with the head's own key and one with the key that all heads
    share. Of the first, queries and keys take half of the factor (its root) each; of the second,
    the queries take all of it.

    Args:
      name: the parameter's. factor: [..., H].

    Returns:
      [..., rows], head by head.

    Source: Kimi K2 report, algorithm 1 (QK-Clip); Kimi K3 keeps the shared key, unrotated.
    """
    nope, shared, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    root, one = jnp.sqrt(factor), jnp.ones_like(factor)
    match name:
        case 'q_b_proj' | 'q_proj':
            parts = (root, nope), (factor, shared)
        case 'kv_b_proj':
            parts = (root, nope), (one, values)
        case _:
            return None
    rows = [jnp.repeat(x[..., None], count, axis=-1) for x, count in parts]
    rows = jnp.concatenate(rows, axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)
