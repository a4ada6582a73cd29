"""Generation: greedy follows the model, sampling follows the distribution, few compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.serve import generate as generate_lib
from k3jax.serve.sampling import Choice, sample
from k3jax.train.eval import logits_of
from tests import tiny

CONFIG = tiny.k3(max_position_embeddings=600)
RUN = Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla')
MODEL = Kimi(CONFIG, RUN, scan_layers=False)


@pytest.fixture(scope='module')
def params():
    params = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    # Logits far apart, so that rounding cannot change which one is largest.
    return params | {'lm_head': 30 * params['lm_head']}


def run(params, prompt, **kwargs):
    return list(generate_lib.generate(MODEL, params, prompt, **kwargs))


def test_greedy_takes_the_likeliest_token_each_time(params):
    ids = [3, 14, 15, 9]
    new = run(params, ids, max_new_tokens=12)
    for token in new:
        assert token == int(np.argmax(logits_of(MODEL, params, ids)[0, -1]))
        ids = [*ids, token]


def test_a_long_prompt_is_read_in_pieces(params, monkeypatch):
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 70).tolist()
    whole = run(params, prompt, max_new_tokens=4)
    monkeypatch.setattr(generate_lib, 'PREFILL_PIECE', 32)
    assert run(params, prompt, max_new_tokens=4) == whole


def test_the_seed_decides_what_is_sampled(params):
    settings = {'max_new_tokens': 16, 'temperature': 3.0}
    first = run(params, [1, 2, 3], seed=1, **settings)
    assert run(params, [1, 2, 3], seed=1, **settings) == first
    assert run(params, [1, 2, 3], seed=2, **settings) != first


def test_generation_stops_before_a_stop_id(params):
    new = run(params, [3, 14, 15, 9], max_new_tokens=12)
    stop = new[5]
    want = new[: new.index(stop)]
    assert run(params, [3, 14, 15, 9], max_new_tokens=12, stop_ids=frozenset({stop})) == want


def test_ids_that_stand_for_nothing_are_never_taken(params):
    new = run(params, [1, 2, 3], max_new_tokens=32, temperature=5.0, num_ids=4)
    assert set(new) <= {0, 1, 2, 3}


def test_no_compilation_a_token(params):
    run(params, [5, 6], max_new_tokens=3)
    compiled = generate_lib._decode, generate_lib._prefill, generate_lib._take_first
    before = [function._cache_size() for function in compiled]
    run(params, [7, 8, 9], max_new_tokens=9)
    assert [function._cache_size() for function in compiled] == before


@pytest.mark.parametrize(
    ('prompt', 'settings', 'message'),
    [
        ([], {}, 'prompt: got no tokens'),
        ([40], {}, 'got token id 40 at position 0, wanted 0..39'),
        ([1], {'max_new_tokens': 600}, 'got 601, wanted at most 600'),
        ([1] * 700, {}, 'got 704, wanted at most 600'),
        ([1], {'max_new_tokens': 0}, 'max_new_tokens: got 0'),
        ([1], {'temperature': -1.0}, 'temperature: got -1.0'),
        ([1], {'temperature': float('nan')}, 'temperature: got nan'),
        ([1], {'top_p': 0.0}, 'top_p: got 0.0'),
    ],
)
def test_bad_requests_are_errors_that_name_the_thing(params, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        generate_lib.generate(MODEL, params, prompt, **({'max_new_tokens': 4} | settings))


def draws(logits, count=4000, **settings):
    keys = jax.random.split(jax.random.key(0), count)
    choice = Choice(
        jnp.float32(settings['temperature']), jnp.float32(settings['top_p']), len(logits)
    )
    tokens = jax.vmap(lambda key: sample(logits[None], key, choice)[0])(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


def test_temperature_scales_the_logits():
    logits = jnp.array([0.0, 1.0, 2.0])
    want = np.asarray(jax.nn.softmax(logits / 2))
    np.testing.assert_allclose(draws(logits, temperature=2.0, top_p=1.0), want, atol=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probs = np.array([0.1, 0.5, 0.15, 0.25])
    got = draws(jnp.log(jnp.asarray(probs)), temperature=1.0, top_p=0.7)
    np.testing.assert_allclose(got, [0.0, 2 / 3, 0.0, 1 / 3], atol=0.03)
    assert draws(jnp.log(jnp.asarray(probs)), temperature=1.0, top_p=1e-6)[1] == 1.0


def test_temperature_zero_is_greedy():
    assert draws(jnp.array([0.0, 3.0, 2.9]), temperature=0.0, top_p=1.0)[1] == 1.0
