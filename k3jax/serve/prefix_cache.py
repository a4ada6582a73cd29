"""Beginnings of prompts that need not be read again: an index and the blocks that it rules.

What a slot or lane has read is copied into blocks at the last whole hash block of a prompt, and at
that of its answer, where a next turn begins. A hit copies blocks into the cache of a lane, which
then belongs to the request alone. Under pressure what was used longest ago moves to the host's
memory, and back when it is asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from k3jax.data.images import Patches
from k3jax.model.cache import Cache
from k3jax.model.kimi import Kimi
from k3jax.serve.block_pool import BlockPool, layer_counts, page_tokens
from k3jax.serve.host_store import HostStore, physical_bytes
from k3jax.serve.prefix_figures import PrefixFigures
from k3jax.serve.prefix_index import Hit, Key, PrefixIndex, keys_of

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
      index: of the device. host: what the device had no room for, or None.
    """

    def __init__(
        self,
        model: Kimi,
        num_bytes: int,
        *,
        host_bytes: int = 0,
        hash_tokens: int = HASH_TOKENS,
        page: int | None = None,
    ):
        """num_bytes: of the blocks on the device. host_bytes: of those on the host; 0: none.
        page: tokens of one; None: the smallest that wastes no block.

        Raises:
          ValueError: there is no room for a page and a state, or less memory than that.
        """
        limit = _device_bytes()
        if num_bytes > limit:
            raise ValueError(
                f'prefix_cache_bytes: got {num_bytes}, wanted at most the {limit} bytes of the '
                'device'
            )
        config, dtype = model.config, model.run.dtype
        self.hash_tokens = hash_tokens
        self._page = page or page_tokens(config, dtype, hash_tokens)
        num_mla, num_kda = layer_counts(config)
        block_bytes = BlockPool(config, model.plan, dtype, 1, self._page).block_bytes
        self._num_blocks = num_bytes // block_bytes
        self._fields = {
            'page_blocks': num_mla,
            'state_blocks': num_kda,
            'hash_tokens': hash_tokens,
            'page_tokens': self._page,
        }
        self._figures = PrefixFigures()
        self.index = self._new_index()
        self._pool = BlockPool(config, model.plan, dtype, self._num_blocks, self._page)
        self.host = HostStore(host_bytes, self._pool, **self._fields) if host_bytes else None

    def _new_index(self) -> PrefixIndex:
        return PrefixIndex(self._num_blocks, on_evict=self._give_up, **self._fields)

    def reset(self) -> None:
        """Forgets everything, but not the figures."""
        self.index = self._new_index()
        self._pool.reset()
        if self.host is not None:
            self.host.reset()

    @property
    def figures(self) -> PrefixFigures:
        """As they are now; for any thread."""
        size, host = self._pool.block_bytes, self.host
        now = {'device_bytes': (self._num_blocks - self.index.num_free) * size}
        if host is not None:
            now['host_bytes'] = (host.index.num_blocks - host.index.num_free) * size
            now['corrupt_blocks'] = host.num_corrupt
        return dataclasses.replace(self._figures, **now)

    def bytes_of(self, num_tokens: int) -> int:
        """Of the blocks that the beginning of a prompt takes."""
        return self.index.blocks_of(num_tokens // self.hash_tokens) * self._pool.block_bytes

    def boundary(self, length: int) -> int:
        """The last place in a prompt of `length` tokens where its beginning is stored."""
        return length // self.hash_tokens * self.hash_tokens

    def load(self, tokens: np.ndarray, cache: Cache, row: int) -> tuple[Cache, int]:
        """The cache, which is given up, with what is held of a prompt in a row; and how much.

        At least one token is left to be read.
        """
        self.fetch(tokens)
        hit = self.index.lookup(self._keys(tokens))
        if hit is None:
            self._figures.misses += 1
            return cache, 0
        for number, page in enumerate(hit.pages):
            cache = self._pool.load_page(cache, row, number * self._page, page.blocks)
        length = hit.num_hashes * self.hash_tokens
        cache = self._pool.load_state(cache, row, length, hit.state.blocks)
        self.index.release(hit)
        self._figures.hits += 1
        self._figures.hit_tokens += length
        return cache, length

    def _keys(self, tokens: np.ndarray) -> list[Key]:
        """Of what may be hit of a prompt."""
        return keys_of(tokens[: len(tokens) - 1], self.hash_tokens)

    def fetch(self, tokens: np.ndarray) -> None:
        """Begins to copy what the host holds of a prompt to the device, if it is more than what is
        there. Early is better: the copies go on beside other work."""
        if self.host is None:
            return
        keys = self._keys(tokens)
        here = self.index.lookup(keys)
        reach = 0 if here is None else here.num_hashes
        if here is not None:
            self.index.release(here)
        there = self.host.lookup(keys, longer_than=reach)
        if there is None:
            return
        new = self.index.store(keys[: there.num_hashes])
        if new is not None:
            self._figures.fetches += 1
            for number, page in new.pages:
                self._pool.put(self.host.get(there.pages[number]), page.blocks)
            if new.state is not None:
                self._pool.put(self.host.get(there.state), new.state.blocks)
        self.host.index.release(there)

    def _give_up(self, evicted: Hit) -> None:
        self._figures.evictions += 1
        if self.host is not None:
            before = self.host.index.num_evicted
            self._figures.offloads += self.host.offload(evicted)
            self._figures.host_evictions += self.host.index.num_evicted - before

    def state_of(self, cache: Cache, row: int) -> jax.Array:
        """A row's states now, to be stored when the tokens before them are known."""
        return self._pool.state_of(cache, row)

    def store(self, tokens: np.ndarray, cache: Cache, row: int, state: jax.Array) -> None:
        """Holds a beginning of whole hash blocks, which a row has read; if there is room.

        state: of the row just after `tokens`.
        """
        keys = keys_of(tokens, self.hash_tokens)
        assert len(keys) * self.hash_tokens == len(tokens)
        new = self.index.store(keys)
        if new is None:
            self._refuse(len(keys))
            return
        for number, page in new.pages:
            self._pool.save_page(cache, row, number * self._page, page.blocks)
        if new.state is not None:
            self._pool.put(state, new.state.blocks)

    def _refuse(self, num_hashes: int) -> None:
        wanted = self.index.blocks_of(num_hashes)
        if wanted <= self._num_blocks:
            return
        self._figures.refusals += 1
        if self._figures.refusals == 1:  # the figure tells of more
            logging.warning(
                'prefix cache: a beginning of %d tokens wants %d blocks of %d bytes, and there are '
                '%d; it is not held. A larger prefix_cache_bytes would hold it.',
                num_hashes * self.hash_tokens, wanted, self._pool.block_bytes, self._num_blocks,
            )  # fmt: skip


def _device_bytes() -> int:
    """Memory of the device that arrays go to."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get('bytes_limit', physical_bytes())
