"""Which tile sizes a kernel uses at a shape: the winners that tune_kernels has stored."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]


def shapes_file(kernel: str) -> pathlib.Path:
    """A JSON list of {"pass", "shape", "dtype", "tiles", "cycles"}; written by tune_kernels."""
    return ROOT / kernel / 'shapes.json'


@functools.cache
def _stored(kernel: str) -> list[dict]:
    path = shapes_file(kernel)
    return json.loads(path.read_text()) if path.exists() else []


def tiles_for(
    kernel: str, pass_name: str, shape: Mapping[str, int], dtype: str, default: Mapping[str, int]
) -> dict[str, int]:
    """`default` with what is stored for a shape whose stored axes all equal `shape`'s."""
    for row in _stored(kernel):
        same = all(shape.get(axis) == size for axis, size in row['shape'].items())
        if row['pass'] == pass_name and row['dtype'] == dtype and same:
            return dict(default) | row['tiles']
    return dict(default)
