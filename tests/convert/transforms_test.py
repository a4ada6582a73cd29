"""Transforms: golden MXFP4 bytes, exactness, and inverses."""

import ml_dtypes
import numpy as np
import pytest

from k3jax.convert.files import ConversionError
from k3jax.convert.transforms import (
    EXPAND_MXFP4,
    IDENTITY,
    SQUEEZE_A_LOG,
    SQUEEZE_CONV,
    SQUEEZE_RES_PROJ,
    TRIM_ZERO_PADDING,
    expand_mxfp4,
)
from tests import release

CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _one_group(first_byte, scale):
    packed = np.zeros((1, 16), np.uint8)
    packed[0, 0] = first_byte
    return expand_mxfp4(packed, np.array([[scale]], np.uint8), 'w').astype(np.float64)[0]


@pytest.mark.parametrize(
    ('byte', 'scale', 'wanted'),
    [
        (0x21, 127, (0.5, 1.0)),
        (0xF7, 127, (6.0, -6.0)),
        (0x22, 125, (0.25, 0.25)),
        (0x21, 0, (0.5 * 2.0**-127, 2.0**-127)),
        (0x53, 252, (1.5 * 2.0**125, 3 * 2.0**125)),
    ],
)
def test_golden_bytes(byte, scale, wanted):
    got = _one_group(byte, scale)
    assert tuple(got[:2]) == wanted
    assert not got[2:].any()


def test_expansion_is_exact_for_every_code_and_finite_scale():
    packed = np.arange(256, dtype=np.uint8).reshape(1, 256)
    for scale in range(253):
        got = expand_mxfp4(packed, np.full((1, 16), scale, np.uint8), 'w')[0].astype(np.float64)
        low, high = np.array(CODES)[packed[0] & 15], np.array(CODES)[packed[0] >> 4]
        wanted = np.stack([low, high], -1).reshape(-1) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


def test_expansion_inverts_an_independent_quantiser():
    rng = np.random.default_rng(0)
    exponents = rng.integers(-8, 3, (48, 3)).repeat(32, axis=1)
    weights = rng.choice(CODES, (48, 96)) * 2.0**exponents
    weights[:, ::32] = 6 * 2.0 ** exponents[:, ::32]  # fixes each group's scale
    got = expand_mxfp4(*release.quantise_mxfp4(weights), 'w')
    np.testing.assert_array_equal(got.astype(np.float64), weights)
    assert got.dtype == ml_dtypes.bfloat16


def test_nan_scale_is_refused_by_name():
    with pytest.raises(ConversionError, match=r'experts.3.w1.*\(0, 0\).*E8M0 NaN'):
        expand_mxfp4(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8), 'experts.3.w1')


def test_scale_beyond_bfloat16_is_refused_by_name():
    with pytest.raises(ConversionError, match='experts.3.w1.*beyond bfloat16'):
        expand_mxfp4(np.full((1, 16), 7, np.uint8), np.full((1, 1), 254, np.uint8), 'experts.3.w1')


@pytest.mark.parametrize(
    ('transform', 'source', 'leaf'),
    [
        (IDENTITY, (4, 3), (4, 3)),
        (SQUEEZE_RES_PROJ, (1, 5), (5,)),
        (SQUEEZE_CONV, (6, 1, 4), (6, 4)),
        (SQUEEZE_A_LOG, (1, 1, 3, 1), (3,)),
    ],
)
def test_load_and_store_are_inverse(transform, source, leaf):
    array = np.random.default_rng(0).standard_normal(source).astype(np.float32)
    assert transform.source_shapes(leaf) == (source,)
    loaded = transform.load([array], leaf, 'w')
    assert loaded.shape == leaf
    np.testing.assert_array_equal(transform.store(loaded, source), array)


@pytest.mark.parametrize('size', [96, 128])
def test_zero_padding_is_trimmed_and_put_back(size):
    padded = np.zeros(size, np.float32)
    padded[:96] = np.arange(1, 97)
    loaded = TRIM_ZERO_PADDING.load([padded], (96,), 'A_log')
    np.testing.assert_array_equal(loaded, np.arange(1, 97))
    np.testing.assert_array_equal(TRIM_ZERO_PADDING.store(loaded, (size,)), padded)
    assert TRIM_ZERO_PADDING.source_shapes((96,)) == ((128,),)


def test_non_zero_padding_is_refused_by_name():
    padded = np.zeros(128, np.float32)
    padded[100] = 0.5
    with pytest.raises(ConversionError, match='layers.4.A_log: got 0.5 at index 100, wanted 0'):
        TRIM_ZERO_PADDING.load([padded], (96,), 'layers.4.A_log')


def test_too_few_heads_are_refused():
    with pytest.raises(ConversionError, match='got 3 values, wanted at least 4'):
        TRIM_ZERO_PADDING.load([np.zeros(3, np.float32)], (4,), 'A_log')


def test_expansion_has_no_inverse():
    with pytest.raises(NotImplementedError, match='quantising'):
        EXPAND_MXFP4.store(np.zeros((2, 32)), (2, 16))
