"""Requests that run together answer as each does alone; what fails or is dropped harms no other."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.data.images import ImageConfig, Patches
from k3jax.serve.constrain import Matcher
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.media import rows_of
from k3jax.serve.pool import Pool
from k3jax.serve.request import Overloaded
from k3jax.train.eval import logits_of
from tests.engines import MODEL, PAD, TOKENIZER, alone, answers, ids, parameters, prompt_of, request

CONFIG = EngineConfig(
    num_slots=3, max_length=200, max_waiting=8, pieces=(8, 32), lane_sizes=(48, 120)
)


@pytest.fixture(scope='module')
def params():
    return parameters()


@pytest.fixture(scope='module')
def engine(params):
    pool = Pool(MODEL, params, CONFIG.num_slots, CONFIG.max_length, None)
    engine = Engine(pool, TOKENIZER, CONFIG, images=ImageConfig(patch_size=2))
    engine.start()
    yield engine
    engine.close()


def test_requests_of_any_length_answer_as_each_does_alone(engine, params):
    lengths = (1, 7, 8, 9, 40, 48, 49, 130, 33, 2)
    some = [request(prompt_of(n), max_new_tokens=3 + n % 5) for n in lengths]
    first = answers(engine, *some[:8])  # more than there are slots
    for asked, found in zip(some, first + answers(engine, *some[8:]), strict=True):
        count = asked.sampling.max_new_tokens
        assert ids(found) == alone(asked.prompt_ids, count, num_ids=512)
        assert [token.finished for token in found] == [None] * (count - 1) + ['length']


def test_what_a_seed_draws_does_not_depend_on_the_others(engine):
    asked = request(prompt_of(20), temperature=2.0, seed=5, max_new_tokens=12)
    others = [request(prompt_of(20), temperature=2.0, seed=n) for n in (6, 7, 8)]
    (want,) = answers(engine, asked)
    assert ids(answers(engine, *others, asked)[-1]) == ids(want)
    assert ids(answers(engine, dataclasses.replace(asked))[0]) == ids(want)
    assert ids(answers(engine, others[0])[0]) != ids(want)[:8]


def test_a_stop_id_is_the_last_token(engine, params):
    new = alone(prompt_of(9))
    stop = new[4]
    (found,) = answers(engine, request(prompt_of(9), stop_ids=frozenset({stop})))
    assert ids(found) == new[: new.index(stop) + 1]
    assert found[-1].finished == 'stop'


def test_logprobs_are_the_models_own(engine, params):
    prompt = prompt_of(11)
    asked = request(prompt, logprobs=3, temperature=5.0, seed=1, top_k=4)
    found = answers(engine, asked, request(prompt_of(5)))[0]
    logits = logits_of(MODEL, params, [*prompt, *ids(found)])[0, len(prompt) - 1 : -1]
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for token, row in zip(found, want, strict=True):
        best = np.argsort(-row)[:4]
        assert token.id in best
        np.testing.assert_allclose(token.logprob, row[token.id], atol=2e-4)
        assert [i for i, _ in token.top] == best[:3].tolist()
        np.testing.assert_allclose([x for _, x in token.top], row[best[:3]], atol=2e-4)


def test_a_grammar_is_followed_beside_requests_without_one(engine, params):
    grammar = 'start: "a" | "bc" | "bd"'
    asked = [request(prompt_of(4, n), constraint=grammar, max_new_tokens=20) for n in range(4)]
    *found, free = answers(engine, *asked, request(prompt_of(6)))
    for tokens in found:
        text = TOKENIZER.decode(ids(tokens)[:-1])
        assert text in ('a', 'bc', 'bd') and tokens[-1].finished == 'stop'
        assert tokens[-1].id == TOKENIZER.end_of_msg_id
    assert ids(free) == alone(prompt_of(6))


def test_images_are_seen_in_the_order_of_their_pads(engine, params):
    rng = np.random.default_rng(0)
    grids = (1, 2, 4), (1, 6, 4)
    media = [
        Patches(rng.integers(0, 256, (r * c, 3, 2, 2), np.uint8), (t, r, c)) for t, r, c in grids
    ]
    rows = [rows_of(MODEL, params, one, ImageConfig(patch_size=2)) for one in media]
    before, after = prompt_of(5), prompt_of(21)
    expanded = [*before, *[PAD] * 2, 7, *[PAD] * 6, *after]
    want = alone(expanded, media_rows=jnp.concatenate(rows))
    asked = request([*before, PAD, 7, PAD, *after], media=media)
    found = answers(engine, request(prompt_of(3)), asked, request(prompt_of(30)))
    assert ids(found[1]) == want
    other = request([*before, PAD, 7, PAD, *after], media=media[::-1])
    assert ids(answers(engine, other)[0]) != want


@pytest.mark.parametrize('count', [0, 1, 3])
def test_another_number_of_images_than_pads_is_refused(engine, count):
    patches = Patches(np.zeros((4, 3, 2, 2), np.uint8), (1, 2, 2))
    with pytest.raises(ValueError, match=f'got 2 media tokens, wanted {count}, one an image'):
        answers(engine, request([1, PAD, PAD], media=[patches] * count))


def test_a_dropped_request_frees_its_slot(engine, params):
    long = request(prompt_of(10), max_new_tokens=150)
    for _ in range(2 * CONFIG.num_slots):
        found = answers(engine, long, request(prompt_of(12)), take=2)
        assert len(found[0]) == 2 and ids(found[1]) == alone(prompt_of(12))
    while engine.num_running:
        engine.wake()
    assert engine.num_waiting == 0


def test_a_full_queue_is_refused_at_once_and_the_others_are_answered(engine):
    async def flood():
        streams = []
        with pytest.raises(Overloaded):
            for _ in range(50):
                streams.append(engine.submit(request(prompt_of(6), max_new_tokens=60)))
        assert len(streams) >= CONFIG.max_waiting
        return [[token async for token in stream] for stream in streams]

    for tokens in asyncio.run(flood()):
        assert len(tokens) == 60 and tokens[-1].finished == 'length'


@pytest.mark.parametrize(
    ('prompt', 'count', 'message'),
    [
        ([], 1, 'prompt: got no tokens'),
        ([600], 1, 'prompt: got token id 600'),
        ([1] * 150, 51, 'prompt of 150 tokens and 51 new ones: .* at most 200'),
        ([1], 0, 'and 0 new ones: wanted 1'),
    ],
)
def test_requests_that_cannot_be_answered_are_named(engine, prompt, count, message):
    with pytest.raises(ValueError, match=message):
        answers(engine, request(prompt, max_new_tokens=count))


def test_a_grammar_that_is_none_fails_its_own_request_alone(engine, params):
    bad, good = answers(engine, request([1, 2], constraint='start: ('), request(prompt_of(8)))
    assert [token.finished for token in bad] == ['error']
    assert ids(good) == alone(prompt_of(8))


@pytest.mark.parametrize('fails', ['bitmask', 'advance'])
@pytest.mark.parametrize('after', [0, 2])
def test_a_grammar_that_fails_on_its_way_fails_its_own_request_alone(
    engine, params, monkeypatch, fails, after
):
    calls = []

    def failing(matcher, *args):
        calls.append(args)
        if len(calls) > after:
            raise ValueError('grammar: a row with too many items')
        return whole(matcher, *args)

    whole = getattr(Matcher, fails)
    bad = request(prompt_of(4), constraint='start: /a{9}/')
    with monkeypatch.context() as patched:
        patched.setattr(Matcher, fails, failing)
        found, *others = answers(engine, bad, request(prompt_of(8)), request(prompt_of(9)))
    assert len(found) == after + 1 and found[-1].finished == 'error'
    for tokens, length in zip(others, (8, 9), strict=True):
        assert ids(tokens) == alone(prompt_of(length))
    assert engine.num_running == 0


def test_after_a_failed_step_the_next_requests_are_answered(engine, params, monkeypatch):
    def fail(*_):
        raise RuntimeError('out of memory')

    with monkeypatch.context() as patched:
        patched.setattr(engine._pool, 'step', fail)
        found = answers(engine, request(prompt_of(5)), request(prompt_of(6)))
    assert [tokens[-1].finished for tokens in found] == ['error', 'error']
    assert ids(answers(engine, request(prompt_of(6)))[0]) == alone(prompt_of(6))


@pytest.mark.slow
def test_warming_up_leaves_an_engine_that_answers(params):
    pool = Pool(MODEL, params, CONFIG.num_slots, CONFIG.max_length, None)
    engine = Engine(pool, TOKENIZER, CONFIG, images=ImageConfig(patch_size=2))
    engine.warm_up()
    engine.start()
    assert ids(answers(engine, request(prompt_of(9)))[0]) == alone(prompt_of(9))
    engine.close()


def test_closing_ends_what_runs(params):
    pool = Pool(MODEL, params, CONFIG.num_slots, CONFIG.max_length, None)
    engine = Engine(pool, TOKENIZER, CONFIG)

    async def close_early():
        stream = engine.submit(request(prompt_of(5), max_new_tokens=100))
        engine.start()
        iterator = aiter(stream)
        await anext(iterator)
        await asyncio.to_thread(engine.close)
        found = [token async for token in iterator]
        with pytest.raises(Overloaded):
            engine.submit(request([1]))
        return found

    assert asyncio.run(close_early())[-1].finished == 'error'


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'num_slots': 0}, 'num_slots: got 0, wanted 1 or more'),
        ({'pieces': (8, 8)}, r'pieces: got \(8, 8\), wanted sizes above 0, ascending'),
        ({'lane_sizes': ()}, r'lane_sizes: got \(\)'),
    ],
)
def test_config_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)
