"""Expert parallelism: outputs and every gradient against all experts on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.aot.compiler import has_libtpu, mesh_of
from k3jax.parallel.moe_ep import routed_mlp
from k3jax.parallel.moe_ep_rows import sends_of
from k3jax.parallel.moon_ep import (
    Grid,
    count_entries,
    entry_rows,
    layout_tables,
    plan_entries,
)
from pallas_kernels.grouped_mlp import Experts, Mxfp4, SiTU, decode_mxfp4
from tests.compare import assert_close, relative_error
from tests.oracles import moon_ep as oracle

NUM_DEVICES = 8
NUM_EXPERTS, TOKENS, CHOSEN, WIDTH, INNER = 16, 6, 3, 8, 12
ACTIVATION = SiTU()
ROUTINGS = ('uniform', 'one hot expert', 'one hot rank', 'empty ranks', 'one expert for all')


def mesh_with(ranks):
    """Two mesh axes, so that groups of ranks have plans of their own."""
    shape = (NUM_DEVICES // ranks, ranks)
    return jax.make_mesh(shape, ('data', 'expert'), axis_types=(AxisType.Auto,) * 2)


def choices(routing, seed=0):
    """[devices * S, k] for meshes of any number of ranks."""
    rng = np.random.default_rng(seed)
    size = NUM_DEVICES * TOKENS
    chosen = np.argsort(rng.random((size, NUM_EXPERTS)), axis=1)[:, :CHOSEN]
    if routing == 'one hot expert':
        chosen = np.where(chosen == 5, chosen[:, :1], chosen)
        chosen[:, 0] = 5
    if routing == 'one hot rank':
        chosen = chosen % (NUM_EXPERTS // NUM_DEVICES) + 6
    if routing == 'empty ranks':
        chosen = chosen % (NUM_EXPERTS // 4) + NUM_EXPERTS // 2
    if routing == 'one expert for all':
        chosen = np.full_like(chosen, 9)
    return chosen.astype(np.int32)


@functools.cache
def inputs(dtype='float32', seed=1):
    rng = np.random.default_rng(seed)
    size = NUM_DEVICES * TOKENS

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)

    experts = Experts(
        normal(NUM_EXPERTS, INNER, WIDTH),
        normal(NUM_EXPERTS, INNER, WIDTH),
        normal(NUM_EXPERTS, WIDTH, INNER),
    )
    weights = jnp.asarray(rng.random((size, CHOSEN)), jnp.float32)
    return normal(size, WIDTH) * 4, weights, experts, jnp.asarray(rng.normal(size=(size, WIDTH)))


def named(mixed, gradients):
    dz, dweights, experts = gradients
    return {'mixed': mixed, 'dz': dz, 'dweights': dweights} | experts._asdict()


@jax.jit
def dense(z, chosen, weights, experts, d):
    """Every expert over every token, in float32."""

    def loss(z, weights, experts):
        w1, w3, w2 = experts
        a, b = (jnp.einsum('sl,efl->sef', z, w, precision='highest') for w in (w1, w3))
        y = jnp.einsum('sef,elf->sel', ACTIVATION(a, b), w2, precision='highest')
        chosen_rows = jnp.take_along_axis(y, chosen[:, :, None], axis=1)
        mixed = jnp.einsum('sk,skl->sl', weights, chosen_rows, precision='highest')
        return jnp.sum(mixed * d), mixed

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (z, weights, experts))
    (_, mixed), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*wide)
    return mixed, gradients


@functools.cache
def sharded(ranks, method, padding=1, axis='expert', remat=False):
    """jitted (z, chosen, weights, experts, d) -> mixed, gradients, on all devices."""
    size = ranks if axis == 'expert' else NUM_DEVICES

    def local(z, chosen, weights, experts, d):
        def loss(z, weights, experts):
            mixed = routed_mlp(
                *(z, chosen, weights, experts, ACTIVATION),
                axis=axis,
                axis_size=size,
                method=method,
                token_padding=padding,
            )
            return jnp.sum(mixed * d), mixed

        if remat:
            policy = jax.checkpoint_policies.save_only_these_names('moe_plan')
            loss = jax.checkpoint(loss, policy=policy)
        found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(z, weights, experts)
        (_, mixed), (dz, dweights, dexperts) = found
        if axis == 'expert':
            dexperts = lax.psum(dexperts, 'data')
        return mixed, (dz, dweights, dexperts)

    rows, home = P(('data', 'expert')), P(axis)
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh_with(ranks),
            in_specs=(rows, rows, rows, home, rows),
            out_specs=(rows, (rows, rows, home)),
            check_vma=False,
        )
    )


def check(program, chosen, tolerance=1e-5, dtype='float32'):
    z, weights, experts, d = inputs(dtype)
    got = program(z, chosen, weights, experts, d)
    want = dense(z, chosen, weights, experts, d)
    assert_close(named(*got), named(*want), tolerance)
    return named(*got)


@pytest.mark.parametrize('routing', ROUTINGS)
@pytest.mark.parametrize('ranks', [2, 4, 8])
def test_moon_equals_one_device_in_outputs_and_gradients(ranks, routing):
    """Rows padded on the smallest mesh; a plan that is kept for the backward pass on another."""
    settings = {2: {'padding': 4}, 4: {'remat': True}, 8: {}}[ranks]
    check(sharded(ranks, 'moon', **settings), choices(routing))


@pytest.mark.parametrize('routing', ROUTINGS)
def test_plain_equals_one_device_and_moon(routing):
    plain = check(sharded(4, 'plain'), choices(routing))
    assert_close(check(sharded(4, 'moon', remat=True), choices(routing)), plain, 1e-6)


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 20.0))
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
def test_any_routing_equals_one_device(seed, skew):
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(NUM_EXPERTS, skew))
    chosen = rng.choice(NUM_EXPERTS, (NUM_DEVICES * TOKENS, CHOSEN), p=share)
    check(sharded(4, 'moon', remat=True), chosen.astype(np.int32))


def test_bfloat16_stays_within_its_rounding():
    for routing in ('uniform', 'one hot expert'):
        got = check(sharded(8, 'moon'), choices(routing), 2e-2, dtype='bfloat16')
        assert got['mixed'].dtype == jnp.float32
        assert got['w1'].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize('padding', [1, 4, 8])
@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('method', ['moon', 'plain'])
@pytest.mark.parametrize('ranks', [1, 2, 4, 8])
def test_every_mesh_method_and_padding_equals_one_device(ranks, method, remat, padding):
    program = sharded(ranks, method, padding=padding, remat=remat)
    for routing in ROUTINGS:
        for seed in range(3):
            check(program, choices(routing, seed))


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [4, 8])
def test_three_thousand_routings_equal_one_device(ranks):
    """Half of them on each mesh: skewed, with hot ranks and empty ones."""
    rng = np.random.default_rng(ranks)
    rank_of = np.arange(NUM_EXPERTS) * ranks // NUM_EXPERTS
    program = sharded(ranks, 'moon')
    for i in range(1500):
        share = rng.dirichlet(np.full(NUM_EXPERTS, rng.choice([0.02, 0.2, 1.0, 20.0])))
        if i % 3 == 1:
            share = np.where(rank_of == rng.integers(ranks), share + 1e-3, 0)
        if i % 3 == 2:
            share = np.where(rng.random(ranks)[rank_of] < 0.5, share, 0) + 1e-6
        shape = (NUM_DEVICES * TOKENS, CHOSEN)
        chosen = rng.choice(NUM_EXPERTS, shape, p=share / share.sum())
        check(program, chosen.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize('method', ['moon', 'plain'])
def test_experts_over_two_mesh_axes_equal_one_device(method):
    program = sharded(4, method, axis=('data', 'expert'))
    for routing in ROUTINGS:
        check(program, choices(routing))


def test_choices_of_no_expert_count_nothing_and_read_nothing():
    z, weights, experts, d = inputs()
    chosen = choices('uniform')
    bad = np.zeros_like(chosen, bool)
    bad[::5, 1] = True
    outside = np.where(bad, np.where(chosen % 2, -7, NUM_EXPERTS + 3), chosen)
    got = named(*sharded(8, 'moon')(z, outside, weights, experts, d))
    want = named(*dense(z, chosen, jnp.where(bad, 0, weights), experts, d))
    want['dweights'] = jnp.where(bad, 0, want['dweights'])
    assert_close(got, want, 1e-5)


def test_packed_experts_are_lent_too():
    width, ranks = 32, 8
    rng = np.random.default_rng(0)
    size = NUM_DEVICES * TOKENS
    z = jnp.asarray(rng.normal(size=(size, width)), jnp.float32)
    weights = inputs()[1]
    codes = rng.integers(0, 256, (3, NUM_EXPERTS, width, width // 2)).astype(np.uint8)
    scales = rng.integers(122, 126, (3, NUM_EXPERTS, width, 1)).astype(np.uint8)
    experts = Experts(*map(Mxfp4, codes, scales))
    decoded = Experts(*(decode_mxfp4(w, jnp.float32) for w in experts))

    def local(z, chosen, weights, experts):
        def loss(z):
            return jnp.sum(
                routed_mlp(z, chosen, weights, experts, ACTIVATION, axis_size=ranks) ** 2
            )

        return jax.grad(loss)(z)

    rows = P(('data', 'expert'))
    program = jax.shard_map(
        local,
        mesh=mesh_with(ranks),
        in_specs=(rows, rows, rows, P('expert')),
        out_specs=rows,
        check_vma=False,
    )
    chosen = choices('one hot expert')
    mixed = dense(z, chosen, weights, decoded, z)[0]
    want = dense(z, chosen, weights, decoded, 2 * mixed)[1][0]
    assert relative_error(jax.jit(program)(z, chosen, weights, experts), want) < 1e-5


@pytest.mark.parametrize('routing', ROUTINGS)
def test_a_token_travels_once_to_each_rank(routing):
    grid = Grid(num_ranks=8, num_experts=NUM_EXPERTS, num_tokens=TOKENS, num_chosen=CHOSEN)
    chosen = choices(routing)
    by_rank = chosen.reshape(8, TOKENS, CHOSEN)
    counts = np.stack([np.bincount(c.ravel(), minlength=NUM_EXPERTS) for c in by_rank])
    amount = oracle.plan(counts, grid.num_entries)
    ranks_of = oracle.destinations(by_rank, amount, 1, dedup=False) // grid.num_rows
    want = np.zeros((8, 8), int)
    for r in range(8):
        for token in ranks_of[r]:
            want[r, np.unique(token)] += 1
    np.testing.assert_array_equal(rows_sent(grid)(chosen), want)


@functools.cache
def rows_sent(grid):
    def local(chosen):
        counts = lax.all_gather(count_entries(chosen, NUM_EXPERTS), 'expert')
        plan = plan_entries(jnp.sum(counts, axis=0), grid)
        tables = layout_tables(plan.amount, grid)
        rank = lax.axis_index('expert')
        rows = entry_rows(chosen, counts, rank, plan.amount, tables, grid)
        return sends_of(rows, grid, 'expert').rows.size

    specs = {'in_specs': P('expert'), 'out_specs': P(), 'check_vma': False}
    return jax.jit(jax.shard_map(local, mesh=mesh_with(8), **specs))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'method': 'moo'}, "method is 'moo', wanted 'moon' or 'plain'"),
        ({'axis_size': 4}, "axis_size is 4, but mesh axis 'expert' has 8 ranks"),
        ({'z': np.zeros((6, 7), np.float32)}, r'z \(6, 7\), weights \(6, 3\), wanted \(6, 8\)'),
        ({'weights': np.zeros((6, 2), np.float32)}, r'weights \(6, 2\), wanted'),
        ({'chosen': np.zeros((6, 3), np.float32)}, 'chosen is float32, wanted integers'),
        ({'chosen': np.zeros(6, np.int32)}, r'chosen has shape \(6,\), wanted \[S, k\]'),
        ({'chosen': np.full((6, 3), 16, np.int32)}, 'chosen holds 16 to 16, wanted expert ids'),
        ({'token_padding': 0}, 'token_padding is 0, wanted at least 1'),
    ],
)
def test_wrong_arguments_are_refused_before_compilation(change, message):
    given = {
        'z': np.zeros((TOKENS, WIDTH), np.float32),
        'chosen': np.zeros((TOKENS, CHOSEN), np.int32),
        'weights': np.zeros((TOKENS, CHOSEN), np.float32),
        'axis_size': 8,
    }

    def local(experts):
        return routed_mlp(experts=experts, activation=ACTIVATION, **given | change)

    specs = {'in_specs': P('expert'), 'out_specs': P('expert'), 'check_vma': False}
    program = jax.shard_map(local, mesh=mesh_with(8), **specs)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(program, inputs()[2])


@pytest.mark.aot
@pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')
@pytest.mark.parametrize('method', ['moon', pytest.param('plain', marks=pytest.mark.slow)])
def test_compiles_for_tpu_with_gradients_and_ragged_exchanges(method):
    mesh = mesh_of('v5p:2x2x1', data=1, expert=4)

    def abstract(shape, dtype):
        sharding = NamedSharding(mesh, P('expert'))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def local(z, chosen, weights, experts):
        def loss(z, weights, experts):
            mixed = routed_mlp(
                *(z, chosen, weights, experts, ACTIVATION), axis_size=4, method=method
            )
            return jnp.sum(mixed**2)

        return jax.grad(loss, (0, 1, 2))(z, weights, experts)

    program = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=P('expert'), out_specs=P('expert'), check_vma=False
        )
    )
    size, width, inner = 4 * 64, 256, 128
    shapes = (NUM_EXPERTS, inner, width), (NUM_EXPERTS, inner, width), (NUM_EXPERTS, width, inner)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = program.lower(
            abstract((size, width), 'bfloat16'),
            abstract((size, CHOSEN), 'int32'),
            abstract((size, CHOSEN), 'float32'),
            Experts(*(abstract(shape, 'bfloat16') for shape in shapes)),
        )
    # Rows, messages and weights go out and rows come back, with gradients of all but the messages;
    # with 'moon' three matrices are lent, and their gradients return.
    assert lowered.as_text().count('ragged_all_to_all') == 7 + (6 if method == 'moon' else 0)
    lowered.compile()
