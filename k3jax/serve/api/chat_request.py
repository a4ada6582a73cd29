"""What a request for a chat completion asks, if it is one."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from k3jax.data.conversation import Conversation
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import Fields, wrong
from k3jax.serve.api.media import ImageSource, check_images
from k3jax.serve.api.messages import MessageReader
from k3jax.serve.api.rules import Rules
from k3jax.serve.api.sampling import MAX_LOGPROBS, SAMPLING_FIELDS, Common, read_common
from k3jax.serve.api.tools import ToolChoice, check_unique, tool_choice_at, tools_at

EFFORTS = ('low', 'high', 'max')
_FIELDS = (
    *SAMPLING_FIELDS,
    *('messages', 'tools', 'tool_choice', 'parallel_tool_calls', 'response_format'),
    *('reasoning_effort', 'thinking', 'chat_template_kwargs', 'max_completion_tokens'),
    *('top_logprobs',),
)


class JsonFormat(NamedTuple):
    """schema: that the response must follow, or None for any object. strict: it is enforced."""

    schema: dict[str, Any] | None
    strict: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for a chat completion.

    Attributes:
      images: of the conversation's parts, by their index.
      json_format: None for text.
      logprobs: how many likeliest tokens to report; None: no logprobs.
    """

    common: Common
    conversation: Conversation
    images: tuple[ImageSource, ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    json_format: JsonFormat | None
    logprobs: int | None


def _json_format(fields: Fields) -> JsonFormat | None:
    param = 'response_format'
    if fields.get(param) is None:
        return None
    outer = Fields(fields.get(param), param)
    kind = outer.choice('type', ('text', 'json_object', 'json_schema'))
    if kind is None:
        raise wrong(outer.path('type'), None, 'one of text, json_object, json_schema')
    if kind != 'json_schema':
        outer.only(('type',))
        return None if kind == 'text' else JsonFormat(None)
    outer.only(('type', 'json_schema'))
    inner = Fields(outer.get('json_schema'), outer.path('json_schema'))
    inner.only(('name', 'schema', 'strict', 'description'))
    if not inner.string('name'):
        raise wrong(inner.path('name'), inner.get('name'), 'a name')
    schema, strict = inner.object('schema'), inner.boolean('strict')
    if schema is None:
        raise wrong(inner.path('schema'), None, 'a JSON schema')
    return JsonFormat(schema, strict is not False)


def _thinking(fields: Fields, rules: Rules) -> tuple[bool, str | None]:
    """Whether the model thinks, and the effort.

    `thinking` goes before reasoning_effort, and that before chat_template_kwargs.
    """
    thinking = Fields(fields.object('thinking') or {}, 'thinking')
    template = Fields(fields.object('chat_template_kwargs') or {}, 'chat_template_kwargs')
    thinking.only(('type', 'keep', 'effort', 'budget_tokens'))
    template.only(('thinking', 'preserve_thinking', 'thinking_effort', 'enable_thinking'))
    template.boolean('preserve_thinking')  # K3 keeps all thoughts anyway
    thinking.choice('keep', ('all',))
    switches = [
        {'enabled': True, 'disabled': False}.get(
            thinking.choice('type', ('enabled', 'disabled')) or ''
        )
    ]
    efforts = []
    named = [(thinking, 'effort'), (fields, 'reasoning_effort'), (template, 'thinking_effort')]
    for place, name in named:
        value = place.string(name)
        if value == 'none':
            switches.append(False)
        elif value in EFFORTS:
            efforts.append(value)
        elif value is not None and not rules.ignores_unknown:
            raise wrong(place.path(name), value, f'one of none, {", ".join(EFFORTS)}')
    switches += [template.boolean('thinking'), template.boolean('enable_thinking')]
    is_on = next((switch for switch in switches if switch is not None), True)
    return is_on, next(iter(efforts), rules.default_effort)


def _logprobs(fields: Fields) -> int | None:
    top = fields.integer('top_logprobs', 0, MAX_LOGPROBS)
    if fields.boolean('logprobs'):
        return top or 0
    if top is not None:
        raise ApiError('top_logprobs: only with logprobs', param='top_logprobs')
    return None


def read_chat_request(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """The request that a body is.

    Images are not read yet, and what the conversation's tokens are is not known.

    Raises:
      ApiError: something in it is not as it should be; names the place.
    """
    fields = Fields(body, '')
    fields.only(_FIELDS)
    common = read_common(fields, rules)
    limit = fields.integer('max_completion_tokens', 1, rules.max_completion_tokens)
    common = common._replace(max_tokens=common.max_tokens if limit is None else limit)
    values = fields.array('messages')
    if not values:
        raise wrong('messages', values, 'an array of at least one message')
    reader = MessageReader()
    messages = tuple(
        reader.read(value, f'messages[{i}]', is_last=i == len(values) - 1)
        for i, value in enumerate(values)
    )
    check_images(reader.images, rules)
    tools = () if fields.get('tools') is None else tools_at(fields.get('tools'), 'tools')
    thinking, effort = _thinking(fields, rules)
    json_format = _json_format(fields)
    conversation = Conversation(
        messages=messages, tools=tools, thinking=thinking, effort=effort if thinking else None
    )
    check_unique(conversation.all_tools)
    choice = tool_choice_at(fields.get('tool_choice'), conversation.all_tools, rules)
    if json_format is not None and conversation.partial is not None:
        raise ApiError(
            'response_format: not together with a partial message', param='response_format'
        )
    shown = json_format and json_format.schema
    if json_format is not None and shown is None:
        shown = 'json_object'
    conversation = dataclasses.replace(
        conversation,
        tool_choice=None if choice.mode == 'auto' else choice.mode,
        response_format=shown,
    )
    parallel = fields.boolean('parallel_tool_calls')
    return ChatRequest(
        common=common,
        conversation=conversation,
        images=tuple(reader.images),
        tool_choice=choice,
        parallel_tool_calls=parallel is not False,
        json_format=json_format,
        logprobs=_logprobs(fields),
    )
