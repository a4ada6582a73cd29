"""Which records of text and images a source holds: .jsonl beside image files, or WebDataset .tar.

A line of a .jsonl file is an object whose "content" lists the parts of a record in order:

    {"content": [{"type": "text", "text": "A cat:", "loss": false},
                 {"type": "image", "image": "images/cat.png"}, {"type": "text", "text": "Tom"}]}

A record with only a "text" is taken too. In a .tar, members with one name up to its first dot make
a record: a .json member holds such an object, whose "image" is the rest of an image member's name
(`0.png`); without one, images come in the order of their names, then the .txt member.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tarfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from k3jax.config import DataConfig
from k3jax.data.sources import Split

_IMAGES = frozenset(('png', 'jpg', 'jpeg', 'webp', 'gif', 'bmp'))  # suffixes of members
_KNOWN = _IMAGES | {'txt', 'json'}


class RecordError(ValueError):
    """A record that cannot be used; the message names it."""


class Text(NamedTuple):
    """loss: whether its tokens are predicted, or only read."""

    text: str
    loss: bool = True


class ImageFile(NamedTuple):
    """An image of a record: a file, or bytes of one.

    Attributes:
      path: of the file.
      offset, size: where in it the image is; None for all of it.
      name: for messages.
    """

    path: epath.Path
    name: str
    offset: int | None = None
    size: int | None = None

    def read(self) -> bytes:
        """Raises RecordError where it cannot be read."""
        try:
            if self.offset is None:
                return self.path.read_bytes()
            with self.path.open('rb') as f:
                f.seek(self.offset)
                return f.read(self.size)
        except OSError as error:
            raise RecordError(f'{self.name}: cannot be read ({error.strerror or error})') from None


Part = Text | ImageFile


class Record(NamedTuple):
    """name: where it is from, for messages."""

    parts: tuple[Part, ...]
    name: str


class Entry(NamedTuple):
    """Where a record is.

    Attributes:
      file: index of its file. key: of the line or the sample.
      members: suffix -> offset and size in the file; of a line, under ''.
    """

    file: int
    key: str
    members: Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Records:
    """Records by index, read from their files when asked for."""

    files: tuple[epath.Path, ...]
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        """Of lines and samples; images that .jsonl files name are not counted."""
        return sum(size for entry in self.entries for _, size in entry.members.values())

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Record:
        """Raises RecordError where it is not one."""
        entry = self.entries[index]
        path = self.files[entry.file]
        name = f'{path}:{entry.key}'
        with path.open('rb') as f:

            def read(suffix: str) -> bytes:
                offset, size = entry.members[suffix]
                f.seek(offset)
                return f.read(size)

            if '' in entry.members:
                images = _Beside(path)
                return Record(_parts(read(''), images, name), name)
            images = _Inside(path, entry)
            if 'json' in entry.members:
                return Record(_parts(read('json'), images, name), name)
            parts: list[Part] = [images(suffix, name) for suffix in images.suffixes]
            if 'txt' in entry.members:
                parts.append(Text(read('txt').decode('utf-8', 'replace').strip('\n')))
        return Record(tuple(parts), name)

    def split(self, split: Split, held_out_every: int) -> Records:
        """The records of one side: the last of every `held_out_every` is held out."""
        entries = tuple(
            entry
            for index, entry in enumerate(self.entries)
            if (index % held_out_every == held_out_every - 1) == (split == 'held_out')
        )
        return dataclasses.replace(self, entries=entries)


class _Beside(NamedTuple):
    """Images that a .jsonl file names: by paths from its folder, or whole paths."""

    file: epath.Path

    def __call__(self, image: str, where: str) -> ImageFile:
        path = epath.Path(image) if '://' in image else self.file.parent / image
        return ImageFile(path, f'{where}: {image}')


class _Inside(NamedTuple):
    """Images of a sample."""

    file: epath.Path
    entry: Entry

    @property
    def suffixes(self) -> list[str]:
        return sorted(s for s in self.entry.members if s.rsplit('.', 1)[-1] in _IMAGES)

    def __call__(self, image: str, where: str) -> ImageFile:
        if image not in self.suffixes:
            raise RecordError(
                f'{where}: wants the image {image!r}, but the sample has {self.suffixes}'
            )
        return ImageFile(self.file, f'{where}.{image}', *self.entry.members[image])


def _parts(data: bytes, images: Any, where: str) -> tuple[Part, ...]:
    """The parts of a record's JSON; images: (name, where) -> ImageFile."""
    try:
        fields = json.loads(data.decode('utf-8', 'replace'))
    except (json.JSONDecodeError, RecursionError) as error:
        raise RecordError(f'{where}: got {data[:60]!r}, which is not JSON ({error})') from None
    content = fields.get('content') if isinstance(fields, dict) else None
    if isinstance(fields, dict) and content is None and isinstance(fields.get('text'), str):
        return (Text(fields['text']),)
    if not isinstance(content, list) or not content:
        raise RecordError(
            f'{where}: got {data[:60]!r}, wanted an object with a list of parts in "content", or a '
            'string in "text"'
        )
    parts: list[Part] = []
    for number, part in enumerate(content):
        kind = part.get('type') if isinstance(part, dict) else None
        value = part.get(kind) if kind in ('text', 'image') else None
        loss = part.get('loss', True) if isinstance(part, dict) else True
        if not isinstance(value, str) or not isinstance(loss, bool):
            raise RecordError(
                f'{where}: content[{number}]: got {str(part)[:60]!r}, wanted '
                '{"type": "text", "text": TEXT} or {"type": "image", "image": PATH}, of a text '
                'also "loss": true or false'
            )
        parts.append(Text(value, loss) if kind == 'text' else images(value, where))
    return tuple(parts)


