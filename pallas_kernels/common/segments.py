"""Which rows belong together: packed documents as run numbers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Runs(NamedTuple):
    """number: [B, T] int32, 0 for the first document; padding takes its neighbour's number.
    real: [B, T] bool, False on padding."""

    number: jax.Array
    real: jax.Array


def runs_of(segment_ids: jax.Array) -> Runs:
    """Numbers the runs of equal ids in each row; 0 marks padding, which never starts a run.

    Equal ids with only padding between them are one run: padding leaves the state unchanged.
    """
    real = segment_ids > 0
    position = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    last_real = lax.cummax(jnp.where(real, position, -1), axis=1)
    filled = jnp.take_along_axis(segment_ids, jnp.maximum(last_real, 0), axis=1)
    started = last_real >= 0
    differs = (filled[:, 1:] != filled[:, :-1]) & started[:, :-1]
    number = jnp.cumsum(jnp.pad(differs, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    return Runs(number, real)


def check_runs(name: str, segment_ids: jax.Array | None) -> None:
    """Refuses known segment ids that are negative or come back after another document.

    Traced ids cannot be looked at; there an id that comes back starts a run of its own.

    Raises:
      ValueError: with the row and the id.
    """
    if segment_ids is None or isinstance(segment_ids, jax.core.Tracer):
        return
    for row, ids in enumerate(np.asarray(segment_ids)):
        if ids.min(initial=0) < 0:
            raise ValueError(f'{name}: segment_ids row {row} has {ids.min()}, wanted 0 or more')
        real = ids[ids > 0]
        starts = real[np.flatnonzero(np.diff(real, prepend=0))]
        values, counts = np.unique(starts, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f'{name}: segment_ids row {row}: {values[counts > 1][0]} comes back after another '
                'document; wanted one run an id'
            )
