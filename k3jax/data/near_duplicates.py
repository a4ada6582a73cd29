"""Which texts are nearly the same: MinHash signatures, and clusters of those that agree."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from datasketch import MinHash, MinHashLSH

SHINGLE = 5  # words that are compared as one
PERMUTATIONS = 128  # numbers of a signature; a similarity is estimated to about 0.04
_SEED = 1
_ROWS_AT_ONCE = 1 << 16

# Chinese and Japanese are written without spaces: each of their characters is a word.
_SIGN = '\u3040-\u30ff\u3400-\u9fff'
_WORD = re.compile(rf'[{_SIGN}]|[^\W{_SIGN}]+')


def _shingles(text: str) -> list[bytes]:
    """Runs of words of the text, case and punctuation left out; a short text is one."""
    words = [word.encode('utf-8', 'replace') for word in _WORD.findall(text.lower())]
    count = max(1, len(words) - SHINGLE + 1)
    return [b' '.join(words[i : i + SHINGLE]) for i in range(count)]


class Signer:
    """Makes signatures: the share of equal numbers in two is the share of shingles in common."""

    def __init__(self) -> None:
        # The scheme and the seed are named: signatures must not change with the library's defaults.
        self._empty = MinHash(PERMUTATIONS, seed=_SEED, scheme='affine32')

    def signature(self, text: str) -> np.ndarray:
        """[PERMUTATIONS] uint32."""
        one = self._empty.copy()
        one.update_batch(_shingles(text))
        return one.hashvalues.astype(np.uint32)


def similar_pairs(
    signatures: np.ndarray, of: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of similar documents, enough to join all that belong together.

    Signatures are cut into bands, as many as find pairs of this similarity best; documents with an
    equal band are compared, each with the first and with the last one before it.

    Args:
      signatures: [N, PERMUTATIONS] uint32, may lie on disk; a band is in memory at a time.
      of: [M], which of them to compare; pairs are of places in it.
      threshold: least share of equal numbers.

    Returns:
      pairs: [P, 2] int64, the smaller number first. similarity: [P] float64.
    """
    lsh = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    pairs, similarity = [np.zeros((0, 2), np.int64)], [np.zeros(0)]
    for band in range(lsh.b):
        rows = np.ascontiguousarray(signatures[of, band * lsh.r : (band + 1) * lsh.r])
        candidates = np.unique(np.concatenate(list(_neighbours(rows))), axis=0)
        for start in range(0, len(candidates), _ROWS_AT_ONCE):
            some = candidates[start : start + _ROWS_AT_ONCE]
            left, right = (signatures[of[some[:, side]]] for side in (0, 1))
            equal = np.mean(left == right, axis=1)
            pairs.append(some[equal >= threshold])
            similarity.append(equal[equal >= threshold])
    return np.concatenate(pairs), np.concatenate(similarity)


def _neighbours(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs [P, 2] of equal rows: each with the first such row, and with the one before it."""
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    order = np.argsort(keys, kind='stable')
    new = np.append(True, keys[order][1:] != keys[order][:-1])[: len(order)]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
    yield np.column_stack([first, order])[~new]
    yield np.column_stack([np.roll(order, 1), order])[~new]


def clusters(pairs: np.ndarray, size: int) -> np.ndarray:
    """[size] int64: for each document the smallest number of those that pairs join it with."""
    parent = np.arange(size)

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in pairs.tolist():
        a, b = root(a), root(b)
        parent[max(a, b)] = min(a, b)
    for i in np.flatnonzero(parent != np.arange(size)):  # a parent's own is done by then
        parent[i] = parent[parent[i]]
    return parent
