"""One optimizer step: the loss it minimises, accumulation, what moves and what is held."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.config import OptimizerConfig
from k3jax.data.pack import IGNORE
from k3jax.model.kimi import Kimi, forward, init_params
from k3jax.model.run import Run
from k3jax.train import losses, optim
from k3jax.train.state import TrainState
from k3jax.train.step import make_train_step
from tests import tiny

CONFIG = tiny.k3()
MODEL = Kimi(CONFIG, Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla'))
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.5)


@pytest.fixture(scope='module')
def params():
    return jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))


@pytest.fixture(scope='module')
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (4, 13)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, 3:] = IGNORE  # slices of unequal weight
    targets[3] = IGNORE
    segment_ids = np.ones((4, 12), np.int32)
    return {'tokens': tokens[:, :-1], 'targets': targets, 'segment_ids': segment_ids}


def make(num_steps=10, grad_accum_steps=1, config=OPTIMIZER):
    optimizer = optim.make_optimizer(config, num_steps, MODEL)
    return optimizer, jax.jit(make_train_step(MODEL, optimizer, grad_accum_steps))


@pytest.fixture(scope='module')
def stepped(params, batch):
    optimizer, step = make()
    return step(TrainState(jnp.int32(0), params, optimizer.init(params)), batch)


def test_loss_is_the_mean_negative_log_likelihood_of_real_targets(params, batch, stepped):
    logits = forward(MODEL, params, batch['tokens'], batch['segment_ids'])
    log_probs = np.asarray(jax.nn.log_softmax(np.asarray(logits, np.float64)))
    real = batch['targets'] != IGNORE
    rows, columns = np.nonzero(real)
    want = -log_probs[rows, columns, batch['targets'][real]].mean()
    np.testing.assert_allclose(stepped[1]['loss'], want, rtol=1e-5)
    assert stepped[1]['targets'] == real.sum()


def test_loss_by_blocks_of_tokens_equals_loss_at_once(params, monkeypatch):
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((2, 9, CONFIG.hidden_size)).astype(np.float32)
    targets = rng.integers(-1, CONFIG.vocab_size, (2, 9)).astype(np.int32)

    def values_and_gradient(hidden):
        total = lambda h: losses.token_losses(params['lm_head'], h, targets).sum()  # noqa: E731
        return losses.token_losses(params['lm_head'], hidden, targets), jax.grad(total)(hidden)

    at_once = values_and_gradient(hidden)
    monkeypatch.setattr(losses, 'LOGITS_AT_ONCE', 4 * CONFIG.vocab_size)
    for got, want in zip(values_and_gradient(hidden), at_once, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_accumulated_slices_equal_one_batch(params, batch, stepped):
    optimizer, step = make(grad_accum_steps=2)
    state, metrics = step(TrainState(jnp.int32(0), params, optimizer.init(params)), batch)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], stepped[1][name], rtol=1e-4)


def test_a_step_lowers_the_loss_of_its_batch(params, batch):
    optimizer, step = make(config=dataclasses.replace(OPTIMIZER, learning_rate=1e-3))
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    values = []
    for _ in range(4):
        state, metrics = step(state, batch)
        values.append(float(metrics['loss']))
    assert values[-1] < values[0]
    assert int(state.step) == 4


def test_the_correction_bias_is_held_and_everything_else_moves(params, stepped):
    state = stepped[0]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, state.params)
    for path, changed in jax.tree_util.tree_leaves_with_path(moved):
        name = jax.tree_util.keystr(path)
        held = 'e_score_correction_bias' in name
        # Layer 0 reads one candidate, so its attention residual has no effect (weight decay aside).
        unused = 'block_0' in name and 'self_attention_res' in name
        assert changed != held or unused, name


def test_weight_decay_is_on_matrices_only():
    labels = optim.labels_of(OPTIMIZER, CONFIG, MODEL.plan)
    by_name: dict[str, set[str]] = {}
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        by_name.setdefault(path[-1].key, set()).add(label)
    assert all(len(found) == 1 for found in by_name.values())
    plain = {name for name, found in by_name.items() if found == {'plain'}}
    assert {'A_log', 'dt_bias', 'o_norm', 'q_conv1d', 'input_layernorm', 'mlp_res_proj'} <= plain
    decayed = {name for name, found in by_name.items() if found == {'decayed'}}
    assert {'q_proj', 'w1', 'gate', 'embed_tokens', 'lm_head', 'kv_b_proj'} <= decayed


def test_learning_rate_warms_up_linearly_and_ends_at_its_ratio():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_ratio=0.1)
    rate = optim.learning_rate(config, 100)
    assert rate(0) == 0.0
    np.testing.assert_allclose([rate(5), rate(10), rate(100)], [0.5, 1.0, 0.1], rtol=1e-6)
    assert float(rate(55)) == pytest.approx(0.55, rel=1e-6)


def test_gradients_are_clipped_by_their_global_norm(params):
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    optimizer = optim.make_optimizer(config, 10, MODEL)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 1e6), params)
    small = jax.tree.map(lambda x: x / 1e3, huge)

    def moved(grads):
        norm = optax.tree.norm(grads)
        after, _ = optimizer.update(grads, optimizer.init(params), params, 0, norm=norm)
        return optax.tree.norm(jax.tree.map(jnp.subtract, after, params))

    np.testing.assert_allclose(moved(huge), moved(small), rtol=1e-5)
