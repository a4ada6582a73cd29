"""How a stream that broke off goes on with another server's: what was sent, and what is new."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

Channel = tuple[Any, ...]


class Diverged(Exception):
    """Another server does not say what the client was sent."""


def _texts(chunk: dict[str, Any]) -> Iterator[tuple[Channel, dict[str, Any], str]]:
    """(channel, object, key) of each text of a chunk. Channels, joined over chunks, are the answer.

    What makes one answer differ from an equal one is none of them: ids, times, usage.
    """
    for choice in chunk['choices']:
        index, delta = choice.get('index', 0), choice.get('delta') or {}
        found = [((index, 'text'), choice, 'text')]
        names = ('role', 'reasoning_content', 'content')
        found += [((index, name), delta, name) for name in names]
        for call in delta.get('tool_calls') or ():
            function = call.get('function') or {}
            names = ('name', 'arguments')
            found += [((index, 'call', call['index'], name), function, name) for name in names]
        found.append(((index, 'finish_reason'), choice, 'finish_reason'))
        yield from (entry for entry in found if isinstance(entry[1].get(entry[2]), str))


def _logprobs(chunk: dict[str, Any]) -> Iterator[tuple[Channel, dict[str, Any], str]]:
    """(channel, object, key) of each list with an entry a token."""
    for choice in chunk['choices']:
        for name, value in (choice.get('logprobs') or {}).items():
            if isinstance(value, list):
                yield (choice.get('index', 0), name), choice['logprobs'], name


class Transcript:
    """What a client was sent of one answer.

    Attributes:
      is_empty: nothing. is_whole: all, with the reason why it ended.
    """

    def __init__(self) -> None:
        self.is_empty, self.is_whole = True, False
        self._texts: dict[Channel, list[str]] = collections.defaultdict(list)
        self._num_logprobs: collections.Counter[Channel] = collections.Counter()
        self._same: dict[str, Any] = {}  # in every chunk

    def add(self, chunk: dict[str, Any]) -> None:
        """A chunk that is being sent."""
        self.is_empty = False
        self._same = self._same or {k: chunk[k] for k in ('id', 'created') if k in chunk}
        for channel, holder, key in _texts(chunk):
            self._texts[channel].append(holder[key])
            self.is_whole |= key == 'finish_reason'
        for channel, holder, key in _logprobs(chunk):
            self._num_logprobs[channel] += len(holder[key])

    def continuation(self) -> Continuation:
        """For an answer that starts anew."""
        texts = {channel: ''.join(pieces) for channel, pieces in self._texts.items()}
        return Continuation(texts, self._num_logprobs.copy(), self._same)


class Continuation:
    """Of an equal answer from its beginning, what comes after the part that was sent."""

    def __init__(
        self, texts: dict[Channel, str], num_logprobs: collections.Counter[Channel], same: dict
    ):
        self._left, self._same = {c: text for c, text in texts.items() if text}, same
        self._num_logprobs = num_logprobs

    @property
    def has_begun(self) -> bool:
        """All that was sent has come again."""
        return not self._left

    def rest(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """What is new of a chunk, which is changed; None where nothing is.

        Raises:
          Diverged: it does not say what was sent, or goes on before it has said all of that.
        """
        had_begun, is_new = self.has_begun, False
        for channel, holder, key in _texts(chunk):
            text, left = holder[key], self._left.pop(channel, '')
            overlap = min(len(text), len(left))
            if text[:overlap] != left[:overlap]:
                raise Diverged
            if left[overlap:]:
                self._left[channel] = left[overlap:]
            holder[key] = text[overlap:]
            if overlap and key == 'finish_reason':
                holder[key] = None
            is_new |= bool(text[overlap:])
        for channel, holder, key in _logprobs(chunk):
            known = min(self._num_logprobs[channel], len(holder[key]))
            self._num_logprobs[channel] -= known
            holder[key] = holder[key][known:]
        if is_new and not self.has_begun:
            raise Diverged
        if not is_new and not had_begun:
            return None
        if not had_begun:
            _leave_out_names(chunk)
        return chunk | self._same


def _leave_out_names(chunk: dict[str, Any]) -> None:
    """Of calls whose name was sent: that comes once, with the id."""
    for choice in chunk['choices']:
        for call in (choice.get('delta') or {}).get('tool_calls') or ():
            if call.get('function', {}).get('name') == '':
                del call['function']['name']
                call.pop('id', None)
                call.pop('type', None)
