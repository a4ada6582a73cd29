"""What a released checkpoint folder holds: config, index and shards, checked against each other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np
from etils import epath

from k3jax.convert.binding import PACKED, SCALE
from k3jax.convert.files import ConversionError, read_json_object
from k3jax.convert.safetensors_io import (
    Shard,
    TensorInfo,
    open_shard,
    read_raw_header,
    read_rows,
)

CONFIG_FILE = 'config.json'
INDEX_FILE = 'model.safetensors.index.json'
SINGLE_FILE = 'model.safetensors'
SAMPLE_BYTES = 64 << 10  # of each end of a shard, for the fingerprint


@dataclasses.dataclass(frozen=True)
class Release:
    """A folder in the released layout."""

    folder: epath.Path
    config: dict[str, Any]  # config.json
    shards: tuple[Shard, ...]
    shard_of: dict[str, Shard]  # by tensor name

    @functools.cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: shard.header.tensors[name] for name, shard in self.shard_of.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) of a tensor, or all of it."""
        return read_rows(self.shard_of[name], name, start, stop)

    @functools.cached_property
    def experts_format(self) -> str:
        """'mxfp4' or 'bf16', by the suffix of the experts' tensors.

        Raises:
          ConversionError: some experts have one form and some the other.
        """
        found: dict[str, str] = {}
        for name in self.shard_of:
            if '.experts.' in name:
                if name.endswith((PACKED, SCALE)):
                    found.setdefault('mxfp4', name)
                elif name.endswith('.weight'):
                    found.setdefault('bf16', name)
        if len(found) == 2:
            raise ConversionError(
                f'{found["bf16"]} is bf16 but {found["mxfp4"]} is MXFP4; wanted all routed experts '
                'in one form'
            )
        return next(iter(found), 'bf16')

    def fingerprint(self) -> str:
        """A digest that tells this checkpoint from another of the same shapes.

        It covers config.json, every header and both ends of every shard's data.
        """
        digest = hashlib.sha256((self.folder / CONFIG_FILE).read_bytes())
        for shard in self.shards:
            digest.update(shard.name.encode() + read_raw_header(shard))
            end = shard.data_start + shard.header.data_bytes
            with shard.path.open('rb') as file:
                for at in (shard.data_start, max(shard.data_start, end - SAMPLE_BYTES)):
                    file.seek(at)
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


def _open_indexed(folder: epath.Path) -> dict[str, Shard]:
    index_path = folder / INDEX_FILE
    weight_map = read_json_object(index_path).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(
            f'{index_path}: got weight_map {weight_map!r}, wanted an object from tensor to shard'
        )
    for name, shard_name in weight_map.items():
        if not isinstance(shard_name, str):
            raise ConversionError(
                f'{index_path}: weight_map: {name}: got {shard_name!r}, wanted the file name of a '
                'shard; get the index again'
            )
    strangers = {p.name for p in folder.iterdir() if p.name.endswith('.safetensors')}
    strangers -= set(weight_map.values())
    if strangers:
        raise ConversionError(
            f'{folder / min(strangers)}: the index does not name this shard; remove the file, or '
            'get the index that belongs to it'
        )
    shards = {name: open_shard(folder / name) for name in sorted(set(weight_map.values()))}
    shard_of: dict[str, Shard] = {}
    for shard in shards.values():
        for name in shard.header.tensors:
            if name in shard_of:
                raise ConversionError(
                    f'{name}: in both {shard_of[name].name} and {shard.name}, wanted in one shard'
                )
            if name not in weight_map:
                raise ConversionError(
                    f'{name}: in {shard.name} but not in {INDEX_FILE}; get the index and the '
                    'shards of one revision'
                )
            shard_of[name] = shard
    for name, shard_name in weight_map.items():
        if name not in shard_of:
            raise ConversionError(
                f'{name}: the index says {shard_name}, which does not hold it; get the index and '
                'the shards of one revision'
            )
        if shard_of[name].name != shard_name:
            raise ConversionError(
                f'{name}: the index says {shard_name}, but it is in {shard_of[name].name}'
            )
    return shard_of


def open_release(folder: epath.PathLike) -> Release:
    """The release in `folder`; headers are read, weights are not.

    Raises:
      ConversionError: names the file or tensor that is missing, damaged or contradictory.
    """
    folder = epath.Path(folder)
    if not folder.is_dir():
        raise ConversionError(f'{folder}: no such folder; --source is the folder of a release')
    config = read_json_object(folder / CONFIG_FILE)
    if (folder / INDEX_FILE).exists():
        shard_of = _open_indexed(folder)
    elif (folder / SINGLE_FILE).exists():
        shard = open_shard(folder / SINGLE_FILE)
        shard_of = dict.fromkeys(shard.header.tensors, shard)
    else:
        raise ConversionError(
            f'{folder}: neither {INDEX_FILE} nor {SINGLE_FILE}; --source is the folder of a release'
        )
    shards = sorted({shard.name: shard for shard in shard_of.values()}.items())
    return Release(folder, config, tuple(shard for _, shard in shards), shard_of)
