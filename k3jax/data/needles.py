"""Windows whose last question needs facts from all over them: does a model use its context?

    <text> ~qx=B <text> ~am=T <text> ~hk=B <text> ? ~hk=B ~qx=B [EOS]

(without the spaces). A window is made of its number alone, and is exactly as long as asked for.
"""

from __future__ import annotations

import dataclasses
import string
from typing import NamedTuple

import numpy as np

from k3jax.config import DataConfig
from k3jax.data import pack, sources
from k3jax.data.tokenizer import Tokenizer

NEEDLES = 'needles'  # as a data.source
NUM_WINDOWS: dict[sources.Split, int] = {'train': 1 << 24, 'held_out': 1 << 12}

_MARK, _ASK = '~', '?'  # text in between has no mark, so that it states no fact
_KEYS = [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase]
_VALUES = string.ascii_uppercase


class Window(NamedTuple):
    """One document.

    Attributes:
      tokens: [T] int32.
      answers: [m] int32, where in `tokens` the answers are.
      depths: [m] float64, where the fact of each is: 0 at the start, 1 at the question.
    """

    tokens: np.ndarray
    answers: np.ndarray
    depths: np.ndarray

    def targets(self, *, answers_only: bool) -> np.ndarray:
        """[T] int32: the next token at each position, or at those alone that predict an answer."""
        targets = pack.following(self.tokens)
        if not answers_only:
            return targets
        before = np.isin(np.arange(len(targets)), self.answers - 1)
        return np.where(before, targets, np.int32(pack.IGNORE))


@dataclasses.dataclass(frozen=True)
class Needles:
    """Windows of `config.sequence_length` tokens by number, different ones on each side of a split.

    The text in between is of that side's documents of `config.needles.text`.
    """

    config: DataConfig
    tokenizer: Tokenizer
    split: sources.Split
    documents: sources.Documents

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Tokenizer, split: sources.Split) -> Needles:
        """Raises ValueError where facts and question do not fit, or the text is unusable."""
        documents = sources.open_documents(config.needles.text, config, split, 'data.needles.text')
        needles = cls(config, tokenizer, split, documents)
        keys = _KEYS[: config.needles.facts]
        facts, question, _ = needles._parts(np.random.default_rng(0), keys)
        smallest = sum(map(len, facts)) + len(question)
        if smallest > config.sequence_length:
            raise ValueError(
                f'data.sequence_length: got {config.sequence_length}, wanted at least {smallest} '
                f'for {len(facts)} facts and a question for {config.needles.asked}; lower '
                'data.needles.facts'
            )
        return needles

    def __len__(self) -> int:
        return NUM_WINDOWS[self.split]

    def __getitem__(self, index: int) -> Window:
        config = self.config
        side = list(NUM_WINDOWS).index(self.split)
        rng = np.random.default_rng([config.needles.seed, side, config.sequence_length, index])
        keys = [_KEYS[i] for i in rng.choice(len(_KEYS), config.needles.facts, replace=False)]
        facts, question, asked = self._parts(rng, keys)
        num_text = config.sequence_length - sum(map(len, facts)) - len(question)
        # One fact in each of equal stretches: every depth is as likely as any other.
        cuts = np.arange(len(facts)) + rng.random(len(facts))
        cuts = (cuts / len(facts) * (num_text + 1)).astype(np.int64)
        text = np.split(self._text(rng, num_text), cuts)
        parts = [part for pair in zip(text, facts, strict=False) for part in pair]
        tokens = np.concatenate([*parts, text[-1], question])
        starts = cuts + np.cumsum([0, *map(len, facts[:-1])])
        end = len(tokens) - len(question)
        return Window(tokens, end + self._places(question), starts[asked] / end)

    def _parts(
        self, rng: np.random.Generator, keys: list[str]
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """The tokens of the facts and of the question with its answers; which facts it asks for."""
        values = rng.choice(list(_VALUES), len(keys))
        facts = [self._fact(key, value) for key, value in zip(keys, values, strict=True)]
        asked = rng.permutation(len(keys))[: self.config.needles.asked]
        begin, end = self.tokenizer.encode_array(_ASK), np.int32([self.tokenizer.eos_id])
        return facts, np.concatenate([begin, *(facts[i] for i in asked), end]), asked

    def _fact(self, key: str, value: str) -> np.ndarray:
        # Encoded in two parts, so that a value is one token in any vocabulary.
        encode = self.tokenizer.encode_array
        return np.concatenate([encode(f'{_MARK}{key}='), encode(value)])

    def _places(self, question: np.ndarray) -> np.ndarray:
        """[m] int64: where in the question the answers are."""
        values = np.concatenate([self.tokenizer.encode_array(value) for value in _VALUES])
        return np.flatnonzero(np.isin(question, values))

    def _text(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """[size] tokens: a document from anywhere in it on, then others."""
        parts: list[np.ndarray] = []
        missing = size
        while missing > 0:
            text = self.documents[int(rng.integers(len(self.documents)))].text
            tokens = self.tokenizer.encode_array(text.replace(_MARK, '-') + '\n')
            if not parts:
                tokens = tokens[int(rng.integers(len(tokens))) :]
            parts.append(tokens[:missing])
            missing -= len(parts[-1])
        return np.concatenate([np.zeros(0, np.int32), *parts])
