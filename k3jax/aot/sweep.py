"""Which mesh and batch size is fastest among those that fit?"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from k3jax.aot.memory import gib
from k3jax.aot.report import Report, seconds
from k3jax.parallel.rules import AXES

ROOT = pathlib.Path(__file__).parents[2]

Settings = tuple[str, ...]  # values of --set


def _settings(path: str, value: str) -> Settings:
    if path != 'mesh':
        return (f'{path}={value}',)
    sizes = value.split('x')
    if not 1 <= len(sizes) <= len(AXES) or not all(size.isdigit() for size in sizes):
        raise ValueError(
            f'--sweep: got mesh={value!r}, wanted sizes of {" x ".join(AXES)}, such as 64x64x1'
        )
    return tuple(f'mesh.{axis}={size}' for axis, size in zip(AXES, sizes, strict=False))


def points(text: str) -> list[Settings]:
    """Every combination of a sweep such as 'mesh=64x64x1,32x128x1;data.batch_size=4096,8192'.

    Raises:
      ValueError: it is not written so.
    """
    choices = []
    for part in text.split(';'):
        path, equals, values = part.strip().partition('=')
        if not path or not equals or not all(values.split(',')):
            raise ValueError(
                f'--sweep: got {part!r}, wanted path=value,value such as '
                'mesh=64x64x1,32x128x1 or data.batch_size=4096,8192, joined by ;'
            )
        choices.append([_settings(path, value.strip()) for value in values.split(',')])
    return [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]


def run_point(command: Sequence[str], settings: Settings) -> Report:
    """The report of one point, compiled in a process of its own.

    Args:
      command: the script and its arguments, for all points.

    Returns:
      What the script writes as JSON, or only 'error' where it got no further.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / 'report.json'
        arguments = [*command, *(f'--set={setting}' for setting in settings), f'--json={result}']
        paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
        done = subprocess.run(
            arguments,
            env=os.environ | {'PYTHONPATH': os.pathsep.join(paths)},
            capture_output=True,
            text=True,
        )
        if result.exists():
            return json.loads(result.read_text())
    lines = done.stderr.strip().splitlines() or [f'exit status {done.returncode}']
    return {'error': next((x for x in reversed(lines) if x.startswith('error: ')), lines[-1])}


def run(command: Sequence[str], swept: Sequence[Settings]) -> Iterator[Report]:
    """A row for each point, in turn: its report with its settings."""
    for settings in swept:
        yield run_point(command, settings) | {'settings': list(settings)}


def ranked(rows: Sequence[Report]) -> list[Report]:
    """By estimated seconds a token, what fits first; then what does not."""

    def key(row: Report) -> tuple[bool, float]:
        return bool(row['error']), 0.0 if row['error'] else 1 / row['tokens_per_second']

    return sorted(rows, key=key)


def line(row: Report) -> str:
    """One point in a line."""
    name = ' '.join(row['settings'])
    if row['error']:
        return f'{name}: {row["error"]}'
    hbm = row['hbm']
    return (
        f'{name}: estimate {seconds(row["step_seconds"])} a step, MFU {row["mfu"]:.1%}, '
        f'{1e9 / row["tokens_per_second"]:.4g} ns a token; HBM {gib(hbm["required"])} of '
        f'{gib(hbm["limit"])}; compiled in {row["compile_seconds"]:.0f} s'
    )
