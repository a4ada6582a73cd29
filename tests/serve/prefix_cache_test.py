"""On the device or on the host, what is held of a prompt is what was stored, or is not held.

Blocks here are NumPy arrays, and what a token leaves in a cache is a number made of all before it.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.serve import prefix_cache
from k3jax.serve.host_store import physical_bytes
from k3jax.serve.prefix_cache import PrefixCache
from k3jax.serve.prefix_index import Hit, keys_of
from tests import tiny

MODEL = Kimi(tiny.k3((1, 2), (3,)), Run(jnp.dtype('float32'), implementation='xla'))
ROWS, NUM_KDA = 2, 2
HISTORIES = 300
NINE = np.int64(9).tobytes()


class Copy:
    """Words on their way to the host; they arrive when they are asked for, or at random."""

    def __init__(self, words, rng):
        self._words, self._rng, self.is_sent = words, rng, False

    def copy_to_host_async(self):
        self.is_sent = True

    def is_ready(self):
        return self._rng.random() < 0.3

    def __array__(self, dtype=None, copy=None):
        assert self.is_sent
        return self._words


class ArrayPool:
    """A `BlockPool` of arrays: a cache is [rows, tokens + 1], the last the state."""

    rng = np.random.default_rng(0)

    def __init__(self, config, plan, dtype, num_blocks, page_tokens):
        self._page, self.num_words = page_tokens, page_tokens
        self.block_bytes, self._num_blocks = 4 * page_tokens, num_blocks
        self.reset()

    def reset(self):
        self.blocks = np.zeros((self._num_blocks, self._page), np.uint32)

    def get(self, ids):
        return Copy(self.blocks[list(ids)], self.rng)

    def put(self, words, ids):
        assert len(words) == len(ids)
        self.blocks[list(ids), : words.shape[1]] = words

    def state_of(self, cache, row):
        return np.tile(cache[row, -1], (NUM_KDA, 1)) + np.arange(NUM_KDA, dtype=np.uint32)[:, None]

    def save_page(self, cache, row, start, ids):
        page = cache[row, start : start + self._page]
        (block,) = ids
        self.blocks[block, : len(page)] = page

    def load_page(self, cache, row, start, ids):
        (block,) = ids
        own = cache[row, start : min(start + self._page, cache.shape[1] - 1)]
        own[:] = self.blocks[block, : len(own)]
        return cache

    def load_state(self, cache, row, length, ids):
        states = self.blocks[list(ids), 0] - np.arange(NUM_KDA, dtype=np.uint32)
        assert (states == states[0]).all()
        cache[row, -1] = states[0]
        return cache


def traces(tokens):
    """[T] uint32: what each token leaves, given all before it."""
    found, last = [], 17
    for token in tokens:
        last = (last * 1_000_003 + int(token) + 1) % 2**32
        found.append(last)
    return np.array(found, np.uint32)


def cache_after(tokens, size):
    cache = np.zeros((ROWS, size + 1), np.uint32)
    cache[1, : len(tokens)] = own = traces(tokens)
    cache[1, -1] = own[-1] if len(own) else 0
    return cache


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(prefix_cache, 'BlockPool', ArrayPool)

    def make(device, host, hash_tokens=4, page=12):
        """device, host: blocks of 4 * page bytes; a page takes one and a state two."""
        size = 4 * page
        return PrefixCache(
            MODEL, device * size, host_bytes=host * size, hash_tokens=hash_tokens, page=page
        )

    return make


def store(cache, tokens):
    end = cache.boundary(len(tokens))
    if end:
        own = cache_after(tokens[:end], len(tokens))
        cache.store(np.array(tokens[:end]), own, 1, ArrayPool.state_of(None, own, 1))


def load(cache, tokens):
    """How much of a prompt is held; all of it is looked at."""
    empty = np.zeros((ROWS, len(tokens) + 1), np.uint32)
    found, length = cache.load(np.array(tokens), empty, 1)
    assert length < len(tokens) and length % cache.hash_tokens == 0
    if length:
        want = cache_after(tokens[:length], len(tokens))
        np.testing.assert_array_equal(found[1, :length], want[1, :length])
        assert found[1, -1] == want[1, -1] and not found[0].any()
    else:
        assert not found.any()
    return length


def check(cache):
    """No block is in two places or none, nothing is pinned, every beginning is whole."""
    for index in (cache.index, *([] if cache.host is None else [cache.host.index])):
        used = [block for entry in index.entries() for block in entry.blocks]
        assert len(used) == len(set(used)) and len(used) + index.num_free == index.num_blocks
        assert all(not entry.pins for entry in index.entries())
        states = [entry for entry in index.entries() if hasattr(entry, 'key')]
        assert [hit.state for hit in index.beginnings()] == states
    figures = cache.figures
    assert figures.device_bytes <= cache.index.num_blocks * cache._pool.block_bytes
    if cache.host is not None:
        assert figures.host_bytes <= cache.host.index.num_blocks * cache._pool.block_bytes


@pytest.mark.parametrize('length', [1, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2800])
def test_the_next_turn_reads_from_the_last_whole_block_on_also_after_it_was_away(make, length):
    """The example of the report: of 2,800 tokens that are shared, 2,560 are found."""
    cache = make(3 + 2, 40, hash_tokens=512, page=1024)
    rng = np.random.default_rng(length)
    first = rng.integers(0, 256, length).tolist()
    turn = [*first, *rng.integers(0, 256, 700).tolist()]
    store(cache, first)
    assert load(cache, turn) == length // 512 * 512
    store(cache, rng.integers(0, 256, 3000).tolist())  # all the device has
    assert not cache.index.beginnings()[1:]
    assert load(cache, turn) == length // 512 * 512
    figures = cache.figures
    assert figures.fetches == (length >= 512) and figures.host_evictions == 0
    assert figures.hits == 2 * (length >= 512)
    check(cache)


def test_only_what_is_not_there_yet_is_copied(make):
    cache = make(2 * 2 + 3, 40)
    shared = list(range(24))
    sent, fetched = [], []
    cache._pool.get = lambda ids: sent.append(ids) or ArrayPool.get(cache._pool, ids)
    cache._pool.put = lambda words, ids: (
        fetched.append(ids) or ArrayPool.put(cache._pool, words, ids)
    )
    store(cache, shared)
    store(cache, [*shared, *range(50, 62)])  # shares two pages and does not share its state
    assert sent == []
    store(cache, [9] * 12)  # a block more than the state of the first
    # Two pages and the state of the first; of the second, what is not on the host by then.
    assert [len(ids) for ids in sent] == [1, 1, 2, 1, 2]
    fetched.clear()
    assert load(cache, [*shared, 7]) == 24
    assert [len(ids) for ids in fetched] == [2]  # its pages are still there
    check(cache)


def test_a_corrupt_block_is_found_and_what_it_held_is_given_up(make, caplog):
    cache = make(3 + 2, 40)
    longer, other = list(range(36)), [9] * 36
    store(cache, longer[:12])
    store(cache, longer)
    store(cache, other)  # the first two are away
    assert [hit.num_hashes for hit in cache.host.index.beginnings()] == [3, 9]
    hit = cache.host.index.beginnings()[1]
    cache.host._land(0)
    cache.host.words[hit.pages[1].blocks[0], 3] ^= 1
    assert load(cache, [*longer, 1]) == 12  # what does not need that block is still there
    assert 'are corrupt' in caplog.text and cache.figures.corrupt_blocks == 1
    check(cache)
    store(cache, other)
    (hit,) = (hit for hit in cache.host.index.beginnings() if hit.num_hashes == 3)
    cache.host.words[hit.state.blocks[1], 0] += 1
    assert load(cache, [*longer, 1]) == 0 and cache.figures.corrupt_blocks == 2
    assert hit.state not in cache.host.index.entries()
    check(cache)


def test_hashes_that_collide_on_the_host_are_misses(make, monkeypatch):
    """All prompts have the hashes of each other, but for those of nines."""
    number = lambda data: bytes([len(data) % 8 and data[0] + 1])  # noqa: E731
    digest = lambda data: (b'x' if data.endswith(NINE) else b'') + number(data)  # noqa: E731
    monkeypatch.setattr(prefix_cache, 'keys_of', lambda tokens, size: keys_of(tokens, size, digest))
    cache = make(1 + 2, 40)
    store(cache, [0] * 12)
    store(cache, [9] * 4)
    assert cache.figures.offloads == 1
    assert load(cache, [1] * 13) == 0  # not what the host has under the same hash
    store(cache, [1] * 12)
    assert load(cache, [1] * 13) == 12
    assert load(cache, [0] * 13) == 0  # what the host has cannot be beside that on the device
    store(cache, [9] * 4)
    assert load(cache, [0] * 13) == 12
    assert cache.figures.offloads == 3
    check(cache)


def test_a_beginning_too_large_for_the_device_is_computed_again(make, caplog):
    cache = make(2 + 2, 40)
    store(cache, list(range(12)))
    before = list(cache.index.entries())
    store(cache, list(range(40)))
    assert list(cache.index.entries()) == before and cache.figures.refusals == 1
    assert 'a beginning of 40 tokens wants 6 blocks' in caplog.text
    assert load(cache, list(range(41))) == 12


def test_a_host_that_cannot_take_a_beginning_gives_up_what_it_can_and_loses_it(make):
    cache = make(3 + 2, 1 + 2)
    store(cache, [1] * 12)
    store(cache, [2] * 36)
    assert load(cache, [1] * 13) == 12
    assert cache.figures.offloads == 1 and cache.figures.evictions == 2
    check(cache)


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ((2, 9), 'prefix cache: got 2 blocks, wanted at least 3: a page of 1 and a state of 2'),
        ((9, 2), 'prefix cache: got 2 blocks, wanted at least 3'),
        ((9, physical_bytes()), 'prefix_host_bytes: got .*, wanted at most the .* bytes of this'),
        ((physical_bytes(), 9), 'prefix_cache_bytes: got .*, wanted at most the .* bytes of the d'),
    ],
)
def test_memory_that_is_too_little_or_not_there_is_refused(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(*sizes)


def history(make, seed):
    """One random life of a cache, against all that was ever stored."""
    rng = np.random.default_rng(seed)
    hash_tokens, page = [(4, 12), (4, 4), (64, 512), (512, 1024)][int(rng.integers(4))]
    ends = [e + d for e in (hash_tokens, 64, 512, page, 2 * page, 3 * page) for d in (-1, 0, 1)]
    ends = [end for end in ends if 0 < end <= 4 * page]
    num_host = int(rng.choice([0, 3, 6, 12, 40]))
    cache = make(int(rng.integers(3, 16)), num_host, hash_tokens, page)
    texts = [rng.integers(0, 3, 4 * page).tolist() for _ in range(3)]
    written = set()
    for _ in range(int(rng.integers(5, 30))):
        text = texts[int(rng.integers(len(texts)))]
        tokens = text[: int(rng.choice(ends))]
        if rng.random() < 0.3:  # goes another way in the middle
            tokens = [*tokens, *rng.integers(0, 3, int(rng.choice(ends))).tolist()][: 4 * page]
            texts.append(tokens)
        action = rng.choice(['turn', 'turn', 'turn', 'cancel', 'fetch', 'corrupt'])
        if action == 'turn':
            reach = load(cache, [*tokens, 1])
            assert reach == 0 or tuple(tokens[:reach]) in written
            end = cache.boundary(len(tokens))
            if end and end > reach:
                written.add(tuple(tokens[:end]))
                store(cache, tokens)
        elif action == 'cancel':  # it was looked for, and never stored
            load(cache, [*tokens, 2])
        elif action == 'fetch':
            cache.fetch(np.array([*tokens, 1]))
        elif cache.host is not None and cache.host.index.beginnings():
            cache.host._land(0)
            hits = cache.host.index.beginnings()
            hit: Hit = hits[int(rng.integers(len(hits)))]
            entry = [*hit.pages, hit.state][int(rng.integers(len(hit.pages) + 1))]
            word = int(rng.integers(page))
            cache.host.words[entry.blocks[0], word] ^= np.uint32(1 << rng.integers(32))
        check(cache)
    return cache.figures


def test_any_history_finds_what_a_store_of_everything_has(make):
    seen = [history(make, seed) for seed in range(HISTORIES)]
    for name in ('hits', 'misses', 'offloads', 'fetches', 'host_evictions', 'refusals'):
        assert sum(getattr(figures, name) for figures in seen) > HISTORIES // 10, name
    assert sum(figures.corrupt_blocks for figures in seen) > HISTORIES // 20


@pytest.mark.slow
def test_thousands_of_histories(make):
    for seed in range(HISTORIES, 20 * HISTORIES):
        history(make, seed)


def test_what_is_on_its_way_is_bounded(make):
    cache = make(1 + 2, 60)
    ArrayPool.rng = type('Never', (), {'random': staticmethod(lambda: 1.0)})
    try:
        for number in range(12):
            store(cache, [number] * 12)
            assert len(cache.host._on_the_way) <= 4
        assert load(cache, [3] * 13) == 12
    finally:
        ArrayPool.rng = np.random.default_rng(0)
