"""Root-mean-square norms and projections, in the reference's rounding order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Statistics in float32; the normalised value is rounded to x's dtype before the weight
    multiplies it, as the reference does.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight.astype(x.dtype)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight^T for weight [out, in], operands and result in x's dtype."""
    return lax.dot_general(x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))
