"""Which tile sizes cost least: `python -m experiments.tune_kernels --kernel=kda/k3_24_heads_1024`.

Compiles cases with each of their tile sizes, counts cycles as bench_kernels does, and stores the
best in the kernel's shapes.json, under the key that the kernel itself looks them up with. Cases
that share a key, as the modes of a kernel do, are added up: choose them with --kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from k3jax.aot.compiler import check_topology
from k3jax.aot.tune import best_tiles, grouped, store
from k3jax.flags import run_main
from pallas_kernels.cases import cases_of

_TOPOLOGY = flags.DEFINE_string('topology', 'v5p:2x2x1', 'TPU to compile for; one chip is used.')
_KERNEL = flags.DEFINE_string('kernel', None, 'Only cases whose key starts so: kda, kda/k3_24, ...')
_JOBS = flags.DEFINE_integer('jobs', 2, 'Cases compiled at a time.', lower_bound=1)
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print what would be stored, and store nothing.')


def main(_: Sequence[str]) -> int:
    """Exit status 1 where no tile size of some case has a figure."""
    check_topology(_TOPOLOGY.value)
    cases = [case for case in cases_of(_KERNEL.value) if len(case.tile_space) > 1]
    if not cases:
        raise ValueError(f'--kernel={_KERNEL.value}: nothing to tune, one tile size each')
    missing = 0
    for key, group in grouped(cases):
        names = ', '.join(case.name for case in group)
        print(f'{group[0].kernel} {key["pass"]} {key["shape"]} {key["dtype"]}: {names}', flush=True)
        best = best_tiles(group, _TOPOLOGY.value, _JOBS.value)
        if best is None:
            print('no tile size has a figure')
            missing += 1
            continue
        tiles, cycles = best
        print(f'best: {dict(tiles)}', flush=True)
        if not _DRY_RUN.value:
            chip = _TOPOLOGY.value.split(':')[0]
            store(group[0].kernel, key | {'tiles': dict(tiles), 'cycles': cycles, 'chip': chip})
    return int(missing > 0)


if __name__ == '__main__':
    run_main(main)
