"""An engine that holds beginnings of prompts answers as one that reads all of them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.images import ImageConfig, Patches
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.pool import Pool
from tests.engines import MODEL, PAD, TOKENIZER, alone, answers, ids, parameters, prompt_of, request

HASH = 8
CONFIG = EngineConfig(
    num_slots=3,
    max_length=200,
    pieces=(8, 32),
    lane_sizes=(48, 120),
    prefix_cache_bytes=200_000,
    prefix_host_bytes=100_000,
    prefix_hash_tokens=HASH,
)
pytestmark = pytest.mark.xdist_group('engine')


@pytest.fixture(scope='module')
def engine():
    pool = Pool(MODEL, parameters(), CONFIG.num_slots, CONFIG.max_length, None)
    engine = Engine(pool, TOKENIZER, CONFIG, images=ImageConfig(patch_size=2))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_held(engine):
    engine._prefixes.reset()


def cached(engine, asked):
    """Tokens that did not have to be read, and the answer."""
    streams = []
    submit = engine.submit
    engine.submit = lambda request: streams.append(submit(request)) or streams[-1]
    try:
        (found,) = answers(engine, asked)
    finally:
        del engine.submit
    return streams[0].cached_tokens, ids(found)


@pytest.mark.parametrize('length', [7, 8, 9, 16, 17, 40, 71])
def test_the_same_prompt_again_is_read_from_its_last_whole_block_on(engine, length):
    prompt = prompt_of(length)
    want = alone(prompt)
    assert cached(engine, request(prompt)) == (0, want)
    reach = (length - 1) // HASH * HASH
    held = length // HASH * HASH
    assert cached(engine, request(prompt)) == (reach if reach == held else 0, want)
    longer = [*prompt, *prompt_of(5, seed=1)]
    assert cached(engine, request(longer)) == (held, alone(longer))


def test_the_next_turn_begins_after_all_but_the_last_partial_block_of_the_first(engine):
    prompt = prompt_of(21)
    _, new = cached(engine, request(prompt, max_new_tokens=30))
    turn = [*prompt, *new, *prompt_of(9, seed=2)]
    # The last token that was drawn has not been read.
    reach = (len(prompt) + len(new) - 1) // HASH * HASH
    assert cached(engine, request(turn)) == (reach, alone(turn))


def test_what_is_held_of_an_answer_does_not_depend_on_what_runs_beside_it(engine):
    """The first page of a short prompt is written when its answer ends, while the other goes on."""
    prompt = prompt_of(5)
    found = answers(
        engine, request(prompt, max_new_tokens=20), request(prompt_of(12), max_new_tokens=90)
    )
    tokens = np.array([*prompt, *ids(found[0])], np.int64)
    held, length = engine._prefixes.load(tokens, engine._pool.lanes(48), 0)
    assert length == 24
    padded = np.pad(tokens[:24].astype(np.int32), (0, 8))[None]
    _, read = engine._pool.read(padded, np.array([24], np.int32), engine._pool.lanes(48), None)
    for one, other in zip(*map(jax.tree.leaves, (held, read)), strict=True):
        if one.shape[1:2] == (48,):  # of latents, what is past them means nothing
            one, other = one[:, :24], other[:, :24]
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_other_images_are_other_prompts(engine):
    rng = np.random.default_rng(0)
    media = [Patches(rng.integers(0, 256, (8, 3, 2, 2), np.uint8), (1, 2, 4)) for _ in range(2)]
    first, second = ([PAD, *prompt_of(33)] for _ in range(2))
    none, want = cached(engine, request(first, media=media[:1]))
    assert none == 0
    assert cached(engine, request(first, media=media[:1])) == (32, want)
    reach, other = cached(engine, request(second, media=media[1:]))
    assert reach == 0 and other != want


def test_a_cache_that_cannot_hold_a_page_is_refused():
    pool = Pool(MODEL, parameters(), 1, 50, None)
    config = EngineConfig(num_slots=1, max_length=50, prefix_cache_bytes=1000)
    with pytest.raises(ValueError, match='prefix cache: got 0 blocks, wanted at least 3'):
        Engine(pool, TOKENIZER, config)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_history_of_requests_answers_as_without_a_cache(engine, data):
    """Prompts of shared beginnings, turns that go on from answers, requests that are dropped; the
    cache holds only some of it."""
    beginnings = [prompt_of(40, seed) for seed in (3, 4)]
    turns = []
    for _ in range(data.draw(st.integers(1, 3))):
        asked = []
        for _ in range(data.draw(st.integers(1, 4))):
            shared = data.draw(st.sampled_from([*beginnings, *turns]))
            prompt = shared[: data.draw(st.integers(1, len(shared)))]
            prompt = [*prompt, *prompt_of(data.draw(st.integers(0, 20)), seed=5)]
            asked.append(request(prompt, max_new_tokens=data.draw(st.integers(1, 20))))
        take = data.draw(st.sampled_from([None, 1]))
        for number, (one, found) in enumerate(
            zip(asked, answers(engine, *asked, take=take), strict=True)
        ):
            want = alone(one.prompt_ids, one.sampling.max_new_tokens)
            assert ids(found) == (want[:1] if take and number == 0 else want)
            turns.append([*one.prompt_ids, *want][:150])
    index = engine._prefixes.index
    used = [block for entry in index.entries() for block in entry.blocks]
    assert len(used) == len(set(used)) and all(not entry.pins for entry in index.entries())
