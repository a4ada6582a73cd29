"""Routed experts: activations, MXFP4, ragged groups, gradients, decoding, every form."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp import (
    Experts,
    Mxfp4,
    SiTU,
    SwiGLU,
    decode_mxfp4,
    dense_kernels,
    fake_quantise_mxfp4,
    grouped_mlp,
    mxfp4_kernels,
    quantise_mxfp4,
    tile_mxfp4,
    token_kernel,
    token_mlp,
    untile_mxfp4,
    xla,
)
from pallas_kernels.grouped_mlp.token import needed
from pallas_kernels.grouped_mlp.visits import visits_by_group, visits_by_tile
from tests.compare import assert_close, relative_error

NUM_ROWS, WIDTH, INNER, NUM_EXPERTS = 40, 12, 20, 5
GROUPS = {
    'even': [8, 8, 8, 8, 8],
    'some empty': [0, 17, 0, 23, 0],
    'first and last empty': [0, 13, 14, 13, 0],
    'one takes all': [0, 0, 40, 0, 0],
    'last takes all': [0, 0, 0, 0, 40],
    'one row each, rest to one': [1, 1, 36, 1, 1],
    'odd sizes': [3, 9, 16, 5, 7],
}
ACTIVATIONS = {'situ': SiTU(), 'swiglu': SwiGLU()}


def activate(name, a, b):
    """In float64."""
    sigmoid = 1 / (1 + np.exp(-a))
    return (
        a * sigmoid * b if name == 'swiglu' else 4 * np.tanh(a / 4) * sigmoid * 25 * np.tanh(b / 25)
    )


def activate_vjp(name, a, b, d):
    sigmoid = 1 / (1 + np.exp(-a))
    if name == 'swiglu':
        return d * b * sigmoid * (1 + a * (1 - sigmoid)), d * a * sigmoid
    ta, tb = np.tanh(a / 4), np.tanh(b / 25)
    gate, up = 4 * ta * sigmoid, 25 * tb
    d_gate = (1 - ta**2) * sigmoid + 4 * ta * sigmoid * (1 - sigmoid)
    return d * up * d_gate, d * gate * (1 - tb**2)


def oracle(x, experts, sizes, name, dy):
    """Outputs and gradients in float64, expert by expert."""
    w1, w3, w2 = (np.asarray(w, np.float64) for w in experts)
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    d1, d3, d2 = np.zeros(w1.shape), np.zeros(w3.shape), np.zeros(w2.shape)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        a, b = x[rows] @ w1[e].T, x[rows] @ w3[e].T
        hidden = activate(name, a, b)
        y[rows] = hidden @ w2[e].T
        d2[e] = dy[rows].T @ hidden
        da, db = activate_vjp(name, a, b, dy[rows] @ w2[e])
        d1[e], d3[e] = da.T @ x[rows], db.T @ x[rows]
        dx[rows] = da @ w1[e] + db @ w3[e]
        start += size
    return {'y': y, 'x': dx, 'w1': d1, 'w3': d3, 'w2': d2}


def random_arguments(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    wide = rng.standard_normal((2, NUM_EXPERTS, INNER, WIDTH)).astype(np.float32)
    w2 = rng.standard_normal((NUM_EXPERTS, WIDTH, INNER)).astype(np.float32)
    dy = rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    return x, Experts(wide[0], wide[1], w2), dy


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


@pytest.mark.parametrize(
    ('a', 'b', 'want'),
    [
        (1, 1, 0.7158178),
        (-1, 2, -0.5258289),
        (4, 25, 56.9593195),
        (-3, -10, 1.1445010),
        (20, 100, 99.9238563),
    ],
)
def test_situ_golden(a, b, want):
    assert float(SiTU()(jnp.float32(a), jnp.float32(b))) == pytest.approx(want, rel=3e-7)


def test_situ_takes_gate_first():
    assert float(SiTU()(jnp.float32(25), jnp.float32(4))) != pytest.approx(56.96, rel=0.1)


def test_situ_stays_below_100_and_its_gate_above_its_minimum():
    a = np.linspace(-100, 100, 4001, dtype=np.float32)
    assert np.abs(SiTU()(a, np.float32(1e6) * np.sign(a))).max() <= 100
    a = np.linspace(-3, 0, 10_001, dtype=np.float32)
    gate = SiTU(linear_beta=None)(a, np.ones_like(a))
    assert float(gate.min()) == pytest.approx(-0.269769, abs=1e-6)


def test_situ_without_betas_caps_the_gate_at_one_and_not_the_up_branch():
    a, b = np.float32(3), np.float32(500)
    want = math.tanh(3) / (1 + math.exp(-3)) * 500
    assert float(SiTU(None, None)(a, b)) == pytest.approx(want, rel=1e-6)


def test_swiglu_golden():
    got = SwiGLU()(jnp.array([1.0, -2.0]), jnp.array([3.0, 0.5]))
    np.testing.assert_allclose(got, [3 / (1 + math.exp(-1)), -1 / (1 + math.exp(2))], rtol=1e-6)


@pytest.mark.parametrize('activation', ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_are_rounded_once_from_float32(activation):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(3 * rng.standard_normal(1000), jnp.bfloat16) for _ in range(2))
    wide = activation(a.astype(jnp.float32), b.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(activation(a, b), wide)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize('scale', [0, 1, 2, 64, 120, 125, 126, 127, 128, 130, 200, 251, 252])
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_every_byte_decodes_exactly(scale, dtype):
    """All codes with one scale; 252 is the largest at which 6 fits float32's range."""
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    got = decode_mxfp4(Mxfp4(packed, np.full((16, 1), scale, np.uint8)), dtype)
    factor = math.ldexp(1, scale - 127)
    want = np.array([[E2M1[b & 15] * factor, E2M1[b >> 4] * factor] for b in packed.ravel()])
    want = want.reshape(16, 32)
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
    tiny = np.abs(want) < 2.0**-126  # what float32 arithmetic may flush to zero
    np.testing.assert_array_equal(got[~tiny], want[~tiny])
    assert np.all((got[tiny] == want[tiny]) | (got[tiny] == 0))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize('scale', [253, 254])
