"""How the bank of block snapshots grows."""

from __future__ import annotations

import jax
from jax import lax


def push_snapshot(bank: jax.Array, snapshot: jax.Array, index: jax.Array | int) -> jax.Array:
    """bank [N, B, T, D] with row `index` set to snapshot [B, T, D]."""
    return lax.dynamic_update_index_in_dim(bank, snapshot, index, 0)
