"""Which token comes next: greedy, temperature, nucleus."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sample(
    logits: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array
) -> jax.Array:
    """One token a row.

    Args:
      logits: [B, Z] float32.
      temperature: scalar; 0 takes the most likely token.
      top_p: scalar in (0, 1]; tokens outside the smallest set with this much probability are
        never taken.

    Returns:
      [B] int32.
    """
    greedy = jnp.argmax(logits, axis=-1)
    scaled = logits / jnp.maximum(temperature, 1e-6)

    def nucleus(scaled: jax.Array) -> jax.Array:
        descending = -jnp.sort(-scaled, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        threshold = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(scaled >= threshold, scaled, -jnp.inf)

    scaled = jax.lax.cond(top_p < 1.0, nucleus, lambda x: x, scaled)
    drawn = jax.random.categorical(key, scaled, axis=-1)
    return jnp.where(temperature > 0.0, drawn, greedy).astype(jnp.int32)
