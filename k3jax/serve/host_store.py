"""What a device had no room for: beginnings of prompts in the host's memory, block by block.

An index of its own rules blocks of the same size as the device's. What the device gives up is
copied here as a whole, pages and state, unless it is here already; what is here longest goes first.
Every block has a checksum, looked at before it goes back.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from k3jax.serve.block_pool import BlockPool
from k3jax.serve.prefix_index import Hit, Key, Page, PrefixIndex, State, keys_to

# Copies on their way take memory of the device beside the cache's, each of a page or a state.
_MOST_ON_THE_WAY = 4


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


class HostStore:
    """Beginnings of one model's prompts; not for several threads.

    Attributes:
      index: what is where. words: [blocks, words] uint32.
      num_corrupt: blocks whose checksum was another.
    """

    def __init__(self, num_bytes: int, pool: BlockPool, **index: Any):
        """index: what a `PrefixIndex` is made of.

        Raises:
          ValueError: more than the machine has, or no room for a page and a state.
        """
        if num_bytes > physical_bytes():
            raise ValueError(
                f'prefix_host_bytes: got {num_bytes}, wanted at most the {physical_bytes()} bytes '
                'of this machine'
            )
        self._pool, self._num_blocks, self._index = pool, num_bytes // pool.block_bytes, index
        self._threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        self.num_corrupt = 0
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.index = PrefixIndex(self._num_blocks, **self._index)
        self.words = np.zeros((self._num_blocks, self._pool.num_words), np.uint32)
        self._sums = np.zeros(self._num_blocks, np.uint32)
        self._on_the_way: collections.deque[tuple[jax.Array, list[int]]] = collections.deque()

    def offload(self, evicted: Hit) -> bool:
        """Begins to copy a beginning that the device is about to give up; False: no room."""
        new = self.index.store(keys_to(evicted.state.key))
        if new is None:
            return False
        for number, page in new.pages:
            self._send(evicted.pages[number], page)
        if new.state is not None:
            self._send(evicted.state, new.state)
        return True

    def _send(self, source: Page | State, target: Page | State) -> None:
        words = self._pool.get(source.blocks)
        words.copy_to_host_async()
        self._on_the_way.append((words, list(target.blocks)))
        self._land(_MOST_ON_THE_WAY)

    def _land(self, most: int) -> None:
        """Takes in what has come, and waits until no more than `most` are on their way."""
        way = self._on_the_way
        while way and (len(way) > most or way[0][0].is_ready()):
            words, blocks = way.popleft()
            self.words[blocks] = np.asarray(words)
            self._sums[blocks] = self._checksums(blocks)

    def _checksums(self, blocks: Sequence[int]) -> list[int]:
        return list(self._threads.map(zlib.crc32, (self.words[block] for block in blocks)))

    def lookup(self, keys: Sequence[Key], longer_than: int) -> Hit | None:
        """The longest whole beginning here of more than `longer_than` hash blocks; pins it.

        What has a block that is corrupt is dropped.
        """
        self._land(_MOST_ON_THE_WAY)
        while (hit := self.index.lookup(keys)) is not None:
            if hit.num_hashes <= longer_than:
                self.index.release(hit)
                return None
            self._land(0)
            entries = (*hit.pages, hit.state)
            corrupt = [entry for entry in entries if not self._is_sound(entry)]
            if not corrupt:
                return hit
            self.index.release(hit)
            for entry in corrupt:
                self.index.discard(entry)
        return None

    def _is_sound(self, entry: Page | State) -> bool:
        sums = self._checksums(entry.blocks)
        wrong = [b for b, own in zip(entry.blocks, sums, strict=True) if own != self._sums[b]]
        if wrong:
            self.num_corrupt += len(wrong)
            logging.error(
                'prefix cache: blocks %s in host memory are corrupt; the %d blocks of this %s are '
                'dropped, and what they held is computed again',
                wrong, len(entry.blocks), type(entry).__name__.lower(),
            )  # fmt: skip
        return not wrong

    def get(self, entry: Page | State) -> np.ndarray:
        """[blocks, words]: a copy of what a hit holds."""
        return self.words[list(entry.blocks)]
