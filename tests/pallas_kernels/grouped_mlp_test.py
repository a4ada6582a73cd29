"""What routed experts compute: outputs and gradients of every form, for groups of any size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp import Experts, SiTU, dense_kernels, grouped_mlp, xla
from pallas_kernels.grouped_mlp.visits import visits_by_group, visits_by_tile
from tests.compare import assert_close, relative_error
from tests.oracles.grouped_mlp import oracle
from tests.pallas_kernels.grouped_mlp_arguments import ACTIVATIONS, WIDTH, random_arguments

GROUPS = {
    'even': [8, 8, 8, 8, 8],
    'some empty': [0, 17, 0, 23, 0],
    'first and last empty': [0, 13, 14, 13, 0],
    'one takes all': [0, 0, 40, 0, 0],
    'last takes all': [0, 0, 0, 0, 40],
    'one row each, rest to one': [1, 1, 36, 1, 1],
    'odd sizes': [3, 9, 16, 5, 7],
}


@functools.cache
def compiled(name, form):
    """(x, experts, sizes, dy) -> outputs and gradients, by the named form."""
    activation = ACTIVATIONS[name]

    @jax.jit
    def run(x, experts, sizes, dy):
        if form == 'ragged':
            y, kept = xla.forward_ragged(x, experts, sizes, activation, keep=True)
            dx, grads = xla.backward_ragged(x, experts, sizes, kept, dy, activation)
            grads = Experts(*grads)
        else:
            y, vjp = jax.vjp(
                lambda x, experts: grouped_mlp(x, experts, sizes, activation, implementation=form),
                x,
                experts,
            )
            dx, grads = vjp(dy)
        return {'y': y, 'x': dx} | grads._asdict()

    return run


def narrowed(x, experts, dy):
    """In bfloat16."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x, experts, dy))


@pytest.mark.parametrize('form', ['reference', 'xla', 'pallas', 'ragged'])
class TestForms:
    @pytest.mark.parametrize('sizes', GROUPS.values(), ids=GROUPS)
    @pytest.mark.parametrize('name', ACTIVATIONS)
    def test_outputs_and_gradients_equal_float64_for_any_groups(self, name, sizes, form):
        x, experts, dy = random_arguments()
        got = compiled(name, form)(x, experts, np.array(sizes, np.int32), dy)
        assert_close(got, oracle(x, experts, sizes, name, dy), 2e-6)

    @pytest.mark.parametrize('sizes', [GROUPS['odd sizes'], GROUPS['some empty']])
    def test_bfloat16_stays_within_its_rounding(self, sizes, form):
        x, experts, dy = narrowed(*random_arguments())
        got = compiled('situ', form)(x, experts, np.array(sizes, np.int32), dy)
        assert got['y'].dtype == got['x'].dtype == got['w1'].dtype == jnp.bfloat16
        assert_close(got, oracle(x, experts, sizes, 'situ', dy), 5e-3)

    def test_rows_past_the_groups_are_zero_and_groups_past_the_rows_are_cut(self, form):
        if form == 'ragged':
            pytest.skip('takes sizes as they are')
        x, experts, dy = random_arguments()
        short = [3, 0, 11, 5, 2]
        got = compiled('situ', form)(x, experts, np.array(short, np.int32), dy)
        assert not np.any(got['y'][sum(short) :]) and not np.any(got['x'][sum(short) :])
        assert_close(got, oracle(x, experts, short, 'situ', dy), 2e-6)
        got = compiled('situ', form)(x, experts, np.array([3, 0, 30, 99, 9], np.int32), dy)
        assert_close(got, oracle(x, experts, [3, 0, 30, 7, 0], 'situ', dy), 2e-6)


