"""What a stream of tokens says: events of a chat, or text, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from k3jax.data.chat import Channel
from k3jax.data.chat_events import Content, Event, ParsedMessage
from k3jax.data.chat_stream import TokenParser
from k3jax.data.detokenize import Detokenizer
from k3jax.data.stop_strings import StopStrings
from k3jax.data.tokenizer import Tokenizer
from k3jax.serve.api.responses import FinishReason, TokenText
from k3jax.serve.request import Token


def token_text(tokenizer: Tokenizer, token: Token) -> TokenText:
    """A token for its logprobs."""
    top = [(tokenizer.token_bytes(i), logprob) for i, logprob in token.top]
    return TokenText(tokenizer.token_bytes(token.id), token.logprob or 0.0, top)


class ChatAnswer:
    """A chat's answer as its tokens come. Stop strings are looked for in the content alone.

    Attributes:
      message: all events so far.
      num_tokens: so far.
      is_done: nothing that follows belongs to the answer.
    """

    def __init__(self, tokenizer: Tokenizer, opened: Channel, stops: Iterable[str]):
        self.message = ParsedMessage()
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._parser = TokenParser(tokenizer, opened)
        self._stops = StopStrings(tuple(stops))
        self._was_cut = False
        self._logprobs: list[TokenText] = []

    @property
    def is_done(self) -> bool:
        return self._parser.is_done or self._stops.stopped

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    def take_logprobs(self) -> list[TokenText]:
        """Those of the content's tokens that came since the last time."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def feed(self, token: Token) -> list[Event]:
        """What a token adds."""
        self.num_tokens += 1
        is_content = self._parser.machine.is_content
        if token.logprob is not None and is_content and token.id < self._tokenizer.num_ranks:
            self._logprobs.append(token_text(self._tokenizer, token))
        self._was_cut = token.finished == 'length'
        return self._passed(self._parser.feed(token.id))

    def feed_or_cut(self, token: Token | None) -> list[Event]:
        """What a token adds; None: no more will come, for want of time."""
        if token is not None:
            return self.feed(token)
        self._was_cut = True
        return []

    def finish(self) -> list[Event]:
        """What was still held back."""
        self._was_cut = self._was_cut and not self._parser.is_done
        events = self._passed(self._parser.finish())
        rest = self._stops.flush()
        if rest:
            events.append(Content(rest))
            self.message.add(events[-1:])
        return events

    def _passed(self, events: list[Event]) -> list[Event]:
        """Events with the content cut at a stop string, and nothing after it."""
        passed: list[Event] = []
        for event in events:
            if self._stops.stopped:
                break
            if isinstance(event, Content):
                text = self._stops.feed(event.text)
                passed += [Content(text)] if text else []
                continue
            held = self._stops.flush()
            passed += [Content(held), event] if held else [event]
        self.message.add(passed)
        return passed

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended, after `finish`."""
        if self._stops.stopped:
            return 'stop'
        if self._parser.machine.was_cut:
            return 'length'
        if self.message.whole_calls:
            return 'tool_calls'
        return 'length' if self._was_cut else 'stop'


class TextAnswer:
    """A plain completion as its tokens come.

    Attributes:
      num_tokens: so far.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]):
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(tuple(stops))
        self._was_cut = False
        self._logprobs: list[TokenText] = []

    @property
    def is_done(self) -> bool:
        return self._stops.stopped

    def take_logprobs(self) -> list[TokenText]:
        """Those that came since the last time."""
        taken, self._logprobs = self._logprobs, []
        return taken

    def feed(self, token: Token) -> str:
        """What a token adds; nothing for one that only says stop."""
        self.num_tokens += 1
        self._was_cut = token.finished == 'length'
        if token.finished == 'stop':
            return ''
        if token.logprob is not None:
            self._logprobs.append(token_text(self._tokenizer, token))
        return self._stops.feed(self._detokenizer.feed(token.id))

    def feed_or_cut(self, token: Token | None) -> str:
        """What a token adds; None: no more will come, for want of time."""
        if token is not None:
            return self.feed(token)
        self._was_cut = True
        return ''

    def finish(self) -> str:
        """What was still held back."""
        return self._stops.feed(self._detokenizer.flush()) + self._stops.flush()

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended, after `finish`."""
        return 'length' if self._was_cut and not self._stops.stopped else 'stop'
