"""What numbers become in MXFP4 and MXFP8: the published vectors, and the definition in float64."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as arrays_of

from pallas_kernels.grouped_mlp import (
    Mxfp4,
    decode_mxfp4,
    fake_quantise_mxfp4,
    fake_quantise_mxfp8,
    quantise_mxfp4,
)
from tests.oracles import mx

RULES = ('ocp_floor', 'ceil')
FORMATS = {
    'mxfp4': (fake_quantise_mxfp4, mx.E2M1, 124),  # scale bytes up to 251
    'mxfp8': (fake_quantise_mxfp8, mx.E4M3, 119),  # above, elements leave float32
}
VECTOR = np.array([[7, -5, 3.5, 2.5, -1.75, 1.25, 0.75, 0.25] + [0] * 24], np.float32)


@functools.cache
def run(name, rule):
    return jax.jit(functools.partial(FORMATS[name][0], rule=rule))


def padded(values, largest):
    """One group: the values, then `largest`, which decides the scale."""
    return np.array([[*values, largest] + [0] * (31 - len(values))], np.float32)


@pytest.mark.parametrize(
    ('name', 'rule', 'factor', 'want'),
    [
        ('mxfp4', 'ocp_floor', 1, [6, -4, 4, 2, -2, 1, 1, 0]),
        ('mxfp4', 'ceil', 1, [8, -4, 4, 2, -2, 1, 1, 0]),
        ('mxfp8', 'ocp_floor', 100, [704, -512, 352, 256, -176, 128, 72, 24]),
        ('mxfp8', 'ceil', 100, [704, -512, 352, 256, -176, 128, 72, 24]),
    ],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_vector_of_the_format(name, rule, factor, want, dtype):
    x = jnp.asarray(factor * VECTOR, dtype)
    for form in (FORMATS[name][0], run(name, rule)):
        got = form(x, rule=rule) if form is FORMATS[name][0] else form(x)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32)[0, :8], want)
        assert not np.any(got[0, 8:])


@pytest.mark.parametrize(
    ('rule', 'scale', 'elements'),
    [
        ('ocp_floor', 127, [6, -4, 4, 2, -2, 1, 1, 0]),
        ('ceil', 128, [4, -2, 2, 1, -1, 0.5, 0.5, 0]),
    ],
)
def test_scale_and_elements_of_the_vector(rule, scale, elements):
    found = quantise_mxfp4(VECTOR, rule)
    assert int(found.scale[0, 0]) == scale
    alone = decode_mxfp4(found._replace(scale=np.full((1, 1), 127, np.uint8)), jnp.float32)
    np.testing.assert_array_equal(alone[0, :8], elements)


@pytest.mark.parametrize(
    ('value', 'want'),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.1, 6), (7, 6)],
)
def test_ties_go_to_even_and_what_is_above_six_saturates(value, want):
    x = padded([value, -value], 4)  # scale 1
    np.testing.assert_array_equal(fake_quantise_mxfp4(x)[0, :2], [want, -want])


@pytest.mark.parametrize(
    ('value', 'want'),
    [
        (17, 16),
        (19, 20),
        (21, 20),
        (0.0009765625, 0),  # half of the smallest element, 2^-9
        (0.0029296875, 0.00390625),  # 1.5 of it
        (0.015, 0.015625),  # up to the smallest normal element
        (464, 448),  # 480 would be the next: a tie, and no element
        (511, 448),
    ],
)
def test_ties_and_saturation_of_eight_bits(value, want):
    x = padded([value, -value], 256)  # scale 1
    np.testing.assert_array_equal(fake_quantise_mxfp8(x)[0, :2], [want, -want])


def test_codes_of_every_element():
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6] + [0] * 22, np.float32)
    packed = np.asarray(quantise_mxfp4(values[None]).packed)[0]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).ravel()
    np.testing.assert_array_equal(codes[:10], [0, 1, 2, 3, 4, 5, 6, 7, 9, 15])


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', FORMATS)
class TestEdges:
    def test_zeros_stay_zeros_and_keep_their_sign(self, name, rule):
        x = np.array([[0.0, -0.0] * 16], np.float32)
        got = np.asarray(run(name, rule)(x))
        np.testing.assert_array_equal(got, x)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))

    def test_a_group_of_subnormal_numbers_is_zero(self, name, rule):
        x = np.full((1, 32), 2.0**-130, np.float32)
        assert not np.any(run(name, rule)(x)) and not np.any(FORMATS[name][0](x, rule))

    def test_one_huge_number_leaves_the_others_nothing(self, name, rule):
        got = np.asarray(run(name, rule)(padded([1.0, -1.0], 2.0**40)))
        np.testing.assert_array_equal(got, padded([0.0, 0.0], 2.0**40))

    def test_a_part_of_a_group_and_an_unknown_rule_are_refused(self, name, rule):
        for form in (FORMATS[name][0], jax.jit(FORMATS[name][0], static_argnums=1)):
            with pytest.raises(ValueError, match='has 40 numbers, wanted a multiple of 32'):
                form(jnp.ones((2, 40)), rule)
            with pytest.raises(ValueError, match="is 'floor', wanted 'ocp_floor' or 'ceil'"):
                form(jnp.ones((2, 32)), 'floor')

    def test_what_is_not_finite_stays_so(self, name, rule):
        x = padded([np.inf, -np.inf, np.nan], 1)
        got = np.asarray(run(name, rule)(x))
        np.testing.assert_array_equal(got[0, :3], x[0, :3])

    def test_the_gradient_is_the_identity(self, name, rule):
        x = jnp.asarray(3 * VECTOR)
        weight = np.arange(32, dtype=np.float32)[None]
        gradient = jax.grad(lambda x: jnp.sum(weight * FORMATS[name][0](x, rule)))(x)
        np.testing.assert_array_equal(gradient, weight)

    def test_every_scale(self, name, rule):
        """A group at each power of two of float32, its numbers spread below it."""
        rng = np.random.default_rng(1)
        numbers = rng.uniform(-1, 1, (254, 32)) * 2.0 ** -rng.integers(0, 12, (254, 32))
        numbers[:, 0] = rng.uniform(1, 2, 254)
        x = (numbers * 2.0 ** np.arange(-126, 128)[:, None]).astype(np.float32)
        _, magnitudes, most = FORMATS[name]
        np.testing.assert_array_equal(run(name, rule)(x), mx.rounded(x, magnitudes, rule, most))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-600, 600, width=32)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    arrays_of.arrays(np.float32, (2, 64), elements=FLOATS | NEAR, fill=NEAR),
    st.sampled_from(RULES),
    st.sampled_from(list(FORMATS)),
)
def test_any_numbers_equal_the_definition_and_are_rounded_once(x, rule, name):
    _, magnitudes, most = FORMATS[name]
    got = np.asarray(run(name, rule)(x))
    want = mx.rounded(x, magnitudes, rule, most)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    np.testing.assert_array_equal(run(name, rule)(got), got)


@functools.cache
def packing(rule):
    return jax.jit(functools.partial(quantise_mxfp4, rule=rule))


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    arrays_of.arrays(np.float32, (2, 64), elements=FLOATS | NEAR, fill=NEAR), st.sampled_from(RULES)
)
def test_packed_scales_and_codes_equal_the_definition(x, rule):
    found = packing(rule)(x)
    packed = np.asarray(found.packed)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 32)
    for group, code, scale in zip(x.reshape(-1, 32), codes, np.ravel(found.scale), strict=True):
        exponent, want, _ = mx.round_group(group, mx.E2M1, rule, 124)
        assert scale == exponent + 127
        np.testing.assert_array_equal(code, want)


@pytest.mark.parametrize('rule', RULES)
def test_training_has_the_values_that_packed_weights_decode_to(rule):
    rng = np.random.default_rng(2)
    w = rng.standard_normal((64, 256)) * np.exp(3 * rng.standard_normal((64, 1)))
    w = jnp.asarray(w, jnp.float32)
    np.testing.assert_array_equal(
        fake_quantise_mxfp4(w, rule), decode_mxfp4(quantise_mxfp4(w, rule), jnp.float32)
    )


def test_every_code_under_every_scale_decodes_to_its_definition():
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    got = np.asarray(decode_mxfp4(Mxfp4(packed, scale), jnp.float32), np.float64)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(255, 512)
    values = np.where(codes >= 8, -1, 1) * mx.E2M1[codes & 7]
    want = values * 2.0 ** (np.arange(255) - 127.0)[:, None]
    tiny = np.abs(want) < mx.SMALLEST  # some devices have zeros there
    np.testing.assert_array_equal(got[tiny] * 0, 0 * want[tiny])
    assert np.all((got[tiny] == want[tiny]) | (got[tiny] == 0))
    largest = float(np.finfo(np.float32).max)
    beyond = np.abs(want) > largest
    np.testing.assert_array_equal(got[~tiny & ~beyond], want[~tiny & ~beyond])
    assert np.all(np.isinf(got[beyond])) and scale.max() == 254  # 255 is NaN
