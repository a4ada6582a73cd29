"""What answers look like on the wire, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from k3jax.data.chat_events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    ParsedMessage,
    Reasoning,
)

FinishReason = Literal['stop', 'length', 'tool_calls']


class Usage(NamedTuple):
    """Tokens of a request. prompt: without those that are not billed. cached: of the prompt."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """With the cached tokens both where Moonshot and where OpenAI has them."""
        cached = min(self.cached, self.prompt)
        body = {
            'prompt_tokens': self.prompt,
            'completion_tokens': self.completion,
            'total_tokens': self.prompt + self.completion,
            'cached_tokens': cached,
            'prompt_tokens_details': {'cached_tokens': cached},
        }
        if self.reasoning is not None:
            body['completion_tokens_details'] = {'reasoning_tokens': self.reasoning}
        return body


class TokenText(NamedTuple):
    """A token as its logprobs show it. top: (bytes, logprob) of the likeliest."""

    data: bytes
    logprob: float
    top: Sequence[tuple[bytes, float]]


def _token_entry(data: bytes, logprob: float) -> dict[str, Any]:
    text = data.decode('utf-8', 'replace')
    return {'token': text, 'logprob': max(logprob, -9999.0), 'bytes': list(data)}


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """The logprobs of some tokens of a chat completion."""
    return {
        'content': [
            _token_entry(data, logprob) | {'top_logprobs': [_token_entry(*pair) for pair in top]}
            for data, logprob, top in tokens
        ],
        'refusal': None,
    }


def completion_logprobs(tokens: Sequence[TokenText], offset: int) -> dict[str, Any]:
    """The logprobs of some tokens of a plain completion, whose text starts at `offset`."""
    texts = [token.data.decode('utf-8', 'replace') for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        'tokens': texts,
        'token_logprobs': [max(token.logprob, -9999.0) for token in tokens],
        'top_logprobs': [
            {data.decode('utf-8', 'replace'): max(p, -9999.0) for data, p in token.top}
            for token in tokens
        ],
        'text_offset': offsets,
    }


class Responder:
    """Bodies of one answer: same id and time in every chunk; calls get ids of their own."""

    def __init__(self, model: str, *, is_chat: bool):
        kind = 'chatcmpl' if is_chat else 'cmpl'
        self._base = {
            'id': f'{kind}-{secrets.token_hex(12)}',
            'created': int(time.time()),
            'model': model,
        }
        self._is_chat = is_chat
        self._call_ids: list[str] = []

    @property
    def id(self) -> str:
        return self._base['id']

    def _call_id(self, index: int, given: str | None) -> str:
        while len(self._call_ids) <= index:
            self._call_ids.append(given or f'call_{secrets.token_hex(12)}')
        return self._call_ids[index]

    def _body(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        return self._base | {'object': kind, 'choices': [{'index': 0} | choice]}

    def delta(self, event: Event) -> dict[str, Any] | None:
        """What an event adds to the message; None for one that adds nothing."""
        match event:
            case Reasoning(text):
                return {'reasoning_content': text}
            case Content(text):
                return {'content': text}
            case CallStart(index, name, given):
                function = {'name': name, 'arguments': ''}
                call = {'index': index, 'id': self._call_id(index, given), 'type': 'function'}
                return {'tool_calls': [call | {'function': function}]}
            case CallArguments(index, text):
                return {'tool_calls': [{'index': index, 'function': {'arguments': text}}]}
            case CallEnd():
                return None

    def chat_chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One event of a stream."""
        choice = {'delta': delta, 'logprobs': logprobs, 'finish_reason': finish_reason}
        return self._body('chat.completion.chunk', choice)

    def completion_chunk(
        self,
        text: str,
        *,
        finish_reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A plain completion, or one event of its stream: they look the same."""
        choice = {'text': text, 'logprobs': logprobs, 'finish_reason': finish_reason}
        return self._body('text_completion', choice)

    def chat_completion(
        self,
        message: ParsedMessage,
        *,
        finish_reason: FinishReason,
        usage: Usage,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A whole chat completion; calls that were cut off are left out."""
        shown: dict[str, Any] = {'role': 'assistant', 'content': message.content}
        if message.reasoning:
            shown['reasoning_content'] = message.reasoning
        calls = [
            {
                'id': self._call_id(index, call.id),
                'type': 'function',
                'function': {'name': call.name, 'arguments': call.arguments},
            }
            for index, call in enumerate(message.whole_calls)
        ]
        if calls:
            shown['tool_calls'] = calls
        choice = {'message': shown, 'logprobs': logprobs, 'finish_reason': finish_reason}
        return self._body('chat.completion', choice) | {'usage': usage.body}


def with_usage(chunk: dict[str, Any], usage: Usage, *, at_top: bool) -> dict[str, Any]:
    """A stream's last chunk with its usage, where Moonshot has it and, if `at_top`, OpenAI too."""
    choice = chunk['choices'][0] | {'usage': usage.body}
    return chunk | {'choices': [choice]} | ({'usage': usage.body} if at_top else {})


def models(name: str, max_length: int, created: int) -> dict[str, Any]:
    """The list of the one model there is."""
    model = {
        'id': name,
        'object': 'model',
        'created': created,
        'owned_by': 'k3jax',
        'context_length': max_length,
    }
    return {'object': 'list', 'data': [model]}
