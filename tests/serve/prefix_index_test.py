"""What is found is what was stored, nothing is leaked or given out twice, collisions are misses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.serve.prefix_index import PrefixIndex, State, keys_of, keys_to

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


def store(index, text):
    return index.store(keys(text))


def test_a_hit_ends_where_a_state_is_and_pages_reach():
    index = index_of()
    new = store(index, 'a' * 10 + 'b' * 10)  # a whole page, and two thirds of one
    assert [(number, len(page.keys)) for number, page in new.pages] == [(0, 3), (1, 2)]
    assert index.lookup(keys('a' * 10 + 'b' * 9)) is None  # four blocks are there, without a state
    hit = index.lookup(keys('a' * 10 + 'b' * 10 + 'c' * 8))
    assert hit.num_hashes == 5 and hit.state is new.state
    assert hit.pages == tuple(page for _, page in new.pages)
    assert store(index, 'a' * 10 + 'bb').pages == ()
    assert index.lookup(keys('a' * 10 + 'b' * 6 + 'x' * 4)).num_hashes == 3
    assert index.lookup(keys('x' + 'a' * 19)) is None
    assert store(index, 'a' * 10 + 'b' * 10) == ((), None)


def test_a_page_that_goes_on_takes_the_place_of_the_one_it_has_in_it():
    index = index_of(40)
    first, second = store(index, 'a' * 16), store(index, 'a' * 20)
    assert len(second.pages) == 1 and first.pages[1][1] not in list(index.entries())
    blocks_in_use(index, 40)
    # Shares half a page, and cannot share its blocks.
    other = store(index, 'a' * 16 + 'b' * 4)
    assert second.pages[0][1] in list(index.entries()) and len(other.pages) == 1
    for text, reach in (('a' * 20, 5), ('a' * 16 + 'b' * 4, 5), ('a' * 16, 4)):
        assert index.lookup(keys(text)).num_hashes == reach


def test_what_was_used_longest_ago_goes_first_and_as_a_whole():
    index = index_of(2 * (2 * PAGE_BLOCKS + STATE_BLOCKS))
    given_up = []
    index.on_evict = lambda hit: given_up.append((hit.num_hashes, len(hit.pages)))
    store(index, 'a' * 24)
    store(index, 'b' * 24)
    index.release(index.lookup(keys('a' * 24)))
    store(index, 'c' * 12)
    assert given_up == [(6, 2)] and index.num_evicted == 1
    assert index.lookup(keys('b' * 24)) is None
    assert index.lookup(keys('a' * 24)).num_hashes == 6


def test_what_is_pinned_stays_and_what_does_not_fit_leaves_all_as_it_was():
    num_blocks = 2 * PAGE_BLOCKS + STATE_BLOCKS
    index = index_of(num_blocks)
    store(index, 'a' * 24)
    hit = index.lookup(keys('a' * 24))
    index.discard(hit.state)
    assert store(index, 'b' * 24) is None
    index.release(hit)
    before = list(index.entries())
    assert store(index, 'b' * 36) is None and list(index.entries()) == before
    assert index.blocks_of(9) == 3 * PAGE_BLOCKS + STATE_BLOCKS
    assert len(store(index, 'b' * 24).pages) == 2
    blocks_in_use(index, num_blocks)
    assert len(store(index, 'b' * 16).pages) == 0  # the states of both ends have no room
    assert index.lookup(keys('b' * 24)).num_hashes == 4


def test_what_is_discarded_takes_along_what_is_of_no_use_without_it():
    index = index_of()
    first, second = store(index, 'a' * 12), store(index, 'a' * 12 + 'b' * 12)
    index.discard(second.pages[0][1])
    assert list(index.entries()) == [first.state, first.pages[0][1]]
    index.discard(first.state)
    assert list(index.entries()) == [first.pages[0][1]]


@pytest.mark.parametrize('digest', [lambda _: b'', lambda data: data[-1:]])
def test_prompts_whose_hashes_collide_are_never_taken_for_each_other(digest):
    index = index_of()
    texts = ['aaaabbbbcccc', 'xxxxbbbbcccc', 'aaaaxxxxcccc', 'aaaabbbbxxxx', 'bbbbaaaacccc']
    for text in texts:
        own = keys(text, digest)
        new = index.store(own)
        hit = index.lookup(own)
        assert (hit is None) == (new is None)
        if hit is not None:
            held = [key.tokens for page in hit.pages for key in page.keys][: hit.num_hashes]
            assert held == [key.tokens for key in own] and hit.state is new.state


@settings(max_examples=100, deadline=None)
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
        match data.draw(st.sampled_from(['store', 'store', 'lookup', 'lookup', 'release', 'drop'])):
            case 'store' if own:
                new = index.store(own)
                for _, page in () if new is None else new.pages:
                    content = b''.join(key.tokens for key in keys_to(page.keys[-1]))
                    for layer, block in enumerate(page.blocks):
                        written[block] = ('page', layer, content)
                if new is not None and new.state is not None:
                    content = b''.join(key.tokens for key in own)
                    for layer, block in enumerate(new.state.blocks):
                        written[block] = ('state', layer, content)
            case 'drop':
                entries = list(index.entries())
                if entries:
                    index.discard(data.draw(st.sampled_from(entries)))
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
        states = [entry for entry in index.entries() if isinstance(entry, State)]
        assert [hit.state for hit in index.beginnings()] == states
        for hit in held:
            assert set(hit.state.blocks) <= set(used)
    for hit in held:
        index.release(hit)
    assert all(entry.pins == 0 for entry in index.entries())


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