def test_the_largest_scales_decode_exactly_up_to_the_range_of_float32(scale):
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    got = np.asarray(decode_mxfp4(Mxfp4(packed, np.full((16, 1), scale, np.uint8)), jnp.float32))
    factor = math.ldexp(1, scale - 127)
    want = np.array([[E2M1[b & 15] * factor, E2M1[b >> 4] * factor] for b in packed.ravel()])
    largest = float(np.finfo(np.float32).max)
    want = np.where(np.abs(want) > largest, np.copysign(np.inf, want), want).reshape(16, 32)
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize(
    ('byte', 'scale', 'want'),
    [(0x21, 127, (0.5, 1.0)), (0xF7, 127, (6, -6)), (0x22, 125, (0.25, 0.25))],
)
def test_golden_bytes(byte, scale, want):
    weight = Mxfp4(np.full((1, 16), byte, np.uint8), np.full((1, 1), scale, np.uint8))
    np.testing.assert_array_equal(decode_mxfp4(weight)[0], np.tile(want, 16))


def test_scales_belong_to_32_columns_of_the_input_axis():
    weight = Mxfp4(np.full((2, 32), 0x22, np.uint8), np.array([[127, 128], [129, 130]], np.uint8))
    got = np.asarray(decode_mxfp4(weight), np.float32)
    np.testing.assert_array_equal(got, np.repeat([[1, 2], [4, 8]], 32, axis=1))


