"""How well counting does: a smoothed trigram model, the bar a trained model has to clear."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from k3jax.data import pack

_TOKENS_AT_ONCE = 1 << 22  # bounds the memory of counting
_UNKNOWN = -1  # a context token that is not given


@dataclasses.dataclass(frozen=True)
class _Order:
    """One order of the model: counts of context + token, discounted.

    P(c | h) = max(n(h, c) - D(n), 0) / n(h) + gamma(h) P_lower(c | h without its first token)

    Attributes:
      keys: [G] int64, sorted: (context, token) as one number.
      shares: [G] float64, the first term of each.
      contexts: [X] int64, sorted.
      gammas: [X] float64, the mass that discounting takes from each context.
    """

    keys: np.ndarray
    shares: np.ndarray
    contexts: np.ndarray
    gammas: np.ndarray

    @classmethod
    def of_counts(cls, keys: np.ndarray, counts: np.ndarray, base: int) -> _Order:
        """Discounts `counts` of the sorted `keys` = context * base + token."""
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        contexts, first = np.unique(keys // base, return_index=True)
        totals = np.add.reduceat(counts, first)
        per_key = np.repeat(totals, np.diff(np.append(first, len(keys))))
        return cls(
            keys=keys,
            shares=(counts - discounts) / per_key,
            contexts=contexts,
            gammas=np.add.reduceat(discounts, first) / totals,
        )

    def prob(
        self, context: np.ndarray, token: np.ndarray, base: int, lower: np.ndarray
    ) -> np.ndarray:
        """[T] float64 P(token | context), given that of the order below."""
        share = _lookup(self.keys, self.shares, context * base + token, 0.0)
        return share + _lookup(self.contexts, self.gammas, context, 1.0) * lower


@dataclasses.dataclass(frozen=True)
class TrigramModel:
    """P(token | two tokens before it): interpolated Kneser-Ney with three discounts an order.

    The lower orders count in how many contexts a token is seen, not how often; the lowest is mixed
    with the uniform distribution, so every token has a probability above 0.

    Source: Chen and Goodman, An empirical study of smoothing techniques for language modeling
    (1998), section 3.
    """

    vocab_size: int
    unigrams: _Order
    bigrams: _Order
    trigrams: _Order

    @classmethod
    def count(cls, documents: Iterable[np.ndarray], vocab_size: int) -> TrigramModel:
        """The model of `documents`, each [T] int tokens below `vocab_size`.

        Raises:
          ValueError: no tokens, or one out of range.
        """
        base = vocab_size + 1  # the last symbol stands before each document, twice
        keys, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for stream in _streams(_checked(documents, vocab_size), start=vocab_size):
            found = (stream[:-2] * base + stream[1:-1]) * base + stream[2:]
            found, times = np.unique(found[stream[2:] != vocab_size], return_counts=True)
            keys, where = np.unique(np.concatenate([keys, found]), return_inverse=True)
            times = np.concatenate([counts, times])
            counts = np.bincount(where, weights=times, minlength=len(keys)).astype(np.int64)
        if not len(keys):
            raise ValueError('a trigram model needs at least one token to count')
        bigrams, bigram_counts = np.unique(keys % base**2, return_counts=True)
        unigrams, unigram_counts = np.unique(bigrams % base, return_counts=True)
        return cls(
            vocab_size=vocab_size,
            unigrams=_Order.of_counts(unigrams, unigram_counts, base),
            bigrams=_Order.of_counts(bigrams, bigram_counts, base),
            trigrams=_Order.of_counts(keys, counts, base),
        )

    def prob(self, before: np.ndarray, last: np.ndarray, token: np.ndarray) -> np.ndarray:
        """[T] float64 P(token | before, last).

        Args:
          before, last: [T] the two tokens in front; `vocab_size` in front of a document, -1 where
            unknown (the order that needs it is then left out).
          token: [T].
        """
        before, last, token = (np.asarray(x, np.int64) for x in (before, last, token))
        base = self.vocab_size + 1
        prob = np.full(token.shape, 1 / self.vocab_size)
        prob = self.unigrams.prob(np.zeros_like(token), token, base, prob)
        # A context that no key can have: keys are never negative.
        prob = self.bigrams.prob(np.where(last < 0, -base, last), token, base, prob)
        context = np.where((before < 0) | (last < 0), -base, before * base + last)
        return self.trigrams.prob(context, token, base, prob)

    def log2_prob(self, tokens: np.ndarray) -> np.ndarray:
        """[T] float64 log2 probability of each token of one document, the first ones included."""
        padded = np.concatenate([[self.vocab_size] * 2, tokens])
        return np.log2(self.prob(padded[:-2], padded[1:-1], padded[2:]))

    def batch_log2_prob(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """[B, T] float64 log2 probability of each target of a batch; 0 where there is none.

        Sees what a model sees: nothing before the row, nothing of the row's other documents.
        """
        tokens, targets, ids = (batch[key] for key in ('tokens', 'targets', 'segment_ids'))
        before = np.full(tokens.shape, _UNKNOWN, np.int64)
        same_document = ids[:, 1:] == ids[:, :-1]
        before[:, 1:] = np.where(same_document, tokens[:, :-1], self.vocab_size)
        real = targets != pack.IGNORE
        out = np.zeros(tokens.shape)
        out[real] = np.log2(self.prob(before[real], tokens[real], targets[real]))
        return out

    def bits_per_byte(
        self, batches: Iterable[dict[str, np.ndarray]], byte_lengths: np.ndarray
    ) -> float:
        """Bits over the targets of `batches`, divided by the bytes that these targets stand for.

        Args:
          batches: as `loader.held_out_batches` gives them.
          byte_lengths: [Z], `Tokenizer.token_byte_lengths()`.

        Raises:
          ValueError: no target stands for a byte.
        """
        bits, num_bytes = 0.0, 0
        for batch in batches:
            bits -= self.batch_log2_prob(batch).sum()
            num_bytes += int(byte_lengths[batch['targets'][batch['targets'] != pack.IGNORE]].sum())
        if not num_bytes:
            raise ValueError('bits per byte: the batches have no targets that stand for text')
        return bits / num_bytes


def trigram_bits_per_byte(
    train_documents: Iterable[np.ndarray],
    held_out: Iterable[dict[str, np.ndarray]],
    byte_lengths: np.ndarray,
) -> float:
    """Held-out bits per byte of a trigram model counted on `train_documents`.

    Args:
      train_documents: [T] tokens of each, as `loader.document_tokens` gives them.
      held_out: batches; the same that the trained model is judged on.
      byte_lengths: [Z], `Tokenizer.token_byte_lengths()`.
    """
    model = TrigramModel.count(train_documents, len(byte_lengths))
    return model.bits_per_byte(held_out, byte_lengths)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """[4] float64: what is taken from a count of 0, 1, 2, and 3 or more.

    With n_i the number of entries seen i times, Y = n_1 / (n_1 + 2 n_2) and
    D_i = i - (i + 1) Y n_{i+1} / n_i. Where a n_i is 0, D_i falls back to 0.5.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(float)
    discounts = np.array([0, 0.5, 0.5, 0.5])
    if n[1] and n[2]:
        y = n[1] / (n[1] + 2 * n[2])
        for i in (1, 2, 3):
            if n[i] and n[i + 1]:
                discounts[i] = np.clip(i - (i + 1) * y * n[i + 1] / n[i], 0.1, i - 0.05)
    return discounts


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float) -> np.ndarray:
    """`values` of the sorted `keys` that are `wanted`; `default` for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], default)


def _checked(documents: Iterable[np.ndarray], vocab_size: int) -> Iterator[np.ndarray]:
    """`documents`, whose tokens are all below `vocab_size`."""
    for index, tokens in enumerate(documents):
        if len(tokens) and (np.min(tokens) < 0 or np.max(tokens) >= vocab_size):
            raise ValueError(
                f'token ids: got {np.min(tokens)}..{np.max(tokens)} in document {index}, wanted '
                f'0..{vocab_size - 1}; use the tokenizer that the vocabulary belongs to'
            )
        yield tokens


def _streams(documents: Iterable[np.ndarray], start: int) -> Iterator[np.ndarray]:
    """int64 streams of about _TOKENS_AT_ONCE tokens: documents, two `start` before each."""
    parts: list[np.ndarray] = []
    size = 0
    for tokens in documents:
        parts += [np.full(2, start, np.int64), np.asarray(tokens, np.int64)]
        size += len(tokens)
        if size >= _TOKENS_AT_ONCE:
            yield np.concatenate(parts)
            parts, size = [], 0
    if size:
        yield np.concatenate(parts)
