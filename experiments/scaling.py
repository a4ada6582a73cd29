"""How a job's cost grows on TPUs that are not here: `python -m experiments.scaling --config=F`.

Compiles the job as experiments.aot does for each of --points, a topology with values of --set, and
prints a table: memory, bytes sent, and an estimate (not a measurement) of the step's time by part
of the model. --json keeps the rows; those it already has are not compiled again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from absl import flags
from etils import epath

from k3jax.aot.chips import chip_of
from k3jax.aot.compiler import check_topology, devices_of
from k3jax.aot.jobs import build_job, mesh_for
from k3jax.aot.report import Report
from k3jax.aot.scaling import Point, markdown, plot, read_points, rows_of, stored_rows
from k3jax.aot.sweep import run_point
from k3jax.config import Config
from k3jax.flags import config_from_file, define_config_flags, run_main
from k3jax.overrides import apply_overrides

_JOB = flags.DEFINE_enum('job', 'train', ['train', 'prefill', 'decode'], 'What to compile.')
_POINTS = flags.DEFINE_string(
    'points', None, "'v5p:4x4x4 data.batch_size=64; v5p:8x8x8 data.batch_size=512'.", required=True
)
_AGAINST = flags.DEFINE_enum('against', 'chips', ['chips', 'context'], 'The x axis of the plot.')
_JSON = flags.DEFINE_string('json', None, 'File that keeps the rows.')
_PNG = flags.DEFINE_string('png', None, 'File to draw the plot to.')
define_config_flags(has_workdir=False)


def _checked(config: Config, points: Sequence[Point]) -> dict[Point, Config]:
    """Each point's config, found to fit its slice as far as that is known before it is compiled."""
    configs = {}
    for point in points:
        check_topology(point.topology)
        configs[point] = apply_overrides(config, point.settings)
        devices = devices_of(point.topology, configs[point].mesh.slices)
        mesh = mesh_for(configs[point], _JOB.value, devices)
        build_job(configs[point], _JOB.value, mesh, chip_of(point.topology).hbm_bytes)
    return configs


def main(_: Sequence[str]) -> int:
    """Exit status 1 if no point fits."""
    shared = tuple(flags.FLAGS.set)
    points = [p._replace(settings=shared + p.settings) for p in read_points(_POINTS.value)]
    for name, path in (('json', _JSON.value), ('png', _PNG.value)):
        if path and not epath.Path(path).parent.is_dir():
            raise ValueError(f'--{name}={path}: there is no such folder; make it first')
    configs = _checked(config_from_file(flags.FLAGS.config), points)
    command = [sys.executable, '-m', 'experiments.aot', f'--job={_JOB.value}']
    command += [f'--config={flags.FLAGS.config}']

    def compiled(point: Point) -> Report:
        row = run_point([*command, f'--topology={point.topology}'], point.settings)
        if 'hbm' not in row:
            raise ValueError(f'--points: {point.key}: {row["error"].removeprefix("error: ")}')
        print(f'{point.key}: compiled in {row["compile_seconds"]:.0f} s', flush=True)
        return row | {'context': configs[point].data.sequence_length}

    def keep(rows: list[Report]) -> None:
        if _JSON.value:
            epath.Path(_JSON.value).write_text(json.dumps(rows, indent=1) + '\n')

    stored = stored_rows(_JSON.value, flags.FLAGS.config, _JOB.value)
    rows = rows_of(points, stored, compiled, keep)
    print(markdown(rows))
    if _PNG.value and not all(row['error'] for row in rows):
        epath.Path(_PNG.value).write_bytes(plot(rows, _AGAINST.value))
    return int(all(row['error'] for row in rows))


if __name__ == '__main__':
    run_main(main)
