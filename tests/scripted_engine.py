"""An engine that says what it is told, behind a real server: no model, all of HTTP."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from k3jax.data.tokenizer import Tokenizer, byte_tokenizer
from k3jax.serve.api.rules import RULES
from k3jax.serve.constrain import Constrainer
from k3jax.serve.prefix_figures import PrefixFigures
from k3jax.serve.request import Overloaded, Request, Token
from k3jax.serve.server import build_app, make_server

_BYTES = byte_tokenizer()
Script = Callable[[Request], Sequence[int]]


def ids_of(text: str) -> list[int]:
    """Bytes of an answer: «name» opens a tag, «/name» closes one, ¶ ends the message."""
    marks = {'«/': '<|close|>', '«': '<|open|>', '»': '<|sep|>', '¶': '<|end_of_msg|>'}
    ids, position = [], 0
    while position < len(text):
        mark = next((m for m in marks if text.startswith(m, position)), None)
        if mark is None:
            ids += text[position].encode()
        else:
            ids.append(_BYTES.special_tokens[marks[mark]])
        position += len(mark or ' ')
    return ids


class ScriptedStream:
    """Tokens of one script; `ScriptedEngine` says how fast."""

    def __init__(self, engine: 'ScriptedEngine', request: Request):
        self.cached_tokens = engine.cached_tokens
        self.is_cancelled = False
        self._engine, self._request = engine, request

    def cancel(self) -> None:
        if not self.is_cancelled:
            self._engine.num_running -= 1
        self.is_cancelled = True

    async def __aiter__(self):
        engine, sampling = self._engine, self._request.sampling
        for number, token_id in enumerate(engine.ids(self._request), 1):
            await asyncio.sleep(engine.delay_s)
            if token_id < 0:
                yield Token(0, finished='error')
                return
            is_stop = token_id in sampling.stop_ids
            is_last = number >= sampling.max_new_tokens
            top = [(token_id, -0.5)][: sampling.logprobs or 0]
            logprob = None if sampling.logprobs is None else -0.5
            yield Token(
                token_id, logprob, top, 'stop' if is_stop else 'length' if is_last else None
            )
            if is_stop or is_last:
                return


class ScriptedEngine:
    """Answers with `script(request)`, or at random under the request's grammar if it has one.

    Attributes:
      requests: all that came. streams: theirs. num_running: not yet cancelled or finished.
    """

    def __init__(self, script: Script, tokenizer: Tokenizer | None = None):
        self.tokenizer = tokenizer or _BYTES
        self.max_length, self.model_name = 4096, 'tiny'
        self.script, self.delay_s, self.max_running, self.cached_tokens = script, 0.0, 1000, 0
        self.prefix_figures: PrefixFigures | None = None
        self.requests: list[Request] = []
        self.streams: list[ScriptedStream] = []
        self.num_running = 0
        self._constrainer = Constrainer(self.tokenizer)

    def submit(self, request: Request) -> ScriptedStream:
        if self.num_running >= self.max_running:
            raise Overloaded
        self.num_running += 1
        self.requests.append(request)
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]

    def ids(self, request: Request) -> Iterator[int]:
        if request.constraint is None:
            yield from self.script(request)
            return
        rng = np.random.default_rng(request.sampling.seed or len(self.requests))
        matcher = self._constrainer.matcher(request.constraint)
        while not matcher.is_finished:
            allowed = np.flatnonzero(matcher.mask())
            special = allowed[allowed >= self.tokenizer.num_ranks]
            if len(special) and rng.random() < 0.1:
                allowed = special
            token_id = int(rng.choice(allowed))
            matcher.advance(token_id)
            yield token_id


class Running:
    """A server in a thread. url: where. engine, app, server: its parts."""

    def __init__(self, url, engine, app, server):
        self.url, self.engine, self.app, self.server = url, engine, app, server


@contextlib.contextmanager
def running(engine, rules='open', *, limits, **options) -> Iterator[Running]:
    """Serves `engine` on a free port until the end of the block."""
    app = build_app(engine, RULES[rules], limits=limits, **options)
    server = make_server(app, '127.0.0.1', 0, limits)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(f'http://127.0.0.1:{port}', engine, app, server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
