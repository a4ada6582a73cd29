"""One request to one server: its answer, whole or in events, or in which way it failed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx

from k3jax.serve.fleet.asked import Asked
from k3jax.serve.fleet.servers import Server, ServerDown

MAX_ANSWER_BYTES = 64 * 2**20  # of a whole answer, or of one event
_PASSED = ('content-type', 'retry-after')  # headers of answers that clients are sent


class Failed(Exception):
    """No answer.

    Attributes:
      why: unreachable: it was never asked; busy: it takes no more; stopping; cut: it broke off;
        bad: it is none.
    """

    def __init__(self, why: str, answer: Whole | None = None):
        super().__init__(why)
        self.why, self.answer = why, answer

    @property
    def was_taken(self) -> bool:
        """The server may have worked on it."""
        return self.why in ('cut', 'bad')


class Whole(NamedTuple):
    """An answer that is no stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def make_client() -> httpx.AsyncClient:
    """For all requests to servers."""
    return httpx.AsyncClient(
        # Silence says nothing: a prompt may be read for minutes. Health checks end what is dead.
        timeout=httpx.Timeout(None, connect=3.0),
        # Given up before a server would, whose own limit is 30 s: else one could be asked on a
        # connection that it is just closing.
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=10.0
        ),
        trust_env=False,
    )


@contextlib.contextmanager
def _failures() -> Any:
    """Makes `Failed` of what the client raises."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise Failed('unreachable') from None
    except (httpx.RemoteProtocolError, httpx.DecodingError) as error:
        # Without any answer the server went away; something else was no HTTP.
        gone = 'disconnected' in str(error) or 'incomplete' in str(error) or 'peer' in str(error)
        raise Failed('cut' if gone else 'bad') from None
    except (httpx.HTTPError, httpx.StreamError, ServerDown, OSError):
        raise Failed('cut') from None


async def _read(server: Server, response: httpx.Response) -> bytes:
    pieces, size = [], 0
    iterator = response.aiter_raw()
    while (piece := await server.unless_down(anext(iterator, None))) is not None:
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise Failed('bad')
    return b''.join(pieces)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


async def _whole(server: Server, response: httpx.Response) -> Whole:
    """Reads it; only what a server means to say is an answer."""
    status, body = response.status_code, await _read(server, response)
    kind = response.headers.get('content-type', '').partition(';')[0]
    if status == 503:
        raise Failed('stopping')
    if not (status == 200 or 400 <= status < 500) or kind != 'application/json':
        raise Failed('bad')
    if 'content-encoding' in response.headers or not _is_json(body):
        raise Failed('bad')
    headers = {name: response.headers[name] for name in _PASSED if name in response.headers}
    answer = Whole(status, headers, body)
    if status == 429:
        raise Failed('busy', answer)
    return answer


@contextlib.asynccontextmanager
async def _response(
    client: httpx.AsyncClient, server: Server, asked: Asked
) -> AsyncIterator[httpx.Response]:
    headers = {**asked.headers, 'accept-encoding': 'identity'}
    request = client.build_request(
        asked.method, f'{server.url}{asked.path}', headers=headers, content=asked.data
    )
    response = await server.unless_down(client.send(request, stream=True))
    try:
        yield response
    finally:
        await response.aclose()


async def ask(client: httpx.AsyncClient, server: Server, asked: Asked) -> Whole:
    """A whole answer.

    Raises:
      Failed: there is none.
    """
    with _failures():
        async with _response(client, server, asked) as response:
            return await _whole(server, response)


class Refused(Exception):
    """In place of a stream came an error of the client's own."""

    def __init__(self, answer: Whole):
        super().__init__(answer.status)
        self.answer = answer


class Event(NamedTuple):
    """An event as it came, and what it says; None for the last."""

    data: bytes
    chunk: dict[str, Any] | None


def _event(data: bytes) -> Event | None:
    """None for a comment."""
    lines = [line[5:].strip() for line in data.splitlines() if line.startswith(b'data:')]
    if not lines:
        return None
    text = b'\n'.join(lines)
    if text == b'[DONE]':
        return Event(data + b'\n\n', None)
    try:
        chunk = json.loads(text)
    except ValueError:
        raise Failed('bad') from None
    if not isinstance(chunk, dict) or not isinstance(chunk.get('choices'), list):
        raise Failed('bad')  # also {"error": …}
    return Event(data + b'\n\n', chunk)


async def stream(client: httpx.AsyncClient, server: Server, asked: Asked) -> AsyncIterator[Event]:
    """The events of an answer, each once all of it is there; ends after the last.

    Raises:
      Failed: it broke off, or is no stream. Refused: so said the server.
    """
    with _failures():
        async with _response(client, server, asked) as response:
            kind = response.headers.get('content-type', '').partition(';')[0]
            if response.status_code != 200:
                raise Refused(await _whole(server, response))
            if kind != 'text/event-stream' or 'content-encoding' in response.headers:
                raise Failed('bad')
            iterator, rest = response.aiter_raw(), b''
            while (piece := await server.unless_down(anext(iterator, None))) is not None:
                *found, rest = (rest + piece).split(b'\n\n')
                for data in found:
                    event = _event(data)
                    if event is not None:
                        yield event
                        if event.chunk is None:
                            return
                if len(rest) > MAX_ANSWER_BYTES:
                    raise Failed('bad')
            raise Failed('cut')
