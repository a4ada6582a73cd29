"""Where a text ends that stops before any of some strings, when it comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from k3jax.data.chat_stream import split_held_back


class StopStrings:
    """Lets text through up to the stop string that is first complete, and leaves that out.

    Attributes:
      stopped: a stop string has come; nothing passes any more.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ''
        self.stopped = False

    def feed(self, text: str) -> str:
        """What of the text so far is sure to come before any stop string, and is new."""
        if self.stopped or not self._stops:
            return '' if self.stopped else text
        text = self._held + text
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        # The one that is complete first, so that it does not matter how the text was cut.
        found = min(((start + size, start) for start, size in starts if start >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ''
            return text[: found[1]]
        text, self._held = split_held_back(text, self._stops)
        return text

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ''
        return held
