"""A pool whose steps guess: the draft says some tokens, the model checks them all at once.

What comes out is distributed as from a `Pool`. At temperature 0, and where a request names a seed,
it is the same text, whatever was guessed, and so whatever else runs or is held.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.model.cache import Cache, MLACache
from k3jax.model.draft import empty_cache, fused, read
from k3jax.model.kimi import Kimi, head
from k3jax.model.window import committed, looking_ahead
from k3jax.serve.draft_folder import open_draft
from k3jax.serve.load import Loaded
from k3jax.serve.pool import Pool, batch_axes
from k3jax.serve.rows import Drawn, Rows, adjusted, after_tokens, draw, drawn_of, keys_of, put_row
from k3jax.serve.sampling import accept, agree, probabilities
from k3jax.serve.speculative import guesses_of, read_draft

Params = Any


class DraftPool(Pool):
    """Slots of a model with a draft, on a single device.

    Attributes:
      num_guesses: tokens guessed before each check.
    """

    def __init__(
        self,
        model: Kimi,
        params: Params,
        draft: Params,
        num_slots: int,
        size: int,
        num_guesses: int = 7,
    ):
        """model: with the taps of its draft, whose parameters `draft` is.

        Raises:
          ValueError: no guess is asked for, or more than a slot could ever take.
        """
        if not 1 <= num_guesses < size:
            raise ValueError(
                f'num_guesses: got {num_guesses}, wanted 1 or more, and fewer than the {size} '
                'tokens of a slot'
            )
        assert model.run.parallel is None
        self._draft, self._width = draft, model.config.hidden_size
        super().__init__(model, params, num_slots, size, None)
        self.num_guesses = num_guesses
        functions = (_read_piece, _admit, functools.partial(_round, num_guesses=num_guesses))
        piece, fill, turn = (functools.partial(function, model) for function in functions)
        self._read_piece = jax.jit(piece, donate_argnums=(5, 6, 7))
        self._fill = jax.jit(fill, donate_argnums=(2, 3, 4, 5, 6))
        self._round = jax.jit(turn, donate_argnums=(2, 3, 4, 5))

    def reset(self) -> None:
        super().reset()
        self._draft_cache = empty_cache(self.model, self.num_slots, self.size)
        self._guess = jnp.zeros((self.num_slots, self._width), self.model.run.dtype)

    def lanes(self, size: int) -> Cache:
        self._lane_draft = empty_cache(self.model, 1, size)
        self._lane_feature = jnp.zeros((1, self._width), self.model.run.dtype)
        return super().lanes(size)

    def read(
        self,
        tokens: np.ndarray,
        num_real: np.ndarray,
        following: np.ndarray,
        cache: Cache,
        media: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        logits, cache, self._lane_draft, self._lane_feature = self._read_piece(
            *(self.params, self._draft, tokens, num_real, following),
            *(cache, self._lane_draft, self._lane_feature, media),
        )
        return logits, cache

    def admit(
        self, lanes: Cache, logits: jax.Array, slot: int, row: Rows, mask: np.ndarray | None
    ) -> Drawn:
        constrained = np.bool_(mask is not None)
        mask = self._open_row if mask is None else mask[None]
        self.cache, self._draft_cache, self.rows, self._guess, self._lane_draft, drawn = self._fill(
            *(self.params, self._draft, self.cache, self._draft_cache, self.rows, self._guess),
            *(self._lane_draft, lanes, self._lane_feature, logits, np.int32(slot), row),
            *(mask, constrained),
        )
        return drawn

    def step(
        self, active: np.ndarray, mask: np.ndarray | None, limit: np.ndarray | None = None
    ) -> Drawn:
        """Some tokens of every slot.

        active, mask: as in a `Pool`; the mask is that of the first token.
        limit: [B] int32, how many tokens a slot may take at most, 1 or more; None for any number.
        """
        constrained = np.bool_(mask is not None)
        mask = self.open_mask if mask is None else mask
        if limit is None:
            limit = np.full(self.num_slots, self.num_guesses + 1, np.int32)
        self.cache, self._draft_cache, self.rows, self._guess, drawn = self._round(
            *(self.params, self._draft, self.cache, self._draft_cache, self.rows, self._guess),
            *(active, mask, constrained, limit),
        )
        return drawn


def open_pool(
    loaded: Loaded, num_slots: int, size: int, draft: str | None = None, num_guesses: int = 7
) -> Pool:
    """Slots of a loaded model, which guess where there is a `draft`, a workdir of one.

    Raises:
      ValueError: the slots do not fit the mesh, or the draft is of another model or goes with none.
    """
    model, params = loaded.model, loaded.params
    if draft is None:
        return Pool(model, params, num_slots, size, loaded.mesh)
    if loaded.mesh is not None:
        raise ValueError('--draft: there are no guesses on a mesh yet; leave one of the two out')
    model, own = open_draft(draft, model)
    return DraftPool(model, params, own, num_slots, size, num_guesses)


def _read_piece(
    model: Kimi,
    params: Params,
    draft: Params,
    tokens: jax.Array,
    num_real: jax.Array,
    following: jax.Array,
    cache: Cache,
    draft_cache: MLACache,
    feature: jax.Array,
    media: jax.Array | None,
) -> tuple[jax.Array, Cache, MLACache, jax.Array]:
    """`prefill` with the draft's layer, which takes each token with the one after it.

    following: [B], what comes after the piece, -1 where that is not drawn yet.
    feature: [B, D] of the last token that was read, where that is this piece's.
    """
    places = jnp.arange(tokens.shape[1])
    valid, is_last = places < num_real[:, None], places == num_real[:, None] - 1
    output = model.apply(
        {'params': params}, tokens, valid.astype(jnp.int32), cache, media_rows=media
    )
    next_tokens = jnp.where(is_last, following[:, None], jnp.roll(tokens, -1, axis=1))
    known = (valid & (next_tokens >= 0)).astype(jnp.int32)
    features = fused(draft, output.taps)
    arguments = features, next_tokens, draft_cache, cache.length, known
    _, draft_cache = read(model, draft, params, *arguments)

    def last_of(x: jax.Array, otherwise: jax.Array) -> jax.Array:
        own = jnp.take_along_axis(x, jnp.maximum(num_real - 1, 0)[:, None, None], axis=1)[:, 0]
        return jnp.where(num_real[:, None] > 0, own, otherwise)

    hidden = last_of(output.hidden, 0)
    logits = head(params['lm_head'], hidden)
    return logits, output.cache, draft_cache, last_of(features, feature)


def _admit(
    model,
    params,
    draft,
    cache,
    draft_cache,
    rows,
    guess,
    lane_draft,
    lanes,
    feature,
    logits,
    slot,
    row,
    mask,
    constrained,
):
    drawn, row = draw(logits, row, mask, constrained)
    place, one = lanes.length - 1, jnp.ones((1, 1), jnp.int32)
    arguments = feature[:, None], drawn.token, one, lane_draft, place
    own, lane_draft = read_draft(model, params, draft, *arguments)
    axes = batch_axes(model.config, model.plan, cache)
    cache = put_row(cache, lanes, slot, True, axes)
    draft_cache, rows = put_row(draft_cache, lane_draft, slot), put_row(rows, row, slot)
    return cache, draft_cache, rows, put_row(guess, own, slot), lane_draft, drawn


def _round(
    model,
    params,
    draft,
    cache,
    draft_cache,
    rows,
    guess,
    active,
    mask,
    constrained,
    limit,
    *,
    num_guesses,
):
    rows = rows._replace(active=active)
    cache = cache._replace(length=jnp.where(active, cache.length, 0))  # as in `pool._step`
    place = jnp.arange(num_guesses + 1)
    keys = jax.vmap(lambda ahead: keys_of(rows.seed, rows.count + ahead))(place)
    guesses, q = guesses_of(
        *(model, params, draft, guess, draft_cache, cache.length),
        *(rows.choice, num_guesses, keys[:-1]),
    )
    window = jnp.concatenate([rows.token[:, None], guesses], axis=1)
    output = model.apply({'params': params}, window, jnp.ones_like(window), looking_ahead(cache))
    logits = head(params['lm_head'], output.hidden)
    # A grammar and penalties depend on the tokens before: the engine lets such rows take one.
    logits = logits.at[:, 0].set(adjusted(logits[:, 0], rows, mask, constrained))
    p = jax.vmap(probabilities, in_axes=(1, None), out_axes=1)(logits, rows.choice)

    def one_row(p, q, guesses, key):
        count, token = accept(p[None], q[None], guesses[None], key)
        return count[0], token[0]

    # A key of its own for each place, like those of the guesses but none of them.
    count, token = jax.vmap(one_row)(p, q, guesses, keys_of(rows.seed, ~rows.count))
    new = jnp.where(place < count[:, None], jnp.pad(guesses, ((0, 0), (0, 1))), token[:, None])
    same_count, same = agree(p, guesses, keys)
    count = jnp.where(rows.is_seeded, same_count, count)
    new = jnp.where(rows.is_seeded[:, None], same, new)
    count = jnp.minimum(count + 1, limit)
    after = committed(cache, output.cache, count, model.run.implementation)
    valid = (place < count[:, None]).astype(jnp.int32)
    arguments = fused(draft, output.taps), new, valid, draft_cache, cache.length
    guess, draft_cache = read_draft(model, params, draft, *arguments)
    drawn = drawn_of(logits, new, count, rows)
    return after, draft_cache, after_tokens(rows, new, count), guess, drawn
