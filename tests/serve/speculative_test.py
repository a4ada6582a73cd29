"""Guessing and checking gives what the model alone gives: exactly, in distribution, greedily."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from k3jax.model.draft import init_draft, with_taps
from k3jax.model.kimi import Kimi, forward
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.serve.generate import generate
from k3jax.serve.sampling import Choice, accept, probabilities
from k3jax.serve.speculative import Counts, generate_speculatively
from tests import tiny

CONFIG = tiny.k3((1, 2), (3,), num_nextn_predict_layers=1, vocab_size=12)
MODEL = with_taps(Kimi(CONFIG, Run(jnp.dtype('float64'), implementation='xla')))


@functools.cache
def target():
    with jax.enable_x64(True):
        params = stack_params(tiny.random_params(CONFIG), MODEL.plan, np.stack)
        return jax.tree.map(jnp.asarray, params)


@functools.cache
def draft(seed=0):
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        fresh = init_draft(MODEL, target(), jax.random.key(0))
        # Near enough to the model that some guesses stand, and far enough that some do not.
        return jax.tree.map(
            lambda x: jnp.asarray(x + 0.05 * rng.standard_normal(x.shape), jnp.float64), fresh
        )


def speculate(prompt, num_new, counts=None, **options):
    return list(
        generate_speculatively(
            MODEL, target(), draft(), prompt, max_new_tokens=num_new, counts=counts, **options
        )
    )


@pytest.mark.parametrize('num_guesses', [1, 4])
def test_greedy_text_is_that_of_the_model_alone(num_guesses):
    with jax.enable_x64(True):
        for prompt in ([3], [1, 2, 3, 4, 5, 6, 7]):
            want = list(generate(MODEL, target(), prompt, max_new_tokens=30))
            counts = Counts()
            assert speculate(prompt, 30, counts, num_guesses=num_guesses) == want
            assert 30 <= counts.tokens + 1 <= 30 + num_guesses


def test_a_perfect_draft_is_always_right():
    """The model's own head on itself: every guess stands, so a check gives all of them and one."""
    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (500, 4, 9)), axis=-1)
    guesses = jax.random.categorical(jax.random.key(1), jnp.log(p[:, :3]), axis=-1)
    count, token = accept(p, p[:, :3], guesses, jax.random.key(2))
    assert np.all(count == 3)
    assert np.all(np.take_along_axis(np.asarray(p[:, 3]), np.asarray(token)[:, None], 1) > 0)


