"""Whether the messages of a request are a conversation, and which."""

from __future__ import annotations

import json
from typing import Any

from k3jax.data.arguments import split_arguments
from k3jax.data.conversation import ChatError, ImagePart, Message, Part, ToolCall
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import Fields, wrong
from k3jax.serve.api.media import ImageSource, image_source
from k3jax.serve.api.tools import tools_at

ROLES = ('system', 'user', 'assistant', 'tool')
# `refusal` and what follows it: parts of an answer by OpenAI's client, sent back as they came.
_KNOWN = {
    'system': ('role', 'content', 'name', 'tools'),
    'user': ('role', 'content', 'name'),
    'assistant': (
        *('role', 'content', 'name', 'reasoning_content', 'reasoning', 'tool_calls', 'partial'),
        *('refusal', 'annotations', 'audio', 'function_call'),
    ),
    'tool': ('role', 'content', 'name', 'tool_call_id'),
}


class MessageReader:
    """Reads messages one after the other.

    Attributes:
      images: those of the messages so far, in order.
    """

    def __init__(self) -> None:
        self.images: list[ImageSource] = []

    def read(self, value: Any, param: str, *, is_last: bool) -> Message:
        """One message.

        Raises:
          ApiError: something in it is not as it should be; names the place.
        """
        fields = Fields(value, param)
        role = fields.get('role')
        if role == 'developer':
            role = 'system'  # what OpenAI's newer models call it
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(fields.path('role'), fields.get('role'), f'one of {", ".join(ROLES)}')
        if 'tools' in value and role != 'system':
            raise ApiError(
                f'{fields.path("tools")}: only a system message may have tools',
                param=fields.path('tools'),
            )
        fields.only(_KNOWN[role])
        name = fields.string('name') or None
        if role == 'assistant':
            return self._assistant(fields, name, is_last)
        if role == 'system' and fields.get('tools') is not None:
            if fields.get('content') not in (None, '', []):
                raise wrong(fields.path('content'), fields.get('content'), 'none beside tools')
            tools = tools_at(fields.get('tools'), fields.path('tools'))
            return Message(role='system', name=name, tools=tools)
        if fields.get('content') is None:
            raise wrong(fields.path('content'), None, 'a string or an array of parts')
        content = self._content(fields, takes_images=True)
        call_id = fields.string('tool_call_id') if role == 'tool' else None
        if role == 'tool' and not call_id:
            raise wrong(fields.path('tool_call_id'), call_id, 'the id of the call')
        return Message(role=role, content=content, name=name, tool_call_id=call_id)

    def _assistant(self, fields: Fields, name: str | None, is_last: bool) -> Message:
        if fields.get('function_call') is not None or fields.get('audio') is not None:
            raise ApiError(f'{fields.path("function_call")}: use tool_calls instead')
        partial = fields.boolean('partial') or False
        if partial and not is_last:
            raise ApiError(
                f'{fields.path("partial")}: only the last message may be partial',
                param=fields.path('partial'),
            )
        calls = self._calls(fields)
        if partial and calls:
            raise ApiError(
                f'{fields.path("tool_calls")}: a partial message has none',
                param=fields.path('tool_calls'),
            )
        reasoning = fields.string('reasoning_content')
        if reasoning is None:
            reasoning = fields.string('reasoning')
        return Message(
            role='assistant',
            content=self._content(fields, takes_images=False),
            name=name,
            reasoning=reasoning or '',
            tool_calls=calls,
            partial=partial,
        )

    def _calls(self, fields: Fields) -> tuple[ToolCall, ...]:
        values = fields.array('tool_calls') or []
        param = fields.path('tool_calls')
        return tuple(_tool_call(value, f'{param}[{i}]') for i, value in enumerate(values))

    def _content(self, fields: Fields, *, takes_images: bool) -> tuple[Part, ...]:
        value, param = fields.get('content'), fields.path('content')
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            raise wrong(param, value, 'a string or an array of parts')
        return tuple(self._part(v, f'{param}[{i}]', takes_images) for i, v in enumerate(value))

    def _part(self, value: Any, param: str, takes_images: bool) -> Part:
        fields = Fields(value, param)
        kind = fields.get('type')
        if kind == 'text':
            fields.only(('type', 'text'))
            text = fields.string('text')
            if text is None:
                raise wrong(fields.path('text'), None, 'a string')
            return text
        if kind != 'image_url' or not takes_images:
            raise wrong(fields.path('type'), kind, 'text or image_url' if takes_images else 'text')
        fields.only(('type', 'image_url'))
        where, url = fields.path('image_url'), fields.get('image_url')
        if isinstance(url, dict):
            inner = Fields(url, where)
            inner.only(('url', 'detail'))
            where, url = inner.path('url'), inner.get('url')
        if not isinstance(url, str):
            raise wrong(where, url, 'a string')
        self.images.append(image_source(url, where))
        return ImagePart(len(self.images) - 1)


def _tool_call(value: Any, param: str) -> ToolCall:
    fields = Fields(value, param)
    fields.only(('id', 'type', 'function', 'index'))
    fields.choice('type', ('function',))
    if fields.object('function') is None:
        raise wrong(fields.path('function'), None, 'an object')
    function = Fields(fields.get('function'), fields.path('function'))
    function.only(('name', 'arguments'))
    name, arguments = function.string('name'), function.get('arguments')
    if not name:
        raise wrong(function.path('name'), name, "a function's name")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is not None and not isinstance(arguments, str):
        raise wrong(function.path('arguments'), arguments, 'JSON text of an object')
    try:
        split_arguments(arguments or '')
    except ChatError as error:
        where = function.path('arguments')
        raise ApiError(f'{where}: {error}', param=where) from None
    return ToolCall(name=name, arguments=arguments or '', id=fields.string('id'))
