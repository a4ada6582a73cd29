"""The draft's loss: the published vector, its gradient by hand, blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.train import losses
from k3jax.train.lk_loss import SMALLEST, acceptance, accepted_shares
from k3jax.train.lk_loss import lk_loss as loss_of

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])


def of_logits(logits, p=P):
    return loss_of(acceptance(p, jax.nn.softmax(logits)))


def test_the_vector_of_the_report():
    loss, grad = jax.value_and_grad(of_logits)(jnp.log(jnp.asarray(Q, jnp.float32)))
    assert float(acceptance(P, Q)) == pytest.approx(0.7)
    assert float(loss) == pytest.approx(0.3566749, rel=1e-6)
    np.testing.assert_allclose(grad, [-0.228571, 0.142857, 0.085714], atol=1e-6)


def test_equal_distributions_have_no_loss_and_no_gradient():
    logits = jnp.log(jnp.asarray(P, jnp.float32))
    loss, grad = jax.value_and_grad(of_logits)(logits, jax.nn.softmax(logits))
    assert abs(float(loss)) < 1e-6
    assert np.abs(grad).max() < 1e-6


def test_disjoint_distributions_are_clamped_without_gradient():
    loss, grad = jax.value_and_grad(of_logits)(
        jnp.array([-100.0, 0.0, -100.0]), jnp.array([1.0, 0.0, 0.0])
    )
    assert float(loss) == pytest.approx(-np.log(SMALLEST))
    assert not np.any(grad)


def test_a_guess_that_is_no_number_has_no_acceptance():
    assert np.isnan(acceptance(P, np.array([0.2, np.nan, 0.3])))


def test_blocks_of_rows_equal_one(monkeypatch):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((11, 5)).astype(np.float32)
    guess, said = (rng.standard_normal((3, 7, 5)).astype(np.float32) for _ in range(2))

    def total(guess):
        return jnp.sum(loss_of(accepted_shares(weight, guess, said)))

    want = jax.value_and_grad(total)(guess)
    monkeypatch.setattr(losses, 'LOGITS_AT_ONCE', 4 * 11)  # of 21 rows, four at a time
    got = jax.value_and_grad(total)(guess)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-7)


def test_only_the_guess_has_a_gradient():
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (2, 4), (2, 4))]
    total = lambda *a: jnp.sum(accepted_shares(*a))  # noqa: E731
    weight, guess, said = jax.grad(total, argnums=(0, 1, 2))(*arrays)
    assert np.any(guess) and not np.any(weight) and not np.any(said)
