"""Which batches training and evaluation see, and how training finds its place again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from k3jax import config as config_lib
from k3jax.data import media as media_lib
from k3jax.data import needles as needles_lib
from k3jax.data import pack, sources
from k3jax.data import records as records_lib
from k3jax.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]  # see media.as_batch

# Documents are small and their text is quick to encode: threads would only compete with the step.
_READ_OPTIONS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_HELD_OUT_SHUFFLE_SEED = 0
_MADE_DOCUMENTS = 256  # of a source without end, where all documents are asked for

_Documents = sources.Documents | needles_lib.Needles | records_lib.Records


class TrainIterator(Iterator[Batch]):
    """Endless batches whose position can be saved and restored exactly.

    streams: stream number -> its dataset of rows; a batch holds as many rows of each, in order of
    the numbers.
    """

    def __init__(
        self,
        streams: Mapping[int, grain.IterDataset],
        config: config_lib.DataConfig,
        identity: dict[str, Any],
    ):
        self._iterators = {number: iter(dataset) for number, dataset in streams.items()}
        self._config = config
        self._identity = identity

    def __next__(self) -> Batch:
        return self.take(self._config.batch_size)

    def take(self, batch_size: int) -> Batch:
        """The next batch of `batch_size` rows, over all streams; a multiple of their number."""
        count = batch_size // self._config.num_streams
        rows = [next(stream) for stream in self._iterators.values() for _ in range(count)]
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return media_lib.as_batch(stacked, self._config)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch given out; may be stored as JSON.

        `positions` holds those of this iterator's streams; states of iterators over other streams
        of the same data may be joined into one.
        """
        positions = {str(n): iterator.get_state() for n, iterator in self._iterators.items()}
        return {'data': dict(self._identity), 'positions': positions}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on after the batch at which `state` was taken.

        Raises:
          ValueError: `state` belongs to other data, cut or shuffled in another way, or lacks a
            stream, so that its position means nothing here.
        """
        saved, positions = state['data'], state.get('positions', {})
        for name, here in self._identity.items():
            if saved.get(name) != here:
                raise ValueError(
                    f'data position: saved with {name} {saved.get(name)!r}, but here it is '
                    f'{here!r}; resume with the data it was saved with, or start a new workdir'
                )
        for number, iterator in self._iterators.items():
            if str(number) not in positions:
                raise ValueError(
                    f'data position: stream {number} is missing, found {sorted(positions)}; was '
                    'it saved by all processes?'
                )
            iterator.set_state(pack.state_from_json(positions[str(number)]))


def train_iterator(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    streams: Iterable[int] | None = None,
) -> TrainIterator:
    """Endless training batches, documents reshuffled every epoch.

    The documents are dealt out to `num_streams` streams, each packed into rows on its own. What a
    batch holds hence does not depend on which process reads which stream. Of a mixture, every
    stream takes rows of one source each, always as many as the weights say.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      streams: numbers of those to read here, of 0..num_streams - 1; None: all.

    Returns:
      An iterator over `pack.as_batch` batches with batch_size / num_streams rows a stream.

    Raises:
      ValueError: there are fewer documents than streams, or the source is unusable.
    """
    parts = {source: _documents(source, config, tokenizer, 'train') for source in config.shares}
    for source, documents in parts.items():
        if len(documents) < config.num_streams:
            raise ValueError(
                f'data.source: got {len(documents)} training documents, wanted at least one for '
                f'each of {config.num_streams} streams (data.num_streams); lower '
                f'data.max_document_bytes to cut those of {source!r} in pieces'
            )

    def rows(documents: _Documents, number: int) -> grain.IterDataset:
        dataset = _source(documents)[number :: config.num_streams]
        dataset = dataset.shuffle(seed=config.shuffle_seed).repeat()
        return _rows(dataset, documents, config, tokenizer)

    def stream(number: int) -> grain.IterDataset:
        # Rows are mixed, not documents: their tokens are as many as the weights say, and no row of
        # one source depends on another's.
        mixed = {source: rows(documents, number) for source, documents in parts.items()}
        dataset, *others = mixed.values()
        if others:
            dataset = grain.IterDataset.mix(mixed, config.shares)
        # A long document fills many rows in a row; without this a batch would be of one document.
        return grain.experimental.WindowShuffleIterDataset(
            dataset, window_size=config.shuffle_rows, seed=config.shuffle_seed
        )

    numbers = range(config.num_streams) if streams is None else streams
    return TrainIterator(
        {number: stream(number) for number in numbers}, config, _identity(parts, config, tokenizer)
    )


def held_out_batches(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Batches of the held-out documents, the same on every call and in every process.

    Documents come in a fixed random order, so that the first `max_batches` are not all from one
    corner of the source. The last batch is filled up with padding. Of a mixture, rows come by the
    weights for as long as each source has some.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      max_batches: at most; None: all there are.

    Raises:
      ValueError: the source is unusable.
    """

    def rows(source: str) -> Iterator[dict[str, np.ndarray]]:
        documents = _documents(source, config, tokenizer, 'held_out')
        dataset = _source(documents).shuffle(seed=_HELD_OUT_SHUFFLE_SEED)
        return iter(_rows(dataset, documents, config, tokenizer))

    mixed = _by_shares({source: rows(source) for source in config.shares}, config.shares)
    return itertools.islice(_batches(mixed, config), max_batches)


