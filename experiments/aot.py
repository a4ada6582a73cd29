"""What a job would cost on a TPU that is not here: `python -m experiments.aot --config=F`.

Compiles the real train step, prefill or decode of a config for a topology such as v5p:4x4x4 and
prints, for one chip, memory, FLOPs, collectives, kernels and loops, and an estimate (not a
measurement) of the step's time. A program that does not fit is reported as a table of its largest
buffers, and exits with 1. --sweep compiles many meshes and batch sizes, and ranks what fits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import jax
from absl import flags
from etils import epath

from k3jax.aot.chips import chip_of
from k3jax.aot.compile_job import compile_lowered
from k3jax.aot.compiler import check_topology, devices_of
from k3jax.aot.estimate import ICI_BANDWIDTH, Rates, read_kernel_seconds
from k3jax.aot.jobs import build_job, mesh_for
from k3jax.aot.page import page
from k3jax.aot.report import Report, make_report, table
from k3jax.aot.sweep import line, points, ranked, run
from k3jax.flags import define_config_flags, load_config, run_main

_JOB = flags.DEFINE_enum('job', 'train', ['train', 'prefill', 'decode'], 'What to compile.')
_TOPOLOGY = flags.DEFINE_string(
    'topology', 'v5p:2x2x1', 'TPU slice to compile for, all of its chips; mesh.slices of them.'
)
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to.')
_HTML = flags.DEFINE_string('html', None, 'File to write a page with plots to.')
_KERNEL_SECONDS = flags.DEFINE_string(
    'kernel_seconds', None, 'JSON file: Pallas kernel -> seconds of one call, where known.'
)
_SWEEP = flags.DEFINE_string(
    'sweep',
    None,
    'Values to combine, mesh as data x expert x sequence: '
    "'mesh=64x64x1,32x128x1;data.batch_size=4096,8192'.",
)
define_config_flags(has_workdir=False)


def _compiled() -> Report:
    """Builds, compiles and reads the job."""
    config, chip, path = load_config(), chip_of(_TOPOLOGY.value), _KERNEL_SECONDS.value
    rates = Rates(
        chip=chip,
        ici_bandwidth=ICI_BANDWIDTH[_TOPOLOGY.value.split(':')[0]],
        kernel_seconds=read_kernel_seconds(path) if path else {},
    )
    mesh = mesh_for(config, _JOB.value, devices_of(_TOPOLOGY.value, config.mesh.slices))
    # Kernels ask the mesh for the chip's generation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        job = build_job(config, _JOB.value, mesh, chip.hbm_bytes)
        lowered = jax.jit(job.function, donate_argnums=job.donate).lower(*job.args)
    facts = {
        'config': flags.FLAGS.config,
        'set': flags.FLAGS.set,
        'job': _JOB.value,
        'topology': _TOPOLOGY.value,
        'mesh': dict(mesh.shape),
        'slices': config.mesh.slices,
        'chips': mesh.size,
        'note': job.note,
    }
    compiled = compile_lowered(lowered, chip)
    return facts | make_report(compiled, rates, mesh.size, job.model_flops, job.tokens)


def _swept() -> list[Report]:
    command = [sys.executable, '-m', __spec__.name]
    command += [f'--{name}={flags.FLAGS[name].value}' for name in ('config', 'job', 'topology')]
    command += [f'--set={setting}' for setting in flags.FLAGS.set]
    if _KERNEL_SECONDS.value:
        command.append(f'--kernel_seconds={_KERNEL_SECONDS.value}')
    rows, swept = [], points(_SWEEP.value)
    for number, row in enumerate(run(command, swept), 1):
        print(f'{number}/{len(swept)} {line(row)}', flush=True)
        rows.append(row)
    return ranked(rows)


def main(_: Sequence[str]) -> int:
    """Exit status 1 if the job, or every point of a sweep, does not fit."""
    check_topology(_TOPOLOGY.value)
    for name, path in (('json', _JSON.value), ('html', _HTML.value)):
        if path and not epath.Path(path).parent.is_dir():
            raise ValueError(f'--{name}={path}: there is no such folder; make it first')
    if _SWEEP.value:
        result = _swept()
        failed = all(row['error'] for row in result)
        print('fastest first (estimate):', *map(line, result), sep='\n')
    else:
        result = _compiled()
        failed = bool(result['error'])
        print(table(result))
    if _JSON.value:
        epath.Path(_JSON.value).write_text(json.dumps(result, indent=1) + '\n')
    if _HTML.value:
        title = f'{_JOB.value} of {flags.FLAGS.config} on {_TOPOLOGY.value}'
        shown = (None, result) if _SWEEP.value else (result, ())
        epath.Path(_HTML.value).write_text(page(title, *shown))
    return int(failed)


if __name__ == '__main__':
    run_main(main)
