"""How an answer is read while it is generated: from token ids, or from text in XTML.

Token ids are safer: text that looks like a marker is text. Read from text, it is taken for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from k3jax.data.chat_events import Event
from k3jax.data.chat_format import is_before_k3
from k3jax.data.chat_k2_machine import MARKERS as K2_MARKERS
from k3jax.data.chat_k2_machine import K2Machine
from k3jax.data.chat_machine import ChatMachine, Marker
from k3jax.data.detokenize import Detokenizer
from k3jax.data.tokenizer import Tokenizer

MARKERS: dict[str, Marker] = {
    '<|open|>': 'open',
    '<|close|>': 'close',
    '<|sep|>': 'sep',
    '<|end_of_msg|>': 'end',
}
_MARKER = re.compile('|'.join(map(re.escape, MARKERS)))


class TokenParser:
    """Events of an answer by its token ids, in the format of the tokenizer's model.

    Special tokens other than markers are left out.

    Attributes:
      machine: the states, with their warnings.
      num_reasoning_tokens: of the tokens so far, those that were thought.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        opened: Literal['think', 'response'],
        *,
        force_nonempty_content: bool = False,
    ):
        self.machine: ChatMachine | K2Machine
        markers: Mapping[str, str]
        if is_before_k3(tokenizer):
            self.machine, markers = K2Machine(opened), K2_MARKERS
        else:
            options = {'force_nonempty_content': force_nonempty_content}
            self.machine, markers = ChatMachine(opened, **options), MARKERS
        self.num_reasoning_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._first_special = tokenizer.num_ranks
        self._markers = {
            tokenizer.special_tokens[text]: marker
            for text, marker in markers.items()
            if text in tokenizer.special_tokens
        }
        self._markers |= dict.fromkeys(tokenizer.stop_ids, 'end')

    @property
    def is_done(self) -> bool:
        """Nothing that follows belongs to the answer."""
        return self.machine.state == 'done'

    def feed(self, token_id: int) -> list[Event]:
        """What `token_id` adds."""
        self.num_reasoning_tokens += self.machine.state == 'think'
        if token_id < self._first_special:
            return self.machine.text(self._detokenizer.feed(token_id))
        events = self.machine.text(self._detokenizer.flush())
        marker = self._markers.get(token_id)
        return events if marker is None else events + self.machine.marker(marker)

    def finish(self) -> list[Event]:
        """What is still held back, when no more tokens come."""
        return self.machine.text(self._detokenizer.flush()) + self.machine.finish()


def split_held_back(text: str, needles: tuple[str, ...]) -> tuple[str, str]:
    """`text` without and with only its longest end that begins one of the needles, not all of it.

    So ('say ', '<|cl') of 'say <|cl' for the markers.
    """
    longest = max(map(len, needles), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        tail = text[start:]
        if any(len(tail) < len(needle) and needle.startswith(tail) for needle in needles):
            return text[:start], tail
    return text, ''


class TextParser:
    """Events of an answer by its text, however that is cut.

    Attributes:
      machine: the states, with their warnings.
    """

    def __init__(
        self, opened: Literal['think', 'response'], *, force_nonempty_content: bool = False
    ):
        self.machine = ChatMachine(opened, force_nonempty_content=force_nonempty_content)
        self._held = ''

    def feed(self, text: str) -> list[Event]:
        """What `text` adds; an end that may become a marker waits."""
        text = self._held + text
        events: list[Event] = []
        start = 0
        for found in _MARKER.finditer(text):
            events += self.machine.text(text[start : found.start()])
            events += self.machine.marker(MARKERS[found[0]])
            start = found.end()
        text, self._held = split_held_back(text[start:], tuple(MARKERS))
        return events + self.machine.text(text)

    def finish(self) -> list[Event]:
        """What is still held back, when no more text comes."""
        held, self._held = self._held, ''
        return self.machine.text(held) + self.machine.finish()
