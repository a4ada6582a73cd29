"""Norms and projections: float64, and the rounding order of the reference."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from k3jax.model.kda import gated_head_norm
from k3jax.model.norms import project, rms_norm

BF16 = ml_dtypes.bfloat16


def test_rms_norm_equals_float64():
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((7, 33)), rng.standard_normal(33)
    want = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * weight
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-5)
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_epsilon_is_added_to_the_mean_square():
    x = np.full((1, 4), 1e-3, np.float32)
    got = rms_norm(x, np.ones(4, np.float32), 1e-6)
    np.testing.assert_allclose(got, 1 / np.sqrt(2), rtol=1e-6)


def test_bfloat16_norm_rounds_before_the_weight():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 64)).astype(BF16)
    weight = (1 + rng.standard_normal(64)).astype(BF16)
    wide = x.astype(np.float32)
    normal = wide / np.sqrt(np.mean(wide * wide, -1, keepdims=True) + np.float32(1e-5))
    rounded = normal.astype(BF16).astype(np.float32)
    want = (rounded * weight.astype(np.float32)).astype(BF16)
    got = np.asarray(rms_norm(x, weight, 1e-5))
    assert got.dtype == BF16
    # float32 statistics may differ in the last bit, which moves few roundings.
    assert np.mean(got == want) > 0.995
    once = (normal * weight.astype(np.float32)).astype(BF16)
    assert np.mean(got == once) < 0.9


def test_head_norm_is_per_head_gated_and_rounded_once():
    rng = np.random.default_rng(2)
    o, z = rng.standard_normal((2, 5, 3, 8)).astype(BF16)
    weight = rng.standard_normal(8).astype(np.float32)
    o64, z64 = o.astype(np.float64), z.astype(np.float64)
    want = o64 / np.sqrt(np.mean(o64**2, -1, keepdims=True) + 1e-5) * weight / (1 + np.exp(-z64))
    got = np.asarray(gated_head_norm(o, z, weight, 1e-5))
    assert got.dtype == BF16
    assert np.mean(got == want.astype(BF16)) > 0.99


def test_project_multiplies_by_rows_of_the_weight():
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 4))
    got = project(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32))
    np.testing.assert_allclose(got, x @ weight.T, rtol=1e-5, atol=1e-6)
