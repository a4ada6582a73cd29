"""What four bits mean: decoding of packed E2M1 codes with E8M0 group scales."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 32  # weights that share a scale, along the input axis


class Mxfp4(NamedTuple):
    """packed: [..., out, in / 2] uint8, low nibble first. scale: [..., out, in / 32] uint8."""

    packed: jax.Array
    scale: jax.Array


def decode_mxfp4(weight: Mxfp4, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    """[..., out, in] weights, exact in bfloat16: e2m1(nibble) * 2^(scale - 127).

    Source: OCP Microscaling Formats 1.0; compressed-tensors `mxfp4-pack-quantized`.
    """
    packed, scale = weight
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    magnitude = (codes & 7).astype(jnp.int32)
    exponent, mantissa = magnitude >> 1, magnitude & 1
    # Exponent 0 is subnormal: 0 or 0.5. Otherwise (1 + m / 2) 2^(exponent - 1).
    value = jnp.where(
        exponent == 0,
        0.5 * mantissa.astype(jnp.float32),
        (2 + mantissa).astype(jnp.float32) * (1 << exponent).astype(jnp.float32) * 0.25,
    )
    value = jnp.where(codes >= 8, -value, value)
    # The byte is a float32 exponent field, except that 0 stands for 2^-127, half of 1's 2^-126: a
    # subnormal factor would count as zero on the CPU.
    bits = jnp.maximum(scale, 1).astype(jnp.int32) << 23
    factor = lax.bitcast_convert_type(bits, jnp.float32)
    half = jnp.where(scale == 0, 0.5, 1.0)
    groups = value.reshape(*scale.shape, -1) * half[..., None] * factor[..., None]
    return groups.reshape(codes.shape).astype(dtype)
