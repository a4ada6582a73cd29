"""How wrong a prediction is: next-token cross entropy in float32."""

from __future__ import annotations

from typing import NamedTuple

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

    size = max(1, LOGITS_AT_ONCE // lm_head.shape[0])
    if rows.shape[0] <= size:
        return jax.tree.map(lambda x: x.reshape(batch, length), block(rows, flat))
    padding = -rows.shape[0] % size
    rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(-1, size, width)
    flat = jnp.pad(flat, (0, padding), constant_values=IGNORE).reshape(-1, size)
    losses = lax.map(lambda x: jax.checkpoint(block)(*x), (rows, flat))
    return jax.tree.map(lambda x: x.reshape(-1)[: batch * length].reshape(batch, length), losses)
