"""Puts runs beside each other: `python -m experiments.compare --runs=adamw=DIR,muon=DIR`.

Prints a table of what their metrics.jsonl say, and draws --png.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags
from etils import epath

from k3jax.flags import run_main
from k3jax.train.comparison import markdown, plot, summary
from k3jax.train.metrics import read_metrics

_RUNS = flags.DEFINE_list('runs', None, 'name=workdir of each run.', required=True)
_TARGET = flags.DEFINE_float('target_loss', None, 'Also tell the step at which each run is there.')
_METRICS = flags.DEFINE_list('metrics', ['loss', 'maxvio'], 'To plot, a panel each.')
_PNG = flags.DEFINE_string('png', None, 'File to draw the plot to.')


def _rows(run: str) -> tuple[str, list[dict]]:
    name, given, workdir = run.partition('=')
    if not (name and given and workdir):
        raise ValueError(f'--runs: got {run!r}, wanted name=workdir')
    path = epath.Path(workdir) / 'metrics.jsonl'
    if not path.exists():
        raise ValueError(f'--runs: {workdir} has no metrics.jsonl; train there first')
    rows = read_metrics(path)
    if not any('loss' in row for row in rows):
        raise ValueError(f'--runs: {path} has no logged loss; train there first')
    return name, rows


def main(_: Sequence[str]) -> None:
    found = [_rows(run) for run in _RUNS.value]
    runs = dict(found)
    if len(runs) < len(found):
        names = ', '.join(name for name, _ in found)
        raise ValueError(f'--runs: got the names {names}, wanted each once')
    if _METRICS.present and not _PNG.value:
        raise ValueError('--metrics: what to plot, but there is no --png to draw it to')
    if _PNG.value and not epath.Path(_PNG.value).parent.is_dir():
        raise ValueError(f'--png={_PNG.value}: there is no such folder; make it first')
    known = sorted({name for rows in runs.values() for row in rows for name in row} - {'step'})
    if _PNG.value and (not _METRICS.value or not set(_METRICS.value) <= set(known)):
        raise ValueError(
            f'--metrics: got {",".join(_METRICS.value)}, wanted some of {", ".join(known)}'
        )
    print(markdown({name: summary(rows, _TARGET.value) for name, rows in runs.items()}))
    if _PNG.value:
        epath.Path(_PNG.value).write_bytes(plot(runs, _METRICS.value))


if __name__ == '__main__':
    run_main(main)
