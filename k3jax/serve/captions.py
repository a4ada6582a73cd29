"""How well a model says what it sees, by records of images whose last text is the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging

from k3jax.data.images import ImageError
from k3jax.data.media import encoded_parts
from k3jax.data.records import Record, RecordError, Records, Text
from k3jax.serve.generate import generate
from k3jax.serve.load import Loaded
from k3jax.serve.media import check_sees, rows_of


class Captions(NamedTuple):
    """Of a set of records.

    right: answers equal to the record's, from the first token to the end of the document.
    unusable: records that were passed over.
    """

    records: int
    right: int
    unusable: int

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.records)


def _answer(record: Record) -> str:
    last = record.parts[-1] if record.parts else None
    if not isinstance(last, Text) or len(record.parts) < 2 or not last.text:
        raise RecordError(
            f'{record.name}: wanted parts to be shown, and a text to be answered last'
        )
    return last.text


def caption_accuracy(
    loaded: Loaded,
    records: Records,
    max_records: int | None = None,
    on_record: Callable[[int], None] = lambda done: None,
) -> Captions:
    """Generates, token by token and greedily, what should follow the record's other parts.

    A record that cannot be used is passed over, with a warning.

    Raises:
      ValueError: the model sees nothing, or no record can be used.
    """
    tokenizer, images, _ = check_sees(loaded)
    model, params = loaded.model, loaded.params
    found = Captions(0, 0, 0)
    for index in range(min(len(records), max_records or len(records))):
        try:
            record = records[index]
            want = [*tokenizer.encode(_answer(record)), tokenizer.eos_id]
            shown = encoded_parts(record._replace(parts=record.parts[:-1]), tokenizer, images)
        except (ImageError, RecordError) as error:
            logging.warning('passed over a record: %s', error)
            found = found._replace(unusable=found.unusable + 1)
            continue
        seen = [rows_of(model, params, part.patches, images) for part in shown if part.patches]
        rows = jnp.concatenate(seen) if seen else None
        prompt = np.concatenate([part.tokens for part in shown]).tolist()
        options = {'max_new_tokens': len(want), 'num_ids': tokenizer.vocab_size}
        new = list(generate(model, params, prompt, media_rows=rows, **options))
        found = found._replace(records=found.records + 1, right=found.right + (new == want))
        on_record(index + 1)
    if not found.records:
        raise ValueError(f'captions: none of {found.unusable} records can be used')
    return found
