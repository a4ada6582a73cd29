"""What a request for a plain completion asks, if it is one."""

from __future__ import annotations

import dataclasses
from typing import Any

from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import Fields, wrong
from k3jax.serve.api.rules import Rules
from k3jax.serve.api.sampling import SAMPLING_FIELDS, Common, read_common

_FIELDS = (*SAMPLING_FIELDS, 'prompt', 'echo', 'best_of', 'suffix')
_MAX_LOGPROBS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A request to go on with a text.

    Attributes:
      prompt: text, which cannot hold special tokens, or token ids, which can.
      echo: the answer starts with the prompt.
      logprobs: how many likeliest tokens to report; None: no logprobs.
    """

    common: Common
    prompt: str | tuple[int, ...]
    echo: bool
    logprobs: int | None


def read_completion_request(
    body: dict[str, Any], rules: Rules, vocab_size: int
) -> CompletionRequest:
    """The request that a body is.

    Raises:
      ApiError: something in it is not as it should be; names the place.
    """
    fields = Fields(body, '')
    fields.only(_FIELDS)
    common = read_common(fields, rules)
    prompt = fields.get('prompt')
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        for position, token_id in enumerate(prompt):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                wanted = f'a token id from 0 to {vocab_size - 1}'
                raise wrong(f'prompt[{position}]', token_id, wanted)
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise wrong('prompt', prompt, 'one text, or the token ids of one, that is not empty')
    fields.integer('best_of', 1, 1)
    if fields.string('suffix'):
        raise ApiError('suffix: not taken by this server', param='suffix')
    return CompletionRequest(
        common=common,
        prompt=prompt,
        echo=fields.boolean('echo') or False,
        logprobs=fields.integer('logprobs', 0, _MAX_LOGPROBS),
    )
