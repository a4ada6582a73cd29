"""The update against optax, and the order in which leaves come from the host's memory."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from k3jax.config import MuonConfig, OptimizerConfig
from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.train import optim
from k3jax.train.muon import Blocks
from k3jax.train.state import abstract_state
from tests import tiny
from tests.compare import relative_error

CONFIG = tiny.k3((1,), (2,))
MODEL = Kimi(CONFIG, Run(jnp.dtype('float32'), jnp.dtype('float32')))
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, grad_clip_norm=0.1)


def random(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_schedule_is_that_of_the_specification():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_ratio=0.1)
    rate = optim.learning_rate(config, 1000)
    np.testing.assert_allclose(
        [rate(step) for step in (0, 5, 10, 505, 1000)], [0, 0.5, 1, 0.55, 0.1], rtol=1e-6
    )


def test_adamw_is_that_of_optax():
    """Gradients in bfloat16 that are clipped; the moments to the last bit."""
    labels = {'matrix': 'decayed', 'norm': 'plain', 'bias': 'held'}
    schedule = optim.learning_rate(SETTINGS, 10)
    optimizer = optim.Optimizer(SETTINGS, schedule, {k: optim.Rule(v) for k, v in labels.items()})
    adamw = optax.adamw(
        schedule,
        b1=SETTINGS.b1,
        b2=SETTINGS.b2,
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
        mask={'matrix': True, 'norm': False, 'bias': False},
    )
    theirs = optax.chain(
        optax.clip_by_global_norm(SETTINGS.grad_clip_norm),
        optax.partition(
            {'moved': adamw, 'held': optax.set_to_zero()},
            {'matrix': 'moved', 'norm': 'moved', 'bias': 'held'},
        ),
    )

    @jax.jit
    def their_step(grads, state, params, count):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads)
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def our_step(grads, state, params, count, step):
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads))
        return optimizer.update(grads, state, params, step, norm=norm, count=count)

    shapes = {'matrix': (5, 7), 'norm': (7,), 'bias': (3,)}
    x = y = {name: jnp.asarray(random(9, shape)) for name, shape in shapes.items()}
    a, b = theirs.init(x), optimizer.init(y)
    for step in range(4):
        grads = {k: jnp.asarray(random(step, v), jnp.bfloat16) for k, v in shapes.items()}
        count = jnp.int32(7)
        x, a = their_step(grads, a, x, count)
        y, b = our_step(grads, b, y, count, jnp.int32(step))
    (_, mu), (_, nu) = (optax.tree.get_all_with_path(a, name)[0] for name in ('mu', 'nu'))
    for name in ('matrix', 'norm'):
        np.testing.assert_array_equal(b[name].mu, mu[name])
        np.testing.assert_array_equal(b[name].nu, nu[name])
        assert relative_error(y[name], x[name]) <= 2**-23
    np.testing.assert_array_equal(y['bias'], x['bias'])
    assert b['bias'] == optax.EmptyState()


def values_made_of(jaxpr):
    """The barriers of a program, in order, and for each those that its inputs are made of."""
    made, barriers = {}, []
    for eqn in jaxpr.eqns:
        inputs = (made.get(x, frozenset()) for x in eqn.invars if not hasattr(x, 'val'))
        found = frozenset().union(*inputs)
        if eqn.primitive.name == 'optimization_barrier':
            barriers.append((eqn, found))
            found |= {len(barriers) - 1}
        made |= dict.fromkeys(eqn.outvars, found)
    return barriers


def update_of(settings, memory):
    """The update's program, how many parameters it moves by each rule, and in how many turns.

    Parameters of Muon whose matrices are alike move in one turn.
    """
    optimizer = optim.make_optimizer(settings, 10, MODEL)
    mesh = Mesh(np.array(jax.devices()[:1]), ('data',))
    state = abstract_state(MODEL, optimizer, mesh, memory)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state.params)

    def update(grads, opt_state, params, norm):
        placed = state.params, state.opt_state
        return optimizer.update(grads, opt_state, params, 0, norm=norm, placed=placed)

    norm = jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = jax.make_jaxpr(update)(grads, state.opt_state, state.params, norm).jaxpr
    labels = collections.Counter(rule.label for rule in jax.tree.leaves(optimizer.rules))
    pairs = zip(*map(jax.tree.leaves, (optimizer.rules, state.params)), strict=True)
    kinds = {(rule.blocks, x.shape[-2:]) for rule, x in pairs if rule.label == 'muon'}
    return jaxpr, labels, len(kinds) + labels['decayed'] + labels['plain']


def on_host(var):
    return var.aval.memory_space != jax.memory.Space.Device


@pytest.mark.parametrize('at_once', [1, 2])
@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_a_leaf_comes_from_the_host_when_an_earlier_one_is_home(name, at_once, monkeypatch):
    monkeypatch.setattr(optim, 'LEAVES_AT_ONCE', at_once)
    settings = dataclasses.replace(SETTINGS, name=name)
    jaxpr, labels, turns = update_of(settings, 'pinned_host')
    barriers = values_made_of(jaxpr)
    assert len(barriers) == turns
    for i, (eqn, before) in enumerate(barriers):
        assert before == frozenset(range(i - at_once, -1, -at_once)), (i, before)
        assert eqn.outvars[0].aval.dtype == jnp.bfloat16  # the gradient: not yet in float32
    moves = [e for e in jaxpr.eqns if e.primitive.name == 'device_put']
    brought = [e for e in moves if on_host(e.invars[0])]
    sent = [e for e in moves if on_host(e.outvars[0])]
    arrays = 2 * labels['muon'] + 3 * (labels['decayed'] + labels['plain'])
    assert len(brought) == len(sent) == arrays
    passed = {var for eqn, _ in barriers for var in eqn.outvars}
    assert all(e.invars[0] in passed for e in brought)


def test_on_chips_only_the_leaves_of_muon_are_ordered():
    for name in ('adamw', 'muon'):
        jaxpr, labels, turns = update_of(dataclasses.replace(SETTINGS, name=name), 'device')
        barriers = values_made_of(jaxpr)
        assert len(barriers) == turns
        of_muon = turns - labels['decayed'] - labels['plain']
        assert sum(bool(before) for _, before in barriers) == max(0, of_muon - 2)
        assert not any(e.primitive.name == 'device_put' for e in jaxpr.eqns)


def test_a_correction_is_the_last_word_on_a_parameter():
    """On one that is held, too."""
    rules = {'a': {'w': optim.Rule('plain'), 'b': optim.Rule('held')}}
    optimizer = optim.Optimizer(SETTINGS, lambda step: 1e-2, rules)
    params = {'a': {'w': jnp.ones(3), 'b': jnp.ones(3)}}
    grads, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    corrections = {('a', 'w'): lambda x: 2 * x, ('a', 'b'): lambda x: x + 5}
    plain, _ = optimizer.update(grads, state, params, 0, norm=1.0)
    got, _ = optimizer.update(grads, state, params, 0, norm=1.0, corrections=corrections)
    np.testing.assert_array_equal(got['a']['w'], 2 * plain['a']['w'])
    np.testing.assert_array_equal(got['a']['b'], np.full(3, 6.0))


def test_a_correction_is_of_one_leaf_of_a_group(monkeypatch):
    """Also where the group's bytes are too many, and it is two."""
    rules = {name: optim.Rule('muon', Blocks(1, (4,))) for name in 'abc'}
    optimizer = optim.Optimizer(SETTINGS, lambda step: 1e-2, rules)
    params = {name: jnp.asarray(random(i, (2, 4, 5))) for i, name in enumerate('abc')}
    grads = jax.tree.map(jnp.cos, params)
    state = optimizer.init(params)
    alone = {}
    for name in 'abc':
        one = optim.Optimizer(SETTINGS, optimizer.schedule, {name: rules[name]})
        inputs = ({name: x[name]} for x in (grads, state, params))
        alone |= one.update(*inputs, 0, norm=1.0)[0]
    for whole_bytes in (2**30, 2 * 4 * 40):
        monkeypatch.setattr(optim, 'WHOLE_BYTES', whole_bytes)
        corrections = {('b',): lambda x: -x}
        got, _ = optimizer.update(grads, state, params, 0, norm=1.0, corrections=corrections)
        for name, sign in zip('abc', (1, -1, 1), strict=True):
            assert relative_error(got[name], sign * alone[name]) <= 1e-6


