"""What a safetensors file holds, read lazily and written as a stream.

Layout: 8 bytes of header length (little endian), the header (JSON: tensor name -> dtype, shape,
data_offsets; optionally `__metadata__`), then the tensors' bytes, back to back.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from k3jax.convert.files import ConversionError, parse_json_object
from k3jax.files import open_whole

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA_KEY = '__metadata__'

# In the order by which the safetensors library ranks dtypes (it stores the last ranked first).
DTYPES: dict[str, np.dtype] = {
    'BOOL': np.dtype(np.bool_),
    'U8': np.dtype(np.uint8),
    'I8': np.dtype(np.int8),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'I16': np.dtype(np.int16),
    'U16': np.dtype(np.uint16),
    'F16': np.dtype(np.float16),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'I32': np.dtype(np.int32),
    'U32': np.dtype(np.uint32),
    'F32': np.dtype(np.float32),
    'F64': np.dtype(np.float64),
    'I64': np.dtype(np.int64),
    'U64': np.dtype(np.uint64),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry in a header."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's tensors in the order of their bytes, and where each begins."""

    tensors: dict[str, TensorInfo]
    starts: dict[str, int]  # from the end of the header
    metadata: dict[str, str] | None
    data_bytes: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """One safetensors file that was checked to be whole."""

    path: epath.Path
    header: Header
    data_start: int  # in the file

    @property
    def name(self) -> str:
        return self.path.name


def _entry(name: str, fields: Any, where: str) -> tuple[TensorInfo, int, int]:
    try:
        dtype, shape = fields['dtype'], tuple(fields['shape'])
        start, end = fields['data_offsets']
    except (KeyError, TypeError, ValueError):
        raise ConversionError(
            f'{where}: {name}: got {fields!r}, wanted dtype, shape and data_offsets [start, end]'
        ) from None
    if dtype not in DTYPES:
        raise ConversionError(f'{where}: {name}: got dtype {dtype!r}, wanted one of {[*DTYPES]}')
    numbers = (*shape, start, end)
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or end < start:
        raise ConversionError(
            f'{where}: {name}: got shape {list(shape)} at [{start}, {end}], wanted whole numbers '
            'of at least 0, start before end; the header is damaged'
        )
    info = TensorInfo(name, dtype, shape)
    if end - start != info.nbytes:
        raise ConversionError(
            f'{where}: {name}: {dtype} {list(shape)} takes {info.nbytes} bytes, '
            f'but its offsets [{start}, {end}] span {end - start}; the header is damaged'
        )
    return info, start, end


def parse_header(data: bytes, where: str) -> Header:
    """The tensors that the JSON header `data` describes.

    Raises:
      ConversionError: names `where` and the tensor whose entry is malformed, or whose bytes
        overlap with, or leave a gap after, those of another.
    """
    fields = parse_json_object(data, f'{where}: header')
    metadata = fields.pop(METADATA_KEY, None)
    entries = sorted(
        (_entry(name, value, where) for name, value in fields.items()),
        key=lambda entry: entry[1:],
    )
    tensors, starts, position = {}, {}, 0
    for info, start, end in entries:
        if start != position:
            problem = 'overlap' if start < position else 'leave a gap'
            raise ConversionError(
                f'{where}: {info.name}: its bytes begin at {start}, wanted {position}: they '
                f'{problem} with those of {next(reversed(tensors), "the header")}; '
                'the header is damaged'
            )
        tensors[info.name], starts[info.name], position = info, start, end
    return Header(tensors, starts, metadata, position)


def open_shard(path: epath.Path) -> Shard:
    """The safetensors file `path`, its header checked against its size.

    Raises:
      ConversionError: missing, truncated, or a damaged header.
    """
    if not path.exists():
        raise ConversionError(f'{path}: no such file; the index names it, so download it again')
    size = path.stat().length
    with path.open('rb') as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, 'little')
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ConversionError(
                f'{path}: got {size} bytes, which cannot hold a header; the file is truncated or '
                'not safetensors: download it again'
            )
        header = parse_header(file.read(length), str(path))
    wanted = 8 + length + header.data_bytes
    if size != wanted:
        problem = 'truncated' if size < wanted else 'longer than its header says'
        raise ConversionError(
            f'{path}: got {size} bytes, wanted {wanted} by its header: the file is {problem}; '
            'download it again'
        )
    return Shard(path, header, 8 + length)


def read_raw_header(shard: Shard) -> bytes:
    """The file's bytes before its tensors."""
    with shard.path.open('rb') as file:
        return file.read(shard.data_start)


def read_rows(shard: Shard, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows [start, stop) on the first axis of tensor `name`; only their bytes are read."""
    info = shard.header.tensors[name]
    shape, row_bytes, first = info.shape, info.nbytes, 0
    if info.shape and info.shape[0]:
        stop = info.shape[0] if stop is None else stop
        row_bytes //= info.shape[0]
        first, shape = start, (stop - start, *info.shape[1:])
    data = np.zeros(math.prod(shape), DTYPES[info.dtype])
    view = memoryview(data.view(np.uint8))
    with shard.path.open('rb') as file:
        file.seek(shard.data_start + shard.header.starts[name] + first * row_bytes)
        filled = 0
        while filled < len(view):
            got = file.read(len(view) - filled)
            if not got:
                raise ConversionError(f'{shard.path}: {name}: the file ended while it was read')
            view[filled : filled + len(got)] = got
            filled += len(got)
    return data.reshape(shape)


def library_order(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The order in which the safetensors library stores tensors: wide dtypes first, then names."""
    return sorted(tensors, key=lambda info: (-_RANK[info.dtype], info.name))


def build_header(tensors: Sequence[TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """A file's bytes before its tensors, equal to what the safetensors library writes."""
    fields: dict[str, Any] = {}
    if metadata is not None:
        fields[METADATA_KEY] = dict(metadata)
    position = 0
    for info in tensors:
        end = position + info.nbytes
        fields[info.name] = {
            'dtype': info.dtype,
            'shape': list(info.shape),
            'data_offsets': [position, end],
        }
        position = end
    text = json.dumps(fields, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % 8)
    return len(text).to_bytes(8, 'little') + text


def write_shard(path: epath.Path, raw_header: bytes, blocks: Iterable[np.ndarray]) -> None:
    """Writes a file from its header and the arrays whose bytes follow; whole or not at all.

    Raises:
      ConversionError: the blocks hold more or fewer bytes than the header describes.
    """
    wanted = parse_header(raw_header[8:], str(path)).data_bytes
    with open_whole(path) as file:
        file.write(raw_header)
        written = 0
        for block in blocks:
            file.write(memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8)))
            written += block.nbytes
        if written != wanted:
            raise ConversionError(f'{path}: {written} bytes were written, wanted {wanted}')
