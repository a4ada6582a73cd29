"""How an engine's thread hands tokens to the event loops that read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from k3jax.serve.request import Token


class EngineStream:
    """See `request.Stream`; made in the event loop that reads it."""

    def __init__(self, wake: Callable[[], None]):
        """wake: called when it is cancelled."""
        self.cached_tokens = 0
        self.is_cancelled = False
        self.loop = asyncio.get_running_loop()
        self._wake = wake
        self._tokens: asyncio.Queue[Token] = asyncio.Queue()

    def put(self, token: Token) -> None:
        """In its event loop."""
        self._tokens.put_nowait(token)

    async def __aiter__(self) -> AsyncIterator[Token]:
        while True:
            token = await self._tokens.get()
            yield token
            if token.finished is not None:
                return

    def cancel(self) -> None:
        self.is_cancelled = True
        self._wake()


def deliver(found: Iterable[tuple[EngineStream, Token]]) -> None:
    """Puts tokens into their streams, in the event loop of each, from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[EngineStream, Token]]] = {}
    for stream, token in found:
        by_loop.setdefault(stream.loop, []).append((stream, token))

    def put(some: list[tuple[EngineStream, Token]]) -> None:
        for stream, token in some:
            stream.put(token)

    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(put, some)
        except RuntimeError:  # the loop is closed, and nobody reads
            for stream, _ in some:
                stream.is_cancelled = True
