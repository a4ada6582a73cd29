"""Released checkpoint -> converted folder: streamed, resumable, whole or not readable at all."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from etils import epath

from k3jax.convert import orbax_tree
from k3jax.convert.binding import FAMILIES, Binding, bind, check_complete
from k3jax.convert.converted import (
    CARRIED,
    CONVERSION_FILE,
    FORMAT,
    PARAMS,
    RELEASE,
    STATE_FILE,
    VERSION,
    Conversion,
    read_conversion,
)
from k3jax.convert.files import ConversionError, is_empty, read_json_object, small_files
from k3jax.convert.progress import Progress
from k3jax.convert.release import Release, open_release
from k3jax.convert.release_config import model_config_from_release
from k3jax.convert.safetensors_io import DTYPES, read_raw_header
from k3jax.convert.transforms import IDENTITY, TRIM_ZERO_PADDING
from k3jax.files import copy_whole, write_json, write_whole

WORKERS = 4  # chunks in flight: one reads while another writes


@dataclasses.dataclass(frozen=True)
class _Array:
    """One array to write, and how to get rows of it."""

    item: epath.Path
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    gather: Callable[[int, int], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _load_part(release: Release, binding: Binding, part: int) -> np.ndarray:
    names = binding.source_names(part)
    arrays = [release.read(name) for name in names]
    return binding.rule.transform.load(arrays, binding.part_shape, names[0])


def gather_rows(release: Release, binding: Binding, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a leaf."""
    if binding.rule.is_stacked:
        if stop - start == 1:
            return _load_part(release, binding, start)[None]
        rows = np.zeros((stop - start, *binding.part_shape), binding.dtype)
        for part in range(start, stop):
            rows[part - start] = _load_part(release, binding, part)
        return rows
    if binding.rule.transform is IDENTITY:
        return release.read(binding.source_names()[0], start, stop)
    return _load_part(release, binding, 0)[start:stop]


def _plan(
    release: Release, target: epath.Path, bindings: list[Binding], carried: list[str]
) -> list[_Array]:
    arrays = []
    for binding in bindings:

        def gather(start: int, stop: int, binding: Binding = binding) -> np.ndarray:
            return gather_rows(release, binding, start, stop)

        arrays.append(
            _Array(target / PARAMS, binding.path, binding.leaf.shape, binding.dtype, gather)
        )
    for name in carried:

        def gather(start: int, stop: int, name: str = name) -> np.ndarray:
            return release.read(name, start, stop)

        info = release.tensors[name]
        arrays.append(_Array(target / CARRIED, name, info.shape, DTYPES[info.dtype], gather))
    return arrays


def _write_chunk(array: _Array, store, start: int, stop: int) -> int:
    rows = array.gather(start, stop)
    try:
        (store[start:stop] if array.shape else store).write(rows).result()
    except (ValueError, OSError, RuntimeError) as error:
        raise ConversionError(
            f'{array.item / array.path}: rows {start}..{stop} could not be written: '
            f'{orbax_tree.reason(error)}; run the same command again once that is solved, it goes '
            'on from here'
        ) from error
    return rows.nbytes


