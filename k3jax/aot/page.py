"""What a report looks like: one HTML file with its plots inside."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from k3jax.aot.memory import GIB, gib
from k3jax.aot.report import Report, notes, seconds, trips

PARTS = ('compute', 'memory', 'communication')
_COLORS = {'compute': '#2a6f97', 'memory': '#e09f3e', 'communication': '#9e2a2b'}
_SHARE_COLORS = {'model': '#386641', 'other_compute': '#2a6f97'} | _COLORS
_HBM_COLORS = {'argument': '#2a6f97', 'temp': '#e09f3e', 'output': '#9e2a2b', 'code': '#777777'}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0 } div { overflow-x: auto }
td, th { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere }
.note { background: #fff6dd; padding: .5em .8em; border-left: 4px solid #e09f3e }
.bad { color: #9e2a2b } svg { max-width: 100%; height: auto }
"""


def _svg(draw: Callable[[Axes], None], height: float) -> str:
    figure = Figure(figsize=(9.5, height), layout='constrained')
    axes = figure.subplots()
    draw(axes)
    axes.spines[['top', 'right']].set_visible(False)
    written = io.StringIO()
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'k3jax'}):
        figure.savefig(written, format='svg', metadata={'Date': None})
    return written.getvalue()[written.getvalue().index('<svg') :]


def _stacked(
    axes: Axes, labels: Sequence[str], parts: dict[str, list[float]], colors: dict[str, str]
) -> None:
    """Horizontal bars of parts, the first label on top."""
    left = [0.0] * len(labels)
    for name, widths in parts.items():
        axes.barh(labels, widths, left=left, label=name.replace('_', ' '), color=colors[name])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(fontsize=8, ncols=4, loc='lower left', bbox_to_anchor=(0, 1), frameon=False)


def _hbm_plot(report: Report) -> str:
    hbm = report['hbm']

    def draw(axes: Axes) -> None:
        own = {name: hbm[name] or 0 for name in _HBM_COLORS}
        own['output'] -= hbm['alias'] or 0
        parts = {name: [size / GIB] for name, size in own.items()}
        _stacked(axes, ['HBM'], parts, _HBM_COLORS)
        axes.axvline(hbm['limit'] / GIB, color='black', linestyle='--')
        axes.set(xlabel=f'GiB a chip (dashed: the limit, {gib(hbm["limit"])})')

    return _svg(draw, 1.7)


def _shares_plot(report: Report) -> str:
    def draw(axes: Axes) -> None:
        parts = {name: [100 * share] for name, share in report['shares'].items()}
        _stacked(axes, ['step'], parts, _SHARE_COLORS)
        axes.set(xlabel='% of the step (estimate); model: the FLOPs that the model needs, at peak')

    return _svg(draw, 1.7)


def _scopes_plot(report: Report) -> str:
    rows = [row for row in report['scopes'] if row['seconds'] > 0]

    def draw(axes: Axes) -> None:
        labels = [f'{row["scope"]} {row["direction"]}' for row in rows]
        _stacked(axes, labels, {name: [row[name] for row in rows] for name in PARTS}, _COLORS)
        axes.set(xlabel='seconds of a step (estimate)')

    return _svg(draw, 1.2 + 0.26 * len(rows))


def _collectives_plot(report: Report) -> str:
    kinds = sorted(report['collectives'].items(), key=lambda item: -item[1])

    def draw(axes: Axes) -> None:
        axes.barh([kind for kind, _ in kinds], [sent / 1e9 for _, sent in kinds], color='#9e2a2b')
        axes.invert_yaxis()
        axes.set(xlabel='GB that a chip sends in a step')

    return _svg(draw, 1.0 + 0.3 * len(kinds))


def _sweep_plot(rows: Sequence[Report]) -> str:
    fitting = [row for row in rows if not row['error']]

    def draw(axes: Axes) -> None:
        labels = [' '.join(row['settings']).replace('mesh.', '') for row in fitting]
        parts = {
            name: [
                1e9 * row['seconds'][name] / row['step_seconds'] / row['tokens_per_second']
                for row in fitting
            ]
            for name in PARTS
        }
        _stacked(axes, labels, parts, _COLORS)
        axes.set(xlabel='ns a token, all chips together (estimate)')

    return _svg(draw, 1.2 + 0.3 * len(fitting))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], text: Sequence[int]) -> str:
    """text: columns that hold words."""

    def line(cells: Sequence[Any], tag: str) -> str:
        marked = (' class="text"' if i in text else '' for i in range(len(cells)))
        parts = (
            f'<{tag}{mark}>{html.escape(str(cell))}</{tag}>'
            for mark, cell in zip(marked, cells, strict=True)
        )
        return f'<tr>{"".join(parts)}</tr>'

    body = ''.join(line(row, 'td') for row in rows)
    return f'<div><table>{line(header, "th")}{body}</table></div>'


