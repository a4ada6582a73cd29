"""Which records of text and images a source holds: .jsonl beside image files, or WebDataset .tar.

A line of a .jsonl file is an object whose "content" lists the parts of a record in order:

    {"content": [{"type": "text", "text": "A cat:", "loss": false},
                 {"type": "image", "image": "images/cat.png"}, {"type": "text", "text": "Tom"}]}

A record with only a "text" is taken too. In a .tar, members with one name up to its first dot make
a record: a .json member holds such an object, whose "image" is the rest of an image member's name
(`0.png`); without one, images come in the order of their names, then .txt members. A .json of other
things beside a .txt is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tarfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import logging
from etils import epath

from k3jax.config import DataConfig
from k3jax.data.images import ImageConfig, NamedFault, check_bytes, image_bytes
from k3jax.data.sources import Split

_IMAGES = frozenset(('png', 'jpg', 'jpeg', 'webp', 'gif', 'bmp'))  # suffixes of members
_KNOWN = _IMAGES | {'txt', 'json'}
_PACKED = ('.tar.gz', '.tgz', '.tar.zst', '.tar.xz', '.tar.bz2', '.jsonl.gz', '.jsonl.zst')
WHERE = 'data.media.sources'
_TAIL = 1 << 20  # bytes after the last member that are looked at


class RecordError(NamedFault):
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

    path: epath.PathLike
    name: str
    offset: int | None = None
    size: int | None = None

    def read(self, images: ImageConfig) -> bytes:
        """Raises ImageError where it cannot be read, or is too large."""
        if self.offset is None:
            return image_bytes(self.path, self.name, images)
        check_bytes(self.size, self.name, images)
        with self.path.open('rb') as f:
            f.seek(self.offset)
            return f.read(self.size)


Part = Text | ImageFile


class Record(NamedTuple):
    """name: where it is from, for messages."""

    parts: tuple[Part, ...]
    name: str


class Entry(NamedTuple):
    """Where a record is.

    Attributes:
      file: index of its file. key: of the line or the sample.
      members: suffix -> offset and size in the file, LINK of a link; of a line, under ''.
    """

    file: int
    key: str
    members: Mapping[str, tuple[int, int]]


LINK = -1, 0  # to what is not in the .tar


def _kind(suffix: str) -> str:
    return suffix.rsplit('.', 1)[-1]


def _place(entry: Entry, suffix: str, where: str) -> tuple[int, int]:
    """Offset and size of a member; raises RecordError for a link."""
    place = entry.members[suffix]
    if place == LINK:
        raise RecordError(
            f'{where}.{suffix}: a link, wanted a file; make the archive with tar --dereference'
        )
    return place


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
                offset, size = _place(entry, suffix, name)
                f.seek(offset)
                return f.read(size)

            if '' in entry.members:
                images = _Beside(path)
                return Record(_parts(read(''), images, name), name)
            images = _Inside(path, entry)
            texts = sorted(suffix for suffix in entry.members if _kind(suffix) == 'txt')
            if 'json' in entry.members:
                data = read('json')
                if not texts or _is_content(data):
                    return Record(_parts(data, images, name), name)
            parts: list[Part] = [images(suffix, name) for suffix in images.suffixes]
            parts += [Text(read(text).decode('utf-8', 'replace').strip('\n')) for text in texts]
        if not parts:
            raise RecordError(f'{name}: wanted an image, a .txt or a .json, got {[*entry.members]}')
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
    """Images that a .jsonl file names: by paths from its folder, whole paths, or gs://."""

    file: epath.Path

    def __call__(self, image: str, where: str) -> ImageFile:
        path = image if '://' in image else self.file.parent / image
        return ImageFile(path, f'{where}: {image[:200]}')


class _Inside(NamedTuple):
    """Images of a sample."""

    file: epath.Path
    entry: Entry

    @property
    def suffixes(self) -> list[str]:
        return sorted(s for s in self.entry.members if _kind(s) in _IMAGES)

    def __call__(self, image: str, where: str) -> ImageFile:
        image = image.lower()  # as suffixes are kept
        if image not in self.suffixes:
            raise RecordError(
                f'{where}: wants the image {image!r}, but the sample has {self.suffixes}'
            )
        return ImageFile(self.file, f'{where}.{image}', *_place(self.entry, image, where))


