"""Routed experts: activations, MXFP4 decoding, ragged groups, gradients, both forms."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_mlp import Experts, Mxfp4, SiTU, SwiGLU, api, decode_mxfp4, grouped_mlp
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
        if form == 'public':
            y, vjp = jax.vjp(
                lambda x, experts: grouped_mlp(x, experts, sizes, activation), x, experts
            )
            dx, grads = vjp(dy)
        else:
            forward = getattr(api, f'_forward_{form}')
            backward = getattr(api, f'_backward_{form}')
            y = forward(x, experts, sizes, activation)
            dx, grads = backward(x, experts, sizes, dy, activation)
        return {'y': y, 'x': dx} | grads._asdict()

    return run


@pytest.mark.parametrize('form', ['public', 'by_tiles', 'ragged'])
@pytest.mark.parametrize('sizes', GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_outputs_and_gradients_equal_float64_for_any_groups(name, sizes, form):
    x, experts, dy = random_arguments()
    got = compiled(name, form)(x, experts, np.array(sizes, np.int32), dy)
    assert_close(got, oracle(x, experts, sizes, name, dy), 2e-6)


def test_every_split_of_few_rows_between_two_experts():
    x, experts, dy = random_arguments(1)
    x, dy, experts = x[:9], dy[:9], Experts(*(w[:2] for w in experts))
    for first in range(10):
        sizes = [first, 9 - first]
        got = compiled('situ', 'public')(x, experts, np.array(sizes, np.int32), dy)
        assert_close(got, oracle(x, experts, sizes, 'situ', dy), 2e-6)


def test_groups_above_a_tile_are_cut():
    rng = np.random.default_rng(2)
    count = 3 * api.MAX_TILE + 5
    x, dy = rng.standard_normal((2, count, WIDTH)).astype(np.float32)
    _, experts, _ = random_arguments()
    experts = Experts(*(w[:2] for w in experts))
    sizes = [7, count - 7]
    got = compiled('situ', 'by_tiles')(x, experts, np.array(sizes, np.int32), dy)
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
    for form in (grouped_mlp, api._forward_by_tiles, api._forward_ragged):
        got = form(x, packed, sizes, SiTU())
        np.testing.assert_array_equal(got, form(x, decoded, sizes, SiTU()))
        assert relative_error(got, oracle(x, decoded, sizes, 'situ', x)['y']) < 2e-6


def test_gradients_through_mxfp4_are_refused():
    rng = np.random.default_rng(3)
    packed = Experts(*(random_mxfp4(rng, 1, *s) for s in ((64, 32), (64, 32), (32, 64))))
    x, sizes = np.ones((2, 32), np.float32), np.array([2], np.int32)
    with pytest.raises(NotImplementedError, match='expand them to bf16'):
        jax.grad(lambda x: grouped_mlp(x, packed, sizes, SiTU()).sum())(x)


@pytest.mark.parametrize(('x', 'sizes'), [((4, 7), 5), ((4, 12), 4), ((2, 4, 12), 5)])
def test_a_wrong_shape_is_an_error(x, sizes):
    _, experts, _ = random_arguments()
    with pytest.raises(ValueError, match=r'wanted \[M, 12\] and \(5,\)'):
        grouped_mlp(np.zeros(x, np.float32), experts, np.zeros(sizes, np.int32), SiTU())
