"""Which rows of which tile belong to which expert: the visits that a kernel over groups makes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """Visits of a row tile by a group, in row order; every array [V] int32.

    tile: which tile of rows. group: whose weights. low, high: the rows [low, high) of the whole
    array that are the group's; none (low == high) on visits that only clear rows, and on the
    repeated last visits that fill the array to its static length.
    """

    tile: jax.Array
    group: jax.Array
    low: jax.Array
    high: jax.Array


def ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """[E] int32: last + 1 row of each group; negative sizes are none, rows past the array cut."""
    # Each is cut before they are added up, since sums of any sizes may pass an int32.
    return jnp.minimum(jnp.cumsum(jnp.clip(group_sizes, 0, num_rows)), num_rows).astype(jnp.int32)


def _bounds(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """First and last + 1 row of each group, inside the array whatever the sizes are."""
    high = ends(group_sizes, num_rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), high[:-1]]), high


def _expand(low, high, tile: int, count: jax.Array, length: int, num_groups: int) -> Visits:
    """`count` [G] visits of each group, in order, in arrays of `length`."""
    last = jnp.cumsum(count)
    index = jnp.arange(length, dtype=jnp.int32)
    inside = index < last[-1]
    clipped = jnp.minimum(index, last[-1] - 1)
    group = jnp.searchsorted(last, clipped, side='right').astype(jnp.int32)
    position = (low // tile)[group] + clipped - (last - count)[group]
    low, high = low[group], jnp.where(inside, high[group], low[group])
    return Visits(position.astype(jnp.int32), jnp.minimum(group, num_groups - 1), low, high)


def visits_by_tile(group_sizes: jax.Array, num_rows: int, tile: int) -> Visits:
    """Every tile is visited once by each group with rows in it, and by none before another tile.

    Rows of no group count as a last one that only clears. V = ceil(M / tile) + min(E, M).
    """
    num_groups = group_sizes.shape[0]
    low, high = _bounds(group_sizes, num_rows)
    end = high[-1:]
    low = jnp.concatenate([low, end])
    high = jnp.concatenate([high, jnp.full(1, num_rows, jnp.int32)])
    count = jnp.where(high > low, (high - 1) // tile - low // tile + 1, 0)
    length = -(-num_rows // tile) + min(num_groups, num_rows)
    found = _expand(low, high, tile, count, length, num_groups + 1)
    clears = found.group == num_groups
    # Weights that were fetched last serve the visits that need none.
    group = jnp.maximum(jax.lax.cummax(jnp.where(clears, -1, found.group)), 0)
    return found._replace(group=group, high=jnp.where(clears, found.low, found.high))


def visits_by_group(group_sizes: jax.Array, num_rows: int, tile: int) -> Visits:
    """As `visits_by_tile`, but each group comes at least once, also if it has no rows.

    Rows of no group are never visited. V = ceil(M / tile) + E.
    """
    low, high = _bounds(group_sizes, num_rows)
    count = jnp.where(high > low, (high - 1) // tile - low // tile + 1, 1)
    num_groups = group_sizes.shape[0]
    found = _expand(low, high, tile, count, -(-num_rows // tile) + num_groups, num_groups)
    return found._replace(tile=jnp.minimum(found.tile, -(-num_rows // tile) - 1))


@dataclasses.dataclass(frozen=True)
class Known:
    """Where a kernel finds its visits: scalars prefetched at run time."""

    count: int

    def at(self, index: Any, refs: Any) -> Visits:
        return Visits(*(ref[index] for ref in refs))

    def tile(self, index: Any, refs: Any) -> Any:
        return refs[0][index]

    def group(self, index: Any, refs: Any) -> Any:
        return refs[1][index]


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The same for equal groups of whole tiles, known without any scalar.

    A static simulator cannot follow prefetched scalars: kernels are costed with this.
    """

    tiles_per_group: int
    num_groups: int
    rows: int  # of a tile

    @property
    def count(self) -> int:
        return self.tiles_per_group * self.num_groups

    def at(self, index: Any, refs: Any) -> Visits:
        low = self.group(index, refs) * self.tiles_per_group * self.rows
        return Visits(index, self.group(index, refs), low, low + self.tiles_per_group * self.rows)

    def tile(self, index: Any, refs: Any) -> Any:
        return index

    def group(self, index: Any, refs: Any) -> Any:
        return index // self.tiles_per_group


Table = Known | Uniform
