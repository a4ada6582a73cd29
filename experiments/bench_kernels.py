"""What each TPU kernel costs at each real shape: `python -m experiments.bench_kernels`.

No TPU is needed: libtpu (the extra `aot`) compiles the kernels and its static simulator counts
cycles. The figures rank variants; they are no promise of a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from absl import flags, logging
from etils import epath

from k3jax.aot.compiler import check_topology
from k3jax.aot.measure import CompileError, Figures, measure
from k3jax.flags import run_main
from pallas_kernels.cases import cases_of
from pallas_kernels.common.case import Case

_TOPOLOGY = flags.DEFINE_string('topology', 'v5p:2x2x1', 'TPU to compile for; one chip is used.')
_KERNEL = flags.DEFINE_string('kernel', None, 'Only cases whose key starts so: kda, kda/k3_24, ...')
_JSON = flags.DEFINE_string('json', None, 'File to write the figures to, as a list of objects.')
_JOBS = flags.DEFINE_integer('jobs', 2, 'Cases compiled at a time.', lower_bound=1)

_COLUMNS = '{:58s} {:>8s} {:>10s} {:>10s} {:>8s} {:>7s} {:>9s}'


def row(case: Case, figures: Figures | None, error: str | None) -> dict[str, Any]:
    """One object of the JSON list."""
    facts = {} if figures is None else dataclasses.asdict(figures)
    return {
        'kernel': case.kernel,
        'name': case.name,
        'pass': case.pass_name,
        'shape': dict(case.shape),
        'dtype': case.dtype,
        'flops': case.flops,
        'hbm_bytes': case.hbm_bytes,
        'note': case.note,
        'error': error,
        **facts,
    }


def _line(case: Case, figures: Figures | None, error: str | None) -> str:
    if figures is None:
        return f'{case.key:58s} FAILED: {error}'
    cycles = '-' if figures.cycles is None else f'{figures.cycles:,}'
    time = '-' if figures.seconds is None else f'{figures.seconds * 1e6:,.1f}'
    share = '-'
    if figures.roofline_fraction is not None:
        share = f'{figures.roofline_fraction:.0%} {figures.bound}'
    vmem, spills = f'{figures.vmem_bytes / 2**20:.1f}', str(figures.spills)
    return _COLUMNS.format(case.key, case.dtype, cycles, time, vmem, spills, share)


def main(_: Sequence[str]) -> int:
    """Exit status 1 if a case does not compile."""
    check_topology(_TOPOLOGY.value)
    if _JSON.value and not epath.Path(_JSON.value).parent.is_dir():
        raise ValueError(f'--json={_JSON.value}: there is no such folder; make it first')
    if _JSON.value and epath.Path(_JSON.value).is_dir():
        raise ValueError(f'--json={_JSON.value}: is a folder, wanted a file')
    cases, rows = cases_of(_KERNEL.value), []
    print(f'{_TOPOLOGY.value}, {len(cases)} cases', flush=True)
    header = ('kernel/shape/pass', 'dtype', 'cycles', 'us', 'MiB', 'spills', 'roofline')
    print(_COLUMNS.format(*header), flush=True)

    def run(case: Case) -> tuple[Figures | None, str | None]:
        try:
            return measure(case, _TOPOLOGY.value), None
        except CompileError as error:
            return None, str(error)

    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        for case, result in zip(cases, pool.map(run, cases), strict=True):
            print(_line(case, *result), flush=True)
            rows.append(row(case, *result))
    if _JSON.value:
        epath.Path(_JSON.value).write_text(json.dumps(rows, indent=1) + '\n')
        logging.info('figures in %s', _JSON.value)
    return int(any(r['error'] for r in rows))


if __name__ == '__main__':
    run_main(main)
