"""What a conversation is, before it becomes a prompt: messages, tools, and how to answer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Role = Literal['system', 'user', 'assistant', 'tool']
Effort = Literal['low', 'high', 'max']


class ChatError(ValueError):
    """A conversation that has no prompt; the message says which part of it and why."""


class PromptTooLong(ChatError):
    """A prompt with more tokens than it may have."""


@dataclasses.dataclass(frozen=True)
class ImagePart:
    """An image at this place of a message; `index` counts the conversation's images from 0."""

    index: int


Part = str | ImagePart


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model made.

    Attributes:
      arguments: JSON text of an object, as the model gave it; '' means no arguments.
      id: by which a tool's message names the call.
    """

    name: str
    arguments: str = ''
    id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One turn.

    Attributes:
      content: texts and images in order.
      name: of the speaker; of the tool in a tool's message.
      reasoning: what the assistant thought.
      tool_call_id: the call that a tool's message answers.
      tools: JSON objects that a system message adds to the tools; then its content is left out.
      partial: the assistant's last message goes on where this one stops.
    """

    role: Role
    content: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str = ''
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    partial: bool = False

    @property
    def text(self) -> str:
        """The content without its images."""
        return ''.join(part for part in self.content if isinstance(part, str))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that a prompt is made of.

    Attributes:
      tools: JSON objects {'type': 'function', 'function': {...}}.
      thinking: whether the assistant thinks before it responds, in every turn.
      effort: None leaves the note on it out.
      tool_choice: None leaves it to the model.
      response_format: None for text, 'json_object', or a JSON schema.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = True
    effort: Effort | None = None
    tool_choice: Literal['required', 'none'] | None = None
    response_format: Literal['json_object'] | dict[str, Any] | None = None

    @property
    def partial(self) -> Message | None:
        """The message that the answer goes on with, if there is one."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == 'assistant' and last.partial else None

    @property
    def all_tools(self) -> tuple[dict[str, Any], ...]:
        """Those of the conversation and those that its messages add."""
        return self.tools + tuple(tool for message in self.messages for tool in message.tools)
