"""Which part of an answer in XTML is thought, response or call: a machine fed markers and text.

It holds no opinion on where markers come from: `chat_stream` reads them from token ids or text.
What the format does not allow is taken for what the model most likely meant, with a warning.

Source: specification, section 4.6.
"""

from __future__ import annotations

import re
from typing import Literal

from k3jax.data.arguments import is_json, json_string
from k3jax.data.chat_events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

Marker = Literal['open', 'close', 'sep', 'end']
State = Literal['think', 'between', 'response', 'tools', 'call', 'argument', 'json', 'done']

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


def _attributes(text: str) -> dict[str, str]:
    return {
        key: value.replace('&quot;', '"').replace('&amp;', '&')
        for key, value in _ATTRIBUTE.findall(text)
    }


class ChatMachine:
    """Events of an answer as its markers and text arrive.

    The JSON text of a call's arguments is written as they come: of a string every piece, of another
    value the whole. A key that comes twice is written twice, and whoever reads JSON takes the last.

    Attributes:
      state: where the answer is.
      warnings: what was not as the format has it.
      was_cut: the answer ended inside a call, which stays without a `CallEnd`.
    """

    def __init__(
        self, opened: Literal['think', 'response'], *, force_nonempty_content: bool = False
    ):
        """Starts in the channel that the prompt opened.

        Args:
          force_nonempty_content: a message that closes without having left its first thought was
            the response, and is given as content too.
        """
        self.state: State = opened
        self.warnings: list[str] = []
        self.was_cut = False
        self._force_nonempty_content = force_nonempty_content
        # The first thought, which may turn out to have been the response.
        self._thought: list[str] | None = [] if opened == 'think' else None
        self._tag: tuple[Marker, list[str]] | None = None
        self._space = ''  # between channels; content only if text follows
        self._index = -1  # of the call
        self._is_dropped = False  # the call has no name
        self._num_arguments = 0
        self._has_json, self._is_json_empty = False, True
        self._key: str | None = None  # None: the argument is dropped
        self._type = 'string'
        self._value: list[str] = []

    @property
    def is_content(self) -> bool:
        """Whether text that comes next is content for sure."""
        return self.state == 'response' and self._tag is None

    def text(self, text: str) -> list[Event]:
        """Takes text that holds no marker."""
        if not text or self.state == 'done':
            return []
        if self._tag is not None:
            self._tag[1].append(text)
            return []
        match self.state:
            case 'think':
                if self._thought is not None:
                    self._thought.append(text)
                return [Reasoning(text)]
            case 'response':
                return [Content(text)]
            case 'between':
                return self._between(text)
            case 'argument':
                return self._argument_text(text)
            case 'json' if not self._is_dropped and self._key is not None:
                self._is_json_empty = False
                return [CallArguments(self._index, text)]
        if text.strip():
            self._warn(f'text between tags of calls was dropped ({len(text)} characters)')
        return []

    def marker(self, marker: Marker) -> list[Event]:
        """Takes a marker."""
        if self.state == 'done':
            return []
        if marker == 'end':
            return self._end(whole=True)
        if marker == 'sep':
            if self._tag is None:
                self._warn('a separator outside of a tag')
                return []
            (kind, pieces), self._tag = self._tag, None
            return self._finish_tag(kind, ''.join(pieces))
        if self._tag is not None:
            self._warn('a tag without its separator')
        self._tag = (marker, [])
        return []

    def finish(self) -> list[Event]:
        """Takes the end of an answer that was cut off, or whose last marker was the stop."""
        return [] if self.state == 'done' else self._end(whole=False)

    def _warn(self, warning: str) -> None:
        if len(self.warnings) < 100:  # a model gone astray must not fill the memory
            self.warnings.append(warning)

    def _between(self, text: str) -> list[Event]:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [Content(shown)] if shown else []

    def _finish_tag(self, kind: Marker, text: str) -> list[Event]:
        words = text.split(None, 1)
        if not words:
            self._warn('a tag without a name')
            return []
        name, attributes = words[0], _attributes(words[1] if len(words) > 1 else '')
        if kind == 'close' and name == 'message':
            return self._close_message()
        match self.state:
            case 'think' | 'between' | 'response':
                return self._channel_tag(kind, name)
            case 'tools':
                return self._tools_tag(kind, name, attributes)
            case 'call':
                return self._call_tag(kind, name, attributes)
        return self._value_tag(kind, name, attributes)

    def _close_message(self) -> list[Event]:
        forced = self.state == 'think' and self._force_nonempty_content
        events = self._answer_was_thought() if forced else []
        return events + self._end(whole=True)

    def _answer_was_thought(self) -> list[Event]:
        thought, self._thought = ''.join(self._thought or ()), None
        return [Content(thought)] if thought else []

    def _to(self, state: State) -> None:
        if self.state == 'think':
            self._thought = None
        self._space = ''
        self.state = state

    def _channel_tag(self, kind: Marker, name: str) -> list[Event]:
        events: list[Event] = []
        match kind, name, self.state:
            case ('open', 'response' | 'tools', _):
                self._to(name)
            case ('open', 'think', 'between'):
                self._to('think')
            case ('close', 'think', 'think') | ('close', 'response', 'response'):
                self._to('between')
            case ('close', 'response', 'think') if self._thought is not None:
                self._warn('the response came without a thought before it')
                events = self._answer_was_thought()
                self._to('between')
            case _:
                self._warn(f'{kind} {name[:40]} in {self.state}')
        return events

    def _tools_tag(self, kind: Marker, name: str, attributes: dict[str, str]) -> list[Event]:
        match kind, name:
            case 'open', 'call':
                return self._open_call(attributes)
            case 'close', 'tools':
                self._to('between')
            case 'open', 'response':
                self._to('response')
            case _:
                self._warn(f'{kind} {name[:40]} in {self.state}')
        return []

    def _open_call(self, attributes: dict[str, str]) -> list[Event]:
        self._to('call')
        self._num_arguments, self._has_json, self._is_json_empty = 0, False, True
        tool = attributes.get('tool')
        self._is_dropped = not tool
        if not tool:
            self._warn('a call without a tool was dropped')
            return []
        self._index += 1
        return [CallStart(self._index, tool)]

    def _call_tag(self, kind: Marker, name: str, attributes: dict[str, str]) -> list[Event]:
        match kind, name:
            case 'open', 'argument':
                return self._open_argument(attributes)
            case 'open', 'json':
                is_first = not self._num_arguments and not self._has_json
                if not is_first:
                    self._warn('a block of JSON beside arguments was dropped')
                self._key = '' if is_first else None
                self._has_json = self._has_json or is_first
                self._to('json')
                return []
            case 'close', 'call':
                return self._close_call()
            case ('open', 'call') | ('close', 'tools'):
                self._warn('a call that does not close')
                events = self._close_call()
                return events + self._tools_tag(kind, name, attributes)
        self._warn(f'{kind} {name[:40]} in {self.state}')
        return []

    def _close_call(self) -> list[Event]:
        self._to('tools')
        if self._is_dropped:
            return []
        end = '}' if self._num_arguments else '' if not self._is_json_empty else '{}'
        events: list[Event] = [CallArguments(self._index, end)] if end else []
        return [*events, CallEnd(self._index)]

    def _open_argument(self, attributes: dict[str, str]) -> list[Event]:
        self._to('argument')
        self._key, self._value = attributes.get('key'), []
        self._type = attributes.get('type', 'string')
        if self._key is None:
            self._warn('an argument without a key was dropped')
        if self._has_json:
            self._warn('an argument beside a block of JSON was dropped')
            self._key = None
        if self._is_dropped or self._key is None or self._type != 'string':
            return []
        return [CallArguments(self._index, self._argument_head() + '"')]

    def _argument_head(self) -> str:
        lead = ', ' if self._num_arguments else '{'
        self._num_arguments += 1
        return f'{lead}{json_string(self._key or "")}: '

    def _argument_text(self, text: str) -> list[Event]:
        if self._is_dropped or self._key is None:
            return []
        if self._type == 'string':
            return [CallArguments(self._index, json_string(text)[1:-1])]
        self._value.append(text)
        return []

    def _value_tag(self, kind: Marker, name: str, attributes: dict[str, str]) -> list[Event]:
        """A tag inside an argument or a block of JSON."""
        if (kind, name) == ('close', self.state):
            return self._close_value()
        if (kind, name) in (('close', 'call'), ('close', 'tools'), ('open', 'argument')):
            self._warn(f'{self.state} does not close')
            return self._close_value() + self._call_tag(kind, name, attributes)
        self._warn(f'{kind} {name[:40]} in {self.state}')
        return []

    def _close_value(self) -> list[Event]:
        is_argument = self.state == 'argument'
        self._to('call')
        if self._is_dropped or self._key is None or not is_argument:
            return []
        if self._type == 'string':
            return [CallArguments(self._index, '"')]
        text = ''.join(self._value)
        if not is_json(text):
            self._warn(f'argument of type {self._type[:40]} is not JSON; taken as a string')
            text = json_string(text)
        return [CallArguments(self._index, self._argument_head() + text)]

    def _end(self, *, whole: bool) -> list[Event]:
        events: list[Event] = []
        if self.state == 'call' and whole:
            self._warn('a call that does not close')
            events = self._close_call()
        elif self.state in ('call', 'argument', 'json') and not self._is_dropped:
            self.was_cut = True
        self.state, self._tag, self._thought = 'done', None, None
        return events
