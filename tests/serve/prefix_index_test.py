"""What is found is what was stored, nothing is leaked or given out twice, collisions are misses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.serve.prefix_index import PrefixIndex, keys_of

HASH, PAGE = 4, 12  # tokens; three hash blocks a page
PAGE_BLOCKS, STATE_BLOCKS = 2, 3


def index_of(num_blocks=200):
    return PrefixIndex(
        num_blocks,
        page_blocks=PAGE_BLOCKS,
        state_blocks=STATE_BLOCKS,
        hash_tokens=HASH,
        page_tokens=PAGE,
    )


def keys(text, digest=None):
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return keys_of(tokens, HASH) if digest is None else keys_of(tokens, HASH, digest)


def blocks_in_use(index, num_blocks):
    """Of all entries; each block once, free ones with them."""
    used = [block for entry in index.entries() for block in entry.blocks]
    assert len(used) == len(set(used))
    assert len(used) + index.num_free == num_blocks
    return used


def store(index, text, state=True):
    new = index.store_pages(keys(text))
    return new, index.store_state(keys(text)) if state else None


def test_a_hit_ends_where_a_state_is_and_pages_reach():
    index = index_of()
    new, state = store(index, 'a' * 10 + 'b' * 10)  # a whole page, and two thirds of one
    assert [len(page.keys) for page in new] == [3, 2] and state is not None
    assert index.lookup(keys('a' * 10 + 'b' * 9)) is None  # four blocks are there, without a state
    hit = index.lookup(keys('a' * 10 + 'b' * 10 + 'c' * 8))
    assert hit.num_hashes == 5 and list(hit.pages) == new and hit.state is state
    store(index, 'a' * 10 + 'bb', state=True)
    assert index.lookup(keys('a' * 10 + 'b' * 6 + 'x' * 4)).num_hashes == 3
    assert index.lookup(keys('x' + 'a' * 19)) is None


def test_a_page_that_goes_on_takes_the_place_of_the_one_it_has_in_it():
    index = index_of(40)
    first, _ = store(index, 'a' * 16)
    second, _ = store(index, 'a' * 20)
    assert len(second) == 1 and first[1] not in list(index.entries())
    blocks_in_use(index, 40)
    other, _ = store(index, 'a' * 16 + 'b' * 4)  # shares half a page, and cannot share its blocks
    assert second[0] in list(index.entries()) and len(other) == 1
    for text in ('a' * 20, 'a' * 16 + 'b' * 4):
        assert index.lookup(keys(text)).num_hashes == 5


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings():
    index = index_of(2 * (2 * PAGE_BLOCKS + STATE_BLOCKS))
    store(index, 'a' * 24)
    store(index, 'b' * 24)
    index.release(index.lookup(keys('a' * 24)))
    store(index, 'c' * 12)
    assert index.lookup(keys('b' * 24)) is None
    assert index.lookup(keys('a' * 24)).num_hashes == 6


def test_what_is_pinned_stays_and_what_does_not_fit_is_not_stored():
    index = index_of(2 * PAGE_BLOCKS + STATE_BLOCKS)
    store(index, 'a' * 24)
    hit = index.lookup(keys('a' * 24))
    assert store(index, 'b' * 24) == ([], None)
    index.drop_state(hit.state)
    index.release(hit)
    new, _ = store(index, 'b' * 24)
    assert len(new) == 2
    blocks_in_use(index, 2 * PAGE_BLOCKS + STATE_BLOCKS)


@pytest.mark.parametrize('digest', [lambda _: b'', lambda data: data[-1:]])
def test_prompts_whose_hashes_collide_are_never_taken_for_each_other(digest):
    index = index_of()
    texts = ['aaaabbbbcccc', 'xxxxbbbbcccc', 'aaaaxxxxcccc', 'aaaabbbbxxxx', 'bbbbaaaacccc']
    for text in texts:
        own = keys(text, digest)
        new, state = index.store_pages(own), index.store_state(own)
        hit = index.lookup(own)
        if hit is not None:
            held = [key.tokens for page in hit.pages for key in page.keys][: hit.num_hashes]
            assert held == [key.tokens for key in own][: hit.num_hashes]
            assert hit.state is state or state is None
        del new


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_history_finds_what_a_store_of_everything_has(data):
    """Prompts over two letters, so that most share beginnings, against all that was written."""
    num_blocks = data.draw(st.integers(PAGE_BLOCKS + STATE_BLOCKS, 40))
    index = index_of(num_blocks)
    written, held = {}, []  # what is in each block: (kind, layer, content)
    for _ in range(data.draw(st.integers(1, 40))):
        letters = data.draw(st.lists(st.sampled_from('ab'), min_size=1, max_size=9))
        text = ''.join(letter * HASH for letter in letters)
        own = keys(text + 'z' * data.draw(st.integers(0, HASH - 1)))
        match data.draw(st.sampled_from(['pages', 'state', 'lookup', 'lookup', 'release'])):
            case 'pages':
                for page in index.store_pages(own):
                    content = b''.join(key.tokens for key in chain(page.keys[-1]))
                    for layer, block in enumerate(page.blocks):
                        written[block] = ('page', layer, content)
            case 'state':
                state = index.store_state(own)
                if state is not None:
                    content = b''.join(key.tokens for key in chain(state.key))
                    for layer, block in enumerate(state.blocks):
                        written[block] = ('state', layer, content)
            case 'lookup':
                hit = index.lookup(own)
                if hit is None:
                    continue
                held.append(hit)
                wanted = b''.join(key.tokens for key in own[: hit.num_hashes])
                reach = 0
                for number, page in enumerate(hit.pages):
                    end = min(len(wanted), 8 * PAGE * (number + 1))
                    for layer, block in enumerate(page.blocks):
                        kind, its_layer, content = written[block]
                        assert (kind, its_layer) == ('page', layer)
                        assert content[:end] == wanted[:end]
                    reach = end
                assert reach == len(wanted)
                for layer, block in enumerate(hit.state.blocks):
                    assert written[block] == ('state', layer, wanted)
            case 'release' if held:
                index.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        used = blocks_in_use(index, num_blocks)
        for hit in held:
            assert set(hit.state.blocks) <= set(used)
    for hit in held:
        index.release(hit)
    assert all(entry.pins == 0 for entry in index.entries())


def chain(key):
    found = []
    while key is not None:
        found.append(key)
        key = key.before
    return found[::-1]


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'page_tokens': 10}, r'page_tokens: got 10, wanted a multiple of 4 \(hash_tokens\)'),
        ({'num_blocks': 4}, 'got 4 blocks, wanted at least 5: a page of 2 and a state of 3'),
    ],
)
def test_pools_that_cannot_hold_anything_are_refused(fields, message):
    own = {'num_blocks': 9, 'page_blocks': 2, 'state_blocks': 3, 'hash_tokens': 4}
    with pytest.raises(ValueError, match=message):
        PrefixIndex(**(own | {'page_tokens': 12} | fields))
