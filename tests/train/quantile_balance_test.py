"""Quantile Balancing: the published vectors, the rule's properties, the estimator against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.model.routing import (
    _counts_by_products,
    _counts_by_scatter,
    bias_range,
    required_bias_histogram,
    route,
)
from k3jax.train.quantile_balance import estimated_bias, exact_bias, load_metrics

# Eight tokens, four experts, one chosen: the loads of the report's figure 5.
SCORES = np.array(
    [
        [0.94, 0.49, 0.72, 0.54],
        [0.60, 0.41, 0.15, 0.10],
        [0.71, 0.79, 0.30, 0.72],
        [0.62, 0.73, 0.15, 0.19],
        [0.64, 0.26, 0.11, 0.54],
        [0.19, 0.79, 0.10, 0.15],
        [0.87, 0.45, 0.33, 0.36],
        [0.65, 0.66, 0.83, 0.57],
    ]
)


def routed(scores, bias, num_chosen):
    """Chosen experts [M, k], loads [E] and cutoffs [M], in float64."""
    order = np.argsort(-(scores + bias), axis=1, kind='stable')
    chosen = order[:, :num_chosen]
    cutoff = np.take_along_axis(scores + bias, order[:, num_chosen : num_chosen + 1], axis=1)[:, 0]
    return chosen, np.bincount(chosen.ravel(), minlength=scores.shape[1]), cutoff


_histogram = jax.jit(required_bias_histogram, static_argnums=4)


def histogram_of(scores, cutoff, bias, bins=1000, counted=None):
    counted = np.ones(len(scores), bool) if counted is None else counted
    arrays = (jnp.float32(x) for x in (scores, cutoff, bias))
    return _histogram(*arrays, jnp.asarray(counted), bins)


def estimated(scores, bias, num_chosen, bins=1000):
    _, _, cutoff = routed(scores, bias, num_chosen)
    histogram = histogram_of(scores, cutoff, bias, bins)
    return np.asarray(estimated_bias(histogram, jnp.float32(bias), num_chosen))


def test_the_exact_rule_gives_the_published_loads_and_stays_there():
    zero = np.zeros(4)
    chosen, load, cutoff = routed(SCORES, zero, 1)
    assert chosen[:, 0].tolist() == [0, 0, 1, 1, 0, 1, 0, 2]
    assert load.tolist() == [4, 3, 1, 0]
    bias = np.asarray(exact_bias(jnp.float32(SCORES), jnp.float32(cutoff), 1))
    np.testing.assert_allclose(bias, [-0.1575, -0.0375, 0.1225, 0.0725], atol=1e-7)
    chosen, load, cutoff = routed(SCORES, bias.astype(np.float64), 1)
    assert chosen[:, 0].tolist() == [2, 0, 3, 1, 3, 1, 0, 2]
    assert load.tolist() == [2, 2, 2, 2]
    again = exact_bias(jnp.float32(SCORES), jnp.float32(cutoff), 1)
    np.testing.assert_allclose(again, bias, atol=1e-7)


def test_the_estimator_gives_its_own_published_vector():
    bias = estimated(SCORES, np.zeros(4), 1)
    np.testing.assert_allclose(bias, [-0.1375, -0.0275, 0.0825, 0.0825], atol=2e-6)
    # Token 0 is tied between experts 0 and 2, but for rounding.
    biased = np.round(SCORES + bias, 6)
    assert routed(biased, np.zeros(4), 1)[1].tolist() == [3, 2, 1, 2]


def test_the_router_takes_the_cutoff_from_the_biased_scores():
    logits = np.log(SCORES / (1 - SCORES))
    bias = np.array([0.1, -0.2, 0.05, 0.0])
    got = route(
        jnp.float32(logits),
        jnp.float32(bias),
        num_chosen=2,
        renormalize=True,
        scaling_factor=1.0,
        with_cutoff=True,
    )
    chosen, _, cutoff = routed(SCORES, bias, 2)
    assert np.array_equal(got.experts, chosen)
    np.testing.assert_allclose(got.cutoff, cutoff, rtol=1e-6)
    assert got.weights.shape == (8, 2)


def test_it_comes_to_balance_in_a_few_steps():
    logits = np.random.default_rng(1234).standard_normal((8192, 16))
    logits[:, 0] += 3
    logits[:, 1] += 1.8
    scores, bias, worst = 1 / (1 + np.exp(-logits)), np.zeros(16), []
    for _ in range(7):
        _, load, cutoff = routed(scores, bias, 4)
        worst.append(np.max(np.abs(load / load.mean() - 1)))
        bias = np.asarray(exact_bias(scores, cutoff, 4), np.float64)
    # The specification's figures.
    want = [2.9038, 0.2183, 0.0459, 0.0146, 0.0117, 0.0107, 0.0098]
    np.testing.assert_allclose(worst, want, atol=1e-3)


@pytest.mark.parametrize('bins', [100, 1000])
def test_the_estimator_is_within_a_bin_and_a_gap_of_the_exact_rule(bins):
    scores = 1 / (1 + np.exp(-np.random.default_rng(5).standard_normal((8192, 16)) - 0.3))
    bias = np.random.default_rng(6).uniform(-0.1, 0.1, 16)
    _, _, cutoff = routed(scores, bias, 4)
    margin = np.sort(scores - cutoff[:, None], axis=0)[::-1]
    gap = np.max(margin[8192 // 4 - 1] - margin[8192 // 4])
    low, high = bias_range(bias)
    exact = np.asarray(exact_bias(scores, cutoff, 4))
    error = np.max(np.abs(estimated(scores, bias, 4, bins) - exact))
    assert error <= 2 * ((high - low) / bins + gap)  # both shift the mean, too


# A few shapes, so that little is compiled; the values are what is searched.
sizes = st.tuples(st.sampled_from([(1, 2, 1), (12, 5, 2), (40, 9, 8)]), st.integers(0, 2**32 - 1))


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_biases_shifted_alike_give_the_same_rule(size):
    (tokens, experts, num_chosen), seed = size
    rng = np.random.default_rng(seed)
    scores, bias = rng.random((tokens, experts)), rng.uniform(-1, 1, experts)
    results = []
    for shift in (0.0, 7.5):
        chosen, _, cutoff = routed(scores, bias + shift, num_chosen)
        with jax.enable_x64(True):
            results.append((chosen, exact_bias(scores, cutoff, num_chosen)))
    assert np.array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_counts_do_not_depend_on_how_tokens_are_split_nor_on_how_they_are_made(size):
    (tokens, experts, num_chosen), seed = size
    rng = np.random.default_rng(seed)
    # Few different values: many ties, among them the margin 0 of the first expert not chosen.
    scores = rng.integers(1, 9, (tokens, experts)) / 10
    bias = rng.integers(-3, 4, experts) / 10
    counted = rng.random(tokens) < 0.8
    first = rng.random(tokens) < 0.5
    _, _, cutoff = routed(scores, bias, num_chosen)
    whole, *parts = (
        np.asarray(histogram_of(scores, cutoff, bias, 50, c))
        for c in (counted, counted & first, counted & ~first)
    )
    assert np.array_equal(whole, sum(parts))
    assert np.all(whole.sum(axis=1) == counted.sum())
    bin_of = rng.integers(0, 50, (tokens, experts))
    want = [np.bincount(bin_of[counted, e], minlength=50) for e in range(experts)]
    for form in (by_products, by_scatter):
        assert np.array_equal(form(bin_of, counted), want)


by_products = jax.jit(functools.partial(_counts_by_products, bins=50, at_once=16))
by_scatter = jax.jit(functools.partial(_counts_by_scatter, bins=50))


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_with_the_cutoffs_held_an_expert_takes_its_share(size):
    (tokens, experts, num_chosen), seed = size
    scores = np.random.default_rng(seed).random((tokens, experts))
    _, _, cutoff = routed(scores, np.zeros(experts), num_chosen)
    margin = np.sort(scores - cutoff[:, None], axis=0)[::-1]
    share = tokens * num_chosen // experts
    with jax.enable_x64(True):
        bias = np.asarray(exact_bias(scores, cutoff, num_chosen))
    uncentred = -margin[share]
    np.testing.assert_allclose(bias, uncentred - uncentred.mean(), atol=1e-12)
    # Margins of 0 are ties by construction: each token has one.
    taken = np.sum(scores - cutoff[:, None] > -uncentred, axis=0)
    tied = np.sum(scores - cutoff[:, None] == -uncentred, axis=0)
    assert np.all((taken <= share) & (share < taken + tied))


def test_nothing_counted_or_every_expert_chosen_keeps_the_bias():
    bias = jnp.float32([0.3, -0.1, 0.2])
    empty = jnp.zeros((3, 10), jnp.int32)
    assert np.array_equal(estimated_bias(empty, bias, 1), bias)
    full = empty.at[:, 4].set(6)
    assert np.array_equal(estimated_bias(full, bias, 3), bias)
    assert not np.array_equal(estimated_bias(full, bias, 1), bias)


def test_momentum_keeps_a_part_of_the_old_bias():
    bias = jnp.float32([0.3, -0.1, -0.2])
    histogram = jnp.asarray(np.random.default_rng(0).integers(1, 5, (3, 1)) * np.ones((1, 20), int))
    new = estimated_bias(histogram, bias, 1)
    np.testing.assert_allclose(
        estimated_bias(histogram, bias, 1, momentum=0.75), 0.75 * bias + 0.25 * new, rtol=1e-6
    )


def test_counts_beyond_float32_are_exact():
    """Half of the tokens are in the first bin; one of 2^26 more would be bins away."""
    half = (1 << 26) + 7  # not a float32
    histogram = jnp.asarray([[half, 0, half], [half, half, 0]], jnp.int32)
    bias = jnp.zeros(2, jnp.float32)
    got = estimated_bias(histogram, bias, 1)
    # q is half of the tokens: all of the first bin, to its upper edge, for both experts.
    np.testing.assert_allclose(got, [0.0, 0.0], atol=1e-6)


def test_load_metrics():
    got = load_metrics(jnp.asarray([[4, 3, 1, 0], [2, 2, 2, 2]]))
    np.testing.assert_allclose(got['maxvio'], [1.0, 0.0], atol=1e-6)
    assert got['dead_experts'].tolist() == [1, 0]
    share = np.array([0.5, 0.375, 0.125])
    want = -np.sum(share * np.log(share)) / np.log(4)
    np.testing.assert_allclose(got['load_entropy'], [want, 1.0], rtol=1e-6)


def test_a_single_expert_is_even():
    got = load_metrics(jnp.asarray([[5]]))
    assert [float(x[0]) for x in got.values()] == [0.0, 0.0, 1.0]


def test_no_gradient_reaches_the_bias_through_what_is_counted():
    def loss(logits, bias):
        routing = route(
            logits,
            bias,
            num_chosen=1,
            renormalize=False,
            scaling_factor=1.0,
            with_cutoff=True,
        )
        return jnp.sum(routing.weights) + jnp.sum(routing.cutoff)

    logits = jnp.float32(np.log(SCORES / (1 - SCORES)))
    grads = jax.grad(loss, argnums=(0, 1))(logits, jnp.zeros(4, jnp.float32))
    assert np.any(grads[0]) and not np.any(grads[1])