def _json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode('utf-8', 'replace'))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise RecordError(f'{where}: got {data[:60]!r}, which is not JSON ({error})') from None


def _is_content(data: bytes) -> bool:
    """Whether a .json member is meant as a record, and not as notes on one."""
    try:
        fields = _json(data, '')
    except RecordError:
        return True  # to be told
    return isinstance(fields, dict) and not fields.keys().isdisjoint(('content', 'text'))


def _parts(data: bytes, images: Any, where: str) -> tuple[Part, ...]:
    """The parts of a record's JSON; images: (name, where) -> ImageFile."""
    fields = _json(data, where)
    fields = fields if isinstance(fields, dict) else {}
    content, text = fields.get('content'), fields.get('text')
    if content is None and isinstance(text, str):
        return (Text(text),)
    if not isinstance(content, list) or not content or text is not None:
        raise RecordError(
            f'{where}: got {data[:60]!r}, wanted an object with a list of parts in "content", or '
            'else a string in "text"'
        )
    parts: list[Part] = []
    for number, part in enumerate(content):
        fields = part if isinstance(part, dict) else {}
        kind, loss = fields.get('type'), fields.get('loss', True)
        value = fields.get(kind) if kind in ('text', 'image') else None
        known = {'type', kind, 'loss'} if kind == 'text' else {'type', kind}
        if not (isinstance(value, str) and isinstance(loss, bool) and fields.keys() <= known):
            raise RecordError(
                f'{where}: content[{number}]: got {str(part)[:100]!r}, wanted '
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


def all_records(source: str, where: str = WHERE) -> Records:
    """The records of a folder or a file, of both sides; `where` leads a message.

    Raises:
      ValueError: no such folder, or a file that is no tar.
    """
    files = record_files(source, where)
    entries = _all_entries(tuple(map(os.fspath, files)), tuple(map(_stamp, files)))
    return Records(tuple(files), entries)


def record_files(source: str, where: str = WHERE) -> list[epath.Path]:
    """The .jsonl and .tar files under a folder, sorted; or the one file that `source` names.

    Raises:
      ValueError: there is none; `where` leads the message.
    """
    root = epath.Path(source)
    if root.is_dir():
        found = [folder / name for folder, _, names in root.walk() for name in names]
    else:
        found = [root] if root.exists() else []
    packed = sorted(path.name for path in found if path.name.endswith(_PACKED))
    found = [path for path in found if path.suffix in ('.jsonl', '.tar')]
    if not found:
        more = f'; {packed[0]} has to be unpacked first' if packed else ''
        raise ValueError(
            f'{where}: got {source!r}, where no .jsonl or .tar file of records is{more}'
        )
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
    """Of a .tar, in the order of their first members.

    A member that a sample has already begins another sample of that name.
    """
    entries: list[Entry] = []
    newest: dict[str, dict[str, tuple[int, int]]] = {}
    places: dict[str, tuple[int, int]] = {}
    try:
        with path.open('rb') as f, tarfile.open(fileobj=f, mode='r:') as tar:
            for member in tar:
                place = member.offset_data, member.size
                if member.islnk() or member.issym():
                    place = places.get(member.linkname, LINK) if member.islnk() else LINK
                elif not member.isreg():
                    continue
                places[member.name] = place
                folder, name = os.path.split(member.name)
                key, _, suffix = name.partition('.')
                suffix = suffix.lower()
                if not key or _kind(suffix) not in _KNOWN:
                    continue
                key = os.path.normpath(os.path.join(folder, key))
                if suffix in newest.get(key, (suffix,)):
                    newest[key] = {}
                    entries.append(Entry(index, key, newest[key]))
                newest[key][suffix] = place
            # It takes a damaged head, and the end of a first archive of two, for the end.
            f.seek(tar.offset)
            tail = f.read(_TAIL)
            if tail.strip(b'\0'):
                raise tarfile.TarError(f'not a member at byte {tar.offset}, before its end')
            if not tail:
                logging.warning('%s: has no end mark; members may be missing', path)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(
            f'{path}: not a whole, single, uncompressed tar ({error}); fetch it again or leave it '
            'out'
        ) from None
    return entries
