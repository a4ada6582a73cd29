"""Beginnings of prompts that need not be read again: an index and the blocks that it rules.

What a slot or lane has read is copied into blocks at the last whole hash block of a prompt, and at
that of its answer, where a next turn begins. A hit copies blocks into the cache of a lane, which
then belongs to the request alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from k3jax.data.images import Patches
from k3jax.model.cache import Cache
from k3jax.model.kimi import Kimi
from k3jax.serve.block_pool import BlockPool, layer_counts, page_tokens
from k3jax.serve.prefix_index import Key, PrefixIndex, keys_of

HASH_TOKENS = 512


def distinct_tokens(
    prompt: Sequence[int], media_id: int | None, media: Sequence[Patches]
) -> np.ndarray:
    """[T] int64: the prompt with numbers made of the media in place of their tokens."""
    tokens = np.array(prompt, np.int64)
    if not media:
        return tokens
    numbers = []
    for patches in media:
        digest = hashlib.blake2b(patches.pixels.tobytes(), digest_size=8)
        digest.update(repr(patches.grid).encode())
        first = int.from_bytes(digest.digest(), 'little') >> 1
        _, rows, columns = patches.grid
        # Never a token: those are not negative.
        numbers.append(-1 - (first + np.arange(rows * columns // 4)) % (2**63 - 1))
    tokens[tokens == media_id] = np.concatenate(numbers)
    return tokens


class PrefixCache:
    """Of one model on one device; not for several threads.

    Attributes:
      hash_tokens: hits are multiples of it.
    """

    def __init__(
        self,
        model: Kimi,
        num_bytes: int,
        *,
        hash_tokens: int = HASH_TOKENS,
        page: int | None = None,
    ):
        """num_bytes: of the blocks. page: tokens of one; None: the smallest that wastes no block.

        Raises:
          ValueError: there is no room for a page and a state.
        """
        config, dtype = model.config, model.run.dtype
        self.hash_tokens = hash_tokens
        self._page = page or page_tokens(config, dtype, hash_tokens)
        num_mla, num_kda = layer_counts(config)
        one = BlockPool(config, model.plan, dtype, 1, self._page)
        self._num_blocks = num_bytes // one.block_bytes
        self._layers = {'page_blocks': num_mla, 'state_blocks': num_kda}
        self._make = lambda: BlockPool(config, model.plan, dtype, self._num_blocks, self._page)
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.index = PrefixIndex(
            self._num_blocks,
            hash_tokens=self.hash_tokens,
            page_tokens=self._page,
            **self._layers,
        )
        self._pool = self._make()

    def boundary(self, length: int) -> int:
        """The last place in a prompt of `length` tokens where its beginning is stored."""
        return length // self.hash_tokens * self.hash_tokens

    def load(self, tokens: np.ndarray, cache: Cache, row: int) -> tuple[Cache, int]:
        """The cache, which is given up, with what is held of a prompt in a row; and how much.

        At least one token is left to be read.
        """
        keys = keys_of(tokens[: len(tokens) - 1], self.hash_tokens)
        hit = self.index.lookup(keys)
        if hit is None:
            return cache, 0
        for number, page in enumerate(hit.pages):
            cache = self._pool.load_page(cache, row, number * self._page, page.blocks)
        length = hit.num_hashes * self.hash_tokens
        cache = self._pool.load_state(cache, row, length, hit.state.blocks)
        self.index.release(hit)
        return cache, length

    def state_of(self, cache: Cache, row: int) -> jax.Array:
        """A row's states now, to be stored when the tokens before them are known."""
        return self._pool.state_of(cache, row)

    def store(self, tokens: np.ndarray, cache: Cache, row: int, state: jax.Array) -> None:
        """Holds a beginning of whole hash blocks, which a row has read; as far as there is room.

        state: of the row just after `tokens`.
        """
        keys: list[Key] = keys_of(tokens, self.hash_tokens)
        assert len(keys) * self.hash_tokens == len(tokens)
        for page in self.index.store_pages(keys):
            number = _number_of(page.keys[0], self._page // self.hash_tokens)
            self._pool.save_page(cache, row, number * self._page, page.blocks)
        taken = self.index.store_state(keys)
        if taken is not None:
            self._pool.save_state(state, taken.blocks)


def _number_of(key: Key, hashes_a_page: int) -> int:
    """Of the page that begins with a key."""
    before = 0
    while key.before is not None:
        key, before = key.before, before + 1
    return before // hashes_a_page
