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
from k3jax.serve.prefix_index import keys_of
from tests.engines import (
    MODEL,
    PAD,
    TOKENIZER,
    alone,
    answers,
    check_memory,
    continued,
    drawn_turn,
    ids,
    parameters,
    prompt_of,
    request,
)

HASH = 8
BLOCK_BYTES = 1792  # 32 tokens of the attention layer, or one of the two KDA layers
CONFIG = EngineConfig(
    num_slots=3,
    max_length=200,
    pieces=(8, 32),
    lane_sizes=(48, 120),
    prefix_cache_bytes=20 * BLOCK_BYTES,
    prefix_host_bytes=60 * BLOCK_BYTES,
    prefix_hash_tokens=HASH,
)


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


def logprobs_of(engine, prompt):
    """[Z] after a prompt that is read from its first token on."""
    pool, lanes = engine._pool, engine._pool.lanes(CONFIG.max_length)
    for start in range(0, len(prompt), 32):
        piece = np.array(prompt[start : start + 32], np.int32)
        num_real = np.array([len(piece)], np.int32)
        piece = np.pad(piece, (0, 32 - len(piece)))[None]
        logits, lanes = pool.read(piece, num_real, -num_real, lanes, None)
    return np.asarray(jax.nn.log_softmax(logits[0]))


@pytest.mark.parametrize('length', [7, 8, 9, 16, 17, 40, 71])
def test_the_same_prompt_again_is_read_from_its_last_whole_block_on(engine, length):
    prompt = prompt_of(length)
    want = alone(prompt)
    assert continued(engine, request(prompt)) == (0, want)
    reach = (length - 1) // HASH * HASH
    held = length // HASH * HASH
    assert continued(engine, request(prompt)) == (reach if reach == held else 0, want)
    longer = [*prompt, *prompt_of(5, seed=1)]
    assert continued(engine, request(longer)) == (held, alone(longer))


def test_the_next_turn_begins_after_all_but_the_last_partial_block_of_the_first(engine):
    prompt = prompt_of(21)
    _, new = continued(engine, request(prompt, max_new_tokens=30))
    turn = [*prompt, *new, *prompt_of(9, seed=2)]
    # The last token that was drawn has not been read.
    reach = (len(prompt) + len(new) - 1) // HASH * HASH
    assert continued(engine, request(turn)) == (reach, alone(turn))


def test_a_turn_whose_conversation_was_away_begins_where_it_did_and_a_corrupt_one_anew(
    engine, caplog
):
    before = engine.prefix_figures
    prompt = prompt_of(70)
    _, new = continued(engine, request(prompt, max_new_tokens=11))
    turn = [*prompt, *new, *prompt_of(6, seed=2)]

    def others():
        for seed in range(6, 11):
            continued(engine, request(prompt_of(120, seed)))

    others()
    assert not engine._prefixes.index.lookup(keys_of(np.array(turn), HASH))
    assert continued(engine, request(turn)) == (80, alone(turn))
    now = engine.prefix_figures
    assert now.fetches == before.fetches + 1 and now.offloads > before.offloads
    assert now.corrupt_blocks == before.corrupt_blocks
    others()
    host = engine._prefixes.host
    host._land(0)
    host.words[:, 5] ^= 1
    assert continued(engine, request(turn)) == (0, alone(turn))
    assert engine.prefix_figures.corrupt_blocks > now.corrupt_blocks
    assert 'are corrupt' in caplog.text
    assert continued(engine, request([*turn, 1])) == (80, alone([*turn, 1]))
    check_memory(engine, CONFIG)