def random_mxfp4(rng, *shape):
    *lead, inputs = shape
    packed = rng.integers(0, 256, (*lead, inputs // 2)).astype(np.uint8)
    return Mxfp4(packed, rng.integers(118, 128, (*lead, inputs // 32)).astype(np.uint8))


def test_mxfp4_experts_equal_their_decoded_bfloat16_experts():
    rng = np.random.default_rng(3)
    packed = Experts(*(random_mxfp4(rng, 3, *s) for s in ((64, 32), (64, 32), (32, 64))))
    decoded = Experts(*(decode_mxfp4(w) for w in packed))
    assert decoded.w1.dtype == ml_dtypes.bfloat16
    sizes = np.array([5, 0, 11], np.int32)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    for form in (grouped_mlp, xla.forward_by_tiles, xla.forward_ragged):
        got = form(x, packed, sizes, SiTU())
        np.testing.assert_array_equal(got, form(x, decoded, sizes, SiTU()))
        assert relative_error(got, oracle(x, decoded, sizes, 'situ', x)['y']) < 2e-6


def packed_arguments(seed=5, num_experts=3, width=128, inner=256):
    """Packed experts, and the arrays that they stand for."""
    rng = np.random.default_rng(seed)
    shapes = ((inner, width), (inner, width), (width, inner))
    packed = Experts(*(random_mxfp4(rng, num_experts, *s) for s in shapes))
    return packed, Experts(*(decode_mxfp4(w) for w in packed)), rng


@functools.cache
def packed_run(form):
    @jax.jit
    def run(x, experts, sizes, dy):
        y, vjp = jax.vjp(lambda x: grouped_mlp(x, experts, sizes, SiTU(), implementation=form), x)
        return {'y': y, 'x': vjp(dy)[0]}

    return run


@pytest.mark.parametrize('form', ['reference', 'xla', 'pallas'])
@pytest.mark.parametrize('sizes', [[16, 0, 24], [3, 20, 17], [0, 40, 0], [5, 5, 5]])
def test_mxfp4_outputs_and_input_gradients_equal_float64(form, sizes):
    packed, decoded, rng = packed_arguments()
    x, dy = (jnp.asarray(rng.standard_normal((40, 128)), jnp.bfloat16) for _ in range(2))
    experts = Experts(*(tile_mxfp4(w) for w in packed)) if sizes[0] == 3 else packed
    got = packed_run(form)(x, experts, np.array(sizes, np.int32), dy)
    want = oracle(x, decoded, sizes, 'situ', dy)
    assert_close(got, {name: want[name] for name in got}, 5e-3)


def test_the_default_form_takes_packed_weights():
    packed, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((6, 128)), jnp.bfloat16)
    sizes = np.array([2, 0, 4], np.int32)
    ids = np.repeat([0, 2], [2, 4])[:, None].astype(np.int32)
    want = oracle(x, decoded, sizes, 'situ', x)['y']
    assert relative_error(grouped_mlp(x, packed, sizes, SiTU()), want) < 5e-3
    assert relative_error(token_mlp(x, packed, ids, np.ones((6, 1)), SiTU()), want) < 5e-3


def test_packed_weights_have_no_gradient():
    packed, _, _ = packed_arguments()
    x, sizes = jnp.ones((2, 128), jnp.bfloat16), np.array([2, 0, 0], np.int32)
    _, vjp = jax.vjp(lambda experts: grouped_mlp(x, experts, sizes, SiTU()), packed)
    for gradient in jax.tree.leaves(vjp(x)):
        assert gradient.dtype == jax.dtypes.float0


def test_the_order_of_the_kernels_keeps_every_bit():
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 256, (2, 24, 128)).astype(np.uint8)
    weight = Mxfp4(packed, rng.integers(0, 256, (2, 24, 8)).astype(np.uint8))
    back = untile_mxfp4(tile_mxfp4(weight))
    np.testing.assert_array_equal(back.packed, weight.packed)
    np.testing.assert_array_equal(back.scale, weight.scale)
    with pytest.raises(ValueError, match='has 32 weights, wanted a multiple of 128'):
        tile_mxfp4(Mxfp4(packed[..., :16], weight.scale[..., :1]))


def test_the_kernels_decode_every_code_under_every_scale_exactly():
    """Twice the weights; codes in all positions, an output a scale."""
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 256, (256, 64)).astype(np.uint8)
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 4, axis=1)
    tiles = tile_mxfp4(Mxfp4(packed, scale))
    planes = [mxfp4_kernels._scale(tiles.scales, *p) for p in mxfp4_kernels._PLANES]
    planes = [jnp.broadcast_to(planes[i], (8, 256)) for i in mxfp4_kernels._USED]
    words = [
        mxfp4_kernels.decode_words(tiles.words[8 * i : 8 * i + 8], planes[4 * i : 4 * i + 4])
        for i in range(2)
    ]
    words = np.concatenate([np.asarray(w) for part in words for w in part]).view(np.uint32)
    halves = np.stack([words & 0xFFFF, words >> 16], axis=1).astype(np.uint16)
    got = halves.reshape(128, 256).T.view(ml_dtypes.bfloat16)[1:252].astype(np.float64) / 2
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, 128)[1:252]
    assert len({*codes.ravel()}) == 16
    want = np.array(E2M1)[codes] * 2.0 ** (np.arange(1, 252) - 127)[:, None]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


