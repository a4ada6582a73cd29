"""How weights become four-bit: MXFP4 quantisation, and training through it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_mlp.mx import (
    E2M1,
    ScaleRule,
    check_groups,
    fake_quantised,
    scale_of,
    to_grid,
)
from pallas_kernels.grouped_mlp.mxfp4 import GROUP, Mxfp4


def quantise_mxfp4(weight: jax.Array, rule: ScaleRule = 'ocp_floor') -> Mxfp4:
    """Nearest E2M1 numbers (ties to even) under one power of two for 32 inputs.

    Args:
      weight: [..., out, in], any float dtype; finite. Numbers below 2^-126 count as 0.
      rule: with a the group's largest magnitude, 'ocp_floor': 2^(floor(log2 a) - 2), above 6 of
        which weights saturate; 'ceil': the smallest scale at which none does.

    Raises:
      ValueError: `in` is not a multiple of 32, or an unknown rule.

    Source: OCP Microscaling Formats 1.0, section 6.3. Which rule Kimi K3 was trained with is not
      published.
    """
    *lead, inputs = weight.shape
    check_groups('quantise_mxfp4', inputs, rule)
    groups = weight.astype(jnp.float32).reshape(*lead, inputs // GROUP, GROUP)
    scale = scale_of(jnp.max(jnp.abs(groups), axis=-1), E2M1, rule)
    half = to_grid(groups, scale[..., None], E2M1)
    codes = sum((half >= edge / 2).astype(jnp.int32) for edge in (0.5, 1, 1.5, 2, 3, 4, 6))
    codes = (codes | jnp.where(jnp.signbit(groups), 8, 0)).astype(jnp.uint8)
    pairs = codes.reshape(*lead, inputs // 2, 2)
    return Mxfp4(pairs[..., 0] | pairs[..., 1] << 4, scale.astype(jnp.uint8))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_quantise_mxfp4(weight: jax.Array, rule: ScaleRule = 'ocp_floor') -> jax.Array:
    """What MXFP4 leaves of the weights, in their dtype; gradients pass straight through.

    `grouped_mlp` over these trains float masters for four-bit use: the forward pass has the
    values that packed weights decode to, and the masters' gradient is that of those values,
    unmasked where they saturate.
    """
    check_groups('fake_quantise_mxfp4', weight.shape[-1], rule)
    return fake_quantised(weight, E2M1, rule)


fake_quantise_mxfp4.defvjp(
    lambda weight, rule: (fake_quantise_mxfp4(weight, rule), None),
    lambda rule, _, gradient: (gradient,),
)