def _write_arrays(arrays: list[_Array], progress: Progress) -> None:
    """Writes the chunks that are not there yet, a few at a time."""
    limits = orbax_tree.context()
    finished = {
        id(a): orbax_tree.finished_rows(a.item, a.path, a.shape, a.dtype.itemsize) for a in arrays
    }
    done = sum(
        int(np.prod(a.shape[1:], dtype=np.int64)) * a.dtype.itemsize * (stop - start)
        for a in arrays
        for start, stop in finished[id(a)]
    )
    progress.start(sum(a.nbytes for a in arrays), done)
    pending: collections.deque[tuple[str, Future[int]]] = collections.deque()

    def wait_for(most: int) -> None:
        while len(pending) > most:
            path, future = pending.popleft()
            progress.add(future.result(), path)

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for array in arrays:
                ranges = orbax_tree.row_ranges(array.shape, array.dtype.itemsize)
                left = [rows for rows in ranges if rows not in finished[id(array)]]
                if not left and finished[id(array)]:
                    continue
                store = orbax_tree.create_array(
                    array.item, array.path, array.shape, array.dtype, limits
                )
                for start, stop in left:
                    future = pool.submit(_write_chunk, array, store, start, stop)
                    pending.append((array.path, future))
                    wait_for(2 * WORKERS)
            wait_for(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    progress.finish()


def _begin(target: epath.Path, job: dict[str, object], source: epath.Path) -> None:
    """Claims `target` for this job, or goes on with the same job that was interrupted."""
    state = target / STATE_FILE
    if state.exists():
        earlier = read_json_object(state)
        for key, what in (('experts_format', '--experts'), ('fingerprint', '--source')):
            if earlier.get(key) != job[key]:
                raise ConversionError(
                    f'{target}: holds an unfinished conversion with another {what} '
                    f'({earlier.get(key)}, now {job[key]}); finish that one, or remove the folder '
                    'or choose another --target'
                )
        return
    if not is_empty(target):
        raise ConversionError(
            f'{target}: not empty, and not a conversion of {source}; choose another --target'
        )
    write_json(state, job)


def convert(
    source: epath.PathLike,
    target: epath.PathLike,
    experts: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Converts the release in `source` into `target`; an interrupted conversion goes on.

    Peak host memory is bounded by a few chunks, whatever the checkpoint's size.

    Args:
      source: folder of a Kimi K3 or Kimi Linear release, local or gs://.
      target: new, empty, or the folder of the same conversion.
      experts: 'bf16' or 'mxfp4' for the routed experts; None keeps what the source has.
      progress: where to count bytes.

    Raises:
      ConversionError, ConfigError: the message names what is wrong; nothing in `target` can be
        restored or read as a conversion then.
    """
    source, target = epath.Path(source), epath.Path(target)
    progress = progress or Progress('convert')
    inside = os.fspath(target.resolve()) + '/'
    if inside.startswith(os.fspath(source.resolve()) + '/'):
        raise ConversionError(f'{target}: within the source {source}; choose another --target')
    release = open_release(source)
    if experts not in (None, 'bf16', 'mxfp4'):
        raise ConversionError(f"--experts: got {experts!r}, wanted 'bf16' or 'mxfp4'")
    ours = experts or release.experts_format
    config = model_config_from_release(
        release.config,
        experts_format=ours,
        name=source.name,
        stored_experts_format=release.experts_format,
    )
    family = FAMILIES[config.family]
    bindings = bind(config, family.table(release.experts_format, ours))
    carried = check_complete(bindings, release.tensors, family.carried_prefixes)
    for binding in bindings:
        if binding.rule.transform is TRIM_ZERO_PADDING:  # an error now, not after hours of copying
            _load_part(release, binding, 0)

    conversion = Conversion(
        path=target,
        model_config=config,
        source_experts_format=release.experts_format,
        fingerprint=release.fingerprint(),
        shards=tuple(shard.name for shard in release.shards),
        carried=tuple(carried),
    )
    if (target / CONVERSION_FILE).exists():
        existing = read_conversion(target)
        if existing.to_json() | {'model': None} != conversion.to_json() | {'model': None}:
            raise ConversionError(
                f'{target}: already holds another conversion; remove it or choose another --target'
            )
        (target / STATE_FILE).unlink(missing_ok=True)
        progress.note(f'{target} is already converted')
        return existing
    job = {
        'format': FORMAT,
        'version': VERSION,
        'experts_format': ours,
        'fingerprint': conversion.fingerprint,
    }
    _begin(target, job, source)
    if ours != release.experts_format:
        progress.note(f'expanding {release.experts_format} experts to {ours}')
    for name in small_files(source):
        copy_whole(source / name, target / RELEASE / name)
    for shard in release.shards:
        write_whole(conversion.header_path(shard.name), read_raw_header(shard))
    arrays = _plan(release, target, bindings, carried)
    _write_arrays(arrays, progress)
    for item in sorted({array.item for array in arrays}):
        orbax_tree.commit(item, [array.path for array in arrays if array.item == item])
    write_json(target / CONVERSION_FILE, conversion.to_json())
    (target / STATE_FILE).unlink()
    return conversion
