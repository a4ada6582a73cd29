"""What an answer is while it arrives, and the message that its pieces make up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class Content(NamedTuple):
    """More of what the model says."""

    text: str


class CallStart(NamedTuple):
    """A call begins; `index` counts the answer's calls from 0. id: if the model gave it one."""

    index: int
    name: str
    id: str | None = None


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(NamedTuple):
    """The call is whole."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclasses.dataclass
class Call:
    """A call of an answer. is_whole: all of it has come."""

    name: str
    arguments: str = ''
    is_whole: bool = False
    id: str | None = None


@dataclasses.dataclass
class ParsedMessage:
    """An answer put together from its events."""

    reasoning: str = ''
    content: str = ''
    calls: list[Call] = dataclasses.field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Appends what `events` bring, which are those of one answer in order."""
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallStart(_, name, call_id):
                    self.calls.append(Call(name, id=call_id))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].is_whole = True

    @property
    def whole_calls(self) -> list[Call]:
        """Without one that was cut off."""
        return [call for call in self.calls if call.is_whole]
