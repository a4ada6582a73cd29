"""Converted folder, or a tree of parameters -> released layout: the inverse of the conversion."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import tensorstore as ts
from etils import epath

from k3jax.config import ModelConfig
from k3jax.convert import orbax_tree
from k3jax.convert.binding import FAMILIES, PACKED, SCALE, Binding, bind
from k3jax.convert.converted import Conversion, check_tree, read_conversion
from k3jax.convert.files import ConversionError, is_empty, read_json_object, small_files
from k3jax.convert.progress import Progress
from k3jax.convert.release import CONFIG_FILE, INDEX_FILE
from k3jax.convert.release_config import release_config_from_model, without_quantization
from k3jax.convert.safetensors_io import (
    DTYPES,
    Header,
    TensorInfo,
    build_header,
    library_order,
    parse_header,
    write_shard,
)
from k3jax.convert.transforms import IDENTITY
from k3jax.files import copy_whole, write_json, write_whole
from k3jax.model.layout import Tree

STATE_FILE = 'export.partial.json'  # there while an export is under way
WEIGHT = '.weight'
METADATA = {'format': 'pt'}
WORKERS = 2  # shards in flight


class Leaves(Protocol):
    """Rows of the arrays to export."""

    def read(self, path: str, rows: slice) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class OrbaxLeaves:
    """Leaves of a checkpoint that `orbax_tree` wrote."""

    item: epath.Path
    limits: ts.Context = dataclasses.field(
        default_factory=lambda: orbax_tree.context(orbax_tree.CACHE_BYTES)
    )

    @functools.lru_cache(maxsize=64)  # noqa: B019 (lives as long as the export)
    def _open(self, path: str):
        return orbax_tree.open_array(self.item, path, self.limits)

    def read(self, path: str, rows: slice) -> np.ndarray:
        store = self._open(path)
        try:
            return np.asarray((store[rows] if store.rank else store).read().result())
        except ValueError as error:
            raise ConversionError(
                f'{self.item}: {path}: could not be read ({orbax_tree.reason(error)}); the '
                'checkpoint is damaged: convert it again'
            ) from None


@dataclasses.dataclass(frozen=True)
class TreeLeaves:
    """Leaves of a plain tree, rounded to the dtypes the release stores."""

    flat: Mapping[str, Any]
    dtypes: Mapping[str, np.dtype]

    def read(self, path: str, rows: slice) -> np.ndarray:
        return np.asarray(self.flat[path][rows]).astype(self.dtypes[path])


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where each tensor's bytes come from."""

    leaves: Leaves
    part_of: Mapping[str, tuple[Binding, int]]  # by tensor name
    carried: Leaves | None = None  # of tensors outside the text model

    def blocks(self, info: TensorInfo) -> Iterator[np.ndarray]:
        """The bytes of one tensor, in order, a chunk at a time."""
        chunks = orbax_tree.row_ranges(info.shape, DTYPES[info.dtype].itemsize)
        if info.name not in self.part_of:
            for start, stop in chunks:
                yield self.carried.read(info.name, slice(start, stop))
            return
        binding, part = self.part_of[info.name]
        transform = binding.rule.transform
        if binding.rule.is_stacked:
            rows = self.leaves.read(binding.path, slice(part, part + 1))
            yield transform.store(rows[0], info.shape)
        elif transform is IDENTITY:
            for start, stop in chunks:
                yield self.leaves.read(binding.path, slice(start, stop))
        else:
            yield transform.store(self.leaves.read(binding.path, slice(None)), info.shape)


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A file to write: its name and the bytes before its tensors."""

    name: str
    raw_header: bytes

    def header(self) -> Header:
        return parse_header(self.raw_header[8:], self.name)


def _bindings(config: ModelConfig) -> list[Binding]:
    form = config.experts_format
    return bind(config, FAMILIES[config.family].table(form, form))


def _part_of(bindings: list[Binding]) -> dict[str, tuple[Binding, int]]:
    return {
        name: (binding, part)
        for binding in bindings
        for part in range(binding.num_parts)
        for name in binding.source_names(part)
    }


def _with_expanded_experts(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """A shard's tensors with `.weight` in bf16 in place of MXFP4 codes and scales."""
    for info in tensors:
        if info.name.endswith(PACKED):
            *lead, packed = info.shape
            yield TensorInfo(info.name.removesuffix(PACKED) + WEIGHT, 'BF16', (*lead, 2 * packed))
        elif not info.name.endswith(SCALE):
            yield info


