"""The attention residual: golden vector, float64 oracle, candidates that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.attn_res import push_snapshot
from pallas_kernels.attn_res import attn_res_mix
from tests.compare import relative_error
from tests.oracles import kimi as oracle

GOLDEN = {
    'norm': np.array([1, 0.5, 2, 1], np.float32),
    'proj': np.array([0.2, -0.1, 0.3, 0.05], np.float32),
}
GOLDEN_BANK = np.array([[1, 2, 3, 4], [-2, 0, 1, 0.5]], np.float32).reshape(2, 1, 1, 4)
GOLDEN_PREFIX = np.full((1, 1, 4), 0.1, np.float32)


def mix(bank, prefix, num_live=None, use_prefix=True, **weights):
    num_live = len(bank) if num_live is None else num_live
    return attn_res_mix(bank, prefix, **weights, num_live=num_live, use_prefix=use_prefix, eps=1e-5)


def random_arguments(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    bank, prefix = rng.standard_normal((3, 2, 5, 16)), rng.standard_normal((2, 5, 16))
    weights = {name: rng.standard_normal(16).astype(dtype) for name in ('norm', 'proj')}
    return bank.astype(dtype), prefix.astype(dtype), weights


def truth(bank, prefix, weights):
    bank, prefix = np.asarray(bank, np.float64), np.asarray(prefix, np.float64)
    rows = [
        oracle.residual_read(bank[:, b], prefix[b], weights['norm'], weights['proj'], 1e-5)
        for b in range(len(prefix))
    ]
    return np.stack(rows)


def test_golden_mixture():
    got = mix(GOLDEN_BANK, GOLDEN_PREFIX, **GOLDEN)
    np.testing.assert_allclose(got.ravel(), [-0.010485, 0.809403, 1.411757, 1.687809], atol=1e-6)


def test_golden_weights_and_scores():
    """The mixture of three known candidates gives back their weights, and these the scores."""
    candidates = np.concatenate([GOLDEN_BANK[:, 0, 0], GOLDEN_PREFIX[0]])
    got = np.asarray(mix(GOLDEN_BANK, GOLDEN_PREFIX, **GOLDEN)).ravel()
    weights = np.linalg.lstsq(np.vstack([candidates.T, np.ones(3)]), np.append(got, 1), rcond=None)[
        0
    ]
    np.testing.assert_allclose(weights, [0.384819, 0.217535, 0.397646], atol=1e-5)
    scores = np.log(weights) - np.log(weights[0]) + 0.766811
    np.testing.assert_allclose(scores, [0.766811, 0.196395, 0.799600], atol=5e-5)


def test_mixture_equals_float64():
    bank, prefix, weights = random_arguments()
    assert relative_error(mix(bank, prefix, **weights), truth(bank, prefix, weights)) < 1e-6


def test_bfloat16_candidates_are_scored_and_mixed_in_float32():
    bank, prefix, weights = random_arguments(1)
    bank, prefix = jnp.asarray(bank, jnp.bfloat16), jnp.asarray(prefix, jnp.bfloat16)
    weights = {name: jnp.asarray(w, jnp.bfloat16) for name, w in weights.items()}
    got = mix(bank, prefix, **weights)
    want = truth(bank, prefix, weights)
    assert got.dtype == jnp.bfloat16
    # One rounding to 8 significant bits, and no more.
    near = np.asarray(jnp.asarray(want, jnp.float32).astype(jnp.bfloat16), np.float64)
    assert np.mean(np.asarray(got, np.float64) == near) > 0.99


@pytest.mark.parametrize('traced', [False, True])
def test_snapshots_past_num_live_do_not_count(traced):
    bank, prefix, weights = random_arguments(2)
    want = mix(bank[:2], prefix, **weights)
    bank[2] = 1e4
    num_live = jnp.asarray(2) if traced else 2
    np.testing.assert_allclose(mix(bank, prefix, num_live, **weights), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('traced', [False, True])
def test_without_the_running_sum_only_snapshots_are_read(traced):
    bank, prefix, weights = random_arguments(3)
    want = truth(bank[:2], bank[2], weights)
    use_prefix = jnp.asarray(False) if traced else False
    got = mix(bank, 1e4 * prefix, use_prefix=use_prefix, **weights)
    assert relative_error(got, want) < 1e-6


def test_one_candidate_is_read_as_it_is():
    bank, prefix, weights = random_arguments(4)
    np.testing.assert_array_equal(mix(bank[:1], prefix, use_prefix=False, **weights), bank[0])


def test_gradients_are_finite_where_rows_do_not_count():
    bank, prefix, weights = random_arguments(5)
    bank[2] = 0

    def loss(bank, prefix):
        return jnp.sum(mix(bank, prefix, jnp.asarray(2), jnp.asarray(False), **weights) ** 2)

    d_bank, d_prefix = jax.grad(loss, argnums=(0, 1))(bank, prefix)
    assert np.isfinite(d_bank).all() and np.any(d_bank[:2])
    assert not np.any(d_bank[2]) and not np.any(d_prefix)


def test_push_sets_one_row():
    bank, prefix, _ = random_arguments(6)
    for index in (1, jnp.asarray(1)):
        got = push_snapshot(bank, prefix, index)
        np.testing.assert_array_equal(got, np.stack([bank[0], prefix, bank[2]]))
