"""How text is continued: prefill in pieces, then one token at a time with the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.model.cache import Cache, init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.serve.sampling import Choice, sample
from k3jax.train.eval import bucket, check_token_ids

PREFILL_PIECE = 512
CACHE_STEP = 256


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(model, params, tokens, num_real, cache):
    return prefill(model, params, tokens, num_real, cache)


def _take(logits: jax.Array, key: jax.Array, choice: Choice) -> tuple[jax.Array, jax.Array]:
    """The next token [B], and the next key."""
    key, now = jax.random.split(key)
    return sample(logits, now, choice), key


_take_first = jax.jit(_take)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode(model, params, token, cache, key, choice):
    logits, cache = decode(model, params, token, cache)
    return *_take(logits, key, choice), cache


def cache_size(num_prompt: int, max_new_tokens: int, limit: int) -> int:
    """Cache length for a request, in steps that keep compilations few.

    Raises:
      ValueError: prompt and continuation together are longer than the model allows.
    """
    wanted = num_prompt + max_new_tokens
    if wanted > limit:
        raise ValueError(
            f'prompt of {num_prompt} tokens and {max_new_tokens} new ones: got {wanted}, wanted '
            f'at most {limit} (model.max_position_embeddings); shorten one of them'
        )
    return min(limit, -(-wanted // CACHE_STEP) * CACHE_STEP)


class Piece(NamedTuple):
    """A part of a prompt, padded to one of a few sizes.

    tokens: [1, T]. num_real: [1]. next_tokens: [1, T], what follows each in the prompt, or -1.
    """

    tokens: np.ndarray
    num_real: np.ndarray
    next_tokens: np.ndarray


def pieces(prompt: list[int]) -> Iterator[Piece]:
    """A prompt as it is read."""
    for start in range(0, len(prompt), PREFILL_PIECE):
        count = min(PREFILL_PIECE, len(prompt) - start)
        shape = 1, min(bucket(count), PREFILL_PIECE)
        tokens, following = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        tokens[0, :count] = prompt[start : start + count]
        after = prompt[start + 1 : start + count + 1]
        following[0, : len(after)] = after
        yield Piece(tokens, np.array([count], np.int32), following)


def read_prompt(model: Kimi, params: Any, prompt: list[int], size: int) -> tuple[jax.Array, Cache]:
    """Logits [1, Z] after `prompt` and a cache of `size` tokens that holds it."""
    cache = init_cache(model.config, model.plan, 1, size, model.run.dtype)
    logits = None
    for piece in pieces(prompt):
        logits, cache = _prefill(model, params, piece.tokens, piece.num_real, cache)
    return logits, cache


def check_request(
    model: Kimi,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    num_ids: int | None,
) -> tuple[int, Choice]:
    """The cache's length for a request, and how its tokens are taken; arguments as of `generate`.

    Raises:
      ValueError: see `generate`.
    """
    check_token_ids(prompt, model.config.vocab_size, 'prompt')
    if max_new_tokens < 1:
        raise ValueError(f'max_new_tokens: got {max_new_tokens}, wanted 1 or more')
    if not 0 <= temperature < math.inf:
        raise ValueError(f'temperature: got {temperature}, wanted a number of 0 or more')
    if not 0 < top_p <= 1:
        raise ValueError(f'top_p: got {top_p}, wanted a number in (0, 1]')
    if not 0 <= seed < 2**32:
        raise ValueError(f'seed: got {seed}, wanted 0..{2**32 - 1}')
    size = cache_size(len(prompt), max_new_tokens, model.config.max_position_embeddings)
    num_ids = num_ids or model.config.vocab_size
    return size, Choice(jnp.float32(temperature), jnp.float32(top_p), jnp.int32(num_ids))


def generate(
    model: Kimi,
    params: Any,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    num_ids: int | None = None,
) -> Iterator[int]:
    """New token ids, one by one, up to `max_new_tokens` or a stop id (which is not given out).

    num_ids: ids from here on stand for nothing (the model's table is larger than the tokenizer)
      and are never taken; None: all of the model's vocabulary.

    Raises:
      ValueError: empty prompt, an id outside the vocabulary, a prompt beyond the cache, or a
        temperature or top_p that is no such thing.
    """
    size, choice = check_request(model, prompt, max_new_tokens, temperature, top_p, seed, num_ids)
    return _generate(model, params, prompt, size, max_new_tokens, choice, seed, stop_ids)


def _generate(model, params, prompt, size, max_new_tokens, choice, seed, stop_ids):
    logits, cache = read_prompt(model, params, prompt, size)
    token, key = _take_first(logits, jax.random.key(seed), choice)
    for left in reversed(range(max_new_tokens)):
        value = int(np.asarray(token)[0])
        if value in stop_ids:
            return
        yield value
        if left:
            token, key, cache = _decode(model, params, token, cache, key, choice)