def test_the_tokens_left_are_what_the_model_has_more():
    """The spec's example: p = (.5, .3, .2) and q = (.2, .5, .3) leave (1, 0, 0); 0.7 stand."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    count = 20000
    guesses = np.random.default_rng(0).choice(3, (count, 1), p=q).astype(np.int32)
    both = np.broadcast_to(p, (count, 2, 3)), np.broadcast_to(q, (count, 1, 3))
    stands, token = accept(*map(jnp.asarray, both), guesses, jax.random.key(0))
    assert abs(np.mean(stands) - 0.7) < 4 * np.sqrt(0.21 / count)
    assert np.all(np.asarray(token)[np.asarray(stands) == 0] == 0)


@pytest.mark.parametrize('seed', range(3))
def test_two_guesses_of_three_tokens_are_drawn_from_the_model_by_enumeration(seed):
    """Every pair of guesses, weighed by q, with the probabilities that `accept` gives each outcome.

    The probability of an outcome is found by integrating over the uniform draws: it is a product
    of min(1, p / q), 1 - min(1, p / q), and what is left of p.
    """
    rng = np.random.default_rng(seed)
    first_p, first_q = rng.dirichlet(np.ones(3), 2)
    after_p, after_q, last_p = rng.dirichlet(np.ones(3), (3, 3))  # by the token before
    found = np.zeros((3, 3))
    for a, b in itertools.product(range(3), repeat=2):
        weight = first_q[a] * after_q[a][b]
        stand_a = min(1, first_p[a] / first_q[a])
        left = np.maximum(first_p - first_q, 0)
        for x in range(3):
            if left.sum():
                # Rejected at once: x, then the next round begins with the model's own.
                found[x] += weight * (1 - stand_a) * left[x] / left.sum() * after_p[x]
        stand_b = min(1, after_p[a][b] / after_q[a][b])
        left = np.maximum(after_p[a] - after_q[a], 0)
        found[a, b] += weight * stand_a * stand_b
        if left.sum():
            found[a] += weight * stand_a * (1 - stand_b) * left / left.sum()
    np.testing.assert_allclose(found, first_p[:, None] * after_p, atol=1e-12)
    # And `accept` has these probabilities.
    count = 60000
    guess_a = rng.choice(3, count, p=first_q)
    guess_b = np.array([rng.choice(3, p=after_q[a]) for a in guess_a])
    p = np.stack([np.broadcast_to(first_p, (count, 3)), after_p[guess_a], last_p[guess_b]], 1)
    q = np.stack([np.broadcast_to(first_q, (count, 3)), after_q[guess_a]], 1)
    guesses = np.stack([guess_a, guess_b], 1).astype(np.int32)
    stands, token = map(
        np.asarray, accept(jnp.asarray(p), jnp.asarray(q), guesses, jax.random.key(seed))
    )
    one = np.where(stands == 0, token, guess_a)
    drawn = np.array([rng.choice(3, p=after_p[x]) for x in one])  # the next round's first
    two = np.select([stands == 0, stands == 1], [drawn, token], guess_b)
    observed = np.zeros((3, 3))
    np.add.at(observed, (one, two), 1)
    expected = count * first_p[:, None] * after_p
    assert stats.chisquare(observed.ravel(), expected.ravel()).pvalue > 1e-3


@pytest.mark.slow
def test_text_at_a_temperature_has_the_model_s_distribution():
    """Chi-square of the first two tokens over 600 requests of the whole loop."""
    prompt, count = [3, 1, 4], 600
    with jax.enable_x64(True):
        tokens = [
            speculate(prompt, 2, temperature=0.9, seed=seed, num_guesses=2) for seed in range(count)
        ]
        rows = np.array([[*prompt, x] for x in range(12)], np.int32)
        logits = np.asarray(forward(MODEL, target(), rows))
    choice = Choice(jnp.float32(0.9), jnp.float32(1.0), jnp.int32(12))
    p = np.asarray(probabilities(jnp.asarray(logits), choice), np.float64)
    expected = count * (p[0, 2][:, None] * p[:, 3]).ravel()
    observed = np.zeros((12, 12))
    np.add.at(observed, tuple(np.array(tokens).T), 1)
    # Pairs that are expected less than five times are taken together.
    rare = expected < 5
    counts = [*observed.ravel()[~rare], observed.ravel()[rare].sum()]
    wanted = np.array([*expected[~rare], expected[rare].sum()])
    assert stats.chisquare(counts, wanted / wanted.sum() * count).pvalue > 1e-3


def test_stop_ids_and_lengths_end_a_text_as_without_a_draft():
    with jax.enable_x64(True):
        want = list(generate(MODEL, target(), [5, 2], max_new_tokens=20))
        stop = want[7]
        cut = want[: want.index(stop)]
        assert speculate([5, 2], 20, stop_ids=frozenset({stop}), num_guesses=4) == cut
        for num_new in (1, 2, 5):
            assert speculate([5, 2], num_new, num_guesses=4) == want[:num_new]


def test_a_text_up_to_the_model_s_last_position_is_that_of_the_model_alone():
    with jax.enable_x64(True):
        want = list(generate(MODEL, target(), [3], max_new_tokens=63))
        assert speculate([3], 63, num_guesses=4) == want


def test_no_guesses_are_refused():
    with pytest.raises(ValueError, match='num_guesses: got 0, wanted 1 or more'):
        generate_speculatively(MODEL, {}, {}, [1], max_new_tokens=1, num_guesses=0)
    with pytest.raises(ValueError, match='prompt'):
        generate_speculatively(MODEL, {}, {}, [99], max_new_tokens=1)