def open_records(source: str, config: DataConfig, split: Split) -> Records:
    """The records of a source on one side of the split.

    Raises:
      ValueError: no such folder, no records in it, too few, or a file that is no tar.
    """
    records = all_records(source)
    if len(records) < config.held_out_every:
        raise ValueError(
            f'data.media.sources: got {source!r} with {len(records)} records, wanted at least '
            f'{config.held_out_every}, so that one in {config.held_out_every} '
            '(data.held_out_every) can be held out'
        )
    return records.split(split, config.held_out_every)


def all_records(source: str) -> Records:
    """The records of a folder or a file, of both sides.

    Raises:
      ValueError: no such folder, or a file that is no tar.
    """
    files = record_files(source)
    entries = _all_entries(tuple(map(os.fspath, files)), tuple(map(_stamp, files)))
    return Records(tuple(files), entries)


def record_files(source: str, where: str = 'data.media.sources') -> list[epath.Path]:
    """The .jsonl and .tar files under a folder, sorted; or the one file that `source` names.

    Raises:
      ValueError: there is none; `where` leads the message.
    """
    root = epath.Path(source)
    if root.is_dir():
        found = [folder / name for folder, _, names in root.walk() for name in names]
    else:
        found = [root] if root.exists() else []
    found = [path for path in found if path.suffix in ('.jsonl', '.tar')]
    if not found:
        raise ValueError(f'{where}: got {source!r}, where no .jsonl or .tar file of records is')
    return sorted(found, key=os.fspath)


def _stamp(path: epath.Path) -> tuple[int, ...]:
    """By which a local file that has changed is told."""
    if '://' in os.fspath(path):
        return ()
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


@functools.lru_cache(maxsize=8)
def _all_entries(paths: tuple[str, ...], stamps: tuple[tuple[int, ...], ...]) -> tuple[Entry, ...]:
    del stamps  # part of the key
    entries: list[Entry] = []
    for index, path in enumerate(map(epath.Path, paths)):
        entries += (_lines if path.suffix == '.jsonl' else _samples)(path, index)
    return tuple(entries)


def _lines(path: epath.Path, index: int) -> list[Entry]:
    entries, offset = [], 0
    with path.open('rb') as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                entries.append(Entry(index, str(number), {'': (offset, len(line))}))
            offset += len(line)
    return entries


def _samples(path: epath.Path, index: int) -> list[Entry]:
    """Of a .tar, in the order of their first members."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with path.open('rb') as f, tarfile.open(fileobj=f, mode='r:') as tar:
            for member in tar:
                folder, name = os.path.split(member.name)
                key, _, suffix = name.partition('.')
                suffix = suffix.lower()
                if member.isfile() and key and suffix.rsplit('.', 1)[-1] in _KNOWN:
                    sample = samples.setdefault(os.path.join(folder, key), {})
                    sample[suffix] = member.offset_data, member.size
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(
            f'{path}: not a whole, uncompressed tar ({error}); fetch it again or leave it out'
        ) from None
    return [Entry(index, key, members) for key, members in samples.items()]
