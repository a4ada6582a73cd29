"""Quantisation-aware training: what a step and an evaluation compute with, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import (
    Config,
    ConfigError,
    MeshConfig,
    QuantisationConfig,
    TrainConfig,
)
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import Parallel, parallel_of
from k3jax.train.quantise import check_cut
from k3jax.train.state import working_copy
from k3jax.train.step import losses_of, make_gradient
from pallas_kernels.grouped_mlp import fake_quantise_mxfp4
from tests import tiny
from tests.compare import relative_error
from tests.oracles import mx

MODEL = tiny.k3(
    *((), (1,)), first_k_dense_replace=0, moe_intermediate_size=64, routed_expert_hidden_size=32
)
ON = QuantisationConfig(weights='mxfp4', activations='mxfp8', scale_rule='ceil')
EXPERTS = ('w1', 'w2', 'w3')


def model_of(quantisation, dtype='float32'):
    run = Run(jnp.dtype(dtype), jnp.dtype('float32'), implementation='xla')
    return Kimi(MODEL, run._replace(quantisation=quantisation))


@pytest.fixture(scope='module')
def params():
    values = jax.tree.map(np.float32, tiny.random_params(MODEL))
    return stack_params(values, model_of(ON).plan, np.stack)


@pytest.fixture(scope='module')
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (4, 17)).astype(np.int32)
    segment_ids = np.ones((4, 16), np.int32)
    return {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'segment_ids': segment_ids}


def named(tree):
    return [(path[-1].key, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_step_works_with_the_experts_quantised_from_the_float32_masters(params, dtype):
    copy = jax.jit(functools.partial(working_copy, model_of(ON, dtype)))(params)
    plain = jax.jit(functools.partial(working_copy, model_of(QuantisationConfig(), dtype)))(params)
    num_experts = 0
    for (name, got), (_, master), (_, other) in zip(
        named(copy), named(params), named(plain), strict=True
    ):
        assert got.dtype == other.dtype
        if name in EXPERTS:
            num_experts += 1
            want = mx.rounded(master, mx.E2M1, 'ceil', 124)
            np.testing.assert_array_equal(np.asarray(got, np.float64), want)
        else:
            np.testing.assert_array_equal(got, other)
    assert num_experts == 3


def test_evaluation_has_the_weights_of_a_step(params, batch):
    copy = jax.jit(functools.partial(working_copy, model_of(ON)))(params)
    got = losses_of(model_of(ON))(params, batch)
    activations_only = model_of(dataclasses.replace(ON, weights=None))
    np.testing.assert_array_equal(got, losses_of(activations_only)(copy, batch))
    assert np.abs(np.asarray(got - losses_of(activations_only)(params, batch))).max() > 1e-5


def gradient_of(model, mesh, params, batch):
    """Of a step: with respect to the working copy."""

    @jax.jit
    def run(params, batch):
        return make_gradient(model, 1, mesh)(working_copy(model, params), batch)[1]

    return run(params, batch)


@pytest.fixture(scope='module')
def gradient(params, batch):
    return gradient_of(model_of(ON), None, params, batch)


@pytest.mark.slow
def test_the_gradient_of_a_step_is_that_of_the_masters_straight_through(params, batch, gradient):
    def loss(masters):
        copy = jax.tree.map(
            lambda x, yes: (
                x + jax.lax.stop_gradient(fake_quantise_mxfp4(x, 'ceil') - x) if yes else x
            ),
            masters,
            jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key in EXPERTS, masters),
        )
        return jnp.sum(losses_of(model_of(dataclasses.replace(ON, weights=None)))(copy, batch))

    want = jax.jit(jax.grad(loss))(params)
    for (name, got), (_, one) in zip(named(gradient), named(want), strict=True):
        assert relative_error(got, one) < 1e-4, name
        assert name not in EXPERTS or np.any(got)


@pytest.mark.slow
@pytest.mark.parametrize('expert_parallel', ['moon', 'plain'])
def test_chips_that_share_experts_have_the_gradient_of_one(
    params, batch, gradient, expert_parallel
):
    config = MeshConfig(data=2, expert=2, whole_below=0, expert_parallel=expert_parallel)
    mesh = make_mesh(config, jax.devices()[:4])
    model = model_of(ON)
    model = model.clone(run=model.run._replace(parallel=parallel_of(mesh, config, 'train')))
    got = gradient_of(model, mesh, params, batch)
    for (name, one), (_, want) in zip(named(got), named(gradient), strict=True):
        assert relative_error(one, want) < 1e-4, name


def test_a_mesh_that_cuts_a_group_of_weights_is_refused():
    parallel = Parallel((4, 1, 1, 1), 'train', 0, 'moon')
    check_cut(Leaf((6, 64, 128), ('expert', None, 'embed'), quantisable=True), parallel)
    leaf = Leaf((6, 64, 64), ('expert', None, 'embed'), quantisable=True)
    with pytest.raises(ConfigError, match='data cuts .* to 16 weights, wanted a multiple of 32'):
        check_cut(leaf, parallel)


@pytest.mark.parametrize(
    ('model', 'field'),
    [
        ({'moe_intermediate_size': 40}, 'moe_intermediate_size'),
        ({'routed_expert_hidden_size': 48}, 'routed_expert_hidden_size'),
        ({'routed_expert_hidden_size': None, 'latent_moe_use_norm': False}, 'hidden_size'),
    ],
)
@pytest.mark.parametrize('what', [{'weights': 'mxfp4'}, {'activations': 'mxfp8'}])
def test_widths_that_are_no_whole_groups_are_refused(model, field, what):
    model = dataclasses.replace(MODEL, **model)
    Config(model=model)
    with pytest.raises(ConfigError, match=rf'model\.{field}: .* wanted a multiple of 32'):
        Config(model=model, train=TrainConfig(quantisation=QuantisationConfig(**what)))


@pytest.mark.parametrize('name', ['weights', 'activations', 'scale_rule'])
def test_an_unknown_format_or_rule_is_refused(name):
    with pytest.raises(ConfigError, match=rf'train\.quantisation\.{name}: got .int8.'):
        QuantisationConfig(**{name: 'int8'})
