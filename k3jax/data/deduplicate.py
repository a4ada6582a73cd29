"""A folder of documents without those that it has twice, or nearly: read once, written once."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from absl import logging
from etils import epath

from k3jax.data import sources
from k3jax.data.near_duplicates import PERMUTATIONS, Signer, clusters, similar_pairs

REPORT = 'deduplication.json'
_THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 1.0)  # that the report tells of, from the one asked for on

Corrupt = Literal['stop', 'skip']
Progress = Callable[[str, int, int], None]  # what is done; bytes done; bytes in all


class _Document(NamedTuple):
    """data: as it stands in its file."""

    path: epath.Path
    data: bytes
    text: str


class _Corpus:
    """The documents of a folder in a fixed order; what is no document is counted, or an error."""

    def __init__(self, source: str, corrupt: Corrupt, progress: Progress):
        self.root = epath.Path(source)
        self._files = sources.folder_files(source, '--source')
        self._corrupt, self._progress = corrupt, progress
        self.num_bytes = sum(map(_size, self._files))
        self.counts: collections.Counter[str] = collections.Counter()

    def documents(self, what: str) -> Iterator[_Document]:
        """Raises ValueError for a line that is none, naming file and line, unless it is skipped."""
        self.counts.clear()
        done = 0
        for path in self._files:
            with path.open('rb') as f:
                lines = enumerate(f if path.suffix == '.jsonl' else [f.read()], 1)
                for number, line in lines:
                    text = self._text(path, number, line)
                    done += len(line)
                    if text:
                        self.counts['documents'] += 1
                        yield _Document(path, line, text)
                    self._progress(what, done, self.num_bytes)

    def _text(self, path: epath.Path, number: int, line: bytes) -> str | None:
        if path.suffix != '.jsonl':
            text = line.decode('utf-8', 'replace')
        elif not line.strip():
            return None
        else:
            try:
                text = sources.text_of_line(line, f'{path}:{number}')
            except ValueError as error:
                if self._corrupt == 'stop':
                    raise ValueError(f'{error}; --corrupt=skip leaves such lines out') from None
                logging.warning('left out: %s', error)
                self.counts['corrupt'] += 1
                return None
        self.counts['empty'] += not text
        return text


def _size(path: epath.Path) -> int:
    with path.open('rb') as f:
        return f.seek(0, os.SEEK_END)


def deduplicate(
    source: str,
    target: str,
    *,
    threshold: float = 0.8,
    corrupt: Corrupt = 'stop',
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Copies the documents of `source` that are unlike all before them; files keep their names.

    Of documents with the same text the first stays; then, of each cluster of near-duplicates, the
    first. Only signatures are held, on the local disk: 540 bytes a document, and about 100 in
    memory; no more of the text than a document. `target` appears when all of it is written.

    Args:
      source: folder of .txt and .jsonl files, or one such file.
      target: folder that does not exist, in which there is also the report.
      threshold: share of runs of five words in common from which documents are nearly the same;
        above 1: exact duplicates alone are looked for.
      corrupt: what to do with a .jsonl line that is no document.

    Returns:
      The report: counts of documents; near-duplicates dropped at higher thresholds too; clusters by
      their size.

    Raises:
      ValueError: nothing to read, a corrupt line, a source that changes meanwhile, no threshold.
      OSError: target is there, or cannot be written; nothing is left of it then.
    """
    if not threshold > 0:
        raise ValueError(f'--threshold: got {threshold}, wanted a number above 0')
    folder = epath.Path(target)
    if folder.exists():
        raise OSError(f'--target: {target} is there already; name another folder')
    if epath.Path(source).resolve() in folder.resolve().parents:
        raise ValueError(f'--target: {target} is inside --source; name another folder')
    corpus = _Corpus(source, corrupt, progress)
    report: dict[str, Any] = {'source': source, 'threshold': threshold}
    with tempfile.TemporaryDirectory() as scratch:
        digests, signatures = _signed(corpus, scratch, near=threshold <= 1)
        report |= {name: corpus.counts[name] for name in ('documents', 'empty', 'corrupt')}
        if not len(digests):
            raise ValueError(f'--source: {source} holds no text, wanted documents')
        kept = np.sort(np.unique(digests, return_index=True)[1])
        report['exact_dropped'] = len(digests) - len(kept)
        if signatures is not None:
            of_kept, found = _near(signatures, kept, threshold)
            kept, report = kept[of_kept], report | found
    report['kept'] = len(kept)
    if len(kept) == 1 < len(digests):
        logging.warning('%s: all %d documents are one and the same', source, len(digests))
    keep = np.zeros(len(digests), bool)
    keep[kept] = True
    _write(corpus, keep, folder, report)
    return report


