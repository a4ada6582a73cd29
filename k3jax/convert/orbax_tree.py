"""How arrays of any size are streamed, chunk by chunk, into a checkpoint that plain Orbax restores.

Orbax without OCDBT keeps each leaf as a zarr array in a folder named by its path, beside metadata
files that hold the tree's structure but no shapes. So the arrays are written straight to those
folders, each chunk whole or not at all, and `commit` adds the metadata files, which Orbax itself
writes for a tree of the same structure with tiny leaves. A folder that was not committed cannot be
restored, so it cannot pass for a whole one.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from k3jax.convert.binding import unflatten
from k3jax.convert.files import ConversionError, read_json_object
from k3jax.files import copy_whole

CHUNK_BYTES = 16 << 20
CACHE_BYTES = 128 << 20  # of decoded chunks, for readers that take less than a chunk at a time
COMMIT_MARKER = 'commit_success.txt'
# Those that zarr has no byte-order string for.
_NAMED_DTYPES = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)

Rows = tuple[int, int]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def chunk_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows of the first axis that one chunk holds; an even split where that costs little."""
    if not shape or not math.prod(shape):
        return max(shape[0], 1) if shape else 1
    most = max(1, CHUNK_BYTES // (itemsize * math.prod(shape[1:])))
    if most >= shape[0]:
        return shape[0]
    even = max(d for d in _divisors(shape[0]) if d <= most)
    return even if 2 * even >= most else most


def row_ranges(shape: tuple[int, ...], itemsize: int) -> list[Rows]:
    """[start, stop) of each chunk, in order."""
    if not shape:
        return [(0, 1)]
    rows = chunk_rows(shape, itemsize)
    return [(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def leaf_folder(item: epath.Path, path: str) -> epath.Path:
    """Where Orbax keeps the leaf `path` ('layers_0/norm') of the checkpoint `item`."""
    return item / path.replace('/', '.')


def _kvstore(folder: epath.Path) -> dict[str, str]:
    where = os.fspath(folder)
    if where.startswith('gs://'):
        bucket, _, key = where.removeprefix('gs://').partition('/')
        return {'driver': 'gcs', 'bucket': bucket, 'path': f'{key}/'}
    return {'driver': 'file', 'path': f'{os.path.abspath(where)}/'}


def reason(error: Exception) -> str:
    """What tensorstore says went wrong, without the specification that it appends."""
    return str(error).partition(' [tensorstore_spec')[0]


def context(cache_bytes: int = 0) -> ts.Context:
    """Limits on tensorstore's memory and threads, shared by the arrays of one job."""
    return ts.Context(
        {
            'cache_pool': {'total_bytes_limit': cache_bytes},
            'data_copy_concurrency': {'limit': 4},
            'file_io_concurrency': {'limit': 4},
        }
    )


def create_array(
    item: epath.Path, path: str, shape: tuple[int, ...], dtype: np.dtype, limits: ts.Context
) -> ts.TensorStore:
    """The array of leaf `path`, made or opened again; chunks span whole rows of the first axis."""
    chunks = [chunk_rows(shape, dtype.itemsize), *(max(n, 1) for n in shape[1:])] if shape else []
    spec = {
        'driver': 'zarr',
        'kvstore': _kvstore(leaf_folder(item, path)),
        'metadata': {
            'shape': list(shape),
            'chunks': chunks,
            'dtype': dtype.name if dtype in _NAMED_DTYPES else dtype.str,
            'compressor': None,
            'fill_value': None,
            'filters': None,
            'order': 'C',
            'dimension_separator': '.',
        },
        'store_data_equal_to_fill_value': True,
        'recheck_cached_data': False,
    }
    try:
        return ts.open(spec, open=True, create=True, context=limits).result()
    except ValueError as error:
        if 'FAILED_PRECONDITION' not in str(error):
            raise ConversionError(
                f'{leaf_folder(item, path)}: could not be made: {reason(error)}'
            ) from error
    # Left by another version of this code, with other chunks.
    return ts.open(spec, create=True, delete_existing=True, context=limits).result()


def open_array(item: epath.Path, path: str, limits: ts.Context) -> ts.TensorStore:
    """The array of leaf `path` for reading.

    Raises:
      ConversionError: it is not there.
    """
    folder = leaf_folder(item, path)
    try:
        return ts.open(
            {
                'driver': 'zarr',
                'kvstore': _kvstore(folder),
                'recheck_cached_data': 'open',
                'fill_missing_data_reads': False,  # a lost chunk is an error, not zeros
            },
            open=True,
            read=True,
            context=limits,
        ).result()
    except ValueError as error:
        raise ConversionError(
            f'{folder}: no readable array ({reason(error)}); the checkpoint is damaged: convert it '
            'again'
        ) from None


def lost_chunk(item: epath.Path, path: str) -> str | None:
    """The name of a chunk that the array of leaf `path` should have but has not, if any."""
    folder = leaf_folder(item, path)
    if not (folder / '.zarray').exists():
        return '.zarray'
    metadata = read_json_object(folder / '.zarray')
    grid = [
        range(-(-size // chunk))
        for size, chunk in zip(metadata['shape'], metadata['chunks'], strict=True)
    ]
    there = {file.name for file in folder.iterdir()}
    wanted = ('.'.join(map(str, numbers)) or '0' for numbers in itertools.product(*grid))
    return next((name for name in wanted if name not in there), None)


def finished_rows(
    item: epath.Path, path: str, shape: tuple[int, ...], itemsize: int
) -> Collection[Rows]:
    """The chunks that an earlier run wrote whole: chunks are uncompressed, so their size tells."""
    folder = leaf_folder(item, path)
    if not (folder / '.zarray').exists():
        return ()
    rows = chunk_rows(shape, itemsize)
    nbytes = rows * math.prod(shape[1:]) * itemsize if shape else itemsize
    ranges, finished = row_ranges(shape, itemsize), set()
    for file in folder.iterdir():
        if re.fullmatch(r'\d+(\.0)*', file.name) and file.stat().length == nbytes:
            number = int(file.name.partition('.')[0])
            if number < len(ranges):
                finished.add(ranges[number])
    return finished


def commit(item: epath.Path, paths: Collection[str]) -> None:
    """Makes the arrays `paths` under `item` a checkpoint that `PyTreeCheckpointer` restores."""
    skeleton = item.parent / f'{item.name}.skeleton'
    for stale in item.parent.glob(f'{skeleton.name}*'):  # of a run that was killed here
        stale.rmtree()
    tree = unflatten({path: np.zeros(1, np.uint8) for path in paths})
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(skeleton, tree)
    for path in paths:
        if not (leaf_folder(skeleton, path) / '.zarray').exists():
            raise NotImplementedError(
                f'this version of orbax-checkpoint ({ocp.__version__}) keeps {path} elsewhere than '
                f'{leaf_folder(item, path)}; use the version of requirements.txt'
            )
    for path in paths:
        for lock in leaf_folder(item, path).glob('*.__lock'):  # of a run that was killed
            lock.unlink(missing_ok=True)
    files = sorted(p for p in skeleton.iterdir() if not p.is_dir())
    files.sort(key=lambda p: p.name == COMMIT_MARKER)
    for file in files:
        copy_whole(file, item / file.name)
    skeleton.rmtree()
