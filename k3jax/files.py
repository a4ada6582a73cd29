"""How a file appears under its final name only when it is whole; paths may be local or gs://."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from etils import epath

COPY_BLOCK_BYTES = 16 << 20


@contextlib.contextmanager
def open_whole(path: epath.Path) -> Iterator[BinaryIO]:
    """A file to write; it takes the name `path` when the block ends well and vanishes otherwise."""
    partial = path.parent / f'.{path.name}.partial'
    try:
        with partial.open('wb') as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: epath.Path, data: bytes) -> None:
    """Writes `data` to `path`, making parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path) as file:
        file.write(data)


def write_json(path: epath.Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1) + '\n').encode())


def copy_whole(source: epath.Path, target: epath.Path) -> None:
    """Copies one file block by block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open('rb') as reader, open_whole(target) as writer:
        while block := reader.read(COPY_BLOCK_BYTES):
            writer.write(block)
