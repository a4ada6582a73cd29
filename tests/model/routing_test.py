"""The router: golden vector, bias for selection only, precision of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.routing import route, router_logits


def call(logits, bias, num_chosen=2, renormalize=True, scaling_factor=1.0):
    return route(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(bias, jnp.float32),
        num_chosen=num_chosen,
        renormalize=renormalize,
        scaling_factor=scaling_factor,
    )


def test_golden_routing():
    """Expert 3 has the largest raw score but is not chosen; the weights leave the bias out."""
    got = call([[1, 0, -1, 2]], [0, 0.3, 0.6, -0.5])
    np.testing.assert_array_equal(got.experts, [[2, 1]])
    np.testing.assert_allclose(got.weights, [[0.349755, 0.650245]], atol=1e-6)
    assert got.experts.dtype == jnp.int32 and got.weights.dtype == jnp.float32


def test_weights_are_raw_scores_without_renormalisation():
    got = call([[1, 0, -1, 2]], [0, 0.3, 0.6, -0.5], renormalize=False, scaling_factor=3.0)
    want = 3 / (1 + np.exp(-np.array([[-1, 0]])))
    np.testing.assert_allclose(got.weights, want, rtol=1e-6)


def test_renormalised_weights_sum_to_the_scaling_factor():
    logits = np.random.default_rng(0).standard_normal((50, 16))
    got = call(logits, np.zeros(16), num_chosen=4, scaling_factor=2.446)
    np.testing.assert_allclose(got.weights.sum(1), 2.446, rtol=1e-6)


def test_a_shift_of_the_whole_bias_changes_nothing():
    logits = np.random.default_rng(1).standard_normal((50, 16))
    bias = np.random.default_rng(2).standard_normal(16) * 0.1
    first, second = call(logits, bias), call(logits, bias + 0.5)
    np.testing.assert_array_equal(first.experts, second.experts)
    np.testing.assert_array_equal(first.weights, second.weights)


def test_no_gradient_reaches_the_bias():
    logits = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)

    def total(logits, bias):
        return jnp.sum(call(logits, bias).weights[:, 0])

    d_logits, d_bias = jax.grad(total, argnums=(0, 1))(jnp.asarray(logits), jnp.zeros(8))
    assert np.any(d_logits) and not np.any(d_bias)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_logits_of_rounded_operands_are_exact_to_float32(dtype):
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((64, 512)), dtype)
    gate = jnp.asarray(rng.standard_normal((96, 512)) * 512**-0.5, jnp.bfloat16)
    logits = router_logits(x, gate)
    want = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, want, atol=2e-6)
    # The same sets as a float64 router; one computed in bfloat16 differs for many tokens.
    chosen = np.sort(call(logits, np.zeros(96), num_chosen=16).experts, axis=1)
    true = np.sort(np.argsort(-want, axis=1)[:, :16], axis=1)
    np.testing.assert_array_equal(chosen, true)
