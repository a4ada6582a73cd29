"""What a simulation of a fleet came to: a row of figures, a table, a plot."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from k3jax.serve.fleet.simulation import Request

_NAMES = {
    'hash': 'consistent hashing',
    'round_robin': 'round robin',
    'least_loaded': 'least loaded',
}
_COLUMNS = (
    *('conversations a second', 'policy', 'hit rate', 'wait p50, p99', 'first token p50, p99'),
    *('in time', 'goodput'),
)


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    if not len(values):
        return {'p50': None, 'p99': None}
    p50, p99 = np.percentile(np.asarray(values), [50, 99])
    return {'p50': round(float(p50), 3), 'p99': round(float(p99), 3)}


def figures(
    requests: Sequence[Request], from_s: float, to_s: float, slo_s: float
) -> dict[str, Any]:
    """Of the requests of a time.

    Args:
      slo_s: the answer of a request counts as good if its first token came within.

    Returns:
      hit_rate: of the tokens of prompts, those not read again. wait_s: until a prompt begins to be
      read. first_token_s: from its arrival. within: share of requests whose first token came in
      time. goodput: tokens a second of answers that ended then, and whose first token did.
    """
    arrived = [r for r in requests if from_s <= r.arrived_s < to_s]
    ended = [r for r in requests if from_s <= r.ended_s < to_s]
    first = [r.first_s - r.arrived_s for r in arrived]
    prompts = sum(r.prompt for r in arrived)
    good = sum(r.answer for r in ended if r.first_s - r.arrived_s <= slo_s)
    return {
        'requests': len(arrived),
        'hit_rate': round(sum(r.hit for r in arrived) / prompts, 4) if prompts else None,
        'wait_s': _quantiles([r.started_s - r.arrived_s for r in arrived]),
        'first_token_s': _quantiles(first),
        'within': round(sum(x <= slo_s for x in first) / len(first), 4) if first else None,
        'goodput': round(good / (to_s - from_s), 1),
    }


def report(
    requests: Sequence[Request], warm_up_s: float, seconds: float, slo_s: float, bin_s: float = 60.0
) -> dict[str, Any]:
    """`figures` after the warm-up, the same by minutes, and of requests that lost their server."""
    lost = [r for r in requests if not math.isnan(r.lost_s)]
    stalls = [r.stalled_s for r in lost if not math.isnan(r.stalled_s)]
    starts = np.arange(0, seconds, bin_s).tolist()
    return {
        **figures(requests, warm_up_s, seconds, slo_s),
        'lost': {'requests': len(lost), 'under_way': len(stalls), 'stalled_s': _quantiles(stalls)},
        'timeline': [
            {'from_s': s, **figures(requests, s, min(s + bin_s, seconds), slo_s)} for s in starts
        ],
    }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row."""
    lines = [f'| {" | ".join(_COLUMNS)} |', '|---' * len(_COLUMNS) + '|']

    def pair(quantiles: Mapping[str, float | None]) -> str:
        return ', '.join('-' if x is None else f'{x:.2f} s' for x in quantiles.values())

    for row in rows:
        hit, within = ('-' if x is None else f'{x:.1%}' for x in (row['hit_rate'], row['within']))
        load = '-' if row['load'] is None else f'{row["load"]:g}'
        lines.append(
            f'| {load} | {_NAMES[row["policy"]]} | {hit} | {pair(row["wait_s"])} '
            f'| {pair(row["first_token_s"])} | {within} | {row["goodput"]:.0f} tok/s |'
        )
    return '\n'.join(lines)


def _value(row: Mapping[str, Any], name: str) -> float:
    value = row['first_token_s']['p99'] if name == 'p99' else row[name]
    return math.nan if value is None else value


def plot(rows: Sequence[Mapping[str, Any]], fail_at_s: float | None) -> bytes:
    """PNG: hit rate, p99 of the time to the first token and goodput, over load.

    With a failure they are over time, of the first load.
    """
    figure = Figure(figsize=(13, 3.6), layout='constrained')
    titles = {
        'hit_rate': 'prompt tokens found in the cache',
        'p99': 'time to first token, p99 (s)',
        'goodput': 'goodput (tokens/s, first token in time)',
    }
    for axes, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for policy in dict.fromkeys(row['policy'] for row in rows):
            own = [row for row in rows if row['policy'] == policy]
            if fail_at_s is None:
                x, points = [row['load'] for row in own], own
            else:
                points = own[0]['timeline']
                x = [point['from_s'] / 60 for point in points]
            y = [_value(point, name) for point in points]
            axes.plot(x, y, marker='o' if fail_at_s is None else None, label=_NAMES[policy])
        axes.set(title=title, xlabel='conversations a second' if fail_at_s is None else 'minutes')
        if fail_at_s is not None:
            axes.axvline(fail_at_s / 60, color='gray', linestyle=':', label='a server is lost')
        if name == 'p99':
            axes.set_yscale('log')
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format='png', dpi=100, metadata={'Software': None})
    return image.getvalue()
