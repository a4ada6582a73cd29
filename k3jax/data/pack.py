"""How tokenised documents fill rows of equal length, nothing lost and nothing padded between."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

IGNORE = -1  # the target of a position that has none

_PAIRS = 'pairs'  # name of the packed feature: token and target side by side


def with_targets(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """One document ready to pack: [T, 2] int32, each token beside the next one of the document.

    The last token has the target -1. Packing cuts both columns at the same places, so that the last
    target of a row is the first token of the next row when a document goes on there.
    """
    return pairs(tokens, following(tokens))


def following(tokens: np.ndarray) -> np.ndarray:
    """[T] int32: the next token at each position of a document; -1 at the last."""
    return np.append(tokens[1:], np.int32(IGNORE))


def pairs(tokens: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """One document ready to pack, its targets any of `following` or -1, both [T] int32."""
    return {_PAIRS: np.stack([tokens, targets], axis=1)}


def pack(documents: grain.IterDataset, sequence_length: int) -> grain.IterDataset:
    """Rows of `sequence_length` positions: documents joined end to end, cut wherever a row is full.

    Args:
      documents: elements made by `with_targets`.
      sequence_length: T. Only the last row of a finite dataset is padded.
    """
    return grain.experimental.ConcatThenSplitIterDataset(
        documents, length_struct=lengths(sequence_length)
    )


def lengths(sequence_length: int) -> dict[str, int]:
    """Of the features of a row that `with_targets` and `pairs` make."""
    return {_PAIRS: sequence_length}


def names() -> tuple[str, ...]:
    """What `as_batch` reads of a row."""
    return _PAIRS, f'{_PAIRS}_segment_ids'


def as_batch(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the model is fed, from stacked rows of `pack`.

    Returns:
      tokens: [B, T] int32.
      targets: [B, T] int32, the next token of the same document; -1 where there is none.
      segment_ids: [B, T] int32, 1, 2, ... for the documents of a row; 0 = padding.
      And what else rows hold, as it is, but for what packing made of it.
    """
    segment_ids = np.ascontiguousarray(rows[f'{_PAIRS}_segment_ids'], np.int32)
    tokens = np.ascontiguousarray(rows[_PAIRS][..., 0])
    targets = np.where(segment_ids == 0, np.int32(IGNORE), rows[_PAIRS][..., 1])
    others = {name: x for name, x in rows.items() if not name.startswith(_PAIRS)}
    return {'tokens': tokens, 'targets': targets, 'segment_ids': segment_ids} | others


def state_from_json(state: Any) -> Any:
    """`state` with lists as tuples: grain compares its states with tuples, which JSON has not."""
    if isinstance(state, dict):
        return {key: state_from_json(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return tuple(state_from_json(value) for value in state)
    return state
