"""How a conversation becomes K3's prompt: XTML in segments, and their token ids.

Each segment is encoded by itself. Only those of the format may hold special tokens, so that nothing
in a message, a name or a schema can forge the structure around it.

Source: the format that the release's chat template writes (specification, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from k3jax.data.arguments import split_arguments
from k3jax.data.conversation import (
    ChatError,
    Conversation,
    ImagePart,
    Message,
    Part,
    PromptTooLong,
    ToolCall,
)
from k3jax.data.images import image_prompt
from k3jax.data.tokenizer import Tokenizer

Channel = Literal['think', 'response']


class Segment(NamedTuple):
    """A piece of a prompt.

    Attributes:
      is_markup: special tokens in `text` mean themselves.
      image: the image that the one media pad in `text` stands for, by its index.
    """

    text: str
    is_markup: bool = False
    image: int | None = None


class Rendered(NamedTuple):
    """A prompt before it is encoded.

    Attributes:
      opened: the channel in which the answer begins.
      num_unbilled: tokens at the end that a usage report leaves out.
    """

    segments: list[Segment]
    opened: Channel
    num_unbilled: int


class Prompt(NamedTuple):
    """A prompt ready for a model.

    Attributes:
      ids: with one media pad for each image.
      images: index of the image of each pad, in order.
      opened, num_unbilled: as `Rendered` has them.
    """

    ids: list[int]
    images: tuple[int, ...]
    opened: Channel
    num_unbilled: int


OPEN, CLOSE, SEP, END = (
    Segment(f'<|{name}|>', is_markup=True) for name in ('open', 'close', 'sep', 'end_of_msg')
)

_STATIC_TOOLS = '# Tools\nHere are the available tools, described in JSONSchema.\n\n'
_DYNAMIC_TOOLS = (
    '## New Tools Available\n'
    'The system dynamically extends the toolset via lazy-loading.\n'
    'You have access to all existing and extended tools.\n'
    'Here are the specs for the extended tools.\n\n'
)
_EFFORT = (
    '`thinking_effort` guides on how much to think in your thinking channel (not including the '
    'response channel), supported values include `low`, `medium`, `high`, and `max`.\n'
    'Now the system is invoked with `thinking_effort={}`.'
)
_TOOL_CHOICE = {
    'required': 'You MUST call tools in the next message.',
    'none': 'You MUST NOT call any tools in the next message.',
}
_JSON_ONLY = (
    'Your response must be raw JSON data without markdown code blocks (```json) or any additional '
    'formatting.'
)


def _sorted_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(',', ':'))


def _json_block(value: Any) -> str:
    return f'```json\n{_sorted_json(value)}\n```'


def _opening(tag: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Segment]:
    yield from (OPEN, Segment(tag))
    for key, value in (attributes or {}).items():
        escaped = str(value).replace('&', '&amp;').replace('"', '&quot;')
        yield from (Segment(f' {key}'), Segment('="'), Segment(escaped), Segment('"'))
    yield SEP


def _closing(tag: str) -> Iterator[Segment]:
    yield from (CLOSE, Segment(tag), SEP)


def _message_end() -> Iterator[Segment]:
    yield from _closing('message')
    yield END


def _block(tag: str, text: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Segment]:
    yield from _opening(tag, attributes)
    yield Segment(text)
    yield from _closing(tag)


def _note(kind: str, text: str) -> Iterator[Segment]:
    """What the system says by itself."""
    yield from _opening('message', {'role': 'system', 'type': kind})
    yield Segment(text)
    yield from _message_end()


def _named(role: str, message: Message) -> dict[str, Any]:
    return {'role': role} | ({'name': message.name} if message.name else {})


def _content(parts: Sequence[Part], sizes: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    for part in parts:
        if isinstance(part, ImagePart):
            yield Segment(image_prompt(*sizes[part.index]), is_markup=True, image=part.index)
        else:
            yield Segment(part)


def _reasoning(message: Message) -> str:
    return message.reasoning if message.reasoning.strip() else ''


def _call(call: ToolCall, index: int) -> Iterator[Segment]:
    yield from _opening('call', {'tool': call.name, 'index': index})
    arguments = split_arguments(call.arguments)
    if arguments is None:
        yield from _block('json', call.arguments, {'type': 'object'})
    else:
        for key, kind, text in arguments:
            yield from _block('argument', text, {'key': key, 'type': kind})
    yield from _closing('call')


def _assistant(message: Message, thinking: bool) -> Iterator[Segment]:
    yield from _opening('message', _named('assistant', message))
    if thinking:
        yield from _block('think', _reasoning(message))
    yield from _block('response', message.text)
    if message.tool_calls:
        yield from _opening('tools')
        for index, call in enumerate(message.tool_calls, 1):
            yield from _call(call, index)
        yield from _closing('tools')
    yield from _message_end()


def _results(
    run: Sequence[Message], calls: Sequence[ToolCall], first: int, sizes: Sequence[tuple[int, int]]
) -> Iterator[Segment]:
    """Consecutive messages of tools, in the order of the calls where every one names its call."""
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            positions.setdefault(call.id, position)
    named: list[tuple[str | None, Message]]
    if all(message.tool_call_id in positions for message in run):
        ordered = sorted(run, key=lambda message: positions[message.tool_call_id])
        named = [(calls[positions[message.tool_call_id]].name, message) for message in ordered]
    else:
        named = [(message.name, message) for message in run]
    for index, (name, message) in enumerate(named, first):
        if name is None and index <= len(calls):
            name = calls[index - 1].name
        if name is None:
            raise ChatError(
                f'tool message {index} since the last assistant message: got tool_call_id '
                f'{message.tool_call_id!r}, which no call has, and no name; wanted either'
            )
        yield from _opening('message', {'role': 'tool', 'tool': name, 'index': index})
        yield from _content(message.content, sizes)
        yield from _message_end()


def _history(
    messages: Sequence[Message], thinking: bool, sizes: Sequence[tuple[int, int]]
) -> Iterator[Segment]:
    calls: tuple[ToolCall, ...] = ()
    num_results = position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        match message.role:
            case 'assistant':
                calls, num_results = message.tool_calls, 0
                yield from _assistant(message, thinking)
            case 'tool':
                run = [message]
                while position < len(messages) and messages[position].role == 'tool':
                    run.append(messages[position])
                    position += 1
                yield from _results(run, calls, num_results + 1, sizes)
                num_results += len(run)
            case 'system' if message.tools:
                text = _DYNAMIC_TOOLS + _json_block(list(message.tools))
                yield from _note('tool-declare', text)
            case _:
                yield from _opening('message', _named(message.role, message))
                yield from _content(message.content, sizes)
                yield from _message_end()


def _response_format(value: str | Mapping[str, Any]) -> str:
    name = value if isinstance(value, str) else 'json_schema'
    text = f'The system is invoked with `response_format={name}`.\n{_JSON_ONLY}'
    if isinstance(value, str):
        return text
    return f'{text}\nThe JSON data must match the following schema:\n{_json_block(value)}'


def _notes_after(conversation: Conversation) -> Iterator[Segment]:
    choice = conversation.tool_choice
    if choice is not None:
        text = f'The system is invoked with `tool_choice={choice}`.\n{_TOOL_CHOICE[choice]}'
        yield from _note('tool-choice', text)
    if conversation.response_format is not None:
        yield from _note('response-format', _response_format(conversation.response_format))


def _continued(message: Message, thinking: bool) -> tuple[list[Segment], Channel]:
    """The message that the answer goes on with, its last channel left open."""
    segments = list(_opening('message', _named('assistant', message)))
    reasoning = _reasoning(message) if thinking else ''
    if reasoning:
        segments += [*_opening('think'), Segment(reasoning)]
        if not message.text:
            return segments, 'think'
        segments += _closing('think')
    return [*segments, *_opening('response'), Segment(message.text)], 'response'


def render(conversation: Conversation, image_sizes: Sequence[tuple[int, int]] = ()) -> Rendered:
    """K3's prompt for a conversation.

    Args:
      image_sizes: (width, height) of each image's file, by its index.

    Raises:
      ChatError: a tool's message without a name, or arguments that are JSON and no object.
    """
    messages, partial = conversation.messages, conversation.partial
    segments: list[Segment] = []
    if conversation.tools:
        text = _STATIC_TOOLS + _json_block(list(conversation.tools))
        segments += _note('tool-declare', text)
    if conversation.thinking and conversation.effort is not None:
        segments += _note('thinking-effort', _EFFORT.format(conversation.effort))
    history = messages if partial is None else messages[:-1]
    segments += _history(history, conversation.thinking, image_sizes)
    segments += _notes_after(conversation)
    if partial is not None:
        tail, opened = _continued(partial, conversation.thinking)
        return Rendered(segments + tail, opened, 0)
    opened = 'think' if conversation.thinking else 'response'
    segments += [*_opening('message', {'role': 'assistant'}), *_opening(opened)]
    return Rendered(segments, opened, 3)


def encode(tokenizer: Tokenizer, rendered: Rendered, max_ids: int | None = None) -> Prompt:
    """Token ids of a prompt, segment by segment.

    Raises:
      PromptTooLong: more than `max_ids`; not all of the prompt has been encoded then.
    """
    ids: list[int] = []
    images: list[int] = []
    for segment in rendered.segments:
        if segment.is_markup:
            ids += tokenizer.encode(segment.text, allow_special=True)
        elif segment.text:
            for piece in tokenizer.encode_pieces(segment.text):
                ids += piece.tolist()
                check_length(len(ids), max_ids)
        if segment.image is not None:
            images.append(segment.image)
    check_length(len(ids), max_ids)
    return Prompt(ids, tuple(images), rendered.opened, rendered.num_unbilled)


def check_length(num_ids: int, max_ids: int | None) -> None:
    """Raises PromptTooLong for more than `max_ids`."""
    if max_ids is not None and num_ids > max_ids:
        raise PromptTooLong(f'got more than {max_ids} tokens')
