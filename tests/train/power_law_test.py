"""Power laws: exact ones are found again, ratios are those built in, intervals cover the truth."""

import numpy as np
import pytest

from k3jax.train import power_law

FLOPS = np.geomspace(1e12, 2e13, 5)
BETTER, BASELINE = (2.0, 0.11), (2.0 * 2.5**0.11, 0.11)  # L = a (C / 1e12)^-b; a ratio of 2.5


def runs(law, noise=None):
    a, b = law
    loss = a * (FLOPS / 1e12) ** -b
    return list(zip(FLOPS, loss if noise is None else loss * np.exp(noise), strict=True))


def test_an_exact_law_is_found_again():
    law = power_law.fit(runs(BETTER))
    assert law.exponent == pytest.approx(0.11)
    assert law.loss(1e12) == pytest.approx(2.0)
    assert law.flops(law.loss(3e12)) == pytest.approx(3e12)


def test_exact_laws_give_the_exact_ratio_and_no_interval():
    found = power_law.family_ratio(runs(BETTER), runs(BASELINE), samples=20)
    assert found == pytest.approx((2.5, 2.5, 2.5))


def test_a_ratio_of_other_exponents_is_that_at_the_loss_asked_for():
    steeper = runs((2.0, 0.2))
    found = power_law.family_ratio(steeper, runs((2.0, 0.1)), flops=1e13, samples=2)
    assert found.value == pytest.approx(10.0)  # 2 * 10^-0.2 takes 1e14 at an exponent of 0.1


def test_the_default_loss_needs_no_extrapolation():
    """At the loss of the baseline's largest run, which the better recipe has at 8e12 FLOPs."""
    better, baseline = runs((2.0, 0.2)), runs((2.0 * 2.5**0.2, 0.1))
    reached = power_law.fit(better).flops(baseline[-1][1])
    assert FLOPS[0] < reached < FLOPS[-1]
    found = power_law.family_ratio(better, baseline, samples=2)
    assert found.value == pytest.approx(FLOPS[-1] / reached)


def test_intervals_cover_the_true_ratio_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = widths = 0
    for _ in range(50):
        noisy = (runs(law, 0.01 * rng.standard_normal(5)) for law in (BETTER, BASELINE))
        found = power_law.family_ratio(*noisy, flops=5e12, samples=150)
        assert found.low <= found.value <= found.high
        covered += found.low <= 2.5 <= found.high
        widths += found.high - found.low
    assert 42 <= covered <= 50
    assert 0.2 < widths / 50 < 1.2  # a loss 1% off is 9% of compute


def test_an_ablated_run_is_measured_against_the_full_recipe():
    full = runs(BETTER)
    a, b = BETTER
    run = (5e12, a * (4e12 / 1e12) ** -b)  # what the full recipe reaches with 4e12
    assert power_law.ablation_ratio(full, run, samples=20).value == pytest.approx(1.25)
    rng = np.random.default_rng(1)
    noisy = [runs(law, 0.01 * rng.standard_normal(5)) for law in (BETTER, BASELINE)]
    found = power_law.ablation_ratio(noisy[0], run, others=noisy[1], samples=500)
    assert found.low < 1.25 < found.high
    # The run's own scatter counts: the interval is wider than that of a point on the curve.
    assert found.high - found.low > 0.1


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match='wanted two sizes'):
        power_law.fit([(1e12, 2.0), (1e12, 2.1)])
    with pytest.raises(ValueError, match='wanted finite numbers above 0'):
        power_law.fit([(1e12, 2.0), (2e12, float('nan'))])
    with pytest.raises(ValueError, match='got 4 runs, wanted more than 4'):
        power_law.family_ratio(runs(BETTER)[:2], runs(BASELINE)[:2])
