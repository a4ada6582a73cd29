"""How text is continued: prefill in pieces, then one token at a time with the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import ModelConfig
from k3jax.model.cache import Cache, init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.serve.sampling import Choice, sample
from k3jax.train.eval import bucket, check_token_ids

PREFILL_PIECE = 512
CACHE_STEP = 256


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(model, params, tokens, num_real, cache, media_rows):
    return prefill(model, params, tokens, num_real, cache, media_rows)


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


@functools.partial(jax.jit, static_argnums=2)
def rows_from(rows: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """[1, count, D]: rows [N, D] from one on, then zeros."""
    padded = jnp.pad(rows, ((0, count), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, count)[None]


def read_prompt(
    model: Kimi, params: Any, prompt: list[int], size: int, media_rows: jax.Array | None = None
) -> tuple[jax.Array, Cache]:
    """Logits [1, Z] after `prompt` and a cache of `size` tokens that holds it.

    media_rows: [N, D], in place of the embeddings of its media tokens.
    """
    cache = init_cache(model.config, model.plan, 1, size, model.run.dtype)
    logits, start = None, 0
    for piece in pieces(prompt):
        own = None
        if media_rows is not None:
            real = piece.tokens[0, : piece.num_real[0]]
            if count := int(np.sum(real == model.config.media_placeholder_token_id)):
                own = rows_from(media_rows, np.int32(start), piece.tokens.shape[1])
                start += count
        logits, cache = _prefill(model, params, piece.tokens, piece.num_real, cache, own)
    return logits, cache


def check_media_count(config: ModelConfig, prompt: list[int], num_rows: int) -> None:
    """Raises ValueError unless a prompt has as many media tokens as there are rows."""
    if config.vision is None:
        return
    count = sum(token == config.media_placeholder_token_id for token in prompt)
    if count != num_rows:
        raise ValueError(
            f'prompt: got {count} media tokens (id {config.media_placeholder_token_id}), wanted '
            f'{num_rows}, one for each row of the images and videos given'
        )


def check_request(
    model: Kimi,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    num_ids: int | None,
    num_rows: int = 0,
) -> tuple[int, Choice]:
    """The cache's length for a request, and how its tokens are taken; arguments as of `generate`.

    Raises:
      ValueError: see `generate`.
    """
    check_token_ids(prompt, model.config.vocab_size, 'prompt')
    check_media_count(model.config, prompt, num_rows)
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
    media_rows: jax.Array | None = None,
) -> Iterator[int]:
    """New token ids, one by one, up to `max_new_tokens` or a stop id (which is not given out).

    num_ids: ids from here on stand for nothing (the model's table is larger than the tokenizer)
      and are never taken; None: all of the model's vocabulary.
    media_rows: [N, D] of `media.see`, in place of the embeddings of the prompt's N media tokens.

    Raises:
      ValueError: empty prompt, an id outside the vocabulary, a prompt beyond the cache, another
        number of media tokens than rows, or a temperature or top_p that is no such thing.
    """
    num_rows = 0 if media_rows is None else len(media_rows)
    size, choice = check_request(
        model, prompt, max_new_tokens, temperature, top_p, seed, num_ids, num_rows
    )
    arguments = prompt, media_rows, size, max_new_tokens, choice, seed, stop_ids
    return _generate(model, params, *arguments)


def _generate(model, params, prompt, media_rows, size, max_new_tokens, choice, seed, stop_ids):
    logits, cache = read_prompt(model, params, prompt, size, media_rows)
    token, key = _take_first(logits, jax.random.key(seed), choice)
    for left in reversed(range(max_new_tokens)):
        value = int(np.asarray(token)[0])
        if value in stop_ids:
            return
        yield value
        if left:
            token, key, cache = _decode(model, params, token, cache, key, choice)
