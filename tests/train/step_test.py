"""One optimizer step: the loss it minimises, accumulation, what moves and what is held."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.config import OptimizerConfig, QuantileBalanceConfig
from k3jax.data.pack import IGNORE
from k3jax.model.kimi import Kimi, forward, init_params
from k3jax.model.plan import at, stacks
from k3jax.model.run import Run
from k3jax.model.statistics import LayerStatistics, Watch
from k3jax.train import losses, optim
from k3jax.train.corrections import BIAS, layer_metrics
from k3jax.train.quantile_balance import estimated_bias
from k3jax.train.state import TrainState
from k3jax.train.step import Extra, losses_of, make_train_step
from tests import tiny

CONFIG = tiny.k3()
MODEL = Kimi(CONFIG, Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla'))
THRESHOLD = 1e-4  # of QK-Clip; the logits of a fresh model are small
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
    return optimizer, jax.jit(make_train_step(MODEL, optimizer, grad_accum_steps=grad_accum_steps))


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
        found = losses.token_losses(params['lm_head'], hidden, targets)
        total = lambda h: sum(  # noqa: E731
            x.sum() for x in losses.token_losses(params['lm_head'], h, targets)
        )
        return *found, jax.grad(total)(hidden)

    at_once = values_and_gradient(hidden)
    monkeypatch.setattr(losses, 'LOGITS_AT_ONCE', 4 * CONFIG.vocab_size)
    for got, want in zip(values_and_gradient(hidden), at_once, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_accumulated_slices_equal_one_batch_and_steps_lower_its_loss(params, batch, stepped):
    slow = dataclasses.replace(OPTIMIZER, learning_rate=1e-3)
    optimizer, step = make(grad_accum_steps=2, config=slow)
    state = TrainState(jnp.int32(0), params, optimizer.init(params))
    values = []
    for _ in range(4):
        state, metrics = step(state, batch)
        values.append(metrics)
    for name, value in values[0].items():
        np.testing.assert_allclose(value, stepped[1][name], rtol=1e-4)
    assert values[-1]['loss'] < values[0]['loss']
    assert int(state.step) == 4


def test_everything_moves(params, stepped):
    state = stepped[0]
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, state.params)
    for path, changed in jax.tree_util.tree_leaves_with_path(moved):
        name = jax.tree_util.keystr(path)
        # Layer 0 reads one candidate, so its attention residual has no effect (weight decay aside).
        unused = 'block_0' in name and 'self_attention_res' in name
        assert changed or unused, name


def test_weight_decay_is_on_matrices_only():
    rules = optim.make_optimizer(OPTIMIZER, 10, MODEL).rules
    by_name: dict[str, set[str]] = {}
    for path, rule in jax.tree_util.tree_leaves_with_path(rules):
        by_name.setdefault(path[-1].key, set()).add(rule.label)
    assert all(len(found) == 1 for found in by_name.values())
    plain = {name for name, found in by_name.items() if found == {'plain'}}
    assert {'A_log', 'dt_bias', 'o_norm', 'q_conv1d', 'input_layernorm', 'mlp_res_proj'} <= plain
    decayed = {name for name, found in by_name.items() if found == {'decayed'}}
    assert {'q_proj', 'w1', 'gate', 'embed_tokens', 'lm_head', 'kv_b_proj'} <= decayed


def test_gradients_are_clipped_by_their_global_norm(params):
    config = dataclasses.replace(OPTIMIZER, weight_decay=0.0)
    optimizer = optim.make_optimizer(config, 10, MODEL)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 1e6), params)
    small = jax.tree.map(lambda x: x / 1e3, huge)

    @jax.jit
    def moved(grads):
        norm = optax.tree.norm(grads)
        after, _ = optimizer.update(grads, optimizer.init(params), params, 0, norm=norm)
        return optax.tree.norm(jax.tree.map(jnp.subtract, after, params))

    np.testing.assert_allclose(moved(huge), moved(small), rtol=1e-5)


def test_the_step_sets_the_biases_by_the_batch_it_has_seen(params, batch, stepped):
    """The next step's router: what the exact rule gives for the routing of the step before."""
    state, metrics = stepped
    watched = MODEL.clone(run=MODEL.run._replace(watch=Watch(1000)))
    seen = watched.apply({'params': params}, batch['tokens'], batch['segment_ids']).seen
    for path, layers in stacks(MODEL.plan):
        statistics = at(seen, path)
        if statistics.histogram is None:
            continue
        rule = functools.partial(estimated_bias, num_chosen=CONFIG.num_experts_per_token)
        for _ in layers.shape:  # a stack of layers is as each of them
            rule = jax.vmap(rule)
        want = rule(statistics.histogram, at(params, path + BIAS))
        got = at(state.params, path + BIAS)
        np.testing.assert_allclose(got, want, atol=1e-6)
        assert np.any(got)
    num_moe = sum(CONFIG.is_moe(layer) for layer in range(CONFIG.num_hidden_layers))
    assert metrics['maxvio'].shape == metrics['dead_experts'].shape == (num_moe,)


