"""Which tile sizes cost least: `python -m experiments.tune_kernels --kernel=kda`.

Compiles every case with each of its tile sizes, counts cycles as bench_kernels does, and stores the
best in the kernel's shapes.json, where the kernel looks them up.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Sequence
from typing import Any

from absl import flags, logging

from experiments.bench_kernels import chosen_cases
from k3jax.aot.chips import chip_of
from k3jax.aot.compiler import prepare_environment
from k3jax.aot.measure import CompileError, measure
from k3jax.flags import run_main
from pallas_kernels.common.case import Case, Tiles
from pallas_kernels.common.tiles import shapes_file

# Shared with bench_kernels: --topology, --kernel, --jobs.
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print what would be stored, and store nothing.')


def best_tiles(case: Case, topology: str, jobs: int) -> tuple[Tiles, int] | None:
    """The tile sizes with the fewest cycles, and these; None where none has a figure."""

    def cycles(tiles: Tiles) -> int | None:
        try:
            return measure(case, topology, tiles).cycles
        except CompileError as error:
            logging.info('%s %s: %s', case.key, dict(tiles), error)
            return None

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = list(zip(case.tile_space, pool.map(cycles, case.tile_space), strict=True))
    for tiles, count in found:
        print(f'{case.key:58s} {dict(tiles)} {"-" if count is None else f"{count:,}"}', flush=True)
    counted = [(tiles, count) for tiles, count in found if count is not None]
    return min(counted, key=lambda pair: pair[1], default=None)


def merged(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """`rows` with `row` in the place of the one for the same pass, shape and dtype."""
    same = ('pass', 'shape', 'dtype')
    kept = [r for r in rows if any(r[name] != row[name] for name in same)]
    return sorted([*kept, row], key=lambda r: json.dumps([r[name] for name in same]))


def main(_: Sequence[str]) -> None:
    topology, jobs = flags.FLAGS.topology, flags.FLAGS.jobs
    chip_of(topology)
    prepare_environment()
    cases = [case for case in chosen_cases(flags.FLAGS.kernel) if len(case.tile_space) > 1]
    for case in cases:
        best = best_tiles(case, topology, jobs)
        if best is None:
            print(f'{case.key}: no tile size has a figure')
            continue
        tiles, cycles = best
        # A kernel looks up what it knows when it is called: not the length, nor the mode.
        shape = {axis: size for axis, size in case.shape.items() if axis not in ('B', 'T')}
        row = {'pass': case.pass_name, 'shape': shape, 'dtype': case.dtype}
        row |= {'tiles': dict(tiles), 'cycles': cycles, 'case': case.name}
        print(f'{case.key}: {dict(tiles)}', flush=True)
        if _DRY_RUN.value:
            continue
        path = shapes_file(case.kernel)
        rows = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps(merged(rows, row), indent=1) + '\n')


if __name__ == '__main__':
    run_main(main)
