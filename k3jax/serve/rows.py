"""What running requests are on the device, a row of a batch each, and how each draws its tokens."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.serve.request import Sampling
from k3jax.serve.sampling import Choice, sample

NUM_TOP = 20  # tokens that may be reported beside the one taken


class Rows(NamedTuple):
    """Requests by row.

    Attributes:
      token: [B] int32, the last one drawn. active: [B] bool, whether a row has a request.
      seed: [B] uint32. count: [B] int32, tokens drawn; with the seed it makes the random numbers,
        so that they do not depend on the other rows.
      is_seeded: [B] bool, whether the seed was asked for: what it draws does not depend on guesses.
      choice: leaves [B].
      presence, frequency, repetition: [B] float32, the penalties of `request.Sampling`.
      wants_top: [B] bool, whether logprobs are reported.
      drawn: [B, Z] int32, how often each token was. prompt: [B, Z] bool, whether it was given.
    """

    token: jax.Array
    active: jax.Array
    seed: jax.Array
    count: jax.Array
    is_seeded: jax.Array
    choice: Choice
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    wants_top: jax.Array
    drawn: jax.Array
    prompt: jax.Array


class Drawn(NamedTuple):
    """New tokens of each row, W at most.

    Attributes:
      count: [B] int32, how many there are. token: [B, W] int32.
      logprob: [B, W]. top_ids, top_logprobs: [B, W, NUM_TOP]; all 0 in rows that do not want them.
    """

    count: jax.Array
    token: jax.Array
    logprob: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def no_rows(num_rows: int, vocab_size: int) -> Rows:
    """Rows without requests."""
    one = row_of(Sampling(), 0, (), vocab_size, vocab_size)
    rows = jax.tree.map(lambda x: jnp.tile(x, (num_rows, *[1] * (x.ndim - 1))), one)
    return rows._replace(active=jnp.zeros(num_rows, bool))


def row_of(
    sampling: Sampling, seed: int, prompt: tuple[int, ...], num_ids: int, vocab_size: int
) -> Rows:
    """A single row, before its first token."""
    given = np.zeros((1, vocab_size), bool)
    if sampling.repetition_penalty != 1.0:
        given[0, list(set(prompt))] = True

    def of(value: float, dtype: str) -> np.ndarray:
        return np.array([value], dtype)

    choice = Choice(
        of(sampling.temperature, 'float32'),
        of(sampling.top_p, 'float32'),
        of(num_ids, 'int32'),
        of(min(sampling.top_k, vocab_size), 'int32'),
        of(sampling.min_p, 'float32'),
    )
    return Rows(
        token=of(0, 'int32'),
        active=of(True, 'bool'),
        seed=of(seed, 'uint32'),
        count=of(0, 'int32'),
        is_seeded=of(sampling.seed is not None, 'bool'),
        choice=choice,
        presence=of(sampling.presence_penalty, 'float32'),
        frequency=of(sampling.frequency_penalty, 'float32'),
        repetition=of(sampling.repetition_penalty, 'float32'),
        wants_top=of(sampling.logprobs is not None, 'bool'),
        drawn=np.zeros((1, vocab_size), np.int32),
        prompt=given,
    )


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask of allowed tokens."""
    return math.ceil(vocab_size / 32)


def _penalised(logits: jax.Array, rows: Rows) -> jax.Array:
    def apply(logits: jax.Array) -> jax.Array:
        met = rows.prompt | (rows.drawn > 0)
        factor = jnp.where(met, rows.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        logits -= rows.frequency[:, None] * rows.drawn
        return logits - rows.presence[:, None] * (rows.drawn > 0)

    some = (rows.presence != 0) | (rows.frequency != 0) | (rows.repetition != 1)
    return lax.cond(jnp.any(some & rows.active), apply, lambda x: x, logits)


def _allowed(logits: jax.Array, mask: jax.Array, constrained: jax.Array) -> jax.Array:
    def apply(logits: jax.Array) -> jax.Array:
        ids = jnp.arange(logits.shape[-1])
        bits = mask[:, ids // 32] >> (ids % 32).astype(jnp.uint32) & 1
        return jnp.where(bits == 1, logits, -jnp.inf)

    return lax.cond(constrained, apply, lambda x: x, logits)


def adjusted(logits: jax.Array, rows: Rows, mask: jax.Array, constrained: jax.Array) -> jax.Array:
    """Logits [B, Z] as requests change them before a token is drawn; see `draw`."""
    return _allowed(_penalised(logits, rows), mask, constrained)


def keys_of(seed: jax.Array, count: jax.Array) -> jax.Array:
    """[B] random keys, of each row's seed and place in its answer."""
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(
        seed, count
    )


def drawn_of(logits: jax.Array, token: jax.Array, count: jax.Array, rows: Rows) -> Drawn:
    """What is told of tokens [B, W], of which `count` [B] count, drawn from logits [B, W, Z]."""

    def tops(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(logprobs, token[..., None], axis=-1)[..., 0]
        best, ids = lax.top_k(logprobs, min(NUM_TOP, logits.shape[-1]))
        return own, ids, best

    shapes = jax.eval_shape(tops, logits)
    own, ids, best = lax.cond(
        jnp.any(rows.wants_top & rows.active),
        tops,
        lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        logits,
    )
    return Drawn(count, token, own, ids, best)


def after_tokens(rows: Rows, token: jax.Array, count: jax.Array) -> Rows:
    """The rows after the first `count` [B] of tokens [B, W], one or more."""
    width = token.shape[1]
    here, counts = jnp.arange(len(token))[:, None], jnp.arange(width) < count[:, None]
    counts = (counts & rows.active[:, None]).astype(jnp.int32)
    return rows._replace(
        token=jnp.take_along_axis(token, count[:, None] - 1, axis=1)[:, 0],
        count=rows.count + count,
        drawn=rows.drawn.at[here, token].add(counts),
    )


def draw(
    logits: jax.Array, rows: Rows, mask: jax.Array, constrained: jax.Array
) -> tuple[Drawn, Rows]:
    """The next token of each row of logits [B, Z] float32, and the rows after it.

    mask: [B, mask_words] uint32, tokens allowed, the first in the lowest bit. constrained: whether
    it is to be looked at.
    """
    logits = adjusted(logits, rows, mask, constrained)
    token = sample(logits, keys_of(rows.seed, rows.count), rows.choice)[:, None]
    one = jnp.ones(len(token), jnp.int32)
    return drawn_of(logits[:, None], token, one, rows), after_tokens(rows, token, one)


def put_row(
    rows: Any, one: Any, slot: jax.Array | int, here: jax.Array | bool = True, axes: Any = 0
) -> Any:
    """A tree of arrays of rows with that of a single row at `slot`, unless it is not here.

    axes: a tree of which axis counts rows, or one for all. `one` may be shorter along other axes.
    """
    if isinstance(axes, int):
        axes = jax.tree.map(lambda _: axes, rows)

    def put(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
        starts = [0] * old.ndim
        starts[axis] = slot
        kept = lax.dynamic_slice(old, starts, new.shape)
        return lax.dynamic_update_slice(old, jnp.where(here, new.astype(old.dtype), kept), starts)

    return jax.tree.map(put, axes, rows, one)
