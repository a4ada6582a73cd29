"""How wrong a prediction is: next-token cross entropy in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.data.pack import IGNORE
from k3jax.model.kimi import head

LOGITS_AT_ONCE = 1 << 25  # elements of a block of logits; above it, blocks are recomputed


@jax.named_scope('loss')
def token_losses(lm_head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target), natural, for each position; 0 where the target is IGNORE.

    Large vocabularies go by blocks of tokens, whose logits never exist all at once.

    Args: lm_head [Z, D], hidden [B, T, D], targets [B, T]. Returns: [B, T] float32.
    """
    batch, length, width = hidden.shape
    rows, flat = hidden.reshape(-1, width), targets.reshape(-1)

    def block(rows: jax.Array, flat: jax.Array) -> jax.Array:
        logits = head(lm_head, rows)
        picked = jnp.take_along_axis(logits, jnp.maximum(flat, 0)[:, None], axis=1)[:, 0]
        return jnp.where(flat == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=1) - picked)

    size = max(1, LOGITS_AT_ONCE // lm_head.shape[0])
    if rows.shape[0] <= size:
        return block(rows, flat).reshape(batch, length)
    padding = -rows.shape[0] % size
    rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(-1, size, width)
    flat = jnp.pad(flat, (0, padding), constant_values=IGNORE).reshape(-1, size)
    losses = lax.map(lambda x: jax.checkpoint(block)(*x), (rows, flat))
    return losses.reshape(-1)[: batch * length].reshape(batch, length)
