"""Balancing by small steps: an expert with few tokens gets a larger bias, whatever it lacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bias_step(load: jax.Array, size: float) -> jax.Array:
    """What is added to the biases: size * sign(mean load - load), [..., E] float32.

    Args:
      load: [..., E] int32, tokens that each expert has got; leading axes number layers.
      size: of a step.

    Source: DeepSeek-V3 report, section 2.1.2; K2 takes it over.
    """
    # Compared as whole numbers: a float32 mean would be rounded above 2^24 tokens.
    total = jnp.sum(load, axis=-1, keepdims=True)
    share, rest = jnp.divmod(total, load.shape[-1])
    return size * (jnp.sign(share - load) + ((load == share) & (rest > 0))).astype(jnp.float32)
