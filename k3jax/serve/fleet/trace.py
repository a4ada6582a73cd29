"""Which conversations a fleet is asked: made at random from a mix, or read from a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath


class Turn(NamedTuple):
    """A prompt adds to what was said, and is answered.

    Attributes:
      pause_s: since the answer before. new_tokens: of the prompt, after that answer.
    """

    pause_s: float
    new_tokens: int
    answer_tokens: int


class Conversation(NamedTuple):
    """The first turn comes at `start_s`, its pause left out."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """What conversations are like, of two kinds.

    Published is the typical request: 400K cached tokens and 4K new ones. All else is assumed.

    Attributes:
      long_share: of conversations. cached_tokens: of a long one's prompts, in the mean over its
        turns but the first. new_tokens: of its further prompts.
      turns: in the mean. pause_s: such as for a tool to run, or for a person to read.
    """

    long_share: float = 0.3
    cached_tokens: int = 400_000
    new_tokens: int = 4_000
    answer_tokens: int = 500
    turns: int = 20
    pause_s: float = 20.0
    short_first_tokens: int = 2_000
    short_new_tokens: int = 300
    short_answer_tokens: int = 400
    short_turns: int = 4
    short_pause_s: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < 1e12 and field.name != 'long_share':
                raise ValueError(f'mix.{field.name}: got {value}, wanted more than 0, below 1e12')
        if not 0 <= self.long_share <= 1:
            raise ValueError(f'mix.long_share: got {self.long_share}, wanted 0 to 1')
        if self.turns < 2:
            raise ValueError(f'mix.turns: got {self.turns}, wanted 2 or more')
        grown = self.turns * (self.new_tokens + self.answer_tokens)
        if grown >= self.cached_tokens:
            raise ValueError(
                f'mix.cached_tokens: got {self.cached_tokens}, which {self.turns} turns of '
                f'{self.new_tokens} new tokens would be more than'
            )


def _around(rng: np.random.Generator, mean: float, count: int) -> np.ndarray:
    """Lognormal whole numbers above 0."""
    spread = 0.5
    return np.maximum(1, rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)).astype(int)


def _turns(
    rng: np.random.Generator, count: int, first: int, new: int, answer: int, pause_s: float
) -> tuple[Turn, ...]:
    news, answers = _around(rng, new, count), _around(rng, answer, count)
    news[0] = first
    pauses = rng.exponential(pause_s, count)
    rows = zip(pauses.tolist(), news.tolist(), answers.tolist(), strict=True)
    return tuple(Turn(*row) for row in rows)


def make_trace(mix: Mix, per_s: float, seconds: float, seed: int) -> list[Conversation]:
    """Conversations that begin at random, so many a second, over a time."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.uniform(0, seconds, rng.poisson(per_s * seconds)))
    found = []
    for start in starts.tolist():
        if rng.random() < mix.long_share:
            count = int(rng.integers(max(2, mix.turns // 2), mix.turns * 3 // 2 + 1))
            # So that prompts of the turns after the first begin with as many as `mix` says.
            grown = (count - 2) / 2 * mix.new_tokens + count / 2 * mix.answer_tokens
            first = int(_around(rng, 100, 1)[0] / 100 * 0.2 * mix.cached_tokens)
            first += int(0.8 * mix.cached_tokens - grown)
            turns = _turns(
                rng, count, max(1, first), mix.new_tokens, mix.answer_tokens, mix.pause_s
            )
        else:
            count = int(rng.geometric(1 / mix.short_turns))
            first = int(_around(rng, mix.short_first_tokens, 1)[0])
            turns = _turns(
                *(rng, count, first, mix.short_new_tokens, mix.short_answer_tokens),
                mix.short_pause_s,
            )
        found.append(Conversation(start, turns))
    return found


def _number(value: Any, lowest: float, kind: type) -> Any:
    if type(value) not in (int, kind) or not lowest <= value < 1e12:
        raise ValueError(f'got {value!r}, wanted a number from {lowest}')
    return value


def read_trace(path: epath.PathLike) -> list[Conversation]:
    """The conversations of a file, one a line:
    {"start_s": 0.5, "turns": [{"pause_s": 0, "new_tokens": 900, "answer_tokens": 80}, …]}.

    Raises:
      ValueError: a line that is none; names it.
    """
    found = []
    for number, line in enumerate(epath.Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            turns = tuple(
                Turn(
                    _number(turn['pause_s'], 0, float),
                    _number(turn['new_tokens'], 1, int),
                    _number(turn['answer_tokens'], 1, int),
                )
                for turn in value['turns']
            )
            found.append(Conversation(_number(value['start_s'], 0, float), turns))
            if not turns:
                raise ValueError('no turns')
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'--trace: line {number} is no conversation ({error!r})') from None
    if not found:
        raise ValueError('--trace: there is no conversation in it')
    return sorted(found)


def summary(trace: Sequence[Conversation]) -> dict[str, float]:
    """What its requests are like, on average."""
    cached, new, answers = [], [], []
    for conversation in trace:
        held = 0
        for turn in conversation.turns:
            cached.append(held)
            new.append(turn.new_tokens)
            answers.append(turn.answer_tokens)
            held += turn.new_tokens + turn.answer_tokens
    long = [(c, n) for c, n in zip(cached, new, strict=True) if c >= 100_000]
    mean_of_long = np.mean(long, axis=0).round().tolist() if long else [0, 0]
    total = sum(cached) + sum(new)
    return {
        'conversations': len(trace),
        'requests': len(new),
        'requests_with_100K_said_before': len(long),
        'their_tokens_said_before': mean_of_long[0],
        'their_new_tokens': mean_of_long[1],
        'share_said_before': round(sum(cached) / max(1, total), 4),
    }
