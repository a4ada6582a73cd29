"""Which part of an answer of a model before K3 is thought, response or call.

Source: specification, section 6.
"""

from __future__ import annotations

import re
from typing import Literal

from k3jax.data.chat_events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

MARKERS = {
    '<think>': 'think',
    '</think>': 'think_end',
    '<|tool_calls_section_begin|>': 'section',
    '<|tool_calls_section_end|>': 'section_end',
    '<|tool_call_begin|>': 'call',
    '<|tool_call_argument_begin|>': 'arguments',
    '<|tool_call_end|>': 'call_end',
    '<|im_end|>': 'end',
}
State = Literal['think', 'response', 'tools', 'call', 'arguments', 'dropped', 'done']
_CALL_ID = re.compile(r'\s*(?:functions\.)?(?P<name>[^\s:]*[^\s:\d][^\s:]*)(?::\d+)?\s*')


class K2Machine:
    """Events of an answer as its markers and text arrive; see `ChatMachine`.

    Attributes:
      state: where the answer is.
      warnings: what was not as the format has it.
      was_cut: the answer ended inside a call, which stays without a `CallEnd`.
    """

    def __init__(self, opened: Literal['think', 'response']):
        self.state: State = opened
        self.warnings: list[str] = []
        self.was_cut = False
        self._index = -1
        self._call_id: list[str] = []
        self._is_empty = True

    @property
    def is_content(self) -> bool:
        """Whether text that comes next is content for sure."""
        return self.state == 'response'

    def text(self, text: str) -> list[Event]:
        """Takes text that holds no marker."""
        if not text:
            return []
        match self.state:
            case 'think':
                return [Reasoning(text)]
            case 'response':
                return [Content(text)]
            case 'call':
                self._call_id.append(text)
            case 'arguments':
                self._is_empty = False
                return [CallArguments(self._index, text)]
            case 'tools' if text.strip():
                self._warn('text between calls was dropped')
        return []

    def marker(self, marker: str) -> list[Event]:
        """Takes a marker."""
        match marker, self.state:
            case _, 'done':
                return []
            case 'end', _:
                return self._end()
            case ('think', 'response') | ('think', 'think'):
                self.state = 'think'
            case 'think_end', 'think':
                self.state = 'response'
            case 'section', 'think' | 'response':
                self.state = 'tools'
            case 'call', _:
                events = self._close_call()
                self.state, self._call_id = 'call', []
                return events
            case 'arguments', 'call':
                return self._open_arguments()
            case 'call_end', _:
                return self._close_call()
            case 'section_end', _:
                events = self._close_call()
                self.state = 'response'
                return events
            case _:
                self._warn(f'{marker} in {self.state}')
        return []

    def finish(self) -> list[Event]:
        """Takes the end of an answer that was cut off, or whose last marker was the stop."""
        return [] if self.state == 'done' else self._end()

    def _warn(self, warning: str) -> None:
        if len(self.warnings) < 100:
            self.warnings.append(warning)

    def _open_arguments(self) -> list[Event]:
        given = ''.join(self._call_id)
        found = _CALL_ID.fullmatch(given)
        if found is None:
            self._warn('a call without a name was dropped')
            self.state = 'dropped'
            return []
        self.state, self._is_empty = 'arguments', True
        self._index += 1
        return [CallStart(self._index, found['name'], given.strip())]

    def _close_call(self) -> list[Event]:
        is_open = self.state == 'arguments'
        if self.state in ('call', 'arguments', 'dropped'):
            self.state = 'tools'
        if not is_open:
            return []
        empty: list[Event] = [CallArguments(self._index, '{}')] if self._is_empty else []
        return [*empty, CallEnd(self._index)]

    def _end(self) -> list[Event]:
        self.was_cut = self.state in ('call', 'arguments')
        self.state = 'done'
        return []
