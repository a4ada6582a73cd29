"""Multi-token prediction and taps: against float64, packed, in the step, on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import (
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    QuantisationConfig,
)
from k3jax.data.pack import IGNORE
from k3jax.model.flops import count_parameters, flops_by_component
from k3jax.model.kimi import Kimi, head, init_params, tap_blocks
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.model.statistics import Watch
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.serve.export import released_form
from k3jax.train.corrections import BIAS
from k3jax.train.optim import make_optimizer
from k3jax.train.state import TrainState
from k3jax.train.step import Extra, Sums, make_gradient, make_train_step, next_targets
from tests import tiny
from tests.compare import relative_error
from tests.oracles import kimi as oracle

EXACT = 1e-12  # of float64 against float64, relative
T = 9
CONFIG = tiny.k3(num_nextn_predict_layers=1)
SHORT = tiny.k3((1,), (2,), num_nextn_predict_layers=1, num_experts=8, hidden_size=32)
RUN = Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla')


def document(length=T, seed=0):
    return np.random.default_rng(seed).integers(0, 40, length).astype(np.int32)


@functools.cache
def model64(config: ModelConfig = CONFIG, taps: tuple[int, ...] = (1, 3, 4)):
    model = Kimi(config, Run(jnp.dtype('float64'), implementation='xla', taps=taps))
    params = stack_params(tiny.random_params(config), model.plan, np.stack)

    @jax.jit
    def run(tokens, ids, next_tokens):
        output = model.apply({'params': params}, tokens, ids, next_tokens=next_tokens)
        return head(params['lm_head'], output.next_hidden), output.taps

    return run


def next_of(tokens):
    return np.append(tokens[1:], np.int32(IGNORE))


def test_the_token_after_next_is_predicted_as_the_oracle_does():
    tokens = document()
    with jax.enable_x64(True):
        got, _ = model64()(tokens[None], None, next_of(tokens)[None])
    want = oracle.mtp_logits(CONFIG, tiny.random_params(CONFIG), tokens)
    assert relative_error(got[0, :-1], want) < EXACT


def test_taps_are_the_sums_at_the_ends_of_blocks():
    tokens = document()
    with jax.enable_x64(True):
        _, taps = model64()(tokens[None], None, next_of(tokens)[None])
    _, bank, last = oracle.hidden_states(CONFIG, tiny.random_params(CONFIG), tokens)
    for got, want in zip(taps, (bank[1], bank[2], last), strict=True):
        assert relative_error(got[0], want) < EXACT


def test_a_tap_inside_a_block_is_refused_with_the_ends():
    assert tap_blocks(CONFIG, (4, 1)) == (3, 1)
    assert tap_blocks(tiny.kimi_linear(), (4,)) == (1,)
    with pytest.raises(ConfigError, match=r'taps: got 2, wanted one of \[1, 3, 4\]'):
        tap_blocks(CONFIG, (1, 2))


def test_packed_documents_equal_separate_ones():
    a, b = document(4, seed=1), document(5, seed=2)
    packed, ids = np.concatenate([a, b]), np.repeat([1, 2], [4, 5]).astype(np.int32)
    with jax.enable_x64(True):
        both, _ = model64()(packed[None], ids[None], np.append(next_of(a), next_of(b))[None])
    params = tiny.random_params(CONFIG)
    for place, tokens in ((slice(0, 3), a), (slice(4, 8), b)):
        assert relative_error(both[0, place], oracle.mtp_logits(CONFIG, params, tokens)) < EXACT


def test_next_targets_stay_in_their_document_and_row():
    targets = np.array([[5, 6, IGNORE, 7, 8], [IGNORE, 1, IGNORE, IGNORE, 2]])
    want = [[6, IGNORE, IGNORE, 8, IGNORE], [IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]]
    np.testing.assert_array_equal(next_targets(targets), want)


@functools.cache
def stepped():
    """The state and metrics after a step, and the parameters before."""
    model = Kimi(SHORT, RUN)
    settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, name='muon')
    optimizer = make_optimizer(settings, 10, model)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    step = jax.jit(make_train_step(model, optimizer, extra=Extra(mtp=0.3)))
    return *step(state, batch()), params


def batch():
    tokens = np.random.default_rng(1).integers(0, 40, (8, 17)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, 3] = IGNORE
    ids = np.ones((8, 16), np.int32)
    ids[0, 4:] = 2
    return {'tokens': tokens[:, :-1], 'targets': targets, 'segment_ids': ids}


@pytest.mark.slow
def test_a_step_moves_the_layer_and_shows_its_loss():
    state, metrics, before = stepped()
    assert float(metrics['mtp_loss']) == pytest.approx(np.log(40), rel=0.02)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before['mtp'], state.params['mtp'])
    assert all(jax.tree.leaves(moved)), moved
    # Quantile Balancing sets the biases of its experts too, and its load is shown as a layer's.
    assert np.any(state.params['mtp']['layer'][BIAS[0]][BIAS[1]])
    assert metrics['maxvio'].shape == metrics['max_logit'].shape == (2,)


@functools.cache
def gradient(mtp, shape=None):
    run, mesh = RUN._replace(watch=Watch(100)), None
    if shape is not None:
        config = MeshConfig(**dict(shape), whole_below=0)
        mesh = make_mesh(config, jax.devices()[:8])
        run = run._replace(parallel=parallel_of(mesh, config, 'train'))
    given = batch() | {'next_targets': next_targets(batch()['targets'])}
    find = jax.jit(make_gradient(Kimi(SHORT, run), 1, mesh, Extra(mtp=mtp)))
    return find(stepped()[2], given)


@pytest.mark.slow
def test_without_weight_it_has_no_gradient():
    assert float(Sums(1.0, 2.0, 3.0).objective(Extra(z=0.1, mtp=0.5))) == pytest.approx(2.7)
    alone, half = gradient(0.0), gradient(0.5)
    assert not any(map(np.any, jax.tree.leaves(alone.grads['mtp'])))
    assert np.any(half.grads['lm_head'] != alone.grads['lm_head'])
    np.testing.assert_allclose(alone.sums, half.sums, rtol=1e-6)


@pytest.mark.slow
def test_on_a_mesh_it_is_as_on_one_chip():
    got, want = gradient(0.5, (('data', 2), ('expert', 2), ('sequence', 2))), gradient(0.5)
    np.testing.assert_allclose(got.sums, want.sums, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got.grads), jax.tree.leaves(want.grads), strict=True):
        assert relative_error(a, b) <= 1e-5
    of_layer = (x.seen['mtp']['layer'].load for x in (got, want))
    np.testing.assert_array_equal(*of_layer)


def test_parameters_and_flops_are_counted_apart():
    plain = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    counts = count_parameters(CONFIG)
    size = sum(np.size(x) for x in jax.tree.leaves(tiny.random_params(CONFIG)['mtp']))
    assert counts.pop('mtp') == size and counts == count_parameters(plain)
    flops = flops_by_component(CONFIG, 16)
    # The layer meets 2 of 6 experts.
    layer = tiny.random_params(CONFIG)['mtp']['layer']
    weights = sum(np.size(x) for x in jax.tree.leaves(layer) if np.ndim(x) == 2)
    weights += sum(np.size(x) for x in layer['block_sparse_moe']['experts'].values()) / 3
    attention = 2 * 2 * (12 + 6) * (16 + 1) / 2
    assert flops['mtp'] == pytest.approx(2 * (weights + 2 * 24 * 24 + 40 * 24) + attention)


def test_an_export_is_without_it():
    config = tiny.k3(num_nextn_predict_layers=1)
    params, released = released_form(tiny.random_params(config), config, QuantisationConfig())
    assert 'mtp' not in params and released.num_nextn_predict_layers == 0