def _shards_as_in_source(conversion: Conversion) -> list[_Shard]:
    is_expanded = conversion.experts_format != conversion.source_experts_format
    shards = []
    for name in conversion.shards:
        raw = conversion.header_path(name).read_bytes()
        if is_expanded:
            header = parse_header(raw[8:], name)
            tensors = library_order(_with_expanded_experts(header.tensors.values()))
            raw = build_header(tensors, header.metadata)
        shards.append(_Shard(name, raw))
    return shards


def _shard_per_layer(bindings: list[Binding]) -> list[_Shard]:
    """As in the K3 release: one shard a layer, then one with the global tensors."""
    groups: dict[str, list[TensorInfo]] = {}
    for binding in bindings:
        groups.setdefault(binding.layer, []).extend(binding.source_tensors())
    groups[''] = groups.pop('')
    return [
        _Shard(
            f'model-{number:05d}-of-{len(groups):06d}.safetensors',
            build_header(library_order(tensors), METADATA),
        )
        for number, tensors in enumerate(groups.values(), 1)
    ]


def _index_of(shards: list[_Shard]) -> dict[str, Any]:
    """The index that fits the shards."""
    headers = [shard.header() for shard in shards]
    weight_map = {
        name: shard.name
        for shard, header in zip(shards, headers, strict=True)
        for name in header.tensors
    }
    total = sum(header.data_bytes for header in headers)
    return {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}


def _write_shards(
    shards: list[_Shard], source: _Source, target: epath.Path, progress: Progress, resume: bool
) -> None:
    """Writes the shards, or those that are not there yet."""
    headers = [shard.header() for shard in shards]

    def is_there(shard: _Shard, data_bytes: int) -> bool:
        path = target / shard.name
        return resume and path.exists() and path.stat().length == len(shard.raw_header) + data_bytes

    sizes = [header.data_bytes for header in headers]
    total = sum(sizes)
    left = [n for n, size in enumerate(sizes) if not is_there(shards[n], size)]
    progress.start(total, total - sum(sizes[n] for n in left))

    def write(number: int) -> None:
        shard = shards[number]

        def blocks() -> Iterator[np.ndarray]:
            for info in headers[number].tensors.values():
                for block in source.blocks(info):
                    yield block
                    progress.add(block.nbytes, shard.name)

        try:
            write_shard(target / shard.name, shard.raw_header, blocks())
        except OSError as error:
            raise ConversionError(
                f'{target / shard.name}: could not be written: {error}; run the same command '
                'again once that is solved'
            ) from error

    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(write, number) for number in left]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    progress.finish()


def _holds_ends(path: epath.Path, shard: _Shard, source: _Source) -> bool:
    """Whether the file `path` is `shard`, judged by its header and its first and last tensor."""
    header = shard.header()
    if not path.exists() or path.stat().length != len(shard.raw_header) + header.data_bytes:
        return False
    names = list(header.tensors)
    with path.open('rb') as file:
        if file.read(len(shard.raw_header)) != shard.raw_header:
            return False
        for name in {*names[:1], *names[-1:]}:
            file.seek(len(shard.raw_header) + header.starts[name])
            for block in source.blocks(header.tensors[name]):
                if file.read(block.nbytes) != block.tobytes():
                    return False
    return True


def _is_exported(
    target: epath.Path, texts: Mapping[str, bytes], shards: list[_Shard], source: _Source
) -> bool:
    """Whether `target` is a finished export: the files `texts` and the shards are all there."""
    if not (target / CONFIG_FILE).exists() or (target / STATE_FILE).exists():
        return False
    for name, wanted in texts.items():
        if not (target / name).exists() or (target / name).read_bytes() != wanted:
            return False
    return all(_holds_ends(target / shard.name, shard, source) for shard in shards)


def _begin(target: epath.Path, job: dict[str, Any]) -> bool:
    """Claims `target`; whether it holds shards of the same job, interrupted."""
    state = target / STATE_FILE
    if state.exists():
        if read_json_object(state) != job:
            raise ConversionError(
                f'{target}: holds an unfinished export of something else; remove the folder or '
                'choose another --target'
            )
        return True
    if not is_empty(target):
        raise ConversionError(
            f'{target}: not empty, and not an export of this source; choose another --target'
        )
    write_json(state, job)
    return False