GROUP_OF_VECTORS = [7, -5, 3.5, 2.5, -1.75, 1.25, 0.75, 0.25] + [0] * 24


@pytest.mark.parametrize(
    ('rule', 'scale', 'want'),
    [
        ('ocp_floor', 127, [6, -4, 4, 2, -2, 1, 1, 0]),
        ('ceil', 128, [8, -4, 4, 2, -2, 1, 1, 0]),
    ],
)
def test_quantisation_golden(rule, scale, want):
    found = quantise_mxfp4(jnp.array([GROUP_OF_VECTORS], jnp.float32), rule)
    assert int(found.scale[0, 0]) == scale
    np.testing.assert_array_equal(decode_mxfp4(found, jnp.float32)[0], want + [0] * 24)


@pytest.mark.parametrize('rule', ['ocp_floor', 'ceil'])
def test_quantised_weights_are_the_nearest_and_quantise_to_themselves(rule):
    rng = np.random.default_rng(8)
    w = rng.standard_normal((16, 64)).astype(np.float32) * np.exp(rng.standard_normal((16, 1)))
    w[0] = 0
    found = quantise_mxfp4(w, rule)
    factor = 2.0 ** (np.repeat(np.asarray(found.scale, np.float64), 32, axis=1) - 127)
    numbers = np.asarray(E2M1).astype(ml_dtypes.float4_e2m1fn)
    nearest = (w / factor).clip(-6, 6).astype(numbers.dtype).astype(np.float64) * factor
    got = np.asarray(decode_mxfp4(found, jnp.float32))
    np.testing.assert_array_equal(got, nearest)
    if rule == 'ceil':
        assert np.all(np.abs(w) <= 6 * factor)
    np.testing.assert_array_equal(fake_quantise_mxfp4(got, rule), got)


def test_quantisation_refuses_a_part_of_a_group_and_an_unknown_rule():
    with pytest.raises(ValueError, match='has 40 weights, wanted a multiple of 32'):
        quantise_mxfp4(jnp.ones((2, 40)))
    with pytest.raises(ValueError, match="rule is 'floor', wanted 'ocp_floor' or 'ceil'"):
        quantise_mxfp4(jnp.ones((2, 32)), 'floor')


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_gradients_pass_straight_through_the_quantisation_to_the_masters(form):
    _, _, rng = packed_arguments()
    shapes = ((3, 64, 32), (3, 64, 32), (3, 32, 64))
    masters = Experts(*(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes))
    x, dy = (jnp.asarray(rng.standard_normal((20, 32)), jnp.float32) for _ in range(2))
    sizes = [4, 0, 16]

    @jax.jit
    def run(x, masters):
        def loss(x, masters):
            quantised = Experts(*(fake_quantise_mxfp4(w) for w in masters))
            return grouped_mlp(
                x, quantised, jnp.array(sizes, jnp.int32), SiTU(), implementation=form
            )

        y, vjp = jax.vjp(loss, x, masters)
        dx, grads = vjp(dy)
        return {'y': y, 'x': dx} | grads._asdict()

    seen = Experts(*(decode_mxfp4(quantise_mxfp4(w), jnp.float32) for w in masters))
    assert_close(run(x, masters), oracle(x, seen, sizes, 'situ', dy), 1e-5)


