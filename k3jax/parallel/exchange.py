"""How do ranks of a mesh axis swap rows when each pair has another number of them?"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Axis = str | tuple[str, ...]


class Transfers(NamedTuple):
    """Rows that go from each rank to each other, all [sender, receiver] int32.

    size: how many. source: the first one, in the sender's array. target: where it arrives in the
    receiver's. Every rank holds the same three tables.
    """

    size: jax.Array
    source: jax.Array
    target: jax.Array

    def reversed(self) -> Transfers:
        """The way back."""
        return Transfers(self.size.T, self.target.T, self.source.T)


def packed(size: jax.Array) -> Transfers:
    """Transfers of rows that lie in order of their receivers, and arrive in order of senders."""
    size = size.astype(jnp.int32)
    source = jnp.cumsum(size, axis=1, dtype=jnp.int32) - size
    return Transfers(size, source, jnp.cumsum(size, axis=0, dtype=jnp.int32) - size)


def ragged_exchange_into(
    out: jax.Array, rows: jax.Array, transfers: Transfers, axis: Axis
) -> jax.Array:
    """`exchange_into` for TPUs: only what is sent travels."""
    rank = lax.axis_index(axis)
    size, source, target = (lax.dynamic_index_in_dim(t, rank, 0, False) for t in transfers)
    received = lax.dynamic_index_in_dim(transfers.size, rank, 1, False)
    return lax.ragged_all_to_all(rows, out, source, size, target, received, axis_name=axis)


def dense_exchange_into(
    out: jax.Array, rows: jax.Array, transfers: Transfers, axis: Axis
) -> jax.Array:
    """`exchange_into` from all rows of all ranks: where the ragged collective does not exist."""
    rank = lax.axis_index(axis)
    everything = lax.all_gather(rows, axis)
    size, source, target = (lax.dynamic_index_in_dim(t, rank, 1, False) for t in transfers)
    index = jnp.arange(out.shape[0])[:, None] - target  # [rows of out, sender]
    is_sent = (index >= 0) & (index < size)
    sender = jnp.argmax(is_sent, axis=1)
    position = source[sender] + jnp.take_along_axis(index, sender[:, None], axis=1)[:, 0]
    is_new = jnp.any(is_sent, axis=1).reshape(-1, *(1,) * (out.ndim - 1))
    return jnp.where(is_new, everything.at[sender, position].get(mode='clip'), out)


def exchange_into(out: jax.Array, rows: jax.Array, transfers: Transfers, axis: Axis) -> jax.Array:
    """`out` with the rows of this rank's `rows` and of others that are sent to it; no gradient.

    Args:
      out, rows: [M, ...] and [N, ...] of one dtype; rows that nothing is sent to stay.
    """
    return lax.platform_dependent(
        out,
        rows,
        transfers,
        tpu=functools.partial(ragged_exchange_into, axis=axis),
        default=functools.partial(dense_exchange_into, axis=axis),
    )


def exchange(rows: jax.Array, transfers: Transfers, num_rows: int, axis: Axis) -> jax.Array:
    """[num_rows, ...] the rows that other ranks send to this one, 0 elsewhere.

    Rows [N, ...] go where `transfers` says; their gradient goes back the same way.
    """
    return _exchange(rows, transfers, (rows.shape[0], num_rows), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, transfers, lengths, axis):
    out = jnp.zeros((lengths[1], *rows.shape[1:]), rows.dtype)
    return exchange_into(out, rows, transfers, axis)


_exchange.defvjp(
    lambda rows, transfers, lengths, axis: (_exchange(rows, transfers, lengths, axis), transfers),
    lambda lengths, axis, transfers, gradient: (
        _exchange(gradient, transfers.reversed(), lengths[::-1], axis),
        None,
    ),
)
