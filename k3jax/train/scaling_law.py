"""Which runs tell how two recipes scale, in what order, and what they say together."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from k3jax.train.power_law import Estimate, ablation_ratio, family_ratio, fit

BASELINE, FULL = 'k2', 'k3'
# Report's abstract, and its section on attention residuals: compute at equal loss.
PUBLISHED = {'whole recipe': 2.5, 'attn_res': 1.25}


class Point(NamedTuple):
    """One training run."""

    recipe: str
    width: int
    rate: float

    @property
    def name(self) -> str:
        return f'{self.recipe}_{self.width}_{self.rate:g}'


class Result(NamedTuple):
    """What a run came to.

    flops: of its training. loss: held-out, nats a token; None where it was no number any more.
    fixed_seconds: to the end of the first step, and for the evaluation. seconds: of other steps.
    """

    point: Point
    flops: float
    tokens: int
    parameters: int
    loss: float | None
    fixed_seconds: float
    seconds: float


class Grid(NamedTuple):
    """widths: from the smallest on. rates: tried at the smallest. ablations: recipes."""

    widths: Sequence[int]
    rates: Sequence[float]
    ablations: Sequence[str]

    def rate_of(self, recipe: str, results: Iterable[Result]) -> float:
        """The best at the smallest width; a recipe without a part takes the full one's."""
        tried = BASELINE if recipe == BASELINE else FULL
        found = [
            (x.loss, x.point.rate)
            for x in results
            if x.point[:2] == (tried, self.widths[0]) and x.loss is not None
        ]
        if not any(x.point[:2] == (tried, self.widths[0]) for x in results):
            raise ValueError(
                f'scaling law: no run of {tried} at width {self.widths[0]} is there yet'
            )
        if not found:
            raise ValueError(
                f'scaling law: {tried} diverged at every learning rate of '
                f'{", ".join(f"{rate:g}" for rate in self.rates)}; lower them'
            )
        return min(found)[1]

    def next_point(self, results: Sequence[Result]) -> Point | None:
        """The first that is not there yet: small ones first, so that any prefix says something."""
        done = {result.point for result in results}
        both = (BASELINE, FULL)
        for rate in self.rates:
            for recipe in both:
                if (point := Point(recipe, self.widths[0], rate)) not in done:
                    return point
        early, late = self.widths[1:3], self.widths[3:]
        order = [(recipe, width) for width in early for recipe in both]
        order += [(recipe, self.widths[1]) for recipe in self.ablations]
        order += [(recipe, width) for width in late for recipe in both]
        for recipe, width in order:
            point = Point(recipe, width, self.rate_of(recipe, results))
            if point not in done:
                return point
        return None

    def runs(self, recipe: str, results: Sequence[Result]) -> list[tuple[float, float]]:
        """(FLOPs, loss) of a recipe's runs at its rate."""
        rate = self.rate_of(recipe, results)
        return sorted(
            (x.flops, x.loss)
            for x in results
            if x.loss is not None and x.point.recipe == recipe and x.point.rate == rate
        )


def seconds_for(flops: float, results: Sequence[Result]) -> float:
    """How long a run will take, from those before; 0 while there is none."""
    if not results:
        return 0.0
    a_flop = sum(x.seconds for x in results) / sum(x.flops for x in results)
    return float(np.mean([x.fixed_seconds for x in results])) + flops * a_flop


def report(grid: Grid, results: Sequence[Result]) -> dict[str, Any]:
    """Fits, compute ratios at equal loss with 95% intervals, and the runs; may be stored as JSON.

    Raises:
      ValueError: too few runs to fit both recipes and tell how far they scatter.
    """
    families = {recipe: grid.runs(recipe, results) for recipe in (BASELINE, FULL)}
    for recipe, runs in families.items():
        if len(runs) < 3:
            raise ValueError(
                f'scaling law: got {len(runs)} runs of {recipe}, wanted three sizes; run longer'
            )
    whole = family_ratio(families[FULL], families[BASELINE])
    ablations = {}
    for recipe in grid.ablations:
        for run in grid.runs(recipe, results):
            found = ablation_ratio(families[FULL], run, others=families[BASELINE])
            ablations[recipe] = {'flops': run[0], 'loss': run[1], 'ratio': found._asdict()}
    return {
        'laws': {name: fit(runs)._asdict() for name, runs in families.items()},
        'whole_recipe': whole._asdict(),
        'ablations': ablations,
        'published': PUBLISHED,
        'rates': {recipe: grid.rate_of(recipe, results) for recipe in families},
        'runs': [x.point._asdict() | x._asdict() | {'point': x.point.name} for x in results],
    }


def _shown(ratio: Mapping[str, float]) -> str:
    value, low, high = Estimate(**ratio)
    return f'{value:.2f} ({low:.2f} to {high:.2f})'


def markdown(found: Mapping[str, Any]) -> str:
    """The ratios of a report as a table."""
    lines = ['| what K3 has | compute saved at equal loss (95%) | published |', '|---|---|---|']
    ratios = {'whole recipe': found['whole_recipe']}
    ratios |= {name: x['ratio'] for name, x in found['ablations'].items()}
    for name, ratio in ratios.items():
        published = found['published'].get(name)
        lines.append(f'| {name} | {_shown(ratio)} | {published or "-"} |')
    for name, law in found['laws'].items():
        lines.append(
            f'\n{name}: loss = {law["coefficient"]:.3f} (C / {law["unit"]:.2e} FLOPs)'
            f'^-{law["exponent"]:.3f}'
        )
    return '\n'.join(lines)


def plot(found: Mapping[str, Any]) -> bytes:
    """PNG: held-out loss over training FLOPs, the laws as lines, runs without a part as crosses."""
    figure = Figure(figsize=(7.5, 5), layout='constrained')
    axes = figure.subplots()
    used = [run for run in found['runs'] if run['loss'] is not None]
    flops = np.geomspace(min(x['flops'] for x in used), max(x['flops'] for x in used))
    for name, law in found['laws'].items():
        curve = law['coefficient'] * (flops / law['unit']) ** -law['exponent']
        (line,) = axes.plot(flops, curve, label=f'{name}: C^-{law["exponent"]:.3f}')
        for rate in sorted({x['rate'] for x in used if x['recipe'] == name}):
            chosen = rate == found['rates'][name]
            at = [
                (x['flops'], x['loss']) for x in used if x['recipe'] == name and x['rate'] == rate
            ]
            style = {'color': line.get_color(), 'alpha': 1.0 if chosen else 0.3}
            axes.plot(*zip(*at, strict=True), 'o', **style)
    for name, run in found['ablations'].items():
        axes.plot(run['flops'], run['loss'], 'x', label=f'k3 without {name}')
    axes.set(
        xscale='log',
        yscale='log',
        xlabel='training FLOPs',
        ylabel='held-out loss (nats a byte)',
        title=f'Compute saved at equal loss: {_shown(found["whole_recipe"])}',
    )
    axes.grid(alpha=0.3, which='both')
    axes.legend(fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format='png', dpi=120)
    return png.getvalue()
