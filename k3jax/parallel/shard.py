"""What a program that runs on every chip of a mesh knows of it, and how it gathers parameters.

The whole loss (or prefill, or decode) runs inside one `jax.shard_map` over all mesh axes, so model
code sees the arrays of one chip and every collective is written out. A gathered parameter's
gradient is scattered back by the transpose of the gather.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from k3jax.config import ExpertParallel, MeshConfig
from k3jax.parallel.rules import AXES, RULES, Described, Strategy, axes_of, spec_of

L = TypeVar('L', bound=Described)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """The mesh as one chip's program sees it; hashable, so that it can be static.

    sizes: chips along each of AXES.
    """

    sizes: tuple[int, ...]
    strategy: Strategy
    whole_below: int
    expert_parallel: ExpertParallel

    def size(self, *axes: str) -> int:
        """Chips along `axes` together."""
        return math.prod(self.sizes[AXES.index(axis)] for axis in axes)

    @property
    def rules(self):
        return RULES[self.strategy]

    @property
    def num_shards(self) -> int:
        """Chips that share the tokens of a row."""
        return self.size(*self.rules.tokens)

    def spec(self, leaf: Described) -> PartitionSpec:
        return spec_of(leaf, self.rules, dict(zip(AXES, self.sizes, strict=True)), self.whole_below)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Of an array [B, T]."""
        return PartitionSpec(self.rules.rows or None, self.rules.tokens or None)

    def local(self, leaf: L) -> L:
        """`leaf` with the shape that one chip holds."""
        shape = tuple(
            size // self.size(*axes_of(cut))
            for size, cut in zip(leaf.shape, self.spec(leaf), strict=True)
        )
        return dataclasses.replace(leaf, shape=shape)

    def gather(self, x: jax.Array, leaf: Described) -> jax.Array:
        """The whole of a parameter that this chip holds a part of, but for the axes kept cut."""
        for dim, (name, cut) in enumerate(zip(leaf.axes, self.spec(leaf), strict=True)):
            if cut and name not in self.rules.kept:
                x = lax.all_gather(x, axes_of(cut), axis=dim, tiled=True)
        return x

    def total(self, x: jax.Array, name: str) -> jax.Array:
        """The sum over the chips that hold other parts of logical axis `name`; not to be
        differentiated."""
        axes = self.cut_of(name)
        return lax.psum(x, axes) if axes else x

    def joined(self, x: jax.Array, name: str) -> jax.Array:
        """x with the parts of logical axis `name`, its last, of all chips; not to be
        differentiated."""
        axes = self.cut_of(name)
        return lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if axes else x

    def cut_of(self, name: str) -> tuple[str, ...]:
        """Mesh axes that logical axis `name` stays cut along in the computation."""
        rules = self.rules
        if name not in rules.kept:
            return ()
        return tuple(axis for axis in rules.weights[name] if self.size(axis) > 1)

    def uncut(self, spec: PartitionSpec) -> tuple[str, ...]:
        """Mesh axes that a parameter of this spec is whole along: its gradient is summed there."""
        used = {axis for cut in spec for axis in axes_of(cut)}
        return tuple(a for a in AXES if a not in used and self.size(a) > 1)


def parallel_of(mesh: Mesh, config: MeshConfig, strategy: Strategy) -> Parallel | None:
    """What programs on `mesh` know of it; None on a single chip."""
    if mesh.size == 1:
        return None
    sizes = tuple(mesh.shape[axis] for axis in AXES)
    return Parallel(sizes, strategy, config.whole_below, config.expert_parallel)