def _finish(target: epath.Path, texts: Mapping[str, bytes]) -> None:
    """Writes the index, if any, and config.json, without which no loader takes the folder."""
    for name in sorted(texts, key=lambda name: name == CONFIG_FILE):
        write_whole(target / name, texts[name])
    (target / STATE_FILE).unlink()


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + '\n').encode()


def export(
    source: epath.PathLike, target: epath.PathLike, progress: Progress | None = None
) -> None:
    """Writes the converted folder `source` back in the released layout; can be run again.

    A target that already holds this export, by its config.json, index, headers and the first and
    last tensor of each shard, is left as it is.

    Files equal those that were converted, byte for byte. Where MXFP4 experts were expanded, they
    are written as bf16 `.weight` tensors, and config.json loses its quantization_config.

    Raises:
      ConversionError: the message names what is wrong; `target` has no config.json then.
    """
    target, progress = epath.Path(target), progress or Progress('export')
    conversion = read_conversion(source)
    config = conversion.model_config
    release = conversion.release_path
    leaves = _Source(
        OrbaxLeaves(conversion.params_path),
        _part_of(_bindings(config)),
        OrbaxLeaves(conversion.carried_path),
    )
    shards = _shards_as_in_source(conversion)
    texts = {
        name: (release / name).read_bytes()
        for name in (INDEX_FILE, CONFIG_FILE)
        if name == CONFIG_FILE or (release / name).exists()
    }
    is_expanded = conversion.experts_format != conversion.source_experts_format
    if is_expanded:
        bf16_config = without_quantization(read_json_object(release / CONFIG_FILE))
        texts[CONFIG_FILE] = _json_bytes(bf16_config)
        if INDEX_FILE in texts:
            texts[INDEX_FILE] = _json_bytes(_index_of(shards))
    if _is_exported(target, texts, shards, leaves):
        progress.note(f'{target} is already exported')
        return
    resume = _begin(target, {'export': conversion.fingerprint, 'experts': config.experts_format})
    for name in small_files(release):
        if name not in (CONFIG_FILE, INDEX_FILE):
            copy_whole(release / name, target / name)
    _write_shards(shards, leaves, target, progress, resume)
    if is_expanded:
        progress.note(
            'experts were expanded to bf16: config.json is written without quantization_config'
        )
    _finish(target, texts)


def export_params(
    params: Tree,
    config: ModelConfig,
    target: epath.PathLike,
    *,
    release: epath.PathLike | None = None,
    small_files_of: epath.PathLike | None = None,
    files: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a tree of parameters in the released layout: one shard a layer, one for the rest.

    Args:
      params: the nested dict of `layout.model_leaves`, of NumPy or JAX arrays; floating-point
        leaves are rounded to the dtypes the release stores.
      config: the model of `params`.
      target: new or empty folder, or one where the same call was interrupted.
      release: a converted folder whose tokenizer and other small files are copied along.
      small_files_of: instead of it, any folder with such files.
      files: name -> what else to write, also in place of such a file.
      progress: where to count bytes.

    Raises:
      ConversionError: names the leaf that does not fit, or what could not be written.
    """
    target = epath.Path(target)
    bindings = _bindings(config)
    flat = check_tree(params, config, 'params')
    for binding in bindings:
        got = np.dtype(flat[binding.path].dtype)
        if (got == np.uint8) != (binding.dtype == np.uint8):
            raise ConversionError(
                f'params: {binding.path}: got {got}, wanted {binding.dtype}; check experts_format'
            )
    _begin(target, {'export_params': config.name})
    if release is not None:
        small_files_of = read_conversion(release).release_path
    if small_files_of is not None:
        folder = epath.Path(small_files_of)
        for name in small_files(folder):
            if name not in (CONFIG_FILE, INDEX_FILE):
                copy_whole(folder / name, target / name)
    dtypes = {binding.path: binding.dtype for binding in bindings}
    source = _Source(TreeLeaves(flat, dtypes), _part_of(bindings))
    shards = _shard_per_layer(bindings)
    _write_shards(shards, source, target, progress or Progress('export'), resume=False)
    texts = {INDEX_FILE: _index_of(shards), CONFIG_FILE: release_config_from_model(config)}
    _finish(target, {**(files or {}), **{name: _json_bytes(v) for name, v in texts.items()}})
