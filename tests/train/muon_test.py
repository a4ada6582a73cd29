"""Muon against vectors, float64 and optax; every parameter of the family is in a group."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import kimi_k3, kimi_linear_48b
from k3jax.config import ConfigError, MuonConfig, OptimizerConfig, VisionConfig
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf
from k3jax.model.plan import depth_plan
from k3jax.model.run import Run
from k3jax.train import optim
from k3jax.train.muon import (
    Blocks,
    MuonState,
    accumulated,
    directions_on_mesh,
    muon_direction,
    newton_schulz,
)
from tests import tiny
from tests.oracles import muon as oracle

EXACT = MuonConfig(dtype='float32')


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_vector_of_the_specification():
    matrix = np.array([[1.0, 2, 0], [0, 1, -1]])
    got = newton_schulz(jnp.asarray(matrix), EXACT)
    want = [[0.4468269, 0.5926886, 0.3009700], [-0.3009700, 0.2963443, -0.8982842]]
    np.testing.assert_allclose(oracle.newton_schulz(matrix), want, atol=3e-6)
    np.testing.assert_allclose(got, want, atol=1e-5)
    values = np.linalg.svd(got, compute_uv=False)
    np.testing.assert_allclose(values, [1.048769, 0.725892], atol=1e-5)


def test_a_small_head_moves_as_far_as_a_large_one_only_when_it_is_a_block():
    """Norms of two heads: the second vector of the specification."""
    x = np.random.default_rng(0).normal(size=(8, 8)).T  # two heads of four rows
    x[4:] *= 1e-3
    x = jnp.asarray(x, jnp.float32)

    def norms(y):
        return jnp.linalg.norm(y.reshape(2, -1), axis=1)

    np.testing.assert_allclose(norms(newton_schulz(x, EXACT)), [1.7042, 0.3761], atol=1e-4)
    apart = newton_schulz(x.reshape(2, 4, 8), EXACT)
    np.testing.assert_allclose(norms(apart), [1.7042, 1.9938], atol=1e-4)


@pytest.mark.parametrize('shape', [(5, 3), (3, 5), (4, 4), (1, 6)])
def test_equals_float64_and_optax(shape):
    x = random(1, 2, *shape)
    got = newton_schulz(jnp.asarray(x), EXACT)
    for one, matrix in zip(got, x, strict=True):
        np.testing.assert_allclose(one, oracle.newton_schulz(matrix), rtol=1e-5, atol=1e-6)
        by_optax = optax.contrib.muon(
            -1.0, EXACT.coefficients, EXACT.steps, beta=0.0, eps=1e-7, nesterov=False,
            consistent_rms=0.2,
        )  # fmt: skip
        moved, _ = by_optax.update(matrix, by_optax.init(jnp.asarray(matrix)), matrix)
        ours = muon_direction(jnp.asarray(matrix), Blocks(1, shape[:1]), EXACT)
        np.testing.assert_allclose(ours, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_update_has_the_rms_of_adam(dtype):
    direction = muon_direction(
        jnp.asarray(random(2, 64, 48)), Blocks(2, (24, 8)), MuonConfig(dtype=dtype)
    )
    for block in (direction[:24], direction[24:32], direction[32:56], direction[56:]):
        assert 0.14 < float(jnp.sqrt(jnp.mean(block**2))) < 0.25


_direction = jax.jit(
    lambda x, blocks: directions_on_mesh([x], blocks, EXACT)[0], static_argnames='blocks'
)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    st.sampled_from([Blocks(3, (4,)), Blocks(4, (2, 3)), Blocks(2, (7,))]), st.integers(0, 99)
)
def test_permuting_heads_and_experts_commutes(blocks, seed):
    x = random(seed, 3, blocks.count, sum(blocks.rows), 6)  # three experts
    rng = np.random.default_rng(seed)
    order = np.ix_(rng.permutation(3), rng.permutation(blocks.count))

    def moved(x):
        return _direction(x.reshape(3, -1, 6), blocks).reshape(x.shape)

    np.testing.assert_allclose(moved(x[order]), moved(x)[order], atol=1e-5)


def test_zero_momentum_moves_nothing():
    assert not np.any(muon_direction(jnp.zeros((4, 3)), Blocks(2, (2,)), EXACT))


@pytest.mark.parametrize('nesterov', [False, True])
def test_momentum_accumulates_as_published(nesterov):
    config = dataclasses.replace(EXACT, nesterov=nesterov)
    state, momentum = MuonState(jnp.zeros((3, 4))), 0.0
    for seed in (5, 6):
        grad = random(seed, 3, 4)
        got, state = accumulated(grad, state, config)
        momentum = 0.95 * momentum + np.asarray(grad, np.float64)
        ahead = grad + 0.95 * momentum if nesterov else momentum
        np.testing.assert_allclose(got, ahead, rtol=1e-6)
        np.testing.assert_allclose(state.momentum, momentum, rtol=1e-6)


def rules_by_name(model):
    """Name -> what moves the parameters of this name, and the blocks in them."""
    names = {}
    run = Run(jnp.dtype('float32'), jnp.dtype('float32'))
    optimizer = optim.make_optimizer(OptimizerConfig(name='muon'), 1000, Kimi(model, run))
    for path, rule in jax.tree_util.tree_leaves_with_path(optimizer.rules):
        names.setdefault(path[-1].key, set()).add((rule.label, rule.blocks))
    return names


def groups(model):
    labels = {name: {label for label, _ in found} for name, found in rules_by_name(model).items()}
    assert all(len(found) == 1 for found in labels.values())
    return {name: found.pop() for name, found in labels.items()}


@pytest.mark.parametrize(
    ('config', 'heads'),
    [
        (
            kimi_k3,
            {
                'q_proj': {Blocks(96, (128,))},
                'k_proj': {Blocks(96, (128,))},
                'v_proj': {Blocks(96, (128,))},
                'q_b_proj': {Blocks(96, (192,))},
                'kv_b_proj': {Blocks(96, (128, 128))},
            },
        ),
        (
            kimi_linear_48b,
            {
                'q_proj': {Blocks(32, (128,)), Blocks(32, (192,))},  # KDA's and MLA's
                'k_proj': {Blocks(32, (128,))},
                'v_proj': {Blocks(32, (128,))},
                'kv_b_proj': {Blocks(32, (128, 128))},
            },
        ),
    ],
)
def test_queries_keys_and_values_move_head_by_head_and_nothing_else_does(config, heads):
    found = {}
    for name, rules in rules_by_name(config.get_config().model).items():
        blocks = {blocks for _, blocks in rules if blocks is not None}
        if any(not x.is_single for x in blocks):
            found[name] = blocks
    assert found == heads


@pytest.mark.parametrize('config', [kimi_k3, kimi_linear_48b])
def test_every_parameter_is_in_a_group(config):
    """Matrices move by Muon, everything else by AdamW, the balancing bias by neither."""
    table = groups(config.get_config().model)
    print(*(f'{name:28s} {label}' for name, label in sorted(table.items())), sep='\n')
    moved = {name for name, label in table.items() if label == 'muon'}
    assert {'q_proj', 'kv_b_proj', 'w1', 'w2', 'w3', 'gate', 'o_proj', 'down_proj'} <= moved
    assert not moved & {'embed_tokens', 'lm_head', 'q_conv1d', 'A_log', 'norm', 'dt_bias'}
    assert table['e_score_correction_bias'] == 'held'
    assert table['embed_tokens'] == table['lm_head'] == 'decayed'
    assert {table[x] for x in ('norm', 'A_log', 'dt_bias', 'q_conv1d')} == {'plain'}


def test_a_parameter_without_a_group_is_an_error():
    with pytest.raises(ConfigError, match="no group has the parameter 'new_proj'"):
        optim.group_of('new_proj')


def test_blocks_are_heads_and_experts():
    model = kimi_k3.get_config().model
    leaf = Leaf((96 * 192, 1536), ('heads', None))
    assert optim.blocks_of('q_b_proj', leaf, model, MuonConfig()) == Blocks(96, (192,))
    leaf = Leaf((96 * 256, 512), ('heads', None))
    assert optim.blocks_of('kv_b_proj', leaf, model, MuonConfig()) == Blocks(96, (128, 128))
    joined = MuonConfig(split_kv_b=False)
    assert optim.blocks_of('kv_b_proj', leaf, model, joined) == Blocks(96, (256,))
    whole = MuonConfig(per_head=False)
    assert optim.blocks_of('kv_b_proj', leaf, model, whole) == Blocks(1, (96 * 256,))
    leaf = Leaf((896, 3072, 3584), ('expert', 'expert_rows', None))
    assert optim.blocks_of('w1', leaf, model, MuonConfig()) == Blocks(1, (3072,))
    with pytest.raises(ConfigError, match='q_proj has 100 rows, wanted a multiple of 96 heads'):
        leaf = Leaf((100, 8), ('kda_heads', 'embed'))
        optim.blocks_of('q_proj', leaf, model, MuonConfig())


@pytest.mark.parametrize('older', [False, True])
def test_matrices_of_the_tower_are_muons_and_its_tables_are_not(older):
    """`older`: as of K2.5, with biases and layer norms."""
    vision = VisionConfig(norm='layer', bias=True) if older else VisionConfig()
    model = tiny.k3((), (1,), vision=vision, media_placeholder_token_id=3)
    config = OptimizerConfig(name='muon')
    rules = optim.map_leaves(
        lambda name, leaf, lead: optim.rule_of(name, leaf, model, config), model, depth_plan(model)
    )
    tower, projector = rules['vision_tower'], rules['mm_projector']
    blocks = tower['blocks']
    assert blocks['wqkv']['weight'].blocks == Blocks(3 * 12, (128,))
    matrices = (blocks['wo'], *blocks['mlp'].values(), projector['proj_0'], projector['proj_2'])
    assert {x['weight'].label for x in matrices} == {'muon'}
    tables = tower['patch_embed']['proj']['weight'], tower['patch_embed']['pos_emb']
    assert {x.label for x in tables} == {'decayed'}
    norms = blocks['norm0'], blocks['norm1'], tower['final_layernorm']
    assert {x['weight'].label for x in norms} == {'plain'}
    if older:
        assert {x['bias'].label for x in (*norms, *matrices)} == {'plain'}


def test_a_step_of_the_whole_model_moves_each_matrix_by_its_own_rule():
    model = tiny.k3((1,), (2,))
    plan = depth_plan(model)
    config = OptimizerConfig(
        name='muon', muon=EXACT, warmup_steps=0, learning_rate=0.1, grad_clip_norm=1e9
    )
    run = Run(jnp.dtype('float32'), jnp.dtype('float32'))
    optimizer = optim.make_optimizer(config, 10, Kimi(model, run))
    leaves = optim.map_leaves(lambda name, leaf, lead: (*lead, *leaf.shape), model, plan)
    params = jax.tree.map(
        lambda shape: jnp.asarray(random(len(shape), *shape)),
        leaves,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    grads = jax.tree.map(lambda x: jnp.asarray(random(x.size, *x.shape)), params)
    update = jax.jit(functools.partial(optimizer.update, norm=optax.tree.norm(grads)))
    moved, state = update(grads, optimizer.init(params), params, 0)
    updates = jax.tree.map(jnp.subtract, moved, params)
    kinds = {
        'muon': MuonState,
        'decayed': optim.AdamState,
        'plain': optim.AdamState,
        'held': optax.EmptyState,
    }
    rules, tree = jax.tree.flatten(optimizer.rules)
    for rule, found in zip(rules, tree.flatten_up_to(state), strict=True):
        assert type(found) is kinds[rule.label]

    def at(tree, *names):
        found = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if tuple(key.key for key in path)[-len(names) :] == names
        ]
        return np.asarray(found[0]).reshape(-1, *found[0].shape[-2:])[0]

    w, g, u = (at(tree, 'self_attn', 'kv_b_proj') for tree in (params, grads, updates))
    heads, keys, values = 2, 8, 6
    want = []
    for block in np.split(g, heads):
        for part in (block[:keys], block[keys:]):
            want.append(0.2 * np.sqrt(max(part.shape)) * oracle.newton_schulz(part))
    want = -0.1 * (np.concatenate(want) + 0.1 * w)
    assert u.shape == (heads * (keys + values), 10)
    np.testing.assert_allclose(u, want, rtol=1e-3, atol=1e-5)
    bias = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        if path[-1].key == 'e_score_correction_bias'
    ]
    assert bias and not any(np.any(x) for x in bias)