def token_oracle(x, experts, ids, weights):
    total = np.zeros(x.shape)
    for i in range(ids.shape[1]):
        order = np.argsort(ids[:, i], kind='stable')
        sizes = np.bincount(ids[:, i], minlength=experts.w1.shape[0])
        rows = np.asarray(x, np.float64)[order]
        found = oracle(rows, experts, sizes, 'situ', rows)['y']
        total[order] += np.asarray(weights, np.float64)[order, i : i + 1] * found
    return total


def token_choices(rng, num_tokens, num_experts, num_chosen):
    ids = np.stack([rng.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
    return ids.astype(np.int32), rng.random((num_tokens, num_chosen)).astype(np.float32)


@pytest.mark.parametrize('form', ['reference', 'xla', 'pallas'])
@pytest.mark.parametrize('num_tokens', [1, 7])
@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'mxfp4'])
def test_tokens_times_their_experts_equal_float64(kind, num_tokens, form):
    packed, decoded, rng = packed_arguments(num_experts=6)
    dtype = jnp.float32 if kind == 'float32' else jnp.bfloat16
    experts = packed if kind == 'mxfp4' else jax.tree.map(lambda w: w.astype(dtype), decoded)
    x = jnp.asarray(rng.standard_normal((num_tokens, 128)), dtype)
    ids, weights = token_choices(rng, num_tokens, 6, 2)
    got = token_mlp(x, experts, ids, weights, SiTU(), implementation=form)
    want = token_oracle(x, decoded, ids, weights)
    assert got.dtype == dtype
    assert relative_error(got, want) < (1e-5 if kind == 'float32' else 5e-3)


def test_only_the_chosen_experts_are_listed_and_foreign_ids_count_for_nothing():
    ids = jnp.array([[5, 2], [9, 5], [-1, 2]], jnp.int32)
    weights = jnp.array([[0.5, 0.25], [7, 0.75], [8, 1]], jnp.float32)
    found = needed(ids, weights, 8)
    assert found.ids.shape == (6,) and int(found.count[0]) == 2
    np.testing.assert_array_equal(found.ids, [2, 5, 5, 5, 5, 5])
    np.testing.assert_array_equal(found.weights[:2, 0], [[0.25, 0, 1], [0.5, 0.75, 0]])
    assert int(needed(jnp.full((2, 2), 8), weights[:2], 8).count[0]) == 0


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_foreign_ids_known_only_at_run_time_add_nothing(form):
    _, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((4, 128)), jnp.float32)
    experts = jax.tree.map(lambda w: w.astype(jnp.float32), decoded)
    run = jax.jit(
        lambda ids, weights: token_mlp(x, experts, ids, weights, SiTU(), implementation=form)
    )
    ids, weights = token_choices(rng, 4, 3, 2)
    foreign = ids.copy()
    foreign[:, 0] = [-1, 3, 99, -7]
    weights[:, 1] = [1, 0.5, 0, 2]
    want = weights[:, 1:] * token_oracle(x, experts, ids[:, 1:], np.ones((4, 1)))
    assert relative_error(run(foreign, weights), want) < 1e-5
    assert not np.any(run(np.full((4, 2), 9, np.int32), weights))


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


