"""Muon's directions on a mesh are those of one chip, and no chip ever holds a whole stack."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from configs import kimi_k3, kimi_k3_pod
from k3jax.config import MeshConfig, MuonConfig, OptimizerConfig
from k3jax.model.kimi import Kimi
from k3jax.model.param import map_leaves
from k3jax.model.run import Run
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.rules import AXES
from k3jax.parallel.shard import Parallel
from k3jax.train import muon
from k3jax.train.muon import WHOLE, Blocks, Cut, directions_on_mesh, newton_schulz
from k3jax.train.optim import Optimizer, Rule, make_optimizer
from tests import tiny
from tests.compare import relative_error
from tests.oracles import muon as muon_oracle

EXACT = MuonConfig(dtype='float32')
# A dense layer, three KDA layers in a stack, an MLA layer; three KDA heads, which no cut leaves
# whole, and four of MLA.
CONFIG = tiny.k3(
    (1, 2, 3, 4), (5,), attn_res_block_size=5, num_experts=8, hidden_size=32, num_attention_heads=4
)
MESHES = {'all': (2, 2, 2), 'data': (8, 1, 1), 'expert': (1, 8, 1), 'sequence': (1, 1, 8)}
OTHERS, SLOW = [name for name in MESHES if name != 'all'], pytest.mark.slow
OTHER = ('data', 'sequence')


def mesh_of(shape):
    return make_mesh(MeshConfig(**dict(zip(AXES, shape, strict=False))), jax.devices()[:8])


def leaves_on(mesh, config, whole_below=0):
    """Path -> (shape, blocks, spec) of each parameter that Muon moves."""
    parallel = Parallel(tuple(mesh.shape.values()), 'train', whole_below, 'moon')
    run = Run(jnp.dtype('float32'), jnp.dtype('float32'), parallel=parallel)
    model = Kimi(config, run)
    optimizer = make_optimizer(OptimizerConfig(name='muon', muon=EXACT), 1000, model, mesh)
    shapes = map_leaves(lambda name, leaf, lead: (*lead, *leaf.shape), config, model.plan)
    rules, tree = jax.tree_util.tree_flatten_with_path(optimizer.rules)
    return {
        jax.tree_util.keystr(path): (shape, rule.blocks, rule.spec)
        for (path, rule), shape in zip(rules, tree.flatten_up_to(shapes), strict=True)
        if rule.label == 'muon'
    }


def directions(xs, cases, mesh=None):
    def all_of(xs):
        return [
            directions_on_mesh([x], blocks, EXACT, mesh, [spec])[0]
            for x, (_, blocks, spec) in zip(xs, cases, strict=True)
        ]

    return jax.jit(all_of)(xs)


def on_one_chip_and_many(name, dtype):
    """Directions of each kind of parameter, and by float64 NumPy."""
    mesh = mesh_of(MESHES[name])
    cases = sorted(set(leaves_on(mesh, CONFIG).values()), key=str)
    assert len(cases) > 20
    with jax.enable_x64(dtype == 'float64'):
        xs = [
            np.random.default_rng(i).normal(size=shape).astype(np.float32).astype(dtype)
            for i, (shape, _, _) in enumerate(cases)
        ]
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, (_, _, spec) in zip(xs, cases, strict=True)
        ]
        one, many = directions(xs, cases), directions(placed, cases, mesh)
        for got, (_, _, spec) in zip(many, cases, strict=True):
            assert got.dtype == dtype and got.sharding.is_equivalent_to(
                NamedSharding(mesh, spec), got.ndim
            )
    exact = [
        muon_oracle.direction(x, blocks.count, blocks.rows)
        for x, (_, blocks, _) in zip(xs, cases, strict=True)
    ]
    return list(zip(cases, exact, jax.device_get(one), jax.device_get(many), strict=True))


@pytest.mark.parametrize('name', ['all', *(pytest.param(x, marks=SLOW) for x in OTHERS)])
def test_directions_of_every_parameter_are_as_exact_as_on_one_chip(name):
    """Newton-Schulz magnifies rounding: in float32 one chip is some 1e-6 off itself."""
    worst = {'mesh': 0.0, 'one chip': 0.0, 'apart': 0.0}
    for case, exact, one, many in on_one_chip_and_many(name, 'float32'):
        errors = {
            'mesh': relative_error(many, exact),
            'one chip': relative_error(one, exact),
            'apart': relative_error(many, one),
        }
        assert errors['mesh'] <= 1.5 * errors['one chip'], (case, errors)
        assert errors['apart'] <= 2 * errors['one chip'], (case, errors)
        worst = {key: max(value, errors[key]) for key, value in worst.items()}
    print(name, *(f'{key} {value:.1e}' for key, value in worst.items()))


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_in_float64_a_mesh_changes_nothing_but_the_last_bits(name):
    for case, exact, one, many in on_one_chip_and_many(name, 'float64'):
        assert relative_error(many, one) <= 1e-13, case
        assert relative_error(one, exact) <= 1e-13, case


def test_arrays_together_move_as_each_alone():
    """Of other depths and with experts; 13 matrices for four chips."""
    mesh, blocks = mesh_of(MESHES['all']), Blocks(1, (24,))
    shapes = {
        (6, 24, 32): P(None, OTHER, 'expert'),
        (24, 32): P(OTHER, 'expert'),
        (3, 2, 24, 32): P(None, None, OTHER, 'expert'),
    }
    rng = np.random.default_rng(0)
    xs = [
        jax.device_put(rng.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))
        for shape, spec in shapes.items()
    ]
    specs = list(shapes.values())
    joined = jax.jit(lambda xs: directions_on_mesh(xs, blocks, EXACT, mesh, specs))
    alone = [directions_on_mesh([x], blocks, EXACT)[0] for x in jax.device_get(xs)]
    for got, want, spec in zip(joined(xs), alone, specs, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)
        assert relative_error(got, want) <= 2e-6
    text = joined.lower(xs).as_text()
    assert text.count('stablehlo.all_to_all') == 2


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    ('shape', 'dim'),
    [((8, 20), 0), ((20, 8), 1), ((8, 20), 1), ((20, 8), 0), ((3, 20), 1), ((20, 3), 0)],
    ids=['short', 'short tall', 'long', 'long tall', 'long uneven', 'long uneven tall'],
)
def test_newton_schulz_of_a_matrix_that_chips_share(shape, dim, dtype):
    """The longer side of three rows: their Gram matrix is whole on each of the four chips."""
    mesh = Mesh(np.array(jax.devices()[:4]), ('data',))
    config, spec = MuonConfig(dtype=dtype), P(None, *('data' if i == dim else None for i in (0, 1)))
    cuts = [Cut(('data',), 4) if i == dim else WHOLE for i in (0, 1)]
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    shared = jax.shard_map(
        lambda x: newton_schulz(x, config, *cuts),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    exact = np.stack([muon_oracle.newton_schulz(one) for one in x])
    error = relative_error(jax.jit(shared)(x), exact)
    alone = relative_error(newton_schulz(jnp.asarray(x), config), exact)
    assert error <= (3e-6 if dtype == 'float32' else 1.5 * alone), (error, alone)
    assert alone <= 0.1


def sizes_in(jaxpr):
    """Elements of every array that is computed, inside all calls."""
    for eqn in jaxpr.eqns:
        yield from (math.prod(x.aval.shape) for x in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from sizes_in(getattr(inner, 'jaxpr', inner))


@pytest.mark.parametrize('sizes', [(64, 64, 1), (4, 64, 2), (1, 64, 64)])
def test_no_chip_of_a_pod_holds_more_than_its_share_of_k3s_matrices(sizes):
    """Whole matrices of a stack are on a chip only as many as it computes, a batch at a time."""
    config = kimi_k3_pod.get_config()
    mesh = AbstractMesh((*sizes, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    found = leaves_on(mesh, kimi_k3.get_config().model, config.mesh.whole_below)
    for path, (shape, blocks, spec) in found.items():
        abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
        jaxpr = jax.make_jaxpr(
            lambda x, c=(blocks, EXACT, mesh, [spec]): directions_on_mesh([x], *c)
        )(abstract)
        (on_each_chip,) = (e for e in jaxpr.eqns if e.primitive.name == 'shard_map')
        largest = max(sizes_in(on_each_chip.params['jaxpr']))
        cut = math.prod(mesh.shape[a] for entry in spec for a in _names(entry))
        if cut == 1:
            continue  # small: whole on every chip
        matrix = math.prod(shape[-2:])
        # A share of all matrices, of those that are cut in two dimensions once along each.
        share = math.prod(shape) // cut
        assert largest <= max(2 * matrix, 2 * share), (path, shape, spec, largest)
        if math.prod(shape[:-2]) > 2:
            assert largest < math.prod(shape), (path, shape, spec, largest)


def _names(entry):
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def test_matrices_go_by_batches_of_bounded_temporaries(monkeypatch):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 6, 5)), jnp.float32)
    blocks = Blocks(1, (4, 2))
    whole = directions_on_mesh([x], blocks, EXACT)[0]
    one = 4 * sum(3 * rows * 5 + 3 * min(rows, 5) ** 2 for rows in (4, 2))
    for most, batches in ((3, 4), (1, 7)):  # of two: less is left empty than with three
        monkeypatch.setattr(muon, 'TEMPORARY_BYTES', most * one)
        jaxpr = jax.make_jaxpr(lambda x: directions_on_mesh([x], blocks, EXACT)[0])(x).jaxpr
        lengths = [e.params['length'] for e in jaxpr.eqns if e.primitive.name == 'scan']
        assert batches in lengths
        got = directions_on_mesh([x], blocks, EXACT)[0]
        assert relative_error(got, whole) <= 1e-6


def test_an_update_on_a_mesh_is_that_of_one_chip_and_gathers_no_stack():
    """Of the program of one chip: no array has the elements of the smallest whole stack."""
    mesh = mesh_of(MESHES['all'])
    stacks = {  # five layers of experts, of heads, of matrices; a table of vectors
        'w1': ((5, 8, 24, 32), 'muon', Blocks(1, (24,)), P(None, 'expert', OTHER, None)),
        'kv_b_proj': ((5, 120, 64), 'muon', Blocks(3, (24, 16)), P(None, 'expert', OTHER)),
        'o_proj': ((5, 64, 96), 'muon', Blocks(1, (64,)), P(None, OTHER, 'expert')),
        'embed_tokens': ((640, 48), 'decayed', None, P('expert', OTHER)),
    }
    rules = {name: Rule(*rest) for name, (_, *rest) in stacks.items()}
    settings = OptimizerConfig(name='muon', muon=EXACT, learning_rate=0.1)
    rng = np.random.default_rng(0)
    params, grads = (
        {name: rng.normal(size=x[0]).astype(np.float32) for name, x in stacks.items()}
        for _ in range(2)
    )

    def updated(mesh):
        optimizer = Optimizer(settings, lambda step: 0.1, rules, mesh)

        def step(params, grads):
            norm = optax.tree.norm(grads)
            return optimizer.update(grads, optimizer.init(params), params, 0, norm=norm)

        if mesh is None:
            return jax.jit(step)(params, grads), ''
        cuts = {name: NamedSharding(mesh, rule.spec) for name, rule in rules.items()}
        placed = jax.device_put((params, grads), (cuts, cuts))
        compiled = jax.jit(step).lower(*placed).compile()
        return compiled(*placed), compiled.as_text()

    (got, text), (want, _) = updated(mesh), updated(None)
    errors = jax.tree.map(relative_error, got, want)
    assert max(jax.tree.leaves(errors)) <= 1e-6, errors
    for name, x in got[0].items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, rules[name].spec), x.ndim)
    shapes = re.findall(r'\b[a-z]+\d+\[([\d,]+)\]', text)
    largest = max(math.prod(map(int, shape.split(','))) for shape in shapes)
    assert largest < min(math.prod(shape) for shape, *_ in stacks.values())
    assert 'all-to-all' in text