def _signed(corpus: _Corpus, scratch: str, *, near: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """[N] 16-byte digests, and [N, PERMUTATIONS] uint32 on disk, of all documents."""
    signer, digests = Signer(), bytearray()
    path = os.path.join(scratch, 'signatures')
    with open(path, 'wb') as f:
        for document in corpus.documents('signing'):
            text = document.text.encode('utf-8', 'replace')
            digests += hashlib.blake2b(text, digest_size=16).digest()
            if near:
                f.write(signer.signature(document.text).tobytes())
    rows = np.frombuffer(bytes(digests), 'V16')
    if not near or not len(rows):
        return rows, None
    return rows, np.memmap(path, np.uint32, 'r', shape=(len(rows), PERMUTATIONS))


def _near(
    signatures: np.ndarray, kept: np.ndarray, threshold: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """Which of the `kept` documents stay, by their place there; and what the report says."""
    pairs, similarity = similar_pairs(signatures, kept, threshold)
    roots = clusters(pairs, len(kept))
    stay = np.flatnonzero(roots == np.arange(len(kept)))
    sizes = np.bincount(roots)
    sizes = collections.Counter(sizes[sizes > 1].tolist())
    at = {t: clusters(pairs[similarity >= t], len(kept)) for t in _THRESHOLDS if t > threshold}
    return stay, {
        'near_dropped': len(kept) - len(stay),
        'clusters_by_size': {str(size): count for size, count in sorted(sizes.items())},
        'near_dropped_at': {
            str(t): int(np.sum(found != np.arange(len(kept)))) for t, found in at.items()
        },
    }


def _write(corpus: _Corpus, keep: np.ndarray, target: epath.Path, report: dict[str, Any]) -> None:
    """The documents to keep, in files like those they come from; all of them or nothing."""
    partial = target.parent / f'{target.name}.partial'
    try:
        if partial.exists():  # of a run that was killed
            partial.rmtree()
        partial.mkdir(parents=True)
        written = _copy(corpus, keep, partial)
        if written != len(keep):
            raise ValueError(
                f'--source: {corpus.root} had {len(keep)} documents at first and now {written}; '
                'nothing may write there meanwhile'
            )
        (partial / REPORT).write_text(json.dumps(report, indent=1) + '\n')
        partial.rename(target)
    except BaseException as error:
        if partial.exists():
            partial.rmtree()
        if isinstance(error, OSError):
            raise OSError(
                f'--target: {target} cannot be written ({error.strerror or error}); nothing is '
                'left of it'
            ) from None
        raise


def _copy(corpus: _Corpus, keep: np.ndarray, folder: epath.Path) -> int:
    """Writes the documents to keep under `folder`; returns how many there were in all."""
    number, path, file = 0, None, None
    try:
        for document in corpus.documents('writing'):
            number += 1
            if number > len(keep) or not keep[number - 1]:
                continue
            if document.path != path:
                if file is not None:
                    file.close()
                path = document.path
                inside = path.name if path == corpus.root else path.relative_to(corpus.root)
                to = folder / inside
                to.parent.mkdir(parents=True, exist_ok=True)
                file = to.open('wb')
            file.write(document.data)
            if path.suffix == '.jsonl' and not document.data.endswith(b'\n'):
                file.write(b'\n')
    finally:
        if file is not None:
            file.close()
    return number
