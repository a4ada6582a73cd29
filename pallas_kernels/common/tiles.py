"""Which tile sizes a kernel uses at a shape: the winners that tune_kernels has stored."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]


def shapes_file(kernel: str) -> pathlib.Path:
    """A JSON list of {"pass", "shape", "dtype", "tiles", ...}; written by tune_kernels."""
    return ROOT / kernel / 'shapes.json'


@functools.cache
def _stored(kernel: str) -> list[dict]:
    path = shapes_file(kernel)
    return json.loads(path.read_text()) if path.exists() else []


_recording: list[list[dict[str, Any]]] = []


@contextlib.contextmanager
def recorded_lookups() -> Iterator[list[dict[str, Any]]]:
    """The keys, {"pass", "shape", "dtype"}, under which kernels look for tiles meanwhile."""
    lookups: list[dict[str, Any]] = []
    _recording.append(lookups)
    try:
        yield lookups
    finally:
        _recording.remove(lookups)


def tiles_for(
    kernel: str, pass_name: str, shape: Mapping[str, int], dtype: str, default: Mapping[str, int]
) -> dict[str, int]:
    """`default` with what is stored for exactly this pass, shape and dtype."""
    key = {'pass': pass_name, 'shape': dict(shape), 'dtype': dtype}
    for lookups in _recording:
        lookups.append(key)
    for row in _stored(kernel):
        if all(row[name] == value for name, value in key.items()):
            return dict(default) | row['tiles']
    return dict(default)
