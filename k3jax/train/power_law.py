"""How loss falls with compute, L = a C^-b, and what compute a recipe saves at equal loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

INTERVAL = (2.5, 97.5)  # percent of the bootstrap


class PowerLaw(NamedTuple):
    """loss = coefficient * (flops / unit)**-exponent.

    unit: the geometric mean of the fitted FLOPs, at which `coefficient` is the loss.
    """

    coefficient: float
    exponent: float
    unit: float

    def loss(self, flops: np.ndarray | float) -> np.ndarray | float:
        return self.coefficient * (flops / self.unit) ** -self.exponent

    def flops(self, loss: np.ndarray | float) -> np.ndarray | float:
        """What a run takes to come to `loss`."""
        return self.unit * (loss / self.coefficient) ** (-1 / self.exponent)


class Estimate(NamedTuple):
    """value, and the ends of a 95% interval."""

    value: float
    low: float
    high: float


Points = Sequence[tuple[float, float]]  # (FLOPs, loss) of runs


def fit(points: Points) -> PowerLaw:
    """Least squares of log loss over log FLOPs.

    Raises:
      ValueError: fewer than two different FLOPs, or a number that has no logarithm.
    """
    flops, loss = np.array(points, np.float64).reshape(-1, 2).T
    if len(set(flops)) < 2:
        raise ValueError(f'power law: got runs of {sorted(set(flops))} FLOPs, wanted two sizes')
    if not (np.isfinite([flops, loss]).all() and (flops > 0).all() and (loss > 0).all()):
        raise ValueError(f'power law: got {list(points)}, wanted finite numbers above 0')
    unit = np.exp(np.mean(np.log(flops)))
    slope, intercept = np.polyfit(np.log(flops / unit), np.log(loss), 1)
    return PowerLaw(float(np.exp(intercept)), float(-slope), float(unit))


def _residuals(points: Points, law: PowerLaw) -> np.ndarray:
    flops, loss = np.array(points, np.float64).T
    return np.log(loss) - np.log(law.loss(flops))


def bootstrap(
    families: Mapping[str, Points],
    statistic: Callable[[Mapping[str, PowerLaw], np.random.Generator, np.ndarray], float],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """A statistic of the families' laws, with the interval that the runs' scatter leaves.

    Residuals of the fits are taken as errors of one kind, of all families together (a family has
    few runs), widened by the degrees of freedom that the fits use up, and dealt out anew over the
    fitted losses.

    Args:
      families: name -> runs, at least three in all beyond two a family.
      statistic: of laws; it also gets the generator and the widened residuals, [] for the value
        itself, for a run of its own beside the families.

    Raises:
      ValueError: no residual is left, so that nothing tells how far runs scatter.
    """
    laws = {name: fit(points) for name, points in families.items()}
    parts = [_residuals(families[name], law) for name, law in laws.items()]
    residuals = np.concatenate(parts)
    freedom = len(residuals) - 2 * len(families)
    if freedom < 1:
        raise ValueError(
            f'bootstrap: got {len(residuals)} runs, wanted more than {2 * len(families)}, two for '
            'each power law'
        )
    residuals = residuals * np.sqrt(len(residuals) / freedom)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(samples):
        again = {}
        for name, law in laws.items():
            flops = np.array([x for x, _ in families[name]])
            noise = rng.choice(residuals, len(flops))
            again[name] = fit(list(zip(flops, law.loss(flops) * np.exp(noise), strict=True)))
        found.append(statistic(again, rng, residuals))
    low, high = np.percentile(found, INTERVAL)
    return Estimate(statistic(laws, rng, residuals[:0]), float(low), float(high))


def compute_ratio(of: PowerLaw, over: PowerLaw, flops: float) -> float:
    """How many times the FLOPs of law `of` the law `over` takes to the loss `of` has at `flops`."""
    return float(over.flops(of.loss(flops)) / flops)


def family_ratio(
    better: Points, baseline: Points, *, flops: float | None = None, samples: int = 2000
) -> Estimate:
    """Compute of the baseline over that of the better recipe, at the loss of equal quality.

    flops: of the better recipe's run; None for the largest at which the baseline need not be
    extrapolated, or the better one's smallest.
    """
    if flops is None:
        laws = fit(better), fit(baseline)
        reached = laws[0].flops(laws[1].loss(max(x for x, _ in baseline)))
        flops = float(np.clip(reached, min(x for x, _ in better), max(x for x, _ in better)))
    return bootstrap(
        {'better': better, 'baseline': baseline},
        lambda laws, *_: compute_ratio(laws['better'], laws['baseline'], flops),
        samples=samples,
    )


def ablation_ratio(
    full: Points, run: tuple[float, float], *, others: Points = (), samples: int = 2000
) -> Estimate:
    """Compute of one run without a factor, over what the full recipe takes to the same loss.

    others: runs of another family, which tell how far runs scatter too.
    """
    flops, loss = run

    def saved(laws: Mapping[str, PowerLaw], rng: np.random.Generator, residuals: np.ndarray):
        noise = rng.choice(residuals) if len(residuals) else 0.0
        return float(flops / laws['full'].flops(loss * np.exp(noise)))

    families = {'full': full} | ({'others': others} if others else {})
    return bootstrap(families, saved, samples=samples)
