"""How a request of the interface becomes one of the engine: prompt, images, limits, grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.data.chat import Channel
from k3jax.data.chat_format import chat_prompt, is_before_k3
from k3jax.data.conversation import ChatError, PromptTooLong
from k3jax.data.images import ImageConfig, plan_image
from k3jax.serve.api.chat_request import ChatRequest
from k3jax.serve.api.completion_request import CompletionRequest
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.rules import Rules
from k3jax.serve.constrain import Constrainer
from k3jax.serve.grammar import chat_grammar
from k3jax.serve.grammar_k2 import k2_grammar
from k3jax.serve.request import Engine, Request, Sampling
from k3jax.serve.schema_text import UnsupportedSchema


class Prepared(NamedTuple):
    """A request for the engine.

    Attributes:
      opened: the channel in which a chat's answer begins; None for a plain completion.
      num_prompt_tokens: as they are billed, images in full.
    """

    request: Request
    opened: Channel | None
    num_prompt_tokens: int


def _unenforceable(why: object) -> ApiError:
    return ApiError(f'A JSON schema of this request cannot be enforced: {why}')


class Preparer:
    """Prepares requests; its methods take long enough to belong in a thread.

    Args:
      images: None for a model that takes none.
      constrainer: None where no answer can be constrained.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Rules,
        images: ImageConfig | None,
        constrainer: Constrainer | None,
    ):
        self._engine, self._rules = engine, rules
        self._images, self._constrainer = images, constrainer

    def _too_long(self, num_prompt: int | None, wanted: int | None) -> ApiError:
        window = self._engine.max_length
        found = f'{num_prompt} tokens' if num_prompt is not None else f'more than {window} tokens'
        asked = '' if wanted is None else f' and {wanted} for the answer'
        return ApiError(
            f'prompt: got {found}{asked}, wanted at most {window} together',
            code='context_length_exceeded',
        )

    def _new_tokens(self, num_prompt: int, wanted: int | None) -> int:
        """How many tokens the answer may have.

        Raises:
          ApiError: prompt and answer do not fit the window.
        """
        left = self._engine.max_length - num_prompt
        if left < (wanted or 1):
            raise self._too_long(num_prompt, wanted)
        return min(left, self._rules.default_max_tokens) if wanted is None else wanted

    def _sampling(self, sampling: Sampling, limit: int, logprobs: int | None) -> Sampling:
        stop_ids = self._engine.tokenizer.stop_ids
        return dataclasses.replace(
            sampling, max_new_tokens=limit, stop_ids=stop_ids, logprobs=logprobs
        )

    def chat(self, asked: ChatRequest) -> Prepared:
        """A chat completion's request.

        Raises:
          ApiError: an image or a schema that cannot be used, or too long a prompt.
        """
        if asked.images and self._images is None:
            raise ApiError('messages: this model takes no images', param='messages')
        # By their heads alone: their pixels wait until everything else is known to fit.
        sizes = [source.size(self._images) for source in asked.images]
        plans = [plan_image(*size, self._images) for size in sizes]
        num_seen = sum(plan.num_tokens for plan in plans)
        if num_seen > self._rules.max_image_tokens:
            raise ApiError(
                f'messages: got images of {num_seen} tokens, wanted at most '
                f'{self._rules.max_image_tokens}',
                param='messages',
            )
        try:
            prompt = chat_prompt(
                self._engine.tokenizer, asked.conversation, sizes, self._engine.max_length
            )
        except PromptTooLong:
            raise self._too_long(None, asked.common.max_tokens) from None
        except ChatError as error:
            raise ApiError(f'messages: {error}', param='messages') from None
        num_tokens = len(prompt.ids) + num_seen - len(plans)
        limit = self._new_tokens(num_tokens, asked.common.max_tokens)
        make = k2_grammar if is_before_k3(self._engine.tokenizer) else chat_grammar
        try:
            grammar = make(asked, prompt.opened)
        except UnsupportedSchema as error:
            raise _unenforceable(error) from None
        if grammar is not None:
            self._check_grammar(grammar)
        request = Request(
            prompt_ids=prompt.ids,
            media=[asked.images[i].patches(self._images) for i in prompt.images],
            sampling=self._sampling(asked.common.sampling, limit, asked.logprobs),
            constraint=grammar,
        )
        return Prepared(request, prompt.opened, num_tokens - prompt.num_unbilled)

    def _check_grammar(self, grammar: str) -> None:
        if self._constrainer is None:
            raise ApiError(
                'This server cannot constrain answers: no response_format, no required tool_choice.'
            )
        fault = self._constrainer.fault(grammar)
        if fault is not None:
            raise _unenforceable(fault)

    def _encoded(self, text: str, wanted: int | None) -> list[int]:
        ids: list[int] = []
        for piece in self._engine.tokenizer.encode_pieces(text):
            ids += piece.tolist()
            if len(ids) > self._engine.max_length:
                raise self._too_long(None, wanted)
        return ids

    def completion(self, asked: CompletionRequest) -> Prepared:
        """A plain completion's request.

        Raises:
          ApiError: too long a prompt.
        """
        ids: Sequence[int]
        if isinstance(asked.prompt, str):
            ids = self._encoded(asked.prompt, asked.common.max_tokens)
        else:
            ids = asked.prompt
        limit = self._new_tokens(len(ids), asked.common.max_tokens or 16)
        sampling = self._sampling(asked.common.sampling, limit, asked.logprobs)
        return Prepared(Request(prompt_ids=ids, sampling=sampling), None, len(ids))
