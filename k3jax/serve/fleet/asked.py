"""What a router must know of a request: whose conversation, how long, and how to repeat it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from k3jax.serve.api.fields import parse_body

CONVERSATION_HEADER = 'x-conversation'
# The router has no tokenizer. Of English a token has some 4.5 bytes, of code and Chinese fewer.
BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 1024  # of an image or video, about
_BEGINNING = 256  # characters of a plain prompt that name its conversation; a quarter as many ids


class Asked(NamedTuple):
    """A request to a server.

    Attributes:
      key: of its conversation: equal from turn to turn.
      num_tokens: of the prompt, about.
      stream: the answer is to come in events.
      headers: that go on to the server.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    data: bytes = b''
    key: str = ''
    num_tokens: int = 0
    stream: bool = False


def _beginning(body: Mapping[str, Any]) -> Any:
    """What stays as it is from turn to turn: up to the first message of the user's."""
    messages, prompt = body.get('messages'), body.get('prompt')
    if isinstance(messages, list):
        roles = [one.get('role') if isinstance(one, dict) else None for one in messages]
        return messages[: roles.index('user') + 1] if 'user' in roles else messages
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return prompt[: _BEGINNING // 4]
    return prompt[:_BEGINNING] if isinstance(prompt, str) else prompt


def conversation_key(header: str | None, body: Mapping[str, Any]) -> str:
    """What a request's conversation is called.

    That is what the client says: the header, or else `prompt_cache_key` or `user` of the body. Of
    one that says nothing it is a hash of model, system message and first message of the user's (of
    a plain prompt: of its beginning; one that was shorter than that has another key when it grows).
    """
    for given in (header, body.get('prompt_cache_key'), body.get('user')):
        if isinstance(given, str) and given:
            break
    else:
        given = json.dumps([body.get('model'), _beginning(body)], sort_keys=True)
    return hashlib.sha256(given.encode('utf-8', 'replace')).hexdigest()


def num_prompt_tokens(body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt has: by its bytes, and media by their number."""
    waiting = [body.get(name) for name in ('messages', 'tools', 'prompt')]
    num_bytes = num_tokens = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            num_bytes += len(value.encode('utf-8', 'replace'))
        elif isinstance(value, dict):
            if value.get('type') in ('image_url', 'video_url'):
                num_tokens += MEDIA_TOKENS
            else:
                waiting += value.values()
                num_bytes += sum(map(len, value))
        elif isinstance(value, list):
            if value and isinstance(value[0], int):
                num_tokens += len(value)
            else:
                waiting += value
    return num_tokens + num_bytes // BYTES_PER_TOKEN


def _repeatable(data: bytes, body: Mapping[str, Any]) -> bytes:
    """The body, with a seed where the answer could not be made again without one."""
    if not body or body.get('seed') is not None or body.get('temperature') in (0, 0.0):
        return data
    # Behind the last field, where it also goes before a null; nothing else of the body changes.
    return data.rstrip()[:-1] + b',"seed":%d}' % random.getrandbits(31)


def read_asked(path: str, headers: Mapping[str, str], data: bytes, given: str | None) -> Asked:
    """A request for a completion.

    What a server judges better, such as the names of fields, is left to it.

    Args:
      given: what the client calls its conversation.

    Raises:
      ApiError: the body is no JSON object.
    """
    body = parse_body(data)
    return Asked(
        method='POST',
        path=path,
        headers=headers,
        data=_repeatable(data, body),
        key=conversation_key(given, body),
        num_tokens=num_prompt_tokens(body),
        stream=body.get('stream') is True,
    )
