"""How weights become four-bit: MXFP4 quantisation, and training through it."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.mxfp4 import GROUP, Mxfp4, decode_mxfp4

ScaleRule = Literal['ocp_floor', 'ceil']
LARGEST_EXPONENT = 2  # of E2M1: 4 and 6


def quantise_mxfp4(weight: jax.Array, rule: ScaleRule = 'ocp_floor') -> Mxfp4:
    """Nearest E2M1 numbers (ties to even) under one power of two for 32 inputs.

    Args:
      weight: [..., out, in], any float dtype; finite.
      rule: with a the group's largest magnitude, 'ocp_floor': 2^(floor(log2 a) - 2), above 6 of
        which weights saturate; 'ceil': the smallest scale at which none does.

    Raises:
      ValueError: `in` is not a multiple of 32, or an unknown rule.

    Source: OCP Microscaling Formats 1.0, section 6.3. Which rule Kimi K3 was trained with is not
      published.
    """
    *lead, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(
            f'quantise_mxfp4: the input axis has {inputs} weights, wanted a multiple of {GROUP}'
        )
    if rule not in ('ocp_floor', 'ceil'):
        raise ValueError(f"quantise_mxfp4: rule is {rule!r}, wanted 'ocp_floor' or 'ceil'")
    groups = weight.astype(jnp.float32).reshape(*lead, inputs // GROUP, GROUP)
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1), jnp.int32)
    scale = (bits >> 23) - LARGEST_EXPONENT
    if rule == 'ceil':
        scale += (bits & 0x7FFFFF) > 0x400000  # above 1.5 times a power of two
    scale = jnp.clip(scale, 0, 251)
    inverse = lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    scaled = groups * inverse[..., None]
    size = jnp.abs(scaled)
    # Half-way points go to the even neighbour: down where the code below is even.
    codes = sum(
        (size > edge if index % 2 == 0 else size >= edge).astype(jnp.int32)
        for index, edge in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
    )
    codes = (codes | jnp.where(jnp.signbit(scaled), 8, 0)).astype(jnp.uint8)
    pairs = codes.reshape(*lead, inputs // 2, 2)
    return Mxfp4(pairs[..., 0] | pairs[..., 1] << 4, scale.astype(jnp.uint8))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_quantise_mxfp4(weight: jax.Array, rule: ScaleRule = 'ocp_floor') -> jax.Array:
    """What MXFP4 leaves of the weights, in their dtype; gradients pass straight through.

    `grouped_mlp` over these trains float masters for four-bit use: the forward pass has the
    values that packed weights decode to, and the masters' gradient is that of those values,
    unmasked where they saturate.
    """
    return decode_mxfp4(quantise_mxfp4(weight, rule), weight.dtype)


fake_quantise_mxfp4.defvjp(
    lambda weight, rule: (fake_quantise_mxfp4(weight, rule), None),
    lambda rule, _, gradient: (gradient,),
)
