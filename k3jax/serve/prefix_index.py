"""Which beginnings of prompts are held, in which blocks, and which are given up first.

Tokens are hashed by blocks of `hash_tokens`, each hash over all before it. A page holds the latents
of up to `page_tokens` tokens, of all attention layers; a state that of all KDA layers at the end of
a hash block. Both are made of equal blocks of one pool: a page of one for each attention layer, a
state of one for each KDA layer, taken and given up together. A page may be filled in part. A
beginning is held whole or not at all: its pages, and the state at its end.

Source: Kimi K3's report on serving; Kimi Linear's cache with blocks of two granularities.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Hash = Callable[[bytes], bytes]


def _blake(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclasses.dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class Key:
    """A hash block of a prompt.

    Attributes:
      digest: of it and all before. tokens: its own, to be compared, since hashes may collide.
      before: the block before it.
    """

    digest: bytes
    tokens: bytes
    before: Key | None


def keys_of(tokens: np.ndarray, hash_tokens: int, digest: Hash = _blake) -> list[Key]:
    """Of the whole hash blocks of tokens [T] int64; what stands for media must tell them apart."""
    keys: list[Key] = []
    for start in range(0, len(tokens) - hash_tokens + 1, hash_tokens):
        own = np.ascontiguousarray(tokens[start : start + hash_tokens], np.int64).tobytes()
        before = keys[-1] if keys else None
        keys.append(Key(digest((before.digest if before else b'') + own), own, before))
    return keys


@dataclasses.dataclass(eq=False)
class Page:
    """keys: of the hash blocks that are in it, in order."""

    keys: tuple[Key, ...]
    blocks: tuple[int, ...]
    pins: int = 0


@dataclasses.dataclass(eq=False)
class State:
    """key: of the hash block at whose end it is."""

    key: Key
    blocks: tuple[int, ...]
    pins: int = 0


class Hit(NamedTuple):
    """A beginning that is held.

    num_hashes: hash blocks. pages: in order; the last may hold more than the hit.
    """

    num_hashes: int
    pages: tuple[Page, ...]
    state: State


class New(NamedTuple):
    """What is to be written: pages with their numbers, and the state if it was not held yet."""

    pages: tuple[tuple[int, Page], ...]
    state: State | None


class PrefixIndex:
    """What is held where; touches no memory.

    Attributes:
      hash_tokens, page_tokens: page_tokens is a multiple.
      num_blocks: in use or free.
      on_evict: told of each beginning that is given up for lack of room, while it is still there.
      num_evicted: how many that were.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        page_blocks: int,
        state_blocks: int,
        hash_tokens: int,
        page_tokens: int,
        on_evict: Callable[[Hit], None] | None = None,
    ):
        """page_blocks, state_blocks: of a page and of a state: attention layers and KDA layers.

        Raises:
          ValueError: pages that are no whole hash blocks, or a pool too small for one of each.
        """
        if page_tokens % hash_tokens:
            raise ValueError(
                f'page_tokens: got {page_tokens}, wanted a multiple of {hash_tokens} (hash_tokens)'
            )
        least = page_blocks + state_blocks
        if num_blocks < least:
            raise ValueError(
                f'prefix cache: got {num_blocks} blocks, wanted at least {least}: a page of '
                f'{page_blocks} and a state of {state_blocks}'
            )
        self.hash_tokens, self.page_tokens = hash_tokens, page_tokens
        self.num_blocks, self.num_evicted, self.on_evict = num_blocks, 0, on_evict
        self._page_blocks, self._state_blocks = page_blocks, state_blocks
        self._free = list(range(num_blocks))[::-1]
        # The one object for each key that is held, so that equal keys are the same.
        self._known: weakref.WeakValueDictionary[bytes, Key] = weakref.WeakValueDictionary()
        self._pages_at: dict[Key, list[Page]] = {}  # by the first key in it
        self._state_of: dict[Key, State] = {}
        # From what was used longest ago on; a dict keeps its order. A state is before its pages.
        self._used: dict[Page | State, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def hashes_a_page(self) -> int:
        return self.page_tokens // self.hash_tokens

    def blocks_of(self, num_hashes: int) -> int:
        """That a beginning takes where nothing of it is held."""
        return -(-num_hashes // self.hashes_a_page) * self._page_blocks + self._state_blocks

    def entries(self) -> Iterator[Page | State]:
        """All that is held, from what was used longest ago on."""
        yield from self._used

    def beginnings(self) -> list[Hit]:
        """All that could be hit."""
        found = (self._whole(entry) for entry in self._used if isinstance(entry, State))
        return [hit for hit in found if hit is not None]

    def _held(self, keys: Sequence[Key]) -> list[Key]:
        """The index's own objects for the first of `keys`, as far as it has any."""
        held: list[Key] = []
        for key in keys:
            found = self._known.get(key.digest)
            before = held[-1] if held else None
            if found is None or found.before is not before or found.tokens != key.tokens:
                break
            held.append(found)
        return held

    def _adopted(self, keys: Sequence[Key]) -> list[Key]:
        """The same, where all of `keys` become known; up to one whose digest is another's."""
        adopted = self._held(keys)
        for key in keys[len(adopted) :]:
            if key.digest in self._known:
                break
            key = dataclasses.replace(key, before=adopted[-1] if adopted else None)
            self._known[key.digest] = key
            adopted.append(key)
        return adopted

    def lookup(self, keys: Sequence[Key]) -> Hit | None:
        """The longest beginning of a prompt that is held; pins it until it is released."""
        held, size = self._held(keys), self.hashes_a_page
        pages: list[Page] = []
        reach = 0
        for first in range(0, len(held), size):
            page, count = self._longest(held[first : first + size])
            if page is None:
                break
            pages.append(page)
            reach += count
            if count < size:
                break
        for end in range(reach, 0, -1):
            state = self._state_of.get(held[end - 1])
            if state is not None:
                hit = Hit(end, tuple(pages[: -(-end // size)]), state)
                self._pin(hit, 1)
                self._touch(hit.pages, state)
                return hit
        return None

    def _longest(self, own: Sequence[Key]) -> tuple[Page | None, int]:
        """The page that holds most of one page's keys, and how many."""
        best, most = None, 0
        for page in self._pages_at.get(own[0], ()):
            same = (one is other for one, other in zip(page.keys, own, strict=False))
            count = sum(itertools.takewhile(bool, same))
            if count > most:
                best, most = page, count
        return best, most

    def release(self, hit: Hit) -> None:
        """Of a hit whose blocks were copied."""
        self._pin(hit, -1)

    def _pin(self, hit: Hit, by: int) -> None:
        for entry in (*hit.pages, hit.state):
            entry.pins += by
            assert entry.pins >= 0

    def _touch(self, pages: Iterable[Page], state: State) -> None:
        """Later pages go first when blocks are needed: without the earlier they are of no use; and
        the state before all of them, while they are there."""
        for entry in [state, *list(pages)[::-1]]:
            self._used.pop(entry, None)
            self._used[entry] = None

    def store(self, keys: Sequence[Key]) -> New | None:
        """Takes blocks for what is not held yet of a beginning: of all of it, or None.

        None is also for keys whose digest is another's: of those nothing is held.
        """
        adopted, size = self._adopted(keys), self.hashes_a_page
        if not keys or len(adopted) < len(keys):
            return None
        runs = [tuple(adopted[first : first + size]) for first in range(0, len(adopted), size)]
        found = [self._longest(run) for run in runs]
        missing = [number for number, run in enumerate(runs) if found[number][1] < len(run)]
        state = self._state_of.get(adopted[-1])
        # All that is in these is in the pages that take their place.
        shorter = [
            page
            for page, count in (found[number] for number in missing)
            if page is not None and len(page.keys) == count and not page.pins
        ]
        keep = {entry for entry in (state, *(page for page, _ in found)) if entry is not None}
        wanted = len(missing) * self._page_blocks + (state is None) * self._state_blocks
        blocks = self._take(wanted, keep, shorter)
        if blocks is None:
            return None
        pages = [page for page, _ in found]
        for number in missing:
            own, blocks = blocks[: self._page_blocks], blocks[self._page_blocks :]
            pages[number] = Page(runs[number], own)
            self._pages_at.setdefault(runs[number][0], []).append(pages[number])
        new = tuple((number, pages[number]) for number in missing)
        if state is not None:
            self._touch(pages, state)
            return New(new, None)
        state = self._state_of[adopted[-1]] = State(adopted[-1], blocks)
        self._touch(pages, state)
        return New(new, state)

    def discard(self, entry: Page | State) -> None:
        """Gives up what is not to be hit any more, and what is of no use without it."""
        if entry in self._used and not entry.pins:
            self._drop(entry)
        for state in [e for e in self._used if isinstance(e, State) and not e.pins]:
            if self._whole(state) is None:
                self._drop(state)

    def _take(
        self, count: int, keep: set[Page | State], shorter: list[Page]
    ) -> tuple[int, ...] | None:
        """`count` free blocks, giving up what was used longest ago and at last `shorter`, which
        goes in any case; None, and nothing is given up, if too much is in `keep` or pinned."""
        others = [e for e in self._used if not e.pins and (e not in keep or e in shorter)]
        if self.num_free + sum(len(entry.blocks) for entry in others) < count:
            return None
        victims = iter([e for e in others if e not in shorter] + shorter)
        while self.num_free < count:
            self._evict(next(victims))
        for page in shorter:
            if page in self._used:
                self._drop(page)
        return tuple(self._free.pop() for _ in range(count))

    def _evict(self, entry: Page | State) -> None:
        hit = self._whole(entry) if isinstance(entry, State) else None
        if hit is not None:
            self.num_evicted += 1
            if self.on_evict is not None:
                self.on_evict(hit)
        self._drop(entry)

    def _whole(self, state: State) -> Hit | None:
        """The beginning that a state ends, if its pages are held."""
        keys, size = keys_to(state.key), self.hashes_a_page
        runs = [keys[first : first + size] for first in range(0, len(keys), size)]
        found = [self._longest(run) for run in runs]
        if any(count < len(run) for (_, count), run in zip(found, runs, strict=True)):
            return None
        return Hit(len(keys), tuple(page for page, _ in found), state)

    def _drop(self, entry: Page | State) -> None:
        del self._used[entry]
        self._free += entry.blocks
        if isinstance(entry, State):
            del self._state_of[entry.key]
            return
        beside = self._pages_at[entry.keys[0]]
        beside.remove(entry)
        if not beside:
            del self._pages_at[entry.keys[0]]


def keys_to(key: Key | None) -> list[Key]:
    """A key and all before it, in order."""
    found: list[Key] = []
    while key is not None:
        found.append(key)
        key = key.before
    return found[::-1]