def _facts(report: Report) -> str:
    hbm = report['hbm']
    rows = [
        ('config', report['config']),
        ('job', report['job']),
        ('topology', report['topology']),
        ('mesh', ', '.join(f'{axis} {size}' for axis, size in report['mesh'].items())),
        ('tokens a step', f'{report["tokens"]:,}'),
        ('HBM a chip', f'{gib(hbm["required"])} of {gib(hbm["limit"])}, peak {gib(hbm["peak"])}'),
    ]
    if not report['error']:
        rows += [
            ('step (estimate)', seconds(report['step_seconds'])),
            ('MFU (estimate)', f'{report["mfu"]:.1%}'),
            ('tokens a second (estimate)', f'{report["tokens_per_second"]:,.0f}'),
            ('FLOPs in products, a chip', f'{report["flops"]:.4g}'),
            ('HBM bytes, a chip', f'{report["hbm_bytes"]:.4g}'),
        ]
    host = gib(report['host_peak_bytes'])
    rows.append(('compiled in', f'{report["compile_seconds"]:.0f} s, {host} of host memory'))
    return _table(('', ''), rows, (0, 1))


def _buffers(report: Report) -> str:
    rows = [
        (gib(row['bytes']), row['count'], row['kind'], row['shape'], row['op_name'])
        for row in report['buffers']
    ]
    header = ('bytes', 'count', 'kind', 'shape', 'from')
    return f'<h2>Largest buffers at the peak</h2>{_table(header, rows, (2, 3, 4))}'


def _kernels(report: Report) -> str:
    rows = [
        (
            row['name'],
            row['calls'],
            f'{row["flops"]:.4g}' if row['has_cost'] else 'unknown',
            f'{row["hbm_bytes"]:.4g}',
            f'{row["vmem_bytes"] / 2**20:.1f}',
            seconds(row['seconds']),
            f'{row["cycles"]:,}',
            row['cycles_from'],
        )
        for row in report['kernels']
    ]
    header = ('kernel', 'calls', 'FLOPs', 'bytes', 'VMEM, MiB', 'a call', 'cycles', 'from')
    return (
        f'<h2>Pallas kernels, one call (seconds and cycles: estimate)</h2>'
        f'{_table(header, rows, (0, 7))}'
    )


def _loops(report: Report) -> str:
    rows = [(row['name'], row['scope'], trips(row), row['times']) for row in report['loops']]
    header = ('loop', 'scope', 'trips', 'executions')
    return f'<h2>Loops</h2>{_table(header, rows, (0, 1))}'


def _collectives(report: Report) -> str:
    rows = [
        (row['kind'], row['group'], row['scope'], row['count'], f'{row["bytes"]:.4g}')
        for row in report['collective_groups']
    ]
    header = ('kind', 'chips', 'scope', 'times', 'bytes sent a chip')
    plot = _collectives_plot(report) if report['collectives'] else '<p>none</p>'
    return f'<h2>Collectives</h2>{plot}{_table(header, rows, (0, 2))}'


def _report(report: Report) -> str:
    parts = [_facts(report)]
    if report['error']:
        parts.append(f'<p class="bad">{html.escape(report["error"])}</p>')
    else:
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in notes(report)]
    parts.append(f'<h2>HBM</h2>{_hbm_plot(report)}')
    if not report['error']:
        parts += [
            f'<h2>Step time (estimate)</h2>{_shares_plot(report)}{_scopes_plot(report)}',
            _collectives(report),
            _kernels(report),
            _loops(report),
        ]
    return ''.join([*parts, _buffers(report)])


def _sweep(rows: Sequence[Report]) -> str:
    cells = []
    for row in rows:
        name = ' '.join(row['settings'])
        if row['error']:
            cells.append((name, *['-'] * 6, row['error']))
            continue
        part = row['seconds']
        cells.append(
            (
                name,
                f'{1e9 / row["tokens_per_second"]:.4g}',
                seconds(row['step_seconds']),
                f'{row["mfu"]:.1%}',
                ' / '.join(f'{part[x] / row["step_seconds"]:.0%}' for x in PARTS),
                gib(row['hbm']['required']),
                f'{row["compile_seconds"]:.0f} s',
                '',
            )
        )
    header = ('settings', 'ns a token', 'step', 'MFU', ' / '.join(PARTS), 'HBM', 'compiled', '')
    fits = any(not row['error'] for row in rows)
    plot = _sweep_plot(rows) if fits else '<p class="bad">Nothing fits.</p>'
    return (
        f'<h2>Sweep, fastest first (times are estimates)</h2>{plot}{_table(header, cells, (0, 7))}'
    )


def page(title: str, report: Report | None, sweep: Sequence[Report] = ()) -> str:
    """The HTML text.

    Args:
      title: what was compiled.
      report: of one job, None where it got no further than an error.
      sweep: rows of a sweep in their order, each a report with its `settings`.
    """
    body = [f'<h1>{html.escape(title)} (estimate, not measured)</h1>']
    if sweep:
        body.append(_sweep(sweep))
    if report is not None:
        body.append(_report(report))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<title>{html.escape(title)} (estimate)</title><style>{_STYLE}</style></head>'
        f'<body>{"".join(body)}</body></html>\n'
    )
