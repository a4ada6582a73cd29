"""Compiles one kernel for one chip: `python -m k3jax.aot.compile_case KEY TOPOLOGY HLO_FILE TILES`.

A process of its own, since libtpu reads its flags once and its simulator may end the process.
"""

from __future__ import annotations

import json
import pathlib
import sys

from k3jax.aot.compiler import compile_for
from pallas_kernels.cases import find_case


def main(key: str, topology: str, hlo_file: str, tiles: str) -> None:
    """tiles: a JSON object, or null for the stored or default ones."""
    case = find_case(key)
    compiled = compile_for(topology, case.build(json.loads(tiles)), case.args)
    pathlib.Path(hlo_file).write_text(compiled.as_text())


if __name__ == '__main__':
    main(*sys.argv[1:])
