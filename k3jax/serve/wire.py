"""How bodies are read and answers sent over ASGI, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from k3jax.serve.api.errors import ApiError

Result = TypeVar('Result')
_JSON_HEADERS = {'content-type': 'application/json'}
_EVENT_HEADERS = {
    'content-type': 'text/event-stream; charset=utf-8',
    'cache-control': 'no-cache',
    'x-accel-buffering': 'no',  # proxies pass events on as they come
}
DONE = b'data: [DONE]\n\n'


class ClientGone(Exception):
    """The client closed the connection."""


def to_json(value: Any) -> bytes:
    """Compact UTF-8; lone surrogates of the client's become '?'."""
    text = json.dumps(value, ensure_ascii=False, separators=(',', ':'))
    return text.encode('utf-8', 'replace')


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b'data: ' + to_json(value) + b'\n\n'


def header(scope: Scope, name: str) -> str | None:
    """A request's header."""
    wanted = name.lower().encode()
    found = (value for key, value in scope['headers'] if key == wanted)
    value = next(found, None)
    return None if value is None else value.decode('latin-1')


def _too_large(limit: int) -> ApiError:
    return ApiError(f'body: wanted at most {limit} bytes', status=413, code='request_too_large')


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """A request's body.

    Raises:
      ApiError: it is larger than `limit`, by what it says or by what comes, or too slow.
      ClientGone: it ended early.
    """
    length = header(scope, 'content-length')
    if length is not None and length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message['type'] == 'http.disconnect':
                    raise ClientGone
                pieces.append(message.get('body', b''))
                size += len(pieces[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get('more_body'):
                    return b''.join(pieces)
    except TimeoutError:
        raise ApiError(
            f'body: did not come within {timeout_s:g} seconds', status=408, code='request_timeout'
        ) from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())['type'] != 'http.disconnect':
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; it is cancelled when the client leaves.

    Raises:
      ClientGone: the client left first.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(key.encode('latin-1'), value.encode('latin-1')) for key, value in headers.items()]
    await send({'type': 'http.response.start', 'status': status, 'headers': raw})


async def send_body(
    send: Send, body: bytes, *, status: int = 200, headers: Mapping[str, str] = _JSON_HEADERS
) -> None:
    """Sends a whole answer."""
    await _start(send, status, {**headers, 'content-length': str(len(body))})
    await send({'type': 'http.response.body', 'body': body})


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as JSON."""
    retry = error.retry_after_s
    headers = _JSON_HEADERS | ({} if retry is None else {'retry-after': str(retry)})
    await send_body(send, to_json(error.body), status=error.status, headers=headers)


async def send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    """Sends events as they come."""
    await _start(send, 200, _EVENT_HEADERS)
    async for data in events:
        await send({'type': 'http.response.body', 'body': data, 'more_body': True})
    await send({'type': 'http.response.body', 'body': b''})
