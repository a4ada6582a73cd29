"""What eight bits leave of the activations that enter the experts' products: MXFP8."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.mx import E4M3, ScaleRule, check_groups, fake_quantised, rounded
from pallas_kernels.grouped_mlp.mxfp4 import GROUP


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_quantise_mxfp8(x: jax.Array, rule: ScaleRule = 'ocp_floor') -> jax.Array:
    """The nearest E4M3 numbers (ties to even) under one power of two for 32 along the last axis.

    Args:
      x: [..., n], float32 or bfloat16. Numbers below 2^-126 count as 0.
      rule: with a the group's largest magnitude, 'ocp_floor': 2^(floor(log2 a) - 8), above 448 of
        which numbers saturate; 'ceil': the smallest power of two under which none does.

    Returns:
      [..., n] in x's dtype, the same bits on every device. The gradient passes straight through,
      also where numbers saturate.

    Raises:
      ValueError: n is not a multiple of 32, or an unknown rule.

    Source: OCP Microscaling Formats 1.0, section 6.3. Which rule Kimi K3 was trained with is not
      published.
    """
    check_groups('fake_quantise_mxfp8', x.shape[-1], rule)
    return fake_quantised(x, E4M3, rule)


fake_quantise_mxfp8.defvjp(
    lambda x, rule: (fake_quantise_mxfp8(x, rule), None),
    lambda rule, _, gradient: (gradient,),
)


def _largest_of_lanes(size: jax.Array) -> jax.Array:
    """The maximum of each 32 lanes of [M, N], in all of them; N a multiple of 128."""
    num = size.shape[1]
    lane = lax.broadcasted_iota(jnp.int32, size.shape, 1)
    distance = 1
    while distance < GROUP:
        # The lane whose number differs in one bit is before or after.
        before, after = (pltpu.roll(size, shift, 1) for shift in (distance, num - distance))
        size = jnp.maximum(size, jnp.where((lane & distance) != 0, before, after))
        distance *= 2
    return size


@dataclasses.dataclass(frozen=True)
class Mxfp8:
    """That what enters each of the experts' products is rounded to MXFP8.

    rule: of the scales, as for `fake_quantise_mxfp8`.
    rows_are_rounded: x comes rounded, so that it is not done again for each of its copies.
    """

    rule: ScaleRule = 'ocp_floor'
    rows_are_rounded: bool = False

    def check(self, name: str, width: int, inner: int) -> None:
        """Raises ValueError where a row of x or of the hidden values is no whole groups."""
        for size in (width, inner):
            check_groups(name, size, self.rule)


def round_rows(x: jax.Array, quantise: Mxfp8 | None) -> tuple[jax.Array, Mxfp8 | None]:
    """[M, L] rows as the first products take them, and the same choice for rows that are."""
    if quantise is None or quantise.rows_are_rounded:
        return x, quantise
    rows = fake_quantise_mxfp8(x, quantise.rule)
    return rows, dataclasses.replace(quantise, rows_are_rounded=True)


@dataclasses.dataclass(frozen=True)
class RoundedActivation:
    """A gated activation and the rounding of what it gives; the gradient is the activation's.

    dtype: of the rows. Gate and up are taken in it, as the backward pass has them: so both passes
      have the same hidden values.
    place: 'xla', or 'kernel' where groups are found by moving lanes; 'interpreted': such a kernel,
      as XLA runs it.
    """

    activation: GatedActivation
    rule: ScaleRule
    dtype: jnp.dtype
    place: Literal['xla', 'kernel', 'interpreted'] = 'xla'

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return _rounded_hidden(self, a, b)

    def narrowed(self, x: jax.Array) -> jax.Array:
        """x as `dtype` has it, in float32."""
        wide = x.astype(jnp.float32)
        if self.dtype == jnp.float32:
            return wide
        if self.place == 'kernel':
            return x.astype(self.dtype).astype(jnp.float32)
        # XLA leaves out casts there and back.
        info = jnp.finfo(self.dtype)
        return lax.reduce_precision(wide, info.nexp, info.nmant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded_hidden(how: RoundedActivation, a: jax.Array, b: jax.Array) -> jax.Array:
    hidden = how.narrowed(how.activation(how.narrowed(a), how.narrowed(b)))
    if how.place == 'xla':
        return fake_quantised(hidden, E4M3, how.rule).astype(a.dtype)
    return rounded(hidden, _largest_of_lanes(jnp.abs(hidden)), E4M3, how.rule).astype(a.dtype)


def _rounded_hidden_backward(how, residuals, d):
    a, b = residuals
    _, vjp = jax.vjp(how.activation, how.narrowed(a), how.narrowed(b))
    return tuple(x.astype(a.dtype) for x in vjp(d.astype(jnp.float32)))


_rounded_hidden.defvjp(
    lambda how, a, b: (_rounded_hidden(how, a, b), (a, b)), _rounded_hidden_backward
)