def test_the_next_prompt_is_fetched_while_others_are_read(engine):
    prompt = prompt_of(70)
    continued(engine, request(prompt))
    for seed in range(6, 11):
        continued(engine, request(prompt_of(120, seed)))
    fetched, fetch = [], engine._prefixes.fetch

    def watched(tokens):
        fetched.append((len(tokens), engine._group is not None))
        fetch(tokens)

    engine._prefixes.fetch = watched
    try:
        found = answers(engine, request(prompt_of(110)), request([*prompt, 3]))
    finally:
        del engine._prefixes.fetch
    assert ids(found[1]) == alone([*prompt, 3])
    # At first while the other is read, which takes four pieces, and then when its turn comes.
    assert fetched == [(110, False), (71, True), (71, False)]


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
    count, following = np.array([24], np.int32), np.array([-1], np.int32)
    _, read = engine._pool.read(padded, count, following, engine._pool.lanes(48), None)
    for one, other in zip(*map(jax.tree.leaves, (held, read)), strict=True):
        if one.shape[1:2] == (48,):  # of latents, what is past them means nothing
            one, other = one[:, :24], other[:, :24]
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_other_images_are_other_prompts(engine):
    rng = np.random.default_rng(0)
    media = [Patches(rng.integers(0, 256, (8, 3, 2, 2), np.uint8), (1, 2, 4)) for _ in range(2)]
    first, second = ([PAD, *prompt_of(33)] for _ in range(2))
    none, want = continued(engine, request(first, media=media[:1]))
    assert none == 0
    assert continued(engine, request(first, media=media[:1])) == (32, want)
    reach, other = continued(engine, request(second, media=media[1:]))
    assert reach == 0 and other != want


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ((1000, 0), 'prefix cache: got 0 blocks, wanted at least 3'),
        ((2**20, 1000), 'prefix cache: got 0 blocks, wanted at least 3'),
        ((-1, 0), r'prefix_cache_bytes: got -1, wanted 0 \(none\) or more'),
        ((2**20, -1), r'prefix_host_bytes: got -1, wanted 0 \(none\) or more'),
        ((0, 2**20), 'prefix_host_bytes: got 1048576 without prefix_cache_bytes'),
        ((2**20, 2**60), 'prefix_host_bytes: got 1152921504606846976, wanted at most'),
        ((2**60, 0), 'prefix_cache_bytes: got 1152921504606846976, wanted at most'),
    ],
)
def test_sizes_that_hold_nothing_or_do_not_exist_are_refused(sizes, message):
    pool = Pool(MODEL, parameters(), 1, 50, None)
    own = dict(zip(('prefix_cache_bytes', 'prefix_host_bytes'), sizes, strict=True))
    with pytest.raises(ValueError, match=message):
        Engine(pool, TOKENIZER, EngineConfig(num_slots=1, max_length=50, **own))


def test_a_prompt_that_is_longer_than_the_whole_cache_is_read_again(engine, monkeypatch):
    monkeypatch.setattr(engine._prefixes, '_num_blocks', 5)
    engine._prefixes.reset()
    prompt = prompt_of(110)
    assert continued(engine, request(prompt)) == (0, alone(prompt))
    assert continued(engine, request([*prompt, 1])) == (0, alone([*prompt, 1]))
    assert engine.prefix_figures.refusals > 0
    monkeypatch.undo()
    engine._prefixes.reset()


def test_any_history_of_requests_answers_as_without_a_cache(engine):
    """Prompts of shared beginnings, turns that go on from answers, requests that are dropped; the
    device holds only some of it and the host some more. After every prompt the probabilities are
    those of one that is read whole."""
    before = engine.prefix_figures

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def live(data):
        turns = []
        for _ in range(data.draw(st.integers(1, 3))):
            asked = drawn_turn(data, turns)
            take = data.draw(st.sampled_from([None, 1]))
            for number, (one, found) in enumerate(
                zip(asked, answers(engine, *asked, take=take), strict=True)
            ):
                want = alone(one.prompt_ids, one.sampling.max_new_tokens)
                assert ids(found) == (want[:1] if take and number == 0 else want)
                logprobs = logprobs_of(engine, one.prompt_ids)
                for token, logprob in found[0].top:
                    assert abs(logprob - logprobs[token]) < 1e-4
                turns.append([*one.prompt_ids, *want][:150])
            check_memory(engine, CONFIG)

    live()
    for name in ('hits', 'offloads', 'fetches', 'host_evictions'):
        assert getattr(engine.prefix_figures, name) > getattr(before, name), name
