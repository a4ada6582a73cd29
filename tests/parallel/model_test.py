"""The model on a mesh equals the model on one chip: loss and every gradient, serving too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MeshConfig, OptimizerConfig
from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, decode, forward, init_params, prefill
from k3jax.model.param import param_specs
from k3jax.model.run import Run
from k3jax.model.statistics import LayerStatistics, Watch
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.serve.steps import decode_step, prefill_step
from k3jax.train.optim import make_optimizer
from k3jax.train.state import TrainState, abstract_state, working_copy
from k3jax.train.step import make_gradient, make_train_step
from tests import tiny
from tests.compare import relative_error

# Two attention-residual blocks; KDA with and without experts, and MLA.
CONFIG = tiny.k3((1, 2), (3,), num_experts=8, hidden_size=32, num_attention_heads=4)
RUN = Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla', watch=Watch(1000))
BATCH, LENGTH = 8, 48
MESHES = {
    'data': (8, 1, 1),
    'expert': (1, 8, 1),
    'sequence': (1, 1, 8),
    'all': (2, 2, 2),
    'data x sequence': (4, 1, 2),
}
REMATS = {
    'none': {},
    'layer': {'remat': 'layer'},
    'keep': {'remat': 'layer', 'keep': ('mixer_output', 'ffn_input')},
    'offload': {'remat': 'layer', 'offload': ('layer_input',)},
    'both': {'remat': 'layer', 'keep': ('ffn_output',), 'offload': ('layer_input', 'mixer_input')},
}


def documents():
    """Rows of several documents: one long, padding at the end, one token each, all padding."""
    ids = np.sort(np.random.default_rng(0).integers(1, 5, (BATCH, LENGTH)), axis=1)
    ids[1] = 1
    ids[2, -20:] = 0
    ids[3] = np.arange(1, LENGTH + 1)
    ids[4] = 0
    return ids.astype(np.int32)


@functools.cache
def batch():
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1))
    tokens, ids = tokens.astype(np.int32), documents()
    targets = np.where(ids > 0, tokens[:, 1:], -1)
    return {'tokens': tokens[:, :-1], 'targets': targets, 'segment_ids': ids}


@functools.cache
def params():
    """Large enough for gates, routers and softmaxes to tell tokens apart."""
    values = jax.jit(lambda key: init_params(Kimi(CONFIG, RUN), key))(jax.random.key(0))

    def scaled(path, x):
        # Fresh gates are all but shut, so that their gradients would be rounding alone.
        return x / 5 if path[-1].key in ('A_log', 'dt_bias') else 2 * x if x.ndim > 1 else x

    return jax.tree_util.tree_map_with_path(scaled, values)


@functools.cache
def on_one_chip():
    return jax.jit(make_gradient(Kimi(CONFIG, RUN), 1, None))(params(), batch())


def mesh_of(shape, **fields):
    data, expert, sequence, *tensor = shape
    axes = {'data': data, 'expert': expert, 'sequence': sequence, 'tensor': (*tensor, 1)[0]}
    config = MeshConfig(**axes, whole_below=0, **fields)
    return config, make_mesh(config, jax.devices()[: int(np.prod(shape))])


def on_mesh(shape, remat='none', grad_accum_steps=1, **fields):
    config, mesh = mesh_of(shape, **fields)
    run = RUN._replace(parallel=parallel_of(mesh, config, 'train'), **REMATS[remat])
    return jax.jit(make_gradient(Kimi(CONFIG, run), grad_accum_steps, mesh))(params(), batch())


def assert_same(got, want):
    np.testing.assert_allclose(got.sums, want.sums, rtol=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(want[1])
    for (path, a), b in zip(leaves, jax.tree.leaves(got[1]), strict=True):
        error = relative_error(b, a)
        assert error <= 1e-5, f'{jax.tree_util.keystr(path)}: {error}'
    seen = (
        jax.tree.leaves(x.seen, is_leaf=lambda x: isinstance(x, LayerStatistics))
        for x in (got, want)
    )
    for a, b in zip(*seen, strict=True):
        np.testing.assert_array_equal(a.load, b.load)
        if b.histogram is not None:
            # Scores that differ in the last bit may lie in neighbouring bins.
            differ = np.abs(np.cumsum(np.asarray(a.histogram) - b.histogram, axis=-1))
            assert differ.max() <= 1 and differ.mean() < 1e-3
        if b.max_logit is not None:
            np.testing.assert_allclose(a.max_logit, b.max_logit, rtol=1e-5)


@pytest.mark.parametrize(
    ('name', 'remat'),
    [('all', 'offload'), pytest.param('sequence', 'none', marks=pytest.mark.slow)],
)
def test_loss_and_gradients_are_those_of_one_chip(name, remat):
    assert_same(on_mesh(MESHES[name], remat), on_one_chip())


def stepped(shape, state_memory):
    """Parameters and loss after a step of AdamW."""
    config, mesh = mesh_of(shape)
    run = RUN._replace(parallel=parallel_of(mesh, config, 'train'))
    model = Kimi(CONFIG, run)
    settings = OptimizerConfig(warmup_steps=0, learning_rate=1e-2)
    optimizer = make_optimizer(settings, 10, model, mesh)
    placed = abstract_state(model, optimizer, mesh, state_memory)
    state = TrainState(jnp.int32(0), params(), jax.jit(optimizer.init)(params()))
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, placed))
    step = jax.jit(make_train_step(model, optimizer, mesh=mesh, placed=placed))
    state, metrics = step(state, batch())
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, state)
    assert kinds == jax.tree.map(lambda x: x.sharding.memory_kind, placed)
    return metrics['loss'], state.params


@pytest.mark.slow
def test_a_working_copy_has_the_gradient_that_rounding_inside_the_step_has():
    config, mesh = mesh_of((2, 2, 2))
    parallel = parallel_of(mesh, config, 'train')
    model = Kimi(CONFIG, RUN._replace(dtype=jnp.dtype('bfloat16'), parallel=parallel))
    gradient = jax.jit(make_gradient(model, 2, mesh))
    want = gradient(params(), batch())
    copy = jax.jit(functools.partial(working_copy, model))(params())
    assert {x.dtype.name for x in jax.tree.leaves(copy)} == {'bfloat16', 'float32'}
    jax.tree.map(np.testing.assert_array_equal, gradient(copy, batch()), want)


@pytest.mark.slow
def test_a_step_with_its_state_in_host_memory_is_the_same_step():
    want = stepped((2, 2, 2), 'device')
    got = stepped((2, 2, 2), 'pinned_host')
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize('remat', REMATS)
@pytest.mark.parametrize('name', MESHES)
def test_every_remat_policy_gives_the_gradients_of_one_chip(name, remat):
    assert_same(on_mesh(MESHES[name], remat), on_one_chip())


@pytest.mark.slow
def test_plain_expert_parallelism_and_accumulation_change_nothing():
    assert_same(on_mesh((2, 2, 2), expert_parallel='plain'), on_one_chip())
    assert_same(on_mesh((2, 1, 4), grad_accum_steps=2), on_one_chip())


def test_prefill_of_a_shared_row_gives_the_cache_and_logits_of_one_chip():
    """Rows of different lengths, one of which ends inside an early part."""
    one = Kimi(CONFIG, RUN)
    tokens, num_real = batch()['tokens'][:2], np.array([LENGTH, 19], np.int32)
    cache = init_cache(CONFIG, one.plan, 2, LENGTH, jnp.float32)
    want = jax.jit(functools.partial(prefill, one))(params(), tokens, num_real, cache)

    config, mesh = mesh_of((1, 1, 8))
    parallel = parallel_of(mesh, config, 'prefill')
    step = prefill_step(Kimi(CONFIG, RUN._replace(parallel=parallel)), mesh)
    logits, got = jax.jit(step)(params(), tokens, num_real, cache)
    assert relative_error(logits, want[0]) <= 1e-5
    np.testing.assert_array_equal(got.length, want[1].length)
    # What padding leaves in the cache of latents is never read.
    real = np.arange(LENGTH) < num_real[:, None]

    def check(path, a, b):
        if 'latent' in jax.tree_util.keystr(path) or '.key' in jax.tree_util.keystr(path):
            a, b = (np.where(real[..., None], x, 0) for x in (a, b))
        assert relative_error(b, a) <= 1e-5, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, want[1].layers, got.layers)


@pytest.mark.parametrize('shape', [(2, 1, 1, 4), (2, 2, 1, 2)])
def test_decoding_on_chips_that_share_heads_gives_the_logits_of_one_chip(shape):
    model_config = dataclasses.replace(
        CONFIG,
        intermediate_size=32,
        moe_intermediate_size=8,
        linear_attn_config=dataclasses.replace(CONFIG.linear_attn_config, num_heads=4),
    )
    one = Kimi(model_config, RUN)
    values = jax.jit(lambda key: init_params(one, key))(jax.random.key(0))
    prompt = batch()['tokens'][:4, :9]
    cache = init_cache(model_config, one.plan, 4, 16, jnp.float32)
    num_real = np.array([9, 5, 7, 1], np.int32)
    logits, cache = jax.jit(functools.partial(prefill, one))(values, prompt, num_real, cache)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    want, after = jax.jit(functools.partial(decode, one))(values, token, cache)

    config, mesh = mesh_of(shape)
    parallel = parallel_of(mesh, config, 'decode')
    step = decode_step(Kimi(model_config, RUN._replace(parallel=parallel)), mesh)
    got, cache = jax.jit(step)(values, token, cache)
    assert relative_error(got, want) <= 1e-5
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        assert relative_error(b, a) <= 1e-5


def test_no_logit_depends_on_a_later_token_of_another_chip():
    config, mesh = mesh_of((1, 1, 8))
    parallel = parallel_of(mesh, config, 'train')
    model = Kimi(CONFIG, RUN._replace(parallel=parallel))
    cut = parallel.batch_spec
    logits = jax.jit(
        jax.shard_map(
            lambda p, t: forward(model, p, t),
            mesh=mesh,
            in_specs=(param_specs(CONFIG, model.plan, parallel), cut),
            out_specs=cut,
            check_vma=False,
        )
    )
    tokens = batch()['tokens'].copy()
    before = np.asarray(logits(params(), tokens))
    at = 29
    tokens[:, at] = (tokens[:, at] + 1) % CONFIG.vocab_size
    changed = np.any(np.asarray(logits(params(), tokens)) != before, axis=(0, 2))
    assert not changed[:at].any() and changed[at:].all()
