"""What a number becomes under a power of two that 32 share: rounding to MXFP4 and MXFP8."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_mlp.mxfp4 import GROUP

ScaleRule = Literal['ocp_floor', 'ceil']

_SIGN, _EXPONENT, _MANTISSA = -(1 << 31), 0x7F800000, 0x7FFFFF  # of float32's bits


@dataclasses.dataclass(frozen=True)
class Element:
    """The numbers of one kind: sign, magnitudes up to `largest`, no infinity.

    mantissa: its bits. smallest_exponent: of normal numbers. most: the largest E8M0 scale byte.
    """

    mantissa: int
    smallest_exponent: int
    largest: float
    most: int

    @property
    def largest_exponent(self) -> int:
        return int(self.largest).bit_length() - 1


E2M1 = Element(1, 0, 6.0, 251)  # the kernels decode exactly up to 251
E4M3 = Element(3, -6, 448.0, 246)  # every element is a float32


def check_groups(name: str, size: int, rule: ScaleRule) -> None:
    """Raises ValueError for an axis that is no whole number of groups, or an unknown rule."""
    if size % GROUP:
        raise ValueError(f'{name}: the last axis has {size} numbers, wanted a multiple of {GROUP}')
    if rule not in get_args(ScaleRule):
        raise ValueError(f"{name}: rule is {rule!r}, wanted 'ocp_floor' or 'ceil'")


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _float_bits(x: float) -> int:
    """Of a power of two, or 1.5 or 1.75 times one."""
    exponent = 0
    while x >= 2:
        x, exponent = x / 2, exponent + 1
    while x < 1:
        x, exponent = x * 2, exponent - 1
    return (exponent + 127 << 23) + int((x - 1) * (1 << 23))


def scale_of(largest: jax.Array, element: Element, rule: ScaleRule) -> jax.Array:
    """The E8M0 byte of groups whose largest magnitudes are `largest`, float32: int32.

    'ocp_floor': 2^(floor(log2 a) - the element's largest exponent), above which numbers saturate;
    'ceil': the smallest power of two under which none does.
    """
    bits = _bits(largest)
    scale = (bits >> 23) - element.largest_exponent
    if rule == 'ceil':
        over = (bits & _MANTISSA) > (_float_bits(element.largest) & _MANTISSA)
        scale = scale + over.astype(jnp.int32)
    return jnp.clip(scale, 0, element.most)


def to_grid(x: jax.Array, scale: jax.Array, element: Element) -> jax.Array:
    """Half the magnitude of the element next to x / 2^(scale - 127), ties to even, saturated.

    Half, because 2^-127 is no normal float32. float32's subnormal numbers, which some devices take
    for 0, count as 0 on all.
    """
    is_number = (_bits(x) & _EXPONENT) != 0
    half = jnp.abs(x) * _float(253 - scale << 23)
    # 2^23 times the distance between elements there: the sum drops what is finer, to even.
    exponent = jnp.maximum(_bits(half) & _EXPONENT, _float_bits(2.0**element.smallest_exponent / 2))
    coarse = _float(exponent + (23 - element.mantissa << 23))
    half = jnp.minimum((half + coarse) - coarse, element.largest / 2)
    return jnp.where(is_number, half, 0.0)


def rounded(x: jax.Array, largest: Any, element: Element, rule: ScaleRule) -> jax.Array:
    """x, float32, with the precision of elements under the scale of its group.

    largest: the largest magnitude of each number's group, of a shape that x's broadcasts with.
    What is not finite stays as it is; results below 2^-126 are 0.
    """
    scale = scale_of(largest, element, rule)
    bits = _bits(to_grid(x, scale, element) * _float(scale + 1 << 23))
    bits = jnp.where(bits < 1 << 23, 0, bits) | (_bits(x) & _SIGN)
    return jnp.where((_bits(x) & _EXPONENT) == _EXPONENT, x, _float(bits))


def fake_quantised(x: jax.Array, element: Element, rule: ScaleRule) -> jax.Array:
    """`rounded` by groups of 32 along the last axis, in x's dtype; exact in bfloat16."""
    groups = x.astype(jnp.float32)
    if x.dtype != jnp.float32:
        # XLA may leave out the cast to x's dtype that gave x, and one that follows.
        info = jnp.finfo(x.dtype)
        groups = lax.reduce_precision(groups, info.nexp, info.nmant)
    groups = groups.reshape(*x.shape[:-1], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    return rounded(groups, largest, element, rule).reshape(x.shape).astype(x.dtype)