LARGE_GROUPS = {
    'inside and across tiles': [200, 0, 700, 124],
    'one takes all': [0, 1024, 0, 0],
    'edges of parts': [128, 384, 511, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('sizes', LARGE_GROUPS.values(), ids=LARGE_GROUPS)
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_tiles_of_every_kind_in_the_kernels(name, sizes, dtype):
    """Whole tiles, shared tiles and parts of them, several column tiles with a short last one."""
    check_large(name, sizes, dtype)


def test_whole_and_shared_tiles_in_the_kernels():
    check_large('situ', LARGE_GROUPS['inside and across tiles'], 'bfloat16')


def check_large(name, sizes, dtype):
    rng = np.random.default_rng(7)
    count, width, inner = sum(sizes), 160, 200
    x, dy = (jnp.asarray(rng.standard_normal((count, width)), dtype) for _ in range(2))
    shapes = [(len(sizes), inner, width)] * 2 + [(len(sizes), width, inner)]
    experts = Experts(*(jnp.asarray(rng.standard_normal(s) / 8, dtype) for s in shapes))
    group_sizes = jnp.array(sizes, jnp.int32)
    tiles = {'rows': 256, 'inner': 128, 'width': 128, 'left': 128, 'right': 128}
    settings = {'interpret': True, 'tiles': tiles}
    args = (x, experts, group_sizes)

    @jax.jit
    def run(args, dy):
        y, kept = dense_kernels.forward(*args, ACTIVATIONS[name], keep=True, **settings)
        dx, grads = dense_kernels.backward(
            *args, kept, dy, ACTIVATIONS[name], dtypes=[x.dtype] * 3, **settings
        )
        return {'y': y, 'x': dx} | Experts(*grads)._asdict()

    tolerance = 1e-5 if dtype == 'float32' else 5e-3
    assert_close(run(args, dy), oracle(x, experts, sizes, name, dy), tolerance)


@pytest.mark.parametrize('tile', [1, 4, 16])
def test_every_row_of_a_group_is_visited_once_and_no_tile_is_returned_to(tile):
    rng = np.random.default_rng(tile)
    by_tile, by_group = (
        jax.jit(visits, static_argnums=(1, 2)) for visits in (visits_by_tile, visits_by_group)
    )
    for num_rows in [1, 37] * 8:
        sizes = rng.multinomial(int(rng.integers(0, num_rows + 1)), rng.dirichlet([0.3] * 6))
        group = np.repeat(np.arange(6), sizes)
        for visits in (by_tile, by_group):
            found = visits(jnp.array(sizes, jnp.int32), num_rows, tile)
            seen = np.full(num_rows, -1)
            for position, expert, low, high in zip(*map(np.asarray, found), strict=True):
                assert 0 <= position < -(-num_rows // tile) and 0 <= expert < 6
                rows = np.arange(max(low, position * tile), min(high, (position + 1) * tile))
                assert np.all(seen[rows] == -1)
                seen[rows] = expert
            np.testing.assert_array_equal(seen[: len(group)], group)
            assert np.all(seen[len(group) :] == -1)
            steps = np.diff(np.asarray(found.tile))
            assert np.all(steps >= 0) and np.all(steps <= 1)
        assert set(np.asarray(by_tile(jnp.array(sizes, jnp.int32), num_rows, tile).tile)) == set(
            range(-(-num_rows // tile))
        )
        assert set(np.asarray(found.group)) == set(range(6))


def test_every_split_of_few_rows_between_two_experts():
    x, experts, dy = random_arguments(1)
    x, dy, experts = x[:9], dy[:9], Experts(*(w[:2] for w in experts))
    for first in range(10):
        sizes = [first, 9 - first]
        got = compiled('situ', None)(x, experts, np.array(sizes, np.int32), dy)
        assert_close(got, oracle(x, experts, sizes, 'situ', dy), 2e-6)


def test_groups_above_a_tile_are_cut():
    rng = np.random.default_rng(2)
    count = 3 * xla.MAX_TILE + 5
    x, dy = rng.standard_normal((2, count, WIDTH)).astype(np.float32)
    _, experts, _ = random_arguments()
    experts = Experts(*(w[:2] for w in experts))
    sizes = [7, count - 7]
    got = compiled('situ', 'xla')(x, experts, np.array(sizes, np.int32), dy)
    assert_close(got, oracle(x, experts, sizes, 'situ', dy), 2e-6)


def test_bfloat16_weights_are_used_in_the_dtype_of_the_rows():
    x, experts, dy = random_arguments()
    narrow = Experts(*(jnp.asarray(w, jnp.bfloat16) for w in experts))
    sizes = GROUPS['odd sizes']
    y = grouped_mlp(x, narrow, np.array(sizes, np.int32), SiTU())
    assert y.dtype == jnp.float32
    assert relative_error(y, oracle(x, narrow, sizes, 'situ', dy)['y']) < 2e-6


def test_the_kernels_have_no_races_and_stay_inside_their_arrays():
    x, experts, dy = narrowed(*random_arguments())
    sizes = jnp.array([10, 0, 13, 7, 2], jnp.int32)
    settings = {
        'interpret': pltpu.InterpretParams(detect_races=True),
        'tiles': {'rows': 16, 'inner': 128, 'width': 128, 'left': 128, 'right': 128},
    }
    y, kept = dense_kernels.forward(x, experts, sizes, SiTU(), keep=True, **settings)
    dx, grads = dense_kernels.backward(
        x, experts, sizes, kept, dy, SiTU(), dtypes=[jnp.bfloat16] * 3, **settings
    )
    got = {'y': y, 'x': dx} | Experts(*grads)._asdict()
    assert_close(got, oracle(x, experts, sizes, 'situ', dy), 5e-3)
