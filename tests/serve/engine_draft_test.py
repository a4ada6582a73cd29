"""An engine that guesses answers as one that does not, whatever of the guesses stands."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from k3jax.config import MeshConfig
from k3jax.data.images import ImageConfig, Patches
from k3jax.model.draft import init_draft, with_taps
from k3jax.parallel.mesh import make_mesh
from k3jax.serve.draft_pool import DraftPool, open_pool
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.generate import generate
from k3jax.serve.load import Loaded
from k3jax.serve.rows import keys_of, row_of
from k3jax.serve.sampling import Choice, probabilities
from k3jax.train.eval import logits_of
from tests.engines import (
    MODEL,
    PAD,
    TOKENIZER,
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
BLOCK_BYTES = 1792  # as in engine_prefix_test.py
CONFIG = EngineConfig(
    num_slots=3,
    max_length=200,
    max_waiting=8,
    pieces=(8, 32),
    lane_sizes=(48, 120),
    prefix_cache_bytes=20 * BLOCK_BYTES,
    prefix_host_bytes=60 * BLOCK_BYTES,
    prefix_hash_tokens=HASH,
)
NUM_GUESSES = 4
GUESSING = with_taps(MODEL)
OUTPUTS = 'o_proj', 'down_proj', 'w2', 'routed_expert_up_proj'


def quieter(params, factor):
    """The outputs of mixers and experts made small: what is said follows the last token."""

    def scaled(path, x):
        return factor * x if path[-1].key in OUTPUTS else x

    return jax.tree_util.tree_map_with_path(scaled, params)


@functools.cache
def model_params():
    return quieter(parameters(), 0.3)


@functools.cache
def draft():
    """A draft that says about what the last token alone would make the model say."""
    fresh = quieter(init_draft(GUESSING, {}, jax.random.key(1)), 0.3)
    d = MODEL.config.hidden_size
    halves = jnp.concatenate([jnp.eye(d), jnp.zeros((d, d))], axis=1)
    return fresh | {'mtp': fresh['mtp'] | {'eh_proj': halves}}


def alone(prompt, count=8, **options):
    return list(generate(MODEL, model_params(), prompt, max_new_tokens=count, **options))


@pytest.fixture(scope='module')
def engine():
    pool = DraftPool(
        GUESSING, model_params(), draft(), CONFIG.num_slots, CONFIG.max_length, NUM_GUESSES
    )
    engine = Engine(pool, TOKENIZER, CONFIG, images=ImageConfig(patch_size=2))
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_held(engine):
    engine._prefixes.reset()


def test_requests_of_any_length_answer_as_each_does_without_guesses(engine):
    lengths = 1, 7, 8, 9, 48, 49, 130, 190  # the last up to the end of the cache
    some = [request(prompt_of(n), max_new_tokens=10 if n == 190 else 3 + n % 19) for n in lengths]
    found = answers(engine, *some)
    for asked, tokens in zip(some, found, strict=True):
        count = asked.sampling.max_new_tokens
        assert ids(tokens) == alone(asked.prompt_ids, count, num_ids=512)
        assert [token.finished for token in tokens] == [None] * (count - 1) + ['length']
    checks, tokens = engine.num_checks, engine.num_checked_tokens
    assert 1.2 < tokens / checks < 4.8  # some guesses stand, not all


GRAMMAR = 'start: "abc" | "bcd" | "bd"'


def test_a_seed_draws_what_the_model_alone_does_whatever_was_guessed(engine):
    prompt = prompt_of(29)
    asked = request(prompt, temperature=60.0, seed=5, max_new_tokens=16)
    others = [request(prompt, temperature=60.0, seed=n, max_new_tokens=4) for n in (6, 7)]
    beside = request(prompt_of(4), constraint=GRAMMAR, max_new_tokens=20)
    (found,) = answers(engine, asked)
    logits = logits_of(MODEL, model_params(), [*prompt, *ids(found)])[0, len(prompt) - 1 : -1]
    keys = keys_of(np.full(16, 5, np.uint32), np.arange(16, dtype=np.int32))
    want = jax.vmap(jax.random.categorical)(keys, logits / 60).tolist()
    assert ids(found) == want
    for held in (True, False):
        assert ids(answers(engine, *others, beside, asked)[-1]) == want, held
        engine._prefixes.reset()
    assert len({tuple(ids(found)[:4]) for found in [found, *answers(engine, *others)]}) == 3


def test_nothing_comes_after_a_stop_id_within_a_window(engine):
    for place in range(2, 8):
        new = alone(prompt_of(9))
        (found,) = answers(engine, request(prompt_of(9), stop_ids=frozenset({new[place]})))
        assert ids(found) == new[: new.index(new[place]) + 1]
        assert found[-1].finished == 'stop'


def test_logprobs_are_the_models_own(engine):
    prompt = prompt_of(11)
    found = answers(engine, request(prompt, logprobs=3, max_new_tokens=12), request([5]))[0]
    logits = logits_of(MODEL, model_params(), [*prompt, *ids(found)])[0, len(prompt) - 1 : -1]
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for token, row in zip(found, want, strict=True):
        np.testing.assert_allclose(token.logprob, row[token.id], atol=2e-4)
        assert [i for i, _ in token.top] == np.argsort(-row)[:3].tolist()


def test_grammars_penalties_and_images_go_beside_guesses(engine):
    asked = [request(prompt_of(4, n), constraint=GRAMMAR, max_new_tokens=20) for n in range(2)]
    punished = request(prompt_of(6), frequency_penalty=1e4, max_new_tokens=20)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 3, 2, 2), np.uint8)
    seeing = request([3, PAD, *prompt_of(30)], media=[Patches(pixels, (1, 2, 4))])
    *found, different, seen, free = answers(engine, *asked, punished, seeing, request(prompt_of(6)))
    for tokens in found:
        assert TOKENIZER.decode(ids(tokens)[:-1]) in ('abc', 'bcd', 'bd')
    assert len(set(ids(different))) == 20
    assert len(seen) == 8
    assert ids(free) == alone(prompt_of(6))


@pytest.mark.parametrize('lengths', [(21, 30), (21, 28), (30, 19), (31, 2)])
def test_a_next_turn_goes_on_from_what_is_held(engine, lengths):
    first, count = prompt_of(lengths[0]), lengths[1]
    _, said = continued(engine, request(first, max_new_tokens=count))
    assert said == alone(first, count)
    second = [*first, *said, *prompt_of(5)]
    # All but the last partial block of what was read: the last token drawn never is.
    want = (len(first) + count - 1) // HASH * HASH
    assert continued(engine, request(second)) == (want, alone(second))


def check_histories(engine, examples):
    """Requests together and one after another, as engine_prefix_test.py has them for a plain one;
    some end early, some have a grammar beside them."""
    before = engine.prefix_figures

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def live(data):
        turns = []
        for _ in range(data.draw(st.integers(1, 3))):
            asked, wants = drawn_turn(data, turns), []
            for number, one in enumerate(asked):
                want = alone(one.prompt_ids, one.sampling.max_new_tokens)
                if data.draw(st.booleans()):
                    stop = data.draw(st.sampled_from(want))
                    sampling = dataclasses.replace(one.sampling, stop_ids=frozenset({stop}))
                    asked[number] = dataclasses.replace(one, sampling=sampling)
                    want = want[: want.index(stop) + 1]
                wants.append(want)
            take = data.draw(st.sampled_from([None, 1, 3]))
            if data.draw(st.booleans()):
                asked.append(request(prompt_of(4), constraint=GRAMMAR, max_new_tokens=20))
            found = answers(engine, *asked, take=take)
            for number, (want, tokens) in enumerate(zip(wants, found, strict=False)):
                dropped = take is not None and number == 0
                assert ids(tokens) == (want[:take] if dropped else want)
            turns += [
                [*one.prompt_ids, *want][:150] for one, want in zip(asked, wants, strict=False)
            ]
            check_memory(engine, CONFIG)

    live()
    for name in ('hits', 'offloads', 'fetches'):
        assert getattr(engine.prefix_figures, name) > getattr(before, name), name


def test_any_history_of_guesses_answers_as_the_model_alone(engine):
    check_histories(engine, 8)


@pytest.mark.slow
def test_many_histories_of_guesses_answer_as_the_model_alone(engine):
    check_histories(engine, 150)


def test_no_request_is_forgotten_where_there_is_no_room_to_read_it(engine, monkeypatch):
    def full(size):
        raise RuntimeError('RESOURCE_EXHAUSTED')

    monkeypatch.setattr(engine._pool, 'lanes', full)
    (found,) = answers(engine, request([1]))
    assert [token.finished for token in found] == ['error']
    monkeypatch.undo()
    assert ids(answers(engine, request([1]))[0]) == alone([1])


@pytest.mark.slow
def test_tokens_are_drawn_from_the_model_whatever_the_limit():
    """Hundreds of slots with one prompt: first tokens of a step, against the model's own odds."""
    slots, prompt = 512, prompt_of(5)
    pool = DraftPool(GUESSING, model_params(), draft(), slots, 16, 2)
    lanes = pool.lanes(16)
    tokens, following = np.array([prompt], np.int32), np.array([-1], np.int32)
    logits, lanes = pool.read(tokens, np.array([5], np.int32), following, lanes, None)
    options = {'temperature': 60.0, 'top_k': 6}
    sampling = request(prompt, **options).sampling
    first = None
    for slot in range(slots):
        # The same first token everywhere: greedy; what follows is drawn.
        row = row_of(sampling, slot, tuple(prompt), 512, 512)
        choice = row.choice._replace(temperature=np.zeros(1, np.float32))
        drawn = pool.admit(lanes, logits, slot, row._replace(choice=choice), None)
        first = int(drawn.token[0, 0])
    pool.rows = pool.rows._replace(
        choice=pool.rows.choice._replace(temperature=jnp.full(slots, 60.0))
    )
    limit = np.where(np.arange(slots) % 2, 1, 3).astype(np.int32)
    drawn = pool.step(np.ones(slots, bool), None, limit)
    own = np.asarray(logits_of(MODEL, model_params(), [*prompt, first]))[0, -1]
    choice = Choice(*map(jnp.asarray, (60.0, 1.0, 512, 6)))
    odds = np.asarray(probabilities(own, choice), np.float64)
    odds /= odds.sum()
    assert np.sum(odds > 0) == 6 and np.max(odds) < 0.9
    for half in (0, 1):
        seen = np.bincount(np.asarray(drawn.token[half::2, 0]), minlength=512)
        assert not np.any(seen[odds == 0])
        kept = odds > 0
        assert stats.chisquare(seen[kept], odds[kept] * slots / 2).pvalue > 1e-3
    counts = np.asarray(drawn.count)
    assert np.all(counts[1::2] == 1) and 1 < np.mean(counts[::2]) < 3


def test_a_mesh_and_no_guesses_are_refused():
    for count in (0, 16, 10**8):
        with pytest.raises(ValueError, match=f'num_guesses: got {count}, wanted 1 or more'):
            DraftPool(GUESSING, model_params(), draft(), 2, 16, count)
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    with pytest.raises(ValueError, match='--draft: there are no guesses on a mesh yet'):
        open_pool(Loaded(MODEL, model_params(), TOKENIZER, None, mesh=mesh), 2, 16, 'draft')
