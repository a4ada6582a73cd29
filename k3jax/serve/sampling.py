"""Which token comes next: greedy, temperature, nucleus; and which guesses of a draft may stand."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """How the next token is taken; each a scalar, or [B], one for each row.

    Attributes:
      temperature: 0 takes the most likely token.
      top_p: in (0, 1]; tokens outside the smallest set with this much probability are never taken.
      num_ids: ids from here on stand for nothing, and are never taken.
      top_k: only so many of the likeliest; 0: all.
      min_p: only tokens with at least this share of the likeliest one's probability.
    """

    temperature: jax.Array
    top_p: jax.Array
    num_ids: jax.Array
    top_k: jax.Array | int = 0
    min_p: jax.Array | float = 0.0


def _of_rows(x: jax.Array | float) -> jax.Array:
    """A scalar, or [B, 1], to go with [B, Z]."""
    x = jnp.asarray(x)
    return x[..., None] if x.ndim else x


def _adjusted(logits: jax.Array, choice: Choice) -> jax.Array:
    """Logits [..., Z] of what is drawn from at a temperature above 0; -inf for what is never."""
    temperature, top_p, num_ids, top_k, min_p = map(_of_rows, choice)
    ids = jnp.arange(logits.shape[-1])
    scaled = jnp.where(ids < num_ids, logits, -jnp.inf) / jnp.maximum(temperature, 1e-6)

    def nucleus(scaled: jax.Array) -> jax.Array:
        descending = -jnp.sort(-scaled, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        kept = jnp.cumsum(probs, axis=-1) - probs < top_p
        kept &= (ids < top_k) | (top_k == 0)
        kept &= probs >= min_p * probs[..., :1]
        kept |= ids == 0  # the likeliest, also where top_p or what it is compared with rounds to 0
        threshold = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(scaled >= threshold, scaled, -jnp.inf)

    cuts = jnp.any(top_p < 1.0) | jnp.any(top_k > 0) | jnp.any(min_p > 0)
    return jax.lax.cond(cuts, nucleus, lambda x: x, scaled)


def probabilities(logits: jax.Array, choice: Choice) -> jax.Array:
    """What the next token is drawn from, [..., Z] float32; at temperature 0 a single one."""
    adjusted = _adjusted(logits, choice)
    greedy = jax.nn.one_hot(jnp.argmax(adjusted, axis=-1), logits.shape[-1])
    drawn = jax.nn.softmax(adjusted, axis=-1)
    return jnp.where(_of_rows(choice.temperature) > 0.0, drawn, greedy)


def sample(logits: jax.Array, key: jax.Array, choice: Choice) -> jax.Array:
    """One token a row, [...] int32, of logits [..., Z] float32.

    key: one, or [B], one for each row.
    """
    adjusted = _adjusted(logits, choice)
    greedy = jnp.argmax(adjusted, axis=-1)
    categorical = jax.vmap(jax.random.categorical) if key.ndim else jax.random.categorical
    is_drawn = choice.temperature > 0.0
    drawn = jax.lax.cond(jnp.any(is_drawn), lambda: categorical(key, adjusted), lambda: greedy)
    return jnp.where(is_drawn, drawn, greedy).astype(jnp.int32)


def agree(p: jax.Array, guesses: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many guesses of each row are what the keys draw from p, and that: whatever was guessed.

    Fewer stand than of `accept`, but most where they were drawn with the same keys.

    Args:
      p: [B, J + 1, Z]. guesses: [B, J] int32. keys: [J + 1, B].

    Returns:
      [B] int32, 0..J; and [B, J + 1] int32, as `sample` gives them.
    """
    categorical = jax.vmap(jax.vmap(jax.random.categorical), in_axes=(0, 1), out_axes=1)
    own = categorical(keys, jnp.log(p)).astype(jnp.int32)
    stands = (own[:, :-1] == guesses).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(stands, axis=1), axis=1), own


def accept(
    p: jax.Array, q: jax.Array, guesses: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many guesses of each row stand, and the token after them: together drawn from p.

    A guess x stands with probability min(1, p(x) / q(x)). After the first that does not, the token
    is drawn from what p has more than q; after all, from the last p.

    Args:
      p: [B, J + 1, Z], what the model says at each guess and after the last.
      q: [B, J, Z], what the guesses were drawn from.
      guesses: [B, J] int32.

    Returns:
      [B] int32, 0..J; and [B] int32.
    """
    batch, num_guesses = guesses.shape
    for_guesses, for_token = jax.random.split(key)

    def of_guess(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, guesses[..., None], axis=-1)[..., 0]

    stands = jax.random.uniform(for_guesses, guesses.shape) * of_guess(q) < of_guess(p[:, :-1])
    count = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
    # After the last guess nothing was drawn, and all of p is left.
    q = jnp.concatenate([q, jnp.zeros((batch, 1, q.shape[-1]), q.dtype)], axis=1)
    here = count[:, None, None]
    p, q = (jnp.take_along_axis(x, here, axis=1)[:, 0] for x in (p, q))
    more = jnp.maximum(p - q, 0)
    # Where p and q are equal but for rounding, nothing may be left.
    more = jnp.where(jnp.sum(more, axis=-1, keepdims=True) > 0, more, p)
    token = jax.random.categorical(for_token, jnp.log(more), axis=-1)
    return count.astype(jnp.int32), token.astype(jnp.int32)
