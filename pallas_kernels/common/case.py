"""What is compiled and costed ahead of time: one pass of a kernel at a real shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import jax

Tiles = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One pass of a kernel at one shape.

    Attributes:
      kernel: folder under pallas_kernels.
      name: what the shape is, such as 'k3_24_heads_1k'; with `kernel` and `pass_name` unique.
      pass_name: 'forward', 'backward' (forward and backward together where noted) or 'decode'.
      shape: axis letter (or word) -> size.
      dtype: of the activations.
      build: tile sizes, or None for the stored or default ones -> the function to compile.
      args: abstract arguments of that function, a tuple of ShapeDtypeStruct trees.
      flops: matmul operations (2 a multiply-add) that the maths needs.
      hbm_bytes: what must cross HBM at least once.
      vector_ops: needed operations on [8, 128] vectors of 4 bytes, 0 where never the limit.
      tile_space: what the tuner may try.
      note: what a reader of the figure must know, such as that a stand-in was compiled.
    """

    kernel: str
    name: str
    pass_name: Literal['forward', 'backward', 'decode']
    shape: Mapping[str, int]
    dtype: str
    build: Callable[[Tiles | None], Callable[..., object]]
    args: tuple[object, ...]
    flops: float
    hbm_bytes: float
    vector_ops: float = 0.0
    tile_space: tuple[Tiles, ...] = ()
    note: str = ''

    @property
    def key(self) -> str:
        return f'{self.kernel}/{self.name}/{self.pass_name}'


def abstract(shape: tuple[int, ...], dtype: str = 'bfloat16') -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
