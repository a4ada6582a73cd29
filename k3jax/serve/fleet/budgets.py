"""How much of each kind of request is let in: budgets by the length of the prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence

from k3jax.serve.api.errors import overloaded

_UNITS = {'': 1, 'K': 2**10, 'M': 2**20}
DEFAULT_CLASSES = (
    '2K:512:512K',
    '16K:256:2M',
    '128K:64:4M',
    '512K:32:12M',
    'rest:8:8M',
)


@dataclasses.dataclass(frozen=True)
class RequestClass:
    """Requests whose prompts have fewer than so many tokens, and more than the class before.

    Attributes:
      below: tokens of a prompt; None: any number.
      num_requests, num_tokens: of prompts, in flight together.
    """

    name: str
    below: int | None
    num_requests: int
    num_tokens: int


def _number(text: str, whole: str) -> int:
    match = re.fullmatch(r'(\d{1,12})([KM]?)', text)
    if match is None or not int(match[1]):
        raise ValueError(
            f'--classes: got {whole!r}, wanted tokens:requests:tokens in flight, such as '
            '16K:128:1M, each 1 or more'
        )
    return int(match[1]) * _UNITS[match[2]]


def read_classes(texts: Sequence[str]) -> tuple[RequestClass, ...]:
    """The classes that --classes names, shortest prompts first; the last is `rest`.

    Raises:
      ValueError: something else; names it.
    """
    found: list[RequestClass] = []
    for text in texts:
        parts = text.strip().split(':')
        limit, *budgets = parts if len(parts) == 3 else ('', '', '')
        below = None if limit == 'rest' else _number(limit, text)
        found.append(RequestClass(limit, below, *(_number(part, text) for part in budgets)))
    limits = [one.below for one in found]
    if not limits or limits[-1] is not None:
        raise ValueError("--classes: the last must be 'rest', for prompts of any length")
    if None in limits[:-1] or limits[:-1] != sorted(set(limits[:-1])):
        raise ValueError(f'--classes: got {",".join(texts)}, wanted growing lengths, then rest')
    return tuple(found)


class _Budget:
    """What one class has in flight."""

    def __init__(self, of: RequestClass):
        self.of, self.num_requests, self.num_tokens = of, 0, 0

    def has_room(self, num_tokens: int) -> bool:
        if self.num_requests >= self.of.num_requests:
            return False
        # A prompt that is larger than the whole budget goes alone, or it would never go.
        return not self.num_requests or self.num_tokens + num_tokens <= self.of.num_tokens


class Budgets:
    """Lets requests in, each class on its own: what one has used up is missing to no other."""

    def __init__(self, classes: Sequence[RequestClass]):
        self._budgets = [_Budget(one) for one in classes]

    @property
    def max_requests(self) -> int:
        """Of all classes together."""
        return sum(budget.of.num_requests for budget in self._budgets)

    def in_flight(self) -> dict[str, tuple[int, int]]:
        """Requests and tokens of their prompts, by the name of the class."""
        return {b.of.name: (b.num_requests, b.num_tokens) for b in self._budgets}

    def class_of(self, num_tokens: int) -> str:
        """The name of the class of prompts of this length."""
        return self._budget(num_tokens).of.name

    def _budget(self, num_tokens: int) -> _Budget:
        return next(b for b in self._budgets if b.of.below is None or num_tokens < b.of.below)

    @contextlib.contextmanager
    def take(self, num_tokens: int) -> Iterator[None]:
        """Holds a place for a request with a prompt of so many tokens.

        Raises:
          ApiError: 429, its class has no room.
        """
        budget = self._budget(num_tokens)
        if not budget.has_room(num_tokens):
            limit = budget.of.below
            which = 'of this length' if limit is None else f'below {limit} tokens'
            raise overloaded(f'There are too many requests with prompts {which} at the moment')
        budget.num_requests += 1
        budget.num_tokens += num_tokens
        try:
            yield
        finally:
            budget.num_requests -= 1
            budget.num_tokens -= num_tokens
