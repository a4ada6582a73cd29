"""Which beginnings of prompts are held, in which blocks, and which are given up first.

Tokens are hashed by blocks of `hash_tokens`, each hash over all before it. A page holds the latents
of up to `page_tokens` tokens, of all attention layers; a state that of all KDA layers at the end of
a hash block. Both are made of equal blocks of one pool: a page of one for each attention layer, a
state of one for each KDA layer, taken and given up together. A page may be filled in part.

Source: Kimi K3's report on serving; Kimi Linear's cache with blocks of two granularities.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
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
    """A beginning that is held; pinned until it is released.

    num_hashes: hash blocks. pages: in order; the last may hold more than the hit.
    """

    num_hashes: int
    pages: tuple[Page, ...]
    state: State


class PrefixIndex:
    """What is held where; touches no device.

    Attributes:
      hash_tokens, page_tokens: page_tokens is a multiple.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        page_blocks: int,
        state_blocks: int,
        hash_tokens: int,
        page_tokens: int,
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
        self._page_blocks, self._state_blocks = page_blocks, state_blocks
        self._free = list(range(num_blocks))[::-1]
        # The one object for each key that is held, so that equal keys are the same.
        self._known: weakref.WeakValueDictionary[bytes, Key] = weakref.WeakValueDictionary()
        self._page_of: dict[Key, Page] = {}  # by every key in it
        self._state_of: dict[Key, State] = {}
        # From what was used longest ago on; a dict keeps its order.
        self._used: dict[Page | State, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def hashes_a_page(self) -> int:
        return self.page_tokens // self.hash_tokens

    def entries(self) -> Iterator[Page | State]:
        """All that is held, from what was used longest ago on."""
        yield from self._used

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
        """The longest beginning of a prompt that is held whole, in every layer; pins it."""
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
        for count in range(len(own), 0, -1):
            page = self._page_of.get(own[count - 1])
            if page is not None:
                return page, count
        return None, 0

    def release(self, hit: Hit) -> None:
        """Of a hit whose blocks were copied."""
        self._pin(hit, -1)

    def _pin(self, hit: Hit, by: int) -> None:
        for entry in (*hit.pages, hit.state):
            entry.pins += by
            assert entry.pins >= 0

    def _touch(self, pages: Sequence[Page], state: State | None) -> None:
        """Later pages go first when blocks are needed: without the earlier they are of no use."""
        for entry in ([] if state is None else [state]) + list(pages)[::-1]:
            if entry in self._used:
                del self._used[entry]
            self._used[entry] = None

    def store_pages(self, keys: Sequence[Key]) -> list[Page]:
        """Takes blocks for the pages of a beginning that are not held yet; those are to be written.

        Fewer pages than the beginning has, where no more blocks can be given up.
        """
        adopted, size = self._adopted(keys), self.hashes_a_page
        held: list[Page] = []
        new: list[Page] = []
        for first in range(0, len(adopted), size):
            own = tuple(adopted[first : first + size])
            page, count = self._longest(own)
            if page is None or count < len(own):
                blocks = self._take(self._page_blocks, keep={*held, page})
                if blocks is None:
                    break
                if page is not None and page.keys == own[:count] and not page.pins:
                    self._drop(page)  # all of it is in the new one too
                page = Page(own, blocks)
                self._page_of |= dict.fromkeys(own, page)
                self._used[page] = None
                new.append(page)
            held.append(page)
        self._touch(held, None)
        return new

    def store_state(self, keys: Sequence[Key]) -> State | None:
        """Takes blocks for the state after `keys`; None if it is held, or nothing can be given up.

        Of keys whose digest is another's, nothing is held.
        """
        adopted = self._adopted(keys)
        if len(adopted) < len(keys):
            return None
        found = self._state_of.get(adopted[-1])
        if found is not None:
            self._touch((), found)
            return None
        blocks = self._take(self._state_blocks, keep=set())
        if blocks is None:
            return None
        state = self._state_of[adopted[-1]] = State(adopted[-1], blocks)
        self._used[state] = None
        return state

    def drop_state(self, state: State) -> None:
        """Gives up a state that another has superseded, unless somebody is copying it."""
        if state in self._used and not state.pins:
            self._drop(state)

    def _take(self, count: int, keep: set[Page | State | None]) -> tuple[int, ...] | None:
        """`count` free blocks, giving up what was used longest ago; None if too much is pinned."""
        while len(self._free) < count:
            victim = next((e for e in self._used if not e.pins and e not in keep), None)
            if victim is None:
                return None
            self._drop(victim)
        return tuple(self._free.pop() for _ in range(count))

    def _drop(self, entry: Page | State) -> None:
        del self._used[entry]
        self._free += entry.blocks
        if isinstance(entry, State):
            del self._state_of[entry.key]
            return
        for key in entry.keys:
            if self._page_of.get(key) is entry:
                del self._page_of[key]
