"""How a router answers a request: by its conversation's server, or the next where that fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
from absl import logging
from starlette.types import Receive, Scope, Send

from k3jax.serve.admission import Limits, Slots
from k3jax.serve.api.errors import ApiError, internal_error
from k3jax.serve.fleet.ask import Failed, Refused, Whole, ask, make_client, stream
from k3jax.serve.fleet.asked import CONVERSATION_HEADER, Asked, read_asked
from k3jax.serve.fleet.budgets import Budgets
from k3jax.serve.fleet.router_metrics import RouterMetrics
from k3jax.serve.fleet.servers import Fleet, Server
from k3jax.serve.fleet.transcript import Diverged, Transcript
from k3jax.serve.wire import (
    DONE,
    ClientGone,
    event,
    header,
    read_body,
    send_body,
    send_error,
    send_events,
    unless_gone,
)

# Servers that may take a request and fail: one that kills servers must not kill them all.
MAX_TAKEN = 2
_BUSY_S = 60.0  # a stream that broke off waits so long for a server that is full
_SEND_TIMEOUT_S = 30.0  # beyond the time that a request may take
_NUM_READING = 256  # requests whose bodies are still coming, or that are being refused
_PASSED = ('authorization', 'content-type', 'accept', 'x-request-id')


def _unavailable(message: str = 'No server can answer at the moment') -> ApiError:
    return ApiError(message, status=503, type='server_error', code='unavailable', retry_after_s=2)


def _broken(message: str, code: str) -> ApiError:
    return ApiError(message, status=502, type='server_error', code=code)


class _Tries:
    """Who was asked for one request.

    Attributes:
      failed: servers that are not asked again. busy: of them, those that may be, later.
      num_taken: that may have worked on it.
    """

    def __init__(self) -> None:
        self.failed: set[Server] = set()
        self.busy: set[Server] = set()
        self.num_taken = 0
        self.deadline: float | None = None  # for those that are busy


class Router:
    """Answers requests with the servers of a fleet.

    Attributes:
      slots: of requests that are being answered.
    """

    def __init__(self, fleet: Fleet, budgets: Budgets, limits: Limits):
        """limits: without max_concurrent and requests_per_minute, which the servers have."""
        self.fleet, self.budgets, self.metrics = fleet, budgets, RouterMetrics()
        self.slots = Slots(budgets.max_requests + _NUM_READING)
        self._limits = limits
        self._client: httpx.AsyncClient | None = None
        self._names = {server: str(number) for number, server in enumerate(fleet.servers)}

    @contextlib.asynccontextmanager
    async def running(self, wait_s: float = 0.0) -> AsyncIterator[None]:
        """Checks the servers in the background until the end of the block.

        Raises:
          ValueError: none of them came up within `wait_s`.
        """
        async with make_client() as client, self.fleet.watched(client, wait_s):
            self._client = client
            yield

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, whatever becomes of it."""
        status, has_started = 200, False
        error: ApiError | None = None

        async def sending(message: dict) -> None:
            nonlocal status, has_started
            if message['type'] == 'http.response.start':
                has_started, status = True, message['status']
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        except ClientGone:
            status = 499
        except ApiError as refused:
            error = refused
        except TimeoutError:
            error = ApiError('The answer took too long', status=408, code='request_timeout')
        except Exception:
            logging.exception('a request failed')
            error = internal_error()
        if error is not None:
            status = error.status
            if not has_started:
                await send_error(send, error)
        self.metrics.requests.labels(scope['path'].rpartition('/v1/')[2], str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, started = self._limits, time.monotonic()
        with self.slots.take():
            data = await read_body(scope, receive, limits.max_body_bytes, limits.body_timeout_s)
            given = header(scope, CONVERSATION_HEADER)
            headers = passed_headers(scope)
            asked = await asyncio.to_thread(read_asked, scope['path'], headers, data, given)
            del data
            # What cannot be answered takes no room from what can.
            self._next_now(asked, _Tries())
            with self._admitted(asked):
                work = (
                    self._stream(asked, send, started)
                    if asked.stream
                    else self._send_whole(asked, send, started)
                )
                async with asyncio.timeout(limits.request_timeout_s + _SEND_TIMEOUT_S):
                    await unless_gone(receive, work)

    @contextlib.contextmanager
    def _admitted(self, asked: Asked):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self.budgets.take(asked.num_tokens))
            except ApiError:
                self.metrics.refused.labels(self.budgets.class_of(asked.num_tokens)).inc()
                raise
            yield

    def _next_now(self, asked: Asked, tries: _Tries) -> Server:
        for server in self.fleet.order(asked.key):
            if server not in tries.failed:
                return server
        raise _unavailable()

    async def _next(self, asked: Asked, tries: _Tries) -> Server:
        """Who is asked next: the first of the conversation's servers that is up and did not fail.

        Raises:
          ApiError: nobody is left.
        """
        while True:
            try:
                server = self._next_now(asked, tries)
            except ApiError:
                if not tries.busy or time.monotonic() > tries.deadline:
                    raise
                await asyncio.sleep(0.5)
                tries.failed -= tries.busy
                tries.busy.clear()
            else:
                self.metrics.asked.labels(self._names[server]).inc()
                return server

    def _after(self, server: Server, failure: Failed, tries: _Tries) -> None:
        """Notes a failure.

        Raises:
          Refused: the client is told what the server says. ApiError: it is told something else.
        """
        self.metrics.failures.labels(self._names[server], failure.why).inc()
        logging.info('%s: %s', server.url, failure.why)
        tries.failed.add(server)
        tries.num_taken += failure.was_taken
        if failure.why != 'busy':
            server.suspect()
        elif not tries.num_taken:
            raise Refused(failure.answer)
        else:
            tries.busy.add(server)
            tries.deadline = tries.deadline or time.monotonic() + _BUSY_S
        if tries.num_taken >= MAX_TAKEN:
            raise _broken(f'{MAX_TAKEN} servers failed to answer this request', 'servers_failed')

    async def ask(self, asked: Asked) -> Whole:
        """A whole answer, of whichever server.

        Raises:
          ApiError: there is none.
        """
        assert self._client is not None
        tries = _Tries()
        while True:
            server = await self._next(asked, tries)
            try:
                answer = await ask(self._client, server, asked)
                self.fleet.answered(asked.key, server)
                return answer
            except Failed as failure:
                try:
                    self._after(server, failure, tries)
                except Refused as refused:
                    return refused.answer

    async def _send_whole(self, asked: Asked, send: Send, started: float) -> None:
        answer = await self.ask(asked)
        self.metrics.first_byte.observe(time.monotonic() - started)
        await send_body(send, answer.body, status=answer.status, headers=answer.headers)

    async def _stream(self, asked: Asked, send: Send, started: float) -> None:
        async with contextlib.aclosing(self._events(asked)) as events:
            try:
                first = await anext(events)  # before it, all is as if nobody had been asked
            except Refused as refused:
                answer = refused.answer
                await send_body(send, answer.body, status=answer.status, headers=answer.headers)
                return
            self.metrics.first_byte.observe(time.monotonic() - started)

            async def all_of_them() -> AsyncIterator[bytes]:
                yield first
                try:
                    async for data in events:
                        yield data
                except ApiError as error:
                    yield event(error.body)
                except Exception:
                    logging.exception('a stream failed')
                    yield event(internal_error().body)

            await send_events(send, all_of_them())

    async def _events(self, asked: Asked) -> AsyncIterator[bytes]:
        """The events of a stream; of one that breaks off, another server's from there on.

        Raises:
          Refused, ApiError: there are none, or no more.
        """
        transcript, tries = Transcript(), _Tries()
        while True:
            server = await self._next(asked, tries)
            try:
                one = self._events_of(server, asked, transcript)
                async with contextlib.aclosing(one) as events:
                    async for data in events:
                        yield data
                self.fleet.answered(asked.key, server)
                return
            except Failed as failure:
                if transcript.is_whole:
                    yield DONE  # which is all that was missing
                    return
                self._after(server, failure, tries)
            except Refused:
                if transcript.is_empty:
                    raise
                raise _broken('The answer broke off, and cannot go on', 'answer_cut') from None
            except Diverged:
                self.metrics.failures.labels(self._names[server], 'diverged').inc()
                raise _broken(
                    'The answer broke off, and what another server says is not what was sent',
                    'answer_diverged',
                ) from None

    async def _events_of(
        self, server: Server, asked: Asked, transcript: Transcript
    ) -> AsyncIterator[bytes]:
        """One server's events, without what was sent."""
        assert self._client is not None
        was_begun = not transcript.is_empty
        continuation = transcript.continuation()
        has_gone_on = False
        async with contextlib.aclosing(stream(self._client, server, asked)) as events:
            async for data, chunk in events:
                if chunk is None:
                    if not continuation.has_begun:
                        raise Diverged
                    yield data
                    return
                try:
                    shown = continuation.rest(chunk) if was_begun else chunk
                    if shown is not None:
                        transcript.add(shown)
                except (AttributeError, KeyError, TypeError):
                    raise Failed('bad') from None
                if shown is None:
                    continue
                if was_begun and not has_gone_on:
                    has_gone_on = True
                    self.metrics.continued.inc()
                yield event(shown) if was_begun else data


def passed_headers(scope: Scope) -> dict[str, str]:
    """Headers of a client's that a server is sent."""
    found = {name: header(scope, name) for name in _PASSED}
    return {name: value for name, value in found.items() if value is not None}
