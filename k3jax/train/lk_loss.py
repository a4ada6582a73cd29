"""How far a draft's guesses are from what its model would say: -log of what is accepted.

Source: report section 4.1.4: L = -log sum_x min(p(x), q(x)), the probability that a guess drawn
from q is accepted by a model that says p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.model.kimi import head
from k3jax.train.losses import by_rows

SMALLEST = 1e-9  # of an acceptance: below it, the loss is that of this and has no gradient


def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """sum_x min(p(x), q(x)) over the last axis, differentiable in q; where they are equal, 0."""
    # So that a q that is no number gives none.
    return jnp.sum(jnp.where(q >= p, lax.stop_gradient(p), q), axis=-1)


def lk_loss(accepted: jax.Array) -> jax.Array:
    """-log of an acceptance."""
    return -jnp.log(jnp.maximum(accepted, SMALLEST))


def accepted_shares(lm_head: jax.Array, guess: jax.Array, said: jax.Array) -> jax.Array:
    """`acceptance` of each guess, [...] float32; large vocabularies go by blocks of rows.

    Args: lm_head [Z, D]; guess and said [..., D], the draft's and the model's, ready for the head.
    Only `guess` has a gradient.
    """
    lm_head, said = lax.stop_gradient((lm_head, said))
    shape = guess.shape[:-1]
    rows = tuple(x.reshape(-1, x.shape[-1]) for x in (guess, said))

    def block(guess: jax.Array, said: jax.Array) -> jax.Array:
        q, p = (jax.nn.softmax(head(lm_head, x), axis=-1) for x in (guess, said))
        return acceptance(p, q)

    return by_rows(block, lm_head.shape[0], *rows).reshape(shape)
