"""Which documents a source holds: texts by index, split into train and held out."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sysconfig
from typing import Literal, NamedTuple, get_args

import numpy as np
from absl import logging
from etils import epath

from k3jax import config as config_lib

Split = Literal['train', 'held_out']

PYTHON_STDLIB = 'python_stdlib'
# Folders of the standard library that hold no library sources.
_STDLIB_SKIP = frozenset(
    ('test', 'tests', 'idlelib', 'site-packages', 'dist-packages', '__pycache__')
)
_MIN_PIECE_BYTES = 16  # above the 4 bytes of the longest character


class Piece(NamedTuple):
    """A document, or one of the pieces of a long one."""

    text: str
    ends_document: bool


@dataclasses.dataclass(frozen=True)
class Documents:
    """Pieces of text by index, read from their files when asked for.

    Attributes:
      files: paths; `.jsonl` files hold one document a line, the others are one document each.
      table: [number of pieces, 7] int64: file index; offset and length of the document's bytes in
        its file; start and stop of the piece in the document's UTF-8 text; whether it is the last;
        bytes of the document's text.
      num_bytes: of text, over all pieces.
    """

    files: tuple[epath.Path, ...]
    table: np.ndarray
    _warned: set[int] = dataclasses.field(default_factory=set, repr=False)

    @property
    def num_bytes(self) -> int:
        return int((self.table[:, 4] - self.table[:, 3]).sum())

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Piece:
        file, offset, length, start, stop, is_last, _ = self.table[index].tolist()
        path = self.files[file]
        with path.open('rb') as f:
            if path.suffix == '.jsonl':
                f.seek(offset)
                text = text_of_line(f.read(length), str(path)).encode('utf-8', 'replace')
                data = text[start : stop + 3]
            else:
                f.seek(start)
                data = f.read(stop + 3 - start)
        data = _whole_characters(data, stop - start, first=start == 0)
        try:
            text = data.decode('utf-8')
        except UnicodeDecodeError as e:
            text = data.decode('utf-8', 'replace')
            if file not in self._warned:
                self._warned.add(file)
                logging.warning('%s: replaced bytes that are not UTF-8 (%s)', path, e)
        return Piece(text, bool(is_last))

    def split(self, split: Split, held_out_every: int) -> Documents:
        """The pieces of one side: the last of every `held_out_every` is held out."""
        if split not in get_args(Split):
            raise ValueError(f'split: got {split!r}, wanted one of {get_args(Split)}')
        is_held_out = np.arange(len(self)) % held_out_every == held_out_every - 1
        keep = is_held_out if split == 'held_out' else ~is_held_out
        return dataclasses.replace(self, table=self.table[keep])

    def repeated(self, times: int, from_bytes: int) -> Documents:
        """Each piece of documents of at least `from_bytes` bytes `times` times, the others once."""
        repeats = np.where(self.table[:, 6] >= from_bytes, times, 1)
        return dataclasses.replace(self, table=np.repeat(self.table, repeats, axis=0))


def open_documents(
    source: str, config: config_lib.DataConfig, split: Split, where: str = 'data.source'
) -> Documents:
    """The documents of a source on one side of the split.

    A document above `max_document_bytes` is cut into pieces; a long one is there for training as
    often as `config.long_document_repeats` says. A source with fewer documents than
    `held_out_every`, such as one long file, is cut so that there are enough pieces to hold one out.

    Raises:
      ValueError: no such folder, no text in it, too little text, or a line that is not a document;
        `where`, a field of the config, leads the message.
    """
    files = _stdlib_files() if source == PYTHON_STDLIB else folder_files(source, where)
    table = _scan_again(files)
    total = int(table[:, 3].sum())
    if not total:
        raise ValueError(f'{where}: got {source!r}, whose {len(files)} files hold no text')
    size = config.max_document_bytes
    if len(table) < config.held_out_every:
        size = min(size, total // config.held_out_every)
    size = max(size, _MIN_PIECE_BYTES)
    documents = Documents(files=tuple(files), table=_cut(table, size))
    if len(documents) < config.held_out_every:
        raise ValueError(
            f'{where}: got {source!r} with {total} bytes of text, wanted at least '
            f'{config.held_out_every * _MIN_PIECE_BYTES}, so that one piece in '
            f'{config.held_out_every} (data.held_out_every) can be held out'
        )
    documents = documents.split(split, config.held_out_every)
    if split == 'train' and config.long_document_bytes:
        return documents.repeated(config.long_document_repeats, config.long_document_bytes)
    return documents


def _stdlib_files() -> list[epath.Path]:
    """The sources of the running interpreter's standard library, sorted."""
    root = epath.Path(sysconfig.get_path('stdlib'))
    found = []
    for folder, subfolders, names in root.walk():
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_SKIP]
        found += [folder / name for name in names if name.endswith('.py')]
    if not found:
        raise ValueError(
            f'data.source: {PYTHON_STDLIB!r} found no .py files under {root}; name a folder of '
            '.txt or .jsonl files instead'
        )
    return sorted(found, key=os.fspath)


