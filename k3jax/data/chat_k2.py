"""How a conversation becomes the prompt of the models before K3 (K2, K2.5, Kimi Linear).

Source: the public chat template of K2 and what is known of its successors (specification, section
6). UNCONFIRMED: that calls are counted from 0 over the whole conversation, and what a prompt looks
like in which a model that can think is told not to; here it is K2's, without a thought.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from k3jax.data.chat import Rendered, Segment
from k3jax.data.conversation import Conversation, ImagePart, Message

DEFAULT_SYSTEM = 'You are Kimi, an AI assistant created by Moonshot AI.'
_IMAGE = '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>'
_SPEAKERS = {'user': 'im_user', 'assistant': 'im_assistant'}


def _mark(name: str) -> Segment:
    return Segment(f'<|{name}|>', is_markup=True)


def _tag(text: str) -> Segment:
    return Segment(text, is_markup=True)


def _head(role: str, name: str) -> Iterator[Segment]:
    yield from (_mark(_SPEAKERS.get(role, 'im_system')), Segment(name), _mark('im_middle'))


def _turn(role: str, name: str, text: str) -> Iterator[Segment]:
    yield from (*_head(role, name), Segment(text), _mark('im_end'))


def _content(message: Message) -> Iterator[Segment]:
    for part in message.content:
        if isinstance(part, ImagePart):
            yield Segment(_IMAGE, is_markup=True, image=part.index)
        else:
            yield Segment(part)


class _CallIds:
    """functions.NAME:IDX for the calls of a conversation, whatever their clients call them."""

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[str, str] = {}

    def new(self, name: str, given: str | None) -> str:
        made = f'functions.{name}:{self._count}'
        self._count += 1
        if given is not None:
            self._known[given] = made
        return made

    def of(self, given: str | None) -> str:
        return self._known.get(given or '', given or '')


def _assistant(message: Message, thought: str | None, ids: _CallIds) -> Iterator[Segment]:
    yield from _head('assistant', message.name or 'assistant')
    if thought is not None:
        yield from (_tag('<think>'), Segment(thought), _tag('</think>'))
    yield Segment(message.text)
    if message.tool_calls:
        yield _mark('tool_calls_section_begin')
        for call in message.tool_calls:
            yield from (_mark('tool_call_begin'), Segment(ids.new(call.name, call.id)))
            yield from (_mark('tool_call_argument_begin'), Segment(call.arguments or '{}'))
            yield _mark('tool_call_end')
        yield _mark('tool_calls_section_end')
    yield _mark('im_end')


def _first_kept_thought(messages: Sequence[Message]) -> int:
    """The message from which thoughts are kept: after the last answer that made no call."""
    answers = [
        position
        for position, message in enumerate(messages)
        if message.role == 'assistant' and not message.tool_calls
    ]
    return answers[-1] + 1 if answers else 0


def render(conversation: Conversation, image_sizes: Sequence[tuple[int, int]] = ()) -> Rendered:
    """K2's prompt for a conversation; effort, tool choice and response format have no words in it.

    Args:
      image_sizes: not part of this prompt.
    """
    del image_sizes
    partial = conversation.partial
    messages = conversation.messages if partial is None else conversation.messages[:-1]
    segments: list[Segment] = []
    if conversation.tools:
        declared = json.dumps(conversation.tools, ensure_ascii=False, separators=(',', ':'))
        segments += _turn('system', 'tool_declare', declared)
    if not messages or messages[0].role != 'system':
        segments += _turn('system', 'system', DEFAULT_SYSTEM)
    kept, ids = _first_kept_thought(messages), _CallIds()
    for position, message in enumerate(messages):
        if message.role == 'assistant':
            reasoning = message.reasoning if position >= kept else ''
            segments += _assistant(message, reasoning if conversation.thinking else None, ids)
            continue
        if message.tools:
            declared = json.dumps(message.tools, ensure_ascii=False, separators=(',', ':'))
            segments += _turn('system', 'tool_declare', declared)
            continue
        segments += _head(message.role, message.name or message.role)
        if message.role == 'tool':
            segments.append(Segment(f'## Return of {ids.of(message.tool_call_id)}\n'))
        segments += [*_content(message), _mark('im_end')]
    segments += _head('assistant', 'assistant')
    if not conversation.thinking:
        return Rendered([*segments, Segment(partial.text if partial else '')], 'response', 0)
    segments.append(_tag('<think>'))
    if partial is None or not (partial.reasoning or partial.text):
        return Rendered(segments, 'think', 0)
    segments.append(Segment(partial.reasoning))
    if not partial.text:
        return Rendered(segments, 'think', 0)
    return Rendered([*segments, _tag('</think>'), Segment(partial.text)], 'response', 0)
