"""Which tile sizes cost least, and under which key a kernel looks them up."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from k3jax.aot.measure import CompileError, measure
from pallas_kernels.common.case import Case, Tiles
from pallas_kernels.common.tiles import recorded_lookups, shapes_file

Row = dict[str, Any]


def lookup_key(case: Case) -> Row:
    """What the case's kernel asks `tiles_for`: {"pass", "shape", "dtype"}."""
    with recorded_lookups() as lookups:
        jax.eval_shape(case.build(None), *case.args)
    if not lookups:
        raise ValueError(f'{case.key} looks up no tile sizes')
    return lookups[0]


def grouped(cases: Sequence[Case]) -> list[tuple[Row, list[Case]]]:
    """Cases by kernel and lookup key."""
    groups: dict[str, tuple[Row, list[Case]]] = {}
    for case in cases:
        key = lookup_key(case)
        name = json.dumps([case.kernel, key], sort_keys=True)
        groups.setdefault(name, (key, []))[1].append(case)
    return list(groups.values())


def best_tiles(cases: Sequence[Case], topology: str, jobs: int) -> tuple[Tiles, int] | None:
    """The tile sizes with the fewest cycles over all cases, and these; None without a figure."""

    def cycles(pair: tuple[Tiles, Case]) -> int | None:
        tiles, case = pair
        try:
            return measure(case, topology, tiles).cycles
        except CompileError as error:
            logging.info('%s %s: %s', case.key, dict(tiles), error)
            return None

    space = [tiles for tiles in cases[0].tile_space if all(tiles in c.tile_space for c in cases)]
    pairs = [(tiles, case) for tiles in space for case in cases]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        counts = list(pool.map(cycles, pairs))
    totals = []
    for i, tiles in enumerate(space):
        own = counts[i * len(cases) : (i + 1) * len(cases)]
        total = None if None in own else sum(own)
        shown = '-' if total is None else f'{total:,}'
        print(f'{cases[0].kernel} {dict(tiles)}: {shown}', flush=True)
        if total is not None:
            totals.append((tiles, total))
    return min(totals, key=lambda pair: pair[1], default=None)


def merged(rows: list[Row], row: Row) -> list[Row]:
    """`rows` with `row` in the place of the one under the same key."""
    names = ('pass', 'shape', 'dtype')
    kept = [r for r in rows if any(r[name] != row[name] for name in names)]
    return sorted([*kept, row], key=lambda r: json.dumps([r[name] for name in names]))


def store(kernel: str, row: Row) -> None:
    path = shapes_file(kernel)
    rows = json.loads(path.read_text()) if path.exists() else []
    fresh = path.with_suffix('.new')
    fresh.write_text(json.dumps(merged(rows, row), indent=1) + '\n')
    fresh.replace(path)
