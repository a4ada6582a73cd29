"""What training attention computes, plainly: every score at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.segments import Runs


def attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, runs: Runs | None
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] and each head's largest logit [H]. See `causal_attention`."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    if runs is not None:
        # What padding holds must not matter, and 0 * NaN would.
        real = runs.real[:, :, None, None]
        q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    logits = jnp.einsum(
        'bthd,bshd->bhts', q.astype(wide), k.astype(wide), precision=lax.Precision.HIGHEST
    )
    logits = logits * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))[None, None]
    if runs is not None:
        alike = runs.number[:, :, None] == runs.number[:, None, :]
        alike &= runs.real[:, :, None] & runs.real[:, None, :]
        seen = seen & alike[:, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
    weights = jnp.where(seen, weights, 0)
    o = jnp.einsum('bhts,bshv->bthv', weights, v.astype(wide), precision=lax.Precision.HIGHEST)
    top = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=(0, 2, 3))
    if runs is not None:
        o = jnp.where(real, o, 0)  # and so no cotangent of padding counts
    return o.astype(v.dtype), lax.stop_gradient(top)