def test_bytes_on_a_chip_are_those_that_the_mesh_leaves_it():
    mesh = AbstractMesh((4, 2), ('data', 'expert'), axis_types=(AxisType.Auto,) * 2)
    optimizer = optim.Optimizer(SETTINGS, lambda step: 1e-2, {}, mesh)
    param = jax.ShapeDtypeStruct((3, 8, 6), jnp.float32)
    for spec, size in ((P(None, 'data', 'expert'), 72), (P(None, None, 'expert'), 288), (P(), 576)):
        leaf = optim._Leaf(optim.Rule('plain', spec=spec), None, (), param, param, None)
        assert optimizer._bytes(leaf) == size


def test_a_large_leaf_comes_in_parts_to_the_same_update(monkeypatch):
    settings = dataclasses.replace(SETTINGS, muon=MuonConfig(dtype='float32'))
    rules = {
        'experts': optim.Rule('muon', Blocks(1, (5,)), lead=2),
        'norm': optim.Rule('plain', lead=1),
        'lm_head': optim.Rule('decayed'),
    }
    optimizer = optim.Optimizer(settings, lambda step: 1e-2, rules)
    shapes = {'experts': (3, 2, 2, 5, 7), 'norm': (3, 7), 'lm_head': (9, 7)}
    params = {name: jnp.asarray(random(1, shape)) for name, shape in shapes.items()}
    grads = {name: jnp.asarray(random(2, shape)) for name, shape in shapes.items()}
    state = jax.tree.map(lambda x: x + 0.5, optimizer.init(params))
    want = jax.jit(optimizer.update)(grads, state, params, 3, norm=jnp.float32(9.0))

    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind='pinned_host')
    waiting = jax.device_put((params, state), host)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host), (params, state)
    )

    for whole_bytes, parts in ((2**30, 1), (4 * 140, 3), (4 * 70, 6)):  # of the experts
        monkeypatch.setattr(optim, 'WHOLE_BYTES', whole_bytes)
        update = functools.partial(optimizer.update, norm=jnp.float32(9.0), placed=placed)
        traced = jax.jit(update, out_shardings=host).trace(grads, waiting[1], waiting[0], 3)
        inside = [e for e in traced.jaxpr.eqns if e.primitive.name in ('scan', 'while')]
        lengths = {e.params.get('length') for e in inside}
        inside = [list(jaxprs_in_params(e.params)) for e in inside]
        brought = [
            sum(e.primitive.name == 'device_put' and on_host(e.invars[0]) for e in jaxpr.eqns)
            for jaxpr in (traced.jaxpr, *itertools.chain.from_iterable(inside))
        ]
        assert brought[0] == (2 + 3 + 3 if parts == 1 else 3 + 3)
        assert [n for n in brought[1:] if n] == [2] * (parts > 1)
        assert parts == 1 or parts in lengths
        got = traced.lower().compile()(grads, waiting[1], waiting[0], 3)
        assert {x.sharding.memory_kind for x in jax.tree.leaves(got)} == {'pinned_host'}
        # What XLA fuses differs, and so may a last bit.
        errors = jax.tree.map(relative_error, got, want)
        assert max(jax.tree.leaves(errors)) <= 2**-23, errors