def _by_shares(
    rows: dict[str, Iterator[dict[str, np.ndarray]]], shares: Mapping[str, float]
) -> Iterator[dict[str, np.ndarray]]:
    """All rows of all sources; at any time each has given its share, if it had as many."""
    given = dict.fromkeys(rows, 0)
    while rows:
        source = min(rows, key=lambda source: (given[source] + 1) / shares[source])
        row = next(rows[source], None)
        if row is None:
            del rows[source]
        else:
            given[source] += 1
            yield row


def _batches(
    rows: Iterator[dict[str, np.ndarray]], config: config_lib.DataConfig
) -> Iterator[Batch]:
    while some := list(itertools.islice(rows, config.batch_size)):
        stacked = {name: np.stack([row[name] for row in some]) for name in some[0]}
        yield _fill_up(media_lib.as_batch(stacked, config), config.batch_size)


def document_tokens(
    config: config_lib.DataConfig, tokenizer: tokenizer_lib.Tokenizer, split: sources.Split
) -> Iterator[np.ndarray]:
    """[T] int32 tokens of each document of a split, in the order of the sources.

    Of those that are made, the first few hundred: they do not end. Records of media have none.
    """
    for source in config.shares:
        documents = _documents(source, config, tokenizer, split)
        if isinstance(documents, records_lib.Records):
            continue
        made = isinstance(documents, needles_lib.Needles)
        for index in range(_MADE_DOCUMENTS if made else len(documents)):
            document = documents[index]
            yield document.tokens if made else _encode(document, tokenizer)


def _documents(
    source: str,
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    split: sources.Split,
) -> _Documents:
    if source == needles_lib.NEEDLES:
        return needles_lib.Needles.of(config, tokenizer, split)
    if source in config.media.sources:
        return records_lib.open_records(source, config, split)
    return sources.open_documents(source, config, split)


def _source(documents: _Documents) -> grain.MapDataset:
    safe = isinstance(documents, records_lib.Records)
    return grain.MapDataset.source(media_lib.Safe(documents) if safe else documents)


def _rows(
    dataset: grain.MapDataset,
    documents: _Documents,
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
) -> grain.IterDataset:
    """Packed rows of `dataset`, some of `documents`; with media where any source has some."""
    if isinstance(documents, records_lib.Records):
        dataset = dataset.map(media_lib.RowMaker(config, tokenizer, len(documents)))
        return media_lib.pack_media(dataset.to_iter_dataset(_READ_OPTIONS), config)
    dataset = dataset.map(lambda document: _pairs(document, config, tokenizer))
    rows = pack.pack(dataset.to_iter_dataset(_READ_OPTIONS), config.sequence_length)
    if not config.media.sources:
        return rows
    return rows.map(lambda row: media_lib.without_media(row, config))


def _pairs(
    document: sources.Piece | needles_lib.Window,
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, np.ndarray]:
    if isinstance(document, needles_lib.Window):
        targets = document.targets(answers_only=config.needles.answers_only)
        return pack.pairs(document.tokens, targets)
    return pack.with_targets(_encode(document, tokenizer))


def _identity(
    parts: Mapping[str, _Documents],
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
) -> dict[str, Any]:
    """What must be the same for a position to mean the same, by the name that a message gives."""
    identity: dict[str, Any] = {'source': config.source}
    if config.mixture:
        identity = {'mixture': list(config.mixture), 'mixture_weights': [*config.mixture_weights]}
    for source, documents in parts.items():
        of = f' of {source}' if config.mixture else ''
        identity[f'num_documents{of}'] = len(documents)
        if source == needles_lib.NEEDLES:
            identity |= {'needles': dataclasses.asdict(config.needles)}
            documents = documents.documents
        identity[f'num_bytes{of}'] = documents.num_bytes
    if config.media.sources:
        identity['media'] = dataclasses.asdict(config.media) | {
            'sources': list(config.media.sources)
        }
    return identity | {
        'vocab_size': tokenizer.vocab_size,
        'sequence_length': config.sequence_length,
        'held_out_every': config.held_out_every,
        'max_document_bytes': config.max_document_bytes,
        'shuffle_seed': config.shuffle_seed,
        'shuffle_rows': config.shuffle_rows,
        'num_streams': config.num_streams,
    }


def _encode(piece: sources.Piece, tokenizer: tokenizer_lib.Tokenizer) -> np.ndarray:
    """[T] int32 tokens, with [EOS] where the document ends."""
    tokens = tokenizer.encode_array(piece.text)
    return np.append(tokens, np.int32(tokenizer.eos_id)) if piece.ends_document else tokens


def _fill_up(batch: Batch, rows: int) -> Batch:
    """`batch` with rows of padding below, `rows` in all."""
    missing = rows - len(batch['tokens'])

    def padded(name: str, array: np.ndarray) -> np.ndarray:
        below = (0, missing), *[(0, 0)] * (array.ndim - 1)
        return np.pad(array, below, constant_values=pack.IGNORE if name == 'targets' else 0)

    return {name: padded(name, array) for name, array in batch.items()}