def test_padding_is_not_counted(params, batch):
    watched = MODEL.clone(run=MODEL.run._replace(watch=Watch(50)))
    look = jax.jit(lambda tokens, ids: watched.apply({'params': params}, tokens, ids).seen)
    ids = batch['segment_ids'].copy()
    ids[:, 7:] = 0
    other = batch['tokens'].copy()
    other[:, 7:] = (other[:, 7:] + 3) % CONFIG.vocab_size
    seen = look(batch['tokens'], ids)
    jax.tree.map(np.testing.assert_array_equal, seen, look(other, ids))
    for path, layers in stacks(MODEL.plan):
        statistics = at(seen, path)
        if statistics.load is not None:
            assert statistics.load.sum() == 4 * 7 * CONFIG.num_experts_per_token * layers.size
            assert np.all(statistics.histogram.sum(axis=-1) == 4 * 7)


@pytest.fixture(scope='module')
def still(params, batch):
    """Two steps in which all but moves: heads are clipped, biases are not set, with a z-loss."""
    config = dataclasses.replace(
        OPTIMIZER,
        learning_rate=1e-30,
        weight_decay=0.0,
        quantile_balance=QuantileBalanceConfig(enabled=False),
        qk_clip_threshold=THRESHOLD,
    )
    optimizer = optim.make_optimizer(config, 10, MODEL)
    step = jax.jit(make_train_step(MODEL, optimizer, extra=Extra(z=0.5)))
    first, metrics = step(TrainState(jnp.int32(0), params, optimizer.init(params)), batch)
    return metrics, *step(first, batch)


def test_heads_over_the_threshold_are_at_it_in_the_next_step(still):
    before, after = (np.asarray(metrics['max_logit']) for metrics in (still[0], still[2]))
    assert before[0] > THRESHOLD
    # Later layers see other inputs than before.
    np.testing.assert_allclose(after[0], THRESHOLD, rtol=1e-5)
    assert after.max() < before.max()


def test_biases_are_held_without_balancing(params, still):
    for path, _ in stacks(MODEL.plan):
        if 'block_sparse_moe' in at(params, path):
            assert np.array_equal(at(still[1].params, path + BIAS), at(params, path + BIAS))


def test_the_z_loss_is_minimised_beside_the_loss_and_shown_apart(params, batch, still, stepped):
    logits = np.asarray(forward(MODEL, params, batch['tokens'], batch['segment_ids']), np.float64)
    log_z = np.log(np.sum(np.exp(logits), axis=-1))[batch['targets'] != IGNORE]
    metrics = still[0]
    np.testing.assert_allclose(metrics['z_loss'], 0.5 * np.mean(log_z**2), rtol=1e-5)
    np.testing.assert_allclose(metrics['loss'], stepped[1]['loss'], rtol=1e-6)
    assert abs(metrics['grad_norm'] / stepped[1]['grad_norm'] - 1) > 1e-3


def test_losses_of_slices_are_those_of_the_batch(params, batch):
    want = losses_of(MODEL)(params, batch)
    np.testing.assert_allclose(losses_of(MODEL, num_slices=2)(params, batch), want, atol=1e-6)
    logits = forward(MODEL, params, batch['tokens'], batch['segment_ids'])
    log_probs = np.asarray(jax.nn.log_softmax(np.asarray(logits, np.float64)))
    picked = np.take_along_axis(log_probs, np.maximum(batch['targets'], 0)[..., None], axis=2)
    wanted = np.where(batch['targets'] == IGNORE, 0, -picked[..., 0])
    np.testing.assert_allclose(want, wanted, rtol=1e-5, atol=1e-6)


def test_metrics_of_layers_stand_in_their_order():
    """A logit that is no number reaches the metrics, which the loop checks; one of no token not."""
    numbers = np.arange(CONFIG.num_hidden_layers, dtype=np.float32)
    seen = {}
    for path, layers in stacks(MODEL.plan):
        node = seen
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = LayerStatistics(
            load=jnp.asarray(numbers[layers][..., None] * np.array([1, 0]) + 1),
            max_logit=jnp.asarray(np.stack([numbers[layers], -numbers[layers]], axis=-1)),
        )
    metrics = layer_metrics(seen, CONFIG, MODEL.plan)
    np.testing.assert_array_equal(metrics['max_logit'], numbers)
    np.testing.assert_allclose(metrics['maxvio'], 2 * (numbers + 1) / (numbers + 2) - 1, rtol=1e-6)
    for value, want in ((jnp.nan, np.nan), (jnp.inf, np.inf), (-jnp.inf, 0.0)):
        one = jax.tree.map(lambda x, v=value: jnp.full_like(x, v), seen)
        np.testing.assert_array_equal(layer_metrics(one, CONFIG, MODEL.plan)['max_logit'], want)
