"""Which batches training and evaluation see, and how training finds its place again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    """Endless batches whose position can be saved and restored exactly."""

    def __init__(self, dataset: grain.IterDataset, identity: dict[str, int | str]):
        self._iterator = iter(dataset)
        self._identity = identity

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch given out; may be stored as JSON."""
        return {'data': dict(self._identity), 'position': self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on after the batch at which `state` was taken.

        Raises:
          ValueError: `state` belongs to other data, cut or shuffled in another way, or to another
            number of processes, so that its position means nothing here.
        """
        saved = state['data']
        for name, here in self._identity.items():
            if saved.get(name) != here:
                raise ValueError(
                    f'data position: saved with {name} {saved.get(name)!r}, but here it is '
                    f'{here!r}; resume with the data it was saved with, or start a new workdir'
                )
        self._iterator.set_state(pack.state_from_json(state['position']))


def train_iterator(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainIterator:
    """Endless training batches of this process, documents reshuffled every epoch.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      process_index, process_count: each process reads its own documents.

    Returns:
      An iterator over `pack.as_batch` batches with B = batch_size / process_count.

    Raises:
      ValueError: the batch or the documents cannot be shared out, or the source is unusable.
    """
    rows = _rows_per_process(config, process_count)
    documents = sources.open_documents(config, 'train')
    if len(documents) < process_count:
        raise ValueError(
            f'data.source: got {len(documents)} training documents, wanted at least one for each '
            f'of {process_count} processes; lower data.max_document_bytes to cut them in pieces'
        )
    dataset = grain.MapDataset.source(documents)[process_index::process_count]
    dataset = dataset.shuffle(seed=config.shuffle_seed).repeat()
    dataset = dataset.map(lambda piece: pack.with_targets(_encode(piece, tokenizer)))
    dataset = pack.pack(dataset.to_iter_dataset(_READ_OPTIONS), config.sequence_length)
    # A long document fills many rows in a row; without this a batch would be of one document.
    dataset = grain.experimental.WindowShuffleIterDataset(
        dataset, window_size=config.shuffle_rows, seed=config.shuffle_seed
    )
    dataset = dataset.batch(rows, drop_remainder=True).map(pack.as_batch)
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
        'process_count': process_count,
        'process_index': process_index,
    }
    return TrainIterator(dataset, identity)


def held_out_batches(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    max_batches: int | None = None,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """Batches of the held-out documents, the same on every call.

    Documents come in a fixed random order, so that the first `max_batches` are not all from one
    corner of the source. Every process gets its share of each batch and hence equally many; the
    last batch is filled up with padding.

    Args:
      config: what to read and how to batch it.
      tokenizer: each document is its tokens followed by `eos_id`.
      max_batches: at most; None: all there are.
      process_index, process_count: this process gets rows of its own, B = batch_size /
        process_count.

    Raises:
      ValueError: the batch cannot be shared out, or the source is unusable.
    """
    rows = _rows_per_process(config, process_count)
    mine = slice(process_index * rows, (process_index + 1) * rows)
    documents = sources.open_documents(config, 'held_out')
    dataset = grain.MapDataset.source(documents).shuffle(seed=_HELD_OUT_SHUFFLE_SEED)
    dataset = dataset.map(lambda piece: pack.with_targets(_encode(piece, tokenizer)))
    dataset = pack.pack(dataset.to_iter_dataset(_READ_OPTIONS), config.sequence_length)
    dataset = dataset.batch(config.batch_size).map(pack.as_batch)

    def batches() -> Iterator[Batch]:
        for batch in itertools.islice(dataset, max_batches):
            batch = _fill_up(batch, config.batch_size)
            yield {name: array[mine] for name, array in batch.items()}

    return batches()


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


def _rows_per_process(config: config_lib.DataConfig, process_count: int) -> int:
    if config.batch_size % process_count:
        raise ValueError(
            f'data.batch_size: got {config.batch_size}, wanted a multiple of the {process_count} '
            'processes'
        )
    return config.batch_size // process_count
