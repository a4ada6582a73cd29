"""What the convolution computes: tap by tap, plainly and in the form that XLA compiles well."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def short_conv_reference(
    x: jax.Array, weight: jax.Array, tail: jax.Array, numbers: jax.Array | None = None
) -> jax.Array:
    """y [B, T, P] by one product over all rows that each token may see. Arguments as below."""
    length, taps = x.shape[1], weight.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if numbers is None:
        numbers = jnp.zeros(x.shape[:2], jnp.int32)
    rows = jnp.concatenate([tail, x], axis=1).astype(wide)
    documents = jnp.pad(numbers, ((0, 0), (taps - 1, 0)))
    sources = jnp.arange(length)[:, None] + jnp.arange(taps)
    same = documents[:, sources] == numbers[..., None]
    seen = jnp.where(same[..., None], rows[:, sources], 0)
    total = jnp.sum(seen * weight.astype(wide).T, axis=2)
    return (total / (1 + jnp.exp(-total))).astype(x.dtype)


def short_conv_xla(
    x: jax.Array, weight: jax.Array, tail: jax.Array, numbers: jax.Array | None = None
) -> jax.Array:
    """y [B, T, P] as a sum of shifted copies.

    tail: [B, W - 1, P] in x's dtype. numbers: [B, T] int32, the document of each row counted from
    0, to which the tail belongs; None for one document.
    """
    (batch, length, width), taps = x.shape, weight.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    extended = jnp.concatenate([tail, x], axis=1)
    documents = None if numbers is None else jnp.pad(numbers, ((0, 0), (taps - 1, 0)))
    total = jnp.zeros((batch, length, width), wide)
    for tap in range(taps):
        rows = extended[:, tap : tap + length].astype(wide)
        if numbers is not None:
            same = documents[:, tap : tap + length] == numbers
            rows = jnp.where(same[..., None], rows, 0)
        total = total + rows * weight[:, tap].astype(wide)
    return jax.nn.silu(total).astype(x.dtype)