def folder_files(source: str, where: str = 'data.source') -> list[epath.Path]:
    """The .txt and .jsonl files under a folder, sorted; or the one file that `source` names.

    Raises:
      ValueError: there is none; `where` leads the message.
    """
    root = epath.Path(source)
    if not root.exists():
        other = f', or {PYTHON_STDLIB!r}' if where.startswith('data.') else ''
        raise ValueError(
            f'{where}: got {source!r}, which does not exist; wanted a folder of .txt and .jsonl '
            f'files{other}'
        )
    if root.is_dir():
        found = [folder / name for folder, _, names in root.walk() for name in names]
    else:
        found = [root]
    found = [path for path in found if path.suffix in ('.txt', '.jsonl')]
    if not found:
        raise ValueError(
            f'{where}: got {source!r}, where no .txt or .jsonl file is; .txt files hold one '
            'document each, .jsonl files one a line in the field "text"'
        )
    return sorted(found, key=os.fspath)


def _scan_again(files: list[epath.Path]) -> np.ndarray:
    """`_scan(files)`, remembered for local files that have kept their sizes and times."""
    if any('://' in os.fspath(path) for path in files):
        return _scan(files)
    stats = [os.stat(path) for path in files]
    stamps = tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)
    return _remembered_scan(tuple(map(os.fspath, files)), stamps)


@functools.lru_cache(maxsize=4)
def _remembered_scan(paths: tuple[str, ...], stamps: tuple[tuple[int, ...], ...]) -> np.ndarray:
    del stamps  # part of the key
    table = _scan([epath.Path(path) for path in paths])
    table.flags.writeable = False
    return table


def _scan(files: list[epath.Path]) -> np.ndarray:
    """[number of documents, 4] int64: file index, offset, length in the file, bytes of text."""
    rows: list[np.ndarray] = []
    for index, path in enumerate(files):
        if path.suffix == '.jsonl':
            rows.append(_scan_lines(path, index))
        else:
            # Not path.stat(), which fails where the owner has no name, as in many containers.
            with path.open('rb') as f:
                f.seek(0, os.SEEK_END)
                num_bytes = f.tell()
            if num_bytes:
                rows.append(np.array([[index, 0, num_bytes, num_bytes]], np.int64))
    return np.concatenate([np.zeros((0, 4), np.int64), *rows])


def _scan_lines(path: epath.Path, index: int) -> np.ndarray:
    """The documents of one .jsonl file, as `_scan` gives them."""
    rows: list[tuple[int, int, int, int]] = []
    offset = 0
    with path.open('rb') as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                text = text_of_line(line, f'{path}:{number}')
                if text:
                    num_bytes = len(text.encode('utf-8', 'replace'))
                    rows.append((index, offset, len(line), num_bytes))
            offset += len(line)
    return np.array(rows, np.int64).reshape(-1, 4)


def text_of_line(line: bytes, where: str) -> str:
    """The document in a .jsonl line.

    Raises:
      ValueError: not a JSON object with a string `text`; `where` leads the message.
    """
    shown = line[:60]
    try:
        fields = json.loads(line.decode('utf-8', 'replace'))
    except json.JSONDecodeError as e:
        raise ValueError(f'{where}: got {shown!r}, which is not JSON ({e})') from None
    text = fields.get('text') if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f'{where}: got {shown!r}, wanted an object with the document as a string in "text"'
        )
    return text


def _cut(table: np.ndarray, size: int) -> np.ndarray:
    """`Documents.table` of the documents in `_scan`'s table, in pieces of at most `size` bytes."""
    num_bytes = table[:, 3]
    pieces = -(-num_bytes // size)
    document = np.repeat(np.arange(len(table)), pieces)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = piece * size
    stop = np.minimum(start + size, num_bytes[document])
    is_last = stop == num_bytes[document]
    columns = table[document, :3], start, stop, is_last, num_bytes[document]
    return np.column_stack(columns).astype(np.int64)


def _whole_characters(data: bytes, size: int, *, first: bool) -> bytes:
    """The characters whose first byte is among the first `size` bytes of `data`.

    Args:
      data: a piece of UTF-8 text and up to 3 bytes of what follows it.
      size: of the piece.
      first: whether the piece begins its document; otherwise leading continuation bytes belong to
        the piece before.
    """

    def end_of_character(position: int) -> int:
        limit = min(position + 3, len(data))
        while position < limit and data[position] & 0xC0 == 0x80:
            position += 1
        return position

    return data[0 if first else end_of_character(0) : end_of_character(size)]
