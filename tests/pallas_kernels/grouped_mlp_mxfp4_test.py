"""What MXFP4 bytes stand for, and which bytes a weight becomes."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_mlp import (
    Mxfp4,
    decode_mxfp4,
    fake_quantise_mxfp4,
    mxfp4_kernels,
    quantise_mxfp4,
    tile_mxfp4,
    untile_mxfp4,
)

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
