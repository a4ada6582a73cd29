"""How text is continued with a draft: some tokens are guessed, then all are checked at once.

What comes out is distributed as without the draft; at temperature 0 it is the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.model.cache import Cache, MLACache, init_cache
from k3jax.model.draft import empty_cache, fused, read, ready_for_head
from k3jax.model.kimi import Kimi, head
from k3jax.model.window import committed, looking_ahead
from k3jax.serve.generate import check_request, pieces
from k3jax.serve.sampling import Choice, accept, probabilities, sample

Params = Any


class State(NamedTuple):
    """Between two rounds, of B sequences.

    Attributes:
      cache: of the model, which has read all tokens but `token`.
      draft: the draft's cache; of it `draft_length` [B] tokens count.
      token: [B], the last one.
      guess: [B, D], the draft's sum for what follows `token`.
      key: of the draws to come.
    """

    cache: Cache
    draft: MLACache
    draft_length: jax.Array
    token: jax.Array
    guess: jax.Array
    key: jax.Array


def read_draft(model, params, draft, features, tokens, valid, cache, length):
    """The draft's layer over new tokens, and its sum at each row's last valid one."""
    x, cache = read(model, draft, params, features, tokens, cache, length, valid)
    last = jnp.sum(valid, axis=1) - 1
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0], cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(4, 5))
def _read_piece(
    model, params, draft, tokens, cache, draft_cache, num_real, next_tokens, choice, key
):
    """A piece of each prompt; next_tokens: what follows, -1 after the last, which is drawn here."""
    length, valid = cache.length, jnp.arange(tokens.shape[1]) < num_real[:, None]
    valid = valid.astype(jnp.int32)
    output = model.apply({'params': params}, tokens, valid, cache)
    last = (num_real - 1)[:, None]
    hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)[:, 0]
    key, now = jax.random.split(key)
    token = sample(head(params['lm_head'], hidden), now, choice)
    given = jnp.take_along_axis(next_tokens, last, axis=1)
    following = jnp.where(given < 0, token[:, None], given)
    places = jnp.arange(tokens.shape[1]) == last
    next_tokens = jnp.where(places, following, next_tokens)
    features = fused(draft, output.taps)
    guess, draft_cache = read_draft(
        model, params, draft, features, next_tokens, valid, draft_cache, length
    )
    return State(output.cache, draft_cache, length + num_real, following[:, 0], guess, key)


def read_prompt(
    model: Kimi,
    params: Params,
    draft: Params,
    prompt: list[int],
    size: int,
    choice: Choice,
    seed: int,
) -> State:
    """The state after `prompt` and the token drawn after it; caches are `size` tokens long."""
    cache = init_cache(model.config, model.plan, 1, size, model.run.dtype)
    state = State(cache, empty_cache(model, 1, size), None, None, None, jax.random.key(seed))
    for tokens, num_real, next_tokens in pieces(prompt):
        arguments = state.cache, state.draft, num_real, next_tokens, choice, state.key
        state = _read_piece(model, params, draft, tokens, *arguments)
    return state


def guesses_of(
    model: Kimi,
    params: Params,
    draft: Params,
    guess: jax.Array,
    cache: MLACache,
    length: jax.Array,
    choice: Choice,
    num_guesses: int,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tokens that may follow, [B, J], and what each was drawn from, [B, J, Z].

    Args:
      guess, cache, length: as in `State`.
      key: one, or [J, B], one for each row of each guess.
    """

    categorical = jax.random.categorical if key.ndim < 2 else jax.vmap(jax.random.categorical)

    def step(carry, key):
        x, cache, length = carry
        q = probabilities(head(params['lm_head'], ready_for_head(model, draft, x)), choice)
        token = categorical(key, jnp.log(q)).astype(jnp.int32)
        arguments = x[:, None], token[:, None], cache, length, None
        x, cache = read(model, draft, params, *arguments)
        return (x[:, 0], cache, length + 1), (token, q)

    keys = jax.random.split(key, num_guesses) if key.ndim == 0 else key
    _, found = lax.scan(step, (guess, cache, length), keys)
    return tuple(jnp.moveaxis(x, 0, 1) for x in found)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=3)
def _round(model, params, draft, state, choice, num_guesses):
    """Guesses and checks: the next state, [B, J + 1] new tokens and how many of them count [B]."""
    key, for_guesses, for_accept = jax.random.split(state.key, 3)
    guesses, q = guesses_of(
        *(model, params, draft, state.guess, state.draft, state.draft_length),
        *(choice, num_guesses, for_guesses),
    )
    window = jnp.concatenate([state.token[:, None], guesses], axis=1)
    ahead = looking_ahead(state.cache)
    output = model.apply({'params': params}, window, jnp.ones_like(window), ahead)
    p = probabilities(head(params['lm_head'], output.hidden), choice)
    count, token = accept(p, q, guesses, for_accept)
    place = jnp.arange(num_guesses + 1)
    new = jnp.where(place < count[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), token[:, None])
    cache = committed(state.cache, output.cache, count + 1, model.run.implementation)
    valid = (place <= count[:, None]).astype(jnp.int32)
    features = fused(draft, output.taps)
    guess, draft_cache = read_draft(
        model, params, draft, features, new, valid, state.draft, state.draft_length
    )
    length = state.draft_length + count + 1
    return State(cache, draft_cache, length, token, guess, key), new, count + 1


class Counts:
    """Of one request. rounds: checks by the model. tokens: that they gave."""

    def __init__(self) -> None:
        self.rounds = self.tokens = 0


def generate_speculatively(
    model: Kimi,
    params: Params,
    draft: Params,
    prompt: list[int],
    *,
    max_new_tokens: int,
    num_guesses: int = 7,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    num_ids: int | None = None,
    counts: Counts | None = None,
) -> Iterator[int]:
    """As `generate`, faster where guesses are right: token ids, one by one.

    Args:
      model: with the taps that the draft was trained with.
      draft: its parameters.
      num_guesses: tokens guessed before each check.
      counts: counts along.

    Raises:
      ValueError: as `generate`; or no guess asked for.
    """
    if num_guesses < 1:
        raise ValueError(f'num_guesses: got {num_guesses}, wanted 1 or more')
    size, choice = check_request(model, prompt, max_new_tokens, temperature, top_p, seed, num_ids)
    counts = Counts() if counts is None else counts
    arguments = model, params, draft, prompt, size, choice, seed
    return _generate(*arguments, max_new_tokens, num_guesses, stop_ids, counts)


def _generate(
    model, params, draft, prompt, size, choice, seed, max_new_tokens, num_guesses, stop_ids, counts
):
    state = read_prompt(model, params, draft, prompt, size, choice, seed)
    tokens, left = [int(np.asarray(state.token)[0])], max_new_tokens
    while True:
        for token in tokens:
            if token in stop_ids:
                return
            yield token
            left -= 1
            if not left:
                return
        state, new, count = _round(model, params, draft, state, choice, num_guesses)
        tokens = np.asarray(new)[0, : int(np.asarray(count)[0])].tolist()
        counts.rounds += 1
        counts.tokens += len(tokens)
