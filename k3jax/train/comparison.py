"""What the metrics of several runs say beside each other: a table and a plot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

LAST = 20  # logged steps that a run is judged by

Rows = Sequence[Mapping[str, Any]]


def _series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps [N], and values [N] or, of a metric with one value a layer, [N, layers]."""
    found = [(row['step'], row[name]) for row in rows if name in row]
    return np.array([step for step, _ in found]), np.array([value for _, value in found])


def summary(rows: Rows, target_loss: float | None = None) -> dict[str, Any]:
    """A run in numbers.

    Keys, each only where the metrics have it: steps; loss, the mean of the last `LAST` logged
    steps; held_out_loss, the last; step_of_target, the first at which the mean of `LAST` logged
    losses is at or under `target_loss` (None: never); maxvio, of the worst layer, the median of the
    last ones; dead_experts, the most there; max_logit, the largest there.
    """
    steps, loss = _series(rows, 'loss')
    if not len(steps):
        raise ValueError('comparison: a run without a logged loss, wanted one in metrics.jsonl')
    found: dict[str, Any] = {'steps': int(steps[-1]), 'loss': float(np.mean(loss[-LAST:]))}
    if target_loss is not None:
        means = [np.mean(loss[max(0, i + 1 - LAST) : i + 1]) for i in range(len(loss))]
        below = [int(s) for s, mean in zip(steps, means, strict=True) if mean <= target_loss]
        found['step_of_target'] = below[0] if below else None
    _, held_out = _series(rows, 'held_out_loss')
    if len(held_out):
        found['held_out_loss'] = float(held_out[-1])
    over_layers = {
        'maxvio': lambda x: np.max(np.median(x, axis=0)),
        'dead_experts': np.max,
        'max_logit': np.max,
    }
    for name, of in over_layers.items():
        _, values = _series(rows, name)
        if len(values):
            found[name] = float(of(values[-LAST:]))
    return found


def markdown(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a run."""
    names = list(dict.fromkeys(name for run in summaries.values() for name in run))
    lines = [f'| run | {" | ".join(name.replace("_", " ") for name in names)} |']
    lines.append('|---' * (len(names) + 1) + '|')

    def shown(value: Any) -> str:
        if value is None:
            return '-'
        return str(int(value)) if float(value).is_integer() else f'{value:.3f}'

    for run, values in summaries.items():
        cells = ' | '.join(shown(values.get(name)) for name in names)
        lines.append(f'| {run} | {cells} |')
    return '\n'.join(lines)


def plot(runs: Mapping[str, Rows], metrics: Sequence[str]) -> bytes:
    """PNG with a panel a metric; of a metric with one value a layer, the worst layer's."""
    figure = Figure(figsize=(5 * len(metrics), 3.6), layout='constrained')
    for axes, metric in zip(
        figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
    ):
        for run, rows in runs.items():
            steps, values = _series(rows, metric)
            if len(steps):
                axes.plot(steps, values.max(axis=1) if values.ndim > 1 else values, label=run)
        axes.set(xlabel='step', title=metric.replace('_', ' '))
        if metric in ('maxvio', 'max_logit'):
            axes.set_yscale('log')
        axes.grid(alpha=0.3)
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=110)
    return image.getvalue()
