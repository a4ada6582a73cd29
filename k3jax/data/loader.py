"""Which batches training and evaluation see, and how training finds its place again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from k3jax import config as config_lib
from k3jax.data import pack, sources
from k3jax.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]  # see pack.as_batch

# Documents are small and their text is quick to encode: threads would only compete with the step.
_READ_OPTIONS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_HELD_OUT_SHUFFLE_SEED = 0


class TrainIterator(Iterator[Batch]):
    """Endless batches whose position can be saved and restored exactly.

    streams: stream number -> its dataset of rows; a batch holds as many rows of each, in order of
    the numbers.
    """

    def __init__(
        self,
        streams: Mapping[int, grain.IterDataset],
        config: config_lib.DataConfig,
        identity: dict[str, int | str],
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
        return pack.as_batch({name: np.stack([row[name] for row in rows]) for name in rows[0]})

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
    batch holds hence does not depend on which process reads which stream.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      streams: numbers of those to read here, of 0..num_streams - 1; None: all.

    Returns:
      An iterator over `pack.as_batch` batches with batch_size / num_streams rows a stream.

    Raises:
      ValueError: there are fewer documents than streams, or the source is unusable.
    """
    documents = sources.open_documents(config, 'train')
    if len(documents) < config.num_streams:
        raise ValueError(
            f'data.source: got {len(documents)} training documents, wanted at least one for each '
            f'of {config.num_streams} streams (data.num_streams); lower data.max_document_bytes to '
            'cut them in pieces'
        )

    def stream(number: int) -> grain.IterDataset:
        dataset = grain.MapDataset.source(documents)[number :: config.num_streams]
        dataset = dataset.shuffle(seed=config.shuffle_seed).repeat()
        dataset = dataset.map(lambda piece: pack.with_targets(_encode(piece, tokenizer)))
        dataset = pack.pack(dataset.to_iter_dataset(_READ_OPTIONS), config.sequence_length)
        # A long document fills many rows in a row; without this a batch would be of one document.
        return grain.experimental.WindowShuffleIterDataset(
            dataset, window_size=config.shuffle_rows, seed=config.shuffle_seed
        )

    identity = {
        'source': config.source,
        'num_documents': len(documents),
        'num_bytes': documents.num_bytes,
        'vocab_size': tokenizer.vocab_size,
        'sequence_length': config.sequence_length,
        'held_out_every': config.held_out_every,
        'max_document_bytes': config.max_document_bytes,
        'shuffle_seed': config.shuffle_seed,
        'shuffle_rows': config.shuffle_rows,
        'num_streams': config.num_streams,
    }
    numbers = range(config.num_streams) if streams is None else streams
    return TrainIterator({number: stream(number) for number in numbers}, config, identity)


def held_out_batches(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Batches of the held-out documents, the same on every call and in every process.

    Documents come in a fixed random order, so that the first `max_batches` are not all from one
    corner of the source. The last batch is filled up with padding.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      max_batches: at most; None: all there are.

    Raises:
      ValueError: the source is unusable.
    """
    documents = sources.open_documents(config, 'held_out')
    dataset = grain.MapDataset.source(documents).shuffle(seed=_HELD_OUT_SHUFFLE_SEED)
    dataset = dataset.map(lambda piece: pack.with_targets(_encode(piece, tokenizer)))
    dataset = pack.pack(dataset.to_iter_dataset(_READ_OPTIONS), config.sequence_length)
    dataset = dataset.batch(config.batch_size).map(pack.as_batch)
    return (_fill_up(batch, config.batch_size) for batch in itertools.islice(dataset, max_batches))


def document_tokens(
    config: config_lib.DataConfig, tokenizer: tokenizer_lib.Tokenizer, split: sources.Split
) -> Iterator[np.ndarray]:
    """[T] int32 tokens of each document of a split, in the order of the source."""
    documents = sources.open_documents(config, split)
    return (_encode(documents[index], tokenizer) for index in range(len(documents)))


def _encode(piece: sources.Piece, tokenizer: tokenizer_lib.Tokenizer) -> np.ndarray:
    """[T] int32 tokens, with [EOS] where the document ends."""
    tokens = tokenizer.encode_array(piece.text)
    return np.append(tokens, np.int32(tokenizer.eos_id)) if piece.ends_document else tokens


def _fill_up(batch: Batch, rows: int) -> Batch:
    """`batch` with rows of padding below, `rows` in all."""
    missing = rows - len(batch['tokens'])
    fill = {'tokens': 0, 'targets': pack.IGNORE, 'segment_ids': 0}
    return {
        name: np.pad(array, ((0, missing), (0, 0)), constant_values=fill[name])
        for name, array in batch.items()
    }
