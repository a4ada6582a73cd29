"""How wrong a prediction is: next-token cross entropy in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.data.pack import IGNORE
from k3jax.model.kimi import head

LOGITS_AT_ONCE = 1 << 25  # elements of a block of logits; above it, blocks are recomputed


class TokenLosses(NamedTuple):
    """Of each position, [B, T] float32; 0 where it has no target.

    nll: -log p(target), natural. log_z: the log of the sum of all exponentiated logits, whose
    square the z-loss keeps small.
    """

    nll: jax.Array
    log_z: jax.Array


def by_rows(function: Callable[..., Any], vocab_size: int, *arrays: jax.Array) -> Any:
    """function(*arrays) of arrays [M, ...], a tree of [M]; many rows go by blocks.

    A block has as many rows as LOGITS_AT_ONCE allows of a vocabulary; it is recomputed in the
    backward pass. The last is filled up with zeros, of which nothing is kept.
    """
    count, size = len(arrays[0]), max(1, LOGITS_AT_ONCE // vocab_size)
    if count <= size:
        return function(*arrays)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, -count % size), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(-1, size, *x.shape[1:])

    found = lax.map(lambda x: jax.checkpoint(function)(*x), tuple(map(cut, arrays)))
    return jax.tree.map(lambda x: x.reshape(-1)[:count], found)


@jax.named_scope('loss')
def token_losses(lm_head: jax.Array, hidden: jax.Array, targets: jax.Array) -> TokenLosses:
    """How wrong each prediction is; a target may be IGNORE.

    Large vocabularies go by blocks of tokens, whose logits never exist all at once.

    Args: lm_head [Z, D], hidden [B, T, D], targets [B, T].
    """
    batch, length, width = hidden.shape
    rows, flat = hidden.reshape(-1, width), targets.reshape(-1)

    def block(rows: jax.Array, flat: jax.Array) -> TokenLosses:
        logits = head(lm_head, rows)
        picked = jnp.take_along_axis(logits, jnp.maximum(flat, 0)[:, None], axis=1)[:, 0]
        log_z = jax.nn.logsumexp(logits, axis=1)
        return TokenLosses(*(jnp.where(flat == IGNORE, 0.0, x) for x in (log_z - picked, log_z)))

    losses = by_rows(block, lm_head.shape[0], rows, flat)
    return jax.tree.map(lambda x: x.reshape(batch, length), losses)
