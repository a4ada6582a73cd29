"""What the server asks of an engine, and what it gets back: the interface between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple, Protocol

from k3jax.data.images import Patches
from k3jax.data.tokenizer import Tokenizer
from k3jax.serve.prefix_figures import PrefixFigures

Finished = Literal['stop', 'length', 'error']


class Overloaded(Exception):
    """The engine's queue is full: try again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: 0 takes the most likely token.
      top_p: in (0, 1]; 1 keeps all. top_k: 0 keeps all. min_p: of the likeliest one's probability.
      presence_penalty, frequency_penalty: taken from the logits of tokens that were generated.
      repetition_penalty: above 0; logits of tokens of prompt and answer are divided by it, or
        multiplied where negative; 1 changes nothing.
      seed: None draws one.
      max_new_tokens: 1 or more.
      stop_ids: a token of these is the last.
      logprobs: how many of the likeliest tokens to report beside the one taken; None: no logprobs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 1
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    Attributes:
      prompt_ids: with one media pad for each image; the engine makes them as many as the image has
        tokens.
      media: the patches of each pad, in order.
      constraint: a grammar in llguidance's Lark that the answer must follow.
    """

    prompt_ids: Sequence[int]
    media: Sequence[Patches] = ()
    sampling: Sampling
    constraint: str | None = None


class Token(NamedTuple):
    """One generated token.

    Attributes:
      logprob: of the distribution before temperature and truncation; None if not asked for.
      top: (id, logprob) of the likeliest tokens.
      finished: why this is the last one: a stop id, which is this token; the limit; or a failure,
        where the id means nothing.
    """

    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    finished: Finished | None = None


class Stream(Protocol):
    """The tokens of one request as they come; the last has `finished` set.

    Attributes:
      cached_tokens: of the prompt, those that did not have to be computed; known with the first
        token.
    """

    cached_tokens: int

    def __aiter__(self) -> AsyncIterator[Token]: ...

    def cancel(self) -> None:
        """Frees what the request holds; also after its end, and more than once."""


class Engine(Protocol):
    """What continues prompts.

    Attributes:
      max_length: tokens that a prompt, its images expanded, and its answer may have together.
    """

    tokenizer: Tokenizer
    max_length: int
    model_name: str

    @property
    def prefix_figures(self) -> PrefixFigures | None:
        """Of the prefix cache, if there is one."""

    def submit(self, request: Request) -> Stream:
        """Queues a request; returns at once.

        Raises:
          Overloaded: the queue is full.
        """
