"""What the experts' weights are, and what one pass leaves for the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from pallas_kernels.grouped_mlp.mxfp4 import Mxfp4
from pallas_kernels.grouped_mlp.mxfp4_tiles import Mxfp4Tiles

Weight = jax.Array | Mxfp4 | Mxfp4Tiles


def is_packed(weight: Any) -> bool:
    return isinstance(weight, Mxfp4 | Mxfp4Tiles)


def shape_of(weight: Weight) -> tuple[int, ...]:
    """[E, out, in], whatever holds it."""
    if isinstance(weight, Mxfp4):
        *lead, half = weight.packed.shape
        return (*lead, 2 * half)
    if isinstance(weight, Mxfp4Tiles):
        *lead, words, outputs = weight.words.shape
        return (*lead, outputs, 8 * words)
    return weight.shape


class Experts(NamedTuple):
    """w1 (gate) and w3 (up): [E, F, L]; w2 (down): [E, L, F]; arrays, `Mxfp4` or `Mxfp4Tiles`."""

    w1: Weight
    w3: Weight
    w2: Weight

    @property
    def num_experts(self) -> int:
        return shape_of(self.w1)[0]

    @property
    def inner(self) -> int:
        return shape_of(self.w1)[-2]

    @property
    def width(self) -> int:
        return shape_of(self.w1)[-1]


class Kept(NamedTuple):
    """What the forward pass leaves for the backward one: w1 x and w3 x, [M, F] in x's dtype.

    Computing them again would be a third of the backward pass's products.
    """

    gate: jax.Array
    up: jax.Array