def test_the_kernels_for_packed_weights_have_no_races_and_stay_inside_their_arrays():
    packed, decoded, rng = packed_arguments(num_experts=2, inner=128)
    experts = Experts(*(tile_mxfp4(w) for w in packed))
    x, dy = (jnp.asarray(rng.standard_normal((20, 128)), jnp.bfloat16) for _ in range(2))
    sizes = jnp.array([7, 13], jnp.int32)
    settings = {
        'interpret': pltpu.InterpretParams(detect_races=True),
        'tiles': {'rows': 16, 'inner': 128, 'width': 128},
    }
    y, kept = mxfp4_kernels.forward(x, experts, sizes, SiTU(), keep=True, **settings)
    dx = mxfp4_kernels.backward(experts, sizes, kept, dy, SiTU(), **settings)
    want = oracle(x, decoded, sizes, 'situ', dy)
    assert_close({'y': y, 'x': dx}, {'y': want['y'], 'x': want['x']}, 5e-3)


def test_the_kernel_for_few_tokens_has_no_races_and_stays_inside_its_arrays():
    _, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    ids, weights = token_choices(rng, 3, 3, 1)
    chosen = needed(jnp.asarray(ids), jnp.asarray(weights), 3)
    y = token_kernel.run(
        x,
        decoded,
        *chosen,
        activation=SiTU(),
        columns=128,
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    assert relative_error(y, token_oracle(x, decoded, ids, weights)) < 5e-3


@pytest.mark.parametrize(('x', 'sizes'), [((4, 7), 5), ((4, 12), 4), ((2, 4, 12), 5)])
def test_a_wrong_shape_is_an_error(x, sizes):
    _, experts, _ = random_arguments()
    with pytest.raises(ValueError, match=r'wanted \[M, 12\] and \(5,\)'):
        grouped_mlp(np.zeros(x, np.float32), experts, np.zeros(sizes, np.int32), SiTU())


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [([3, 1, 0, 0, 1], 'sum to 5, wanted none negative and the 4 rows'), ([5, -1, 0, 0, 0], '-1')],
)
def test_known_group_sizes_that_do_not_add_up_are_refused(sizes, message):
    _, experts, _ = random_arguments()
    with pytest.raises(ValueError, match=message):
        grouped_mlp(np.zeros((4, 12), np.float32), experts, np.array(sizes, np.int32), SiTU())


def test_what_the_kernels_do_not_support_is_refused_by_name_and_falls_back_otherwise():
    packed, _, _ = packed_arguments()
    x, sizes = jnp.ones((2, 128), jnp.float32), np.array([1, 0, 1], np.int32)
    with pytest.raises(NotImplementedError, match='rows in float32, wanted bfloat16'):
        grouped_mlp(x, packed, sizes, SiTU(), implementation='pallas')
    assert grouped_mlp(x, packed, sizes, SiTU()).shape == x.shape
    with pytest.raises(NotImplementedError, match='rows in float16'):
        grouped_mlp(x.astype(jnp.float16), packed, sizes, SiTU(), implementation='pallas')
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        grouped_mlp(x, packed, sizes, SiTU(), implementation='cuda')
    many = jnp.ones((65, 128), jnp.bfloat16)
    ids = np.zeros((65, 1), np.int32)
    with pytest.raises(NotImplementedError, match='65 tokens, wanted at most 64'):
        token_mlp(many, packed, ids, np.ones((65, 1)), SiTU(), implementation='pallas')


def test_token_mlp_refuses_known_ids_out_of_range_and_shapes_that_disagree():
    _, experts, _ = random_arguments()
    x = np.zeros((2, 12), np.float32)
    with pytest.raises(ValueError, match='reach from 0 to 5, wanted 0 to 4'):
        token_mlp(x, experts, np.array([[0], [5]], np.int32), np.ones((2, 1)), SiTU())
    with pytest.raises(ValueError, match=r'wanted \[T, 12\] and \[T, k\] twice'):
        token_mlp(x, experts, np.zeros((3, 1), np.int32), np.ones((3, 1)), SiTU())


def test_weights_whose_shapes_disagree_are_an_error():
    _, experts, _ = random_arguments()
    swapped = experts._replace(w2=np.swapaxes(experts.w2, 1, 2))
    with pytest.raises(ValueError, match='w1, w3, w2 have shapes'):
        grouped_mlp(np.zeros((0, 12), np.float32), swapped, np.zeros(5, np.int32), SiTU())
