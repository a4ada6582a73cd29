"""What the experts' gated activations are."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_mlp import SiTU, SwiGLU
from tests.pallas_kernels.grouped_mlp_arguments import ACTIVATIONS


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
