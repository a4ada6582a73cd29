"""How the cost of a job grows with chips or context: points to compile, their table and plot."""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from k3jax.aot.memory import GIB
from k3jax.aot.report import Report

# Parts of the model that are shown apart; the rest is 'other'.
_PARTS = {
    'KDA': 'kda_mixer',
    'MLA': 'mla_mixer',
    'experts': 'block_sparse_moe',
    'attention residual': 'attn_res',
    'parameters': 'gather_parameters',
}
_COLORS = ('#2a6f97', '#9e2a2b', '#e09f3e', '#386641', '#7b5ea7', '#999999')


class Point(NamedTuple):
    """A slice, and values of --set for it."""

    topology: str
    settings: tuple[str, ...]

    @property
    def key(self) -> str:
        return ' '.join((self.topology, *self.settings))


def read_points(text: str) -> list[Point]:
    """Points such as 'v5p:4x4x4 data.batch_size=64; v5p:8x8x8 data.batch_size=512'.

    Raises:
      ValueError: it is not written so.
    """
    found = []
    for part in text.split(';'):
        topology, *settings = part.split() or ['']
        if ':' not in topology or not all('=' in setting for setting in settings):
            raise ValueError(
                f'--points: got {part.strip()!r}, wanted a topology and values of --set, such as '
                "'v5p:4x4x4 data.batch_size=64'"
            )
        found.append(Point(topology, tuple(settings)))
    return found


def stored_rows(path: str | None, config: str, job: str) -> dict[str, Report]:
    """Rows of an earlier run, by their point's key.

    Raises:
      ValueError: the file holds something else, or rows of another config or job.
    """
    if path is None or not epath.Path(path).exists():
        return {}
    try:
        rows = json.loads(epath.Path(path).read_text())
        same = all((row['config'], row['job']) == (config, job) for row in rows)
        found = {row['point']: row for row in rows if row['hbm']}
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f'--json={path}: wanted rows of this script ({error}); name another file'
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f'--json={path}: wanted a list of rows of this script; name another file')
    if not same:
        raise ValueError(
            f'--json={path}: has rows of another config or job than {config}, {job}; name another '
            'file'
        )
    return found


def part_seconds(row: Report) -> dict[str, float]:
    """Estimated seconds of a step by part of the model."""
    sums: dict[str, float] = collections.Counter()
    for scope in row['scopes']:
        sums[scope['scope']] += scope['seconds']
    shown = {name: sums[scope] for name, scope in _PARTS.items()}
    return shown | {'other': row['step_seconds'] - sum(shown.values())}


def _peak(row: Report) -> int:
    hbm = row['hbm']
    return hbm['required'] if hbm['peak'] is None else hbm['peak']


def _columns(row: Report) -> Iterator[tuple[str, str]]:
    yield 'slice', row['topology']
    yield 'mesh', 'x'.join(str(size) for size in row['mesh'].values() if size > 1) or '1'
    yield 'context', f'{row["context"]:,}'
    yield 'tokens a chip', f'{row["tokens"] / row["chips"]:,.0f}'
    yield 'HBM peak, GiB', f'{_peak(row) / GIB:.1f}'
    if row['error']:
        return
    yield 'GB sent a chip', f'{sum(row["collectives"].values()) / 1e9:.1f}'
    yield 'GB to and from the host', f'{row["host_bytes"] / 1e9:.1f}'
    yield 'estimate, s a step', f'{row["step_seconds"]:.2f}'
    for name, seconds in part_seconds(row).items():
        yield f'{name}, s', f'{seconds:.2f}'
    yield 'MFU (estimate)', f'{row["mfu"]:.1%}'


def markdown(rows: Sequence[Report]) -> str:
    """A table with a line a point; what does not fit says so."""
    found = [dict(_columns(row)) for row in rows]
    header = max(found, key=len)
    lines = ['| ' + ' | '.join(header) + ' |', '|---' * len(header) + '|']
    for row, cells in zip(rows, found, strict=True):
        empty = 'does not fit' if row['error'] else ''
        lines.append('| ' + ' | '.join(cells.get(name, empty) for name in header) + ' |')
    return '\n'.join(lines)


def plot(rows: Sequence[Report], against: str) -> bytes:
    """PNG: seconds by part of the model, memory and bytes sent, of the points that fit.

    against: 'chips' or 'context', the field that is the x axis.
    """
    rows = [row for row in rows if not row['error']]
    figure = Figure(figsize=(12, 4), layout='constrained')
    seconds, memory, sent = figure.subplots(1, 3)
    places, labels = range(len(rows)), [f'{row[against]:,}' for row in rows]

    def stacked(axes: Axes, parts: dict[str, list[float]], label: str) -> None:
        bottom = [0.0] * len(rows)
        for (name, heights), color in zip(parts.items(), _COLORS, strict=False):
            axes.bar(places, heights, bottom=bottom, label=name, color=color, width=0.6)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(xlabel=against, ylabel=label, xticks=places, xticklabels=labels)
        axes.set_ylim(top=1.35 * max(bottom, default=1))  # room for the legend
        axes.legend(fontsize=7, frameon=False, ncols=2, loc='upper center')
        axes.spines[['top', 'right']].set_visible(False)

    by_part = [part_seconds(row) for row in rows]
    stacked(
        seconds,
        {name: [parts[name] for parts in by_part] for name in by_part[0]},
        'seconds of a step (estimate)',
    )
    state = [row['hbm']['argument'] / GIB for row in rows]
    rest = [_peak(row) / GIB - held for row, held in zip(rows, state, strict=True)]
    stacked(memory, {'state': state, 'the rest at the peak': rest}, 'GiB of HBM a chip')
    kinds = sorted({kind for row in rows for kind in row['collectives']})
    stacked(
        sent,
        {kind: [row['collectives'].get(kind, 0) / 1e9 for row in rows] for kind in kinds},
        'GB that a chip sends in a step',
    )
    written = io.BytesIO()
    figure.savefig(written, format='png', dpi=100, metadata={'Software': None})
    return written.getvalue()


def rows_of(
    points: Sequence[Point],
    stored: dict[str, Report],
    compiled: Callable[[Point], Report],
    keep: Callable[[list[Report]], None],
) -> list[Report]:
    """A row a point: stored, or compiled now and handed to `keep` with all that came before it."""
    rows = dict(stored)
    for point in points:
        if point.key not in rows:
            rows[point.key] = compiled(point) | {'point': point.key}
            keep(list(rows.values()))
    return [rows[point.key] for point in points]
