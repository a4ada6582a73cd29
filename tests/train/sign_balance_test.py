"""Balancing by signs: towards the mean load, by the step, and instead of Quantile Balancing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError, OptimizerConfig, QuantileBalanceConfig
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.plan import at, stacks
from k3jax.model.routing import route
from k3jax.model.run import Run
from k3jax.model.statistics import Watch
from k3jax.train.corrections import BIAS, corrections
from k3jax.train.sign_balance import bias_step
from tests import tiny

CONFIG = tiny.k3((1,), (2,))
WATCH = Run(jnp.dtype('float32'), jnp.dtype('float32'), watch=Watch())
SETTINGS = OptimizerConfig(
    quantile_balance=QuantileBalanceConfig(enabled=False), sign_balance_step=0.25
)


@pytest.mark.parametrize(
    ('load', 'signs'),
    [
        ([4, 0, 2, 2], [-1, 1, 0, 0]),
        ([2, 2, 2, 1], [-1, -1, -1, 1]),  # the mean is 1.75
        ([1, 1, 2, 1], [1, 1, -1, 1]),  # the mean is 1.25
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([2**24 + 1, 2**24 - 1, 2**24, 2**24], [-1, 1, 0, 0]),  # beyond float32
    ],
)
def test_a_step_is_the_sign_of_what_the_load_lacks(load, signs):
    found = bias_step(jnp.int32([load, load[::-1]]), 1e-3)
    np.testing.assert_allclose(found, 1e-3 * np.float32([signs, signs[::-1]]))


def test_repeated_steps_balance_a_router_that_is_not():
    logits = jax.random.normal(jax.random.key(0), (512, 8)) + jnp.linspace(0, 3, 8)
    choose = functools.partial(route, num_chosen=2, renormalize=True, scaling_factor=1.0)

    def load_of(bias):
        return jnp.bincount(choose(logits, bias).experts.ravel(), length=8)

    bias = jnp.zeros(8)
    assert load_of(bias).max() > 2 * 128
    bias = jax.lax.fori_loop(0, 600, lambda _, b: b + bias_step(load_of(b), 1e-3), bias)
    assert load_of(bias).max() < 1.2 * 128


def test_the_biases_move_from_where_they_are():
    model = Kimi(CONFIG, WATCH)
    params = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    seen = jax.eval_shape(
        lambda *args: model.apply({'params': args[0]}, *args[1:]).seen, params, tokens, tokens
    )
    seen = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype), seen)
    rules = corrections(seen, params, CONFIG, model.plan, SETTINGS)
    found = 0
    for path, _ in stacks(model.plan):
        if 'block_sparse_moe' in at(params, path):
            found += 1
            bias = jnp.full(at(params, path + BIAS).shape, 0.5)
            want = np.float32([0.75, 0.75, 0.75, 0.25, 0.25, 0.25])  # loads 0 to 5
            np.testing.assert_array_equal(rules[path + BIAS](bias).reshape(6), want)
    assert found == 1


def test_two_rules_for_the_biases_are_refused():
    with pytest.raises(ConfigError, match='optimizer.sign_balance_step: got 0.25, wanted 0, or'):
        OptimizerConfig(sign_balance_step=0.25)
