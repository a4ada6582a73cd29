"""How chips that share a row's tokens know their place: documents across borders, tokens before."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.segments import Runs, runs_of

AXIS = 'sequence'


class Row(NamedTuple):
    """What one of P chips along a row knows of all of it.

    Attributes:
      index: [], which part of the row this chip has.
      continues: [P, B] bool, whether the first document of part p began in an earlier part.
      end: [B], the part with the row's last real token.
      runs: of the whole row, [B, T]; None where rows are one document without padding.
    """

    index: jax.Array
    continues: jax.Array
    end: jax.Array
    runs: Runs | None


def row_of(batch: int, segment_ids: jax.Array | None, num_shards: int) -> Row:
    """The row's documents as every chip sees them; segment_ids: [B, T / P] int32 or None."""
    index = lax.axis_index(AXIS)
    if segment_ids is None:
        end = jnp.full(batch, num_shards - 1, jnp.int32)
        return Row(index, jnp.ones((num_shards, batch), bool), end, None)
    ids = lax.all_gather(segment_ids, AXIS)  # [P, B, T / P]
    real = ids > 0
    # A part that is all padding passes on what comes into it.
    first = jnp.take_along_axis(ids, jnp.argmax(real, axis=2)[..., None], axis=2)[..., 0]
    backwards = jnp.argmax(real[..., ::-1], axis=2)[..., None]
    last = jnp.take_along_axis(ids[..., ::-1], backwards, axis=2)[..., 0]

    def step(carried: jax.Array, part: tuple[jax.Array, jax.Array]):
        first, last = part
        return jnp.where(last > 0, last, carried), (first == 0) | (first == carried)

    _, continues = lax.scan(step, jnp.zeros_like(first[0]), (first, last))
    end = num_shards - 1 - jnp.argmax(last[::-1] > 0, axis=0)
    whole = jnp.moveaxis(ids, 0, 1).reshape(batch, -1)
    return Row(index, continues, end, runs_of(whole))


def tokens_before(
    x: jax.Array,
    count: int,
    segment_ids: jax.Array | None,
    first: jax.Array | None,
    num_shards: int,
) -> jax.Array:
    """The last `count` tokens before this chip's part; zeros where they are of another document.

    Args: x [B, T / P, D], this chip's part; first [B, count, D], what came before the row, or None
    for zeros. Returns [B, count, D].
    """
    forward = [(part, part + 1) for part in range(num_shards - 1)]
    before = lax.ppermute(x[:, -count:], AXIS, forward)
    if segment_ids is not None:
        ids = lax.ppermute(segment_ids[:, -count:], AXIS, forward)
        before = jnp.where((ids == segment_ids[:, :1])[..., None], before, 0)
    if first is not None:
        before = jnp.where(lax.axis_index(AXIS) == 0, first.astype(x.dtype), before)
    return before


def from_end(x: jax.Array, row: Row) -> jax.Array:
    """x [B, ...] as the chip with each row's last real token has it; not to be differentiated."""
    own = (row.index == row.end).reshape(-1, *[1] * (x.ndim - 1))
    return lax.psum(jnp.where(own, x, 0), AXIS)
