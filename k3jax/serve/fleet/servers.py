"""Which servers there are, and which of them can be asked: health checks in the background."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Literal, TypeVar

import httpx
from absl import logging

from k3jax.serve.fleet.rendezvous import Rendezvous

Result = TypeVar('Result')
_STAY_S = 3600.0  # since its last request, that a conversation stays where it had to go
_MAX_MOVED = 100_000  # conversations that are remembered to be elsewhere
State = Literal['up', 'draining', 'down']


class ServerDown(Exception):
    """The health checks gave a server up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """When a server is asked how it is, and what follows.

    Attributes:
      interval_s: between checks. retry_s: after one that failed.
      timeout_s: of a check; generous, since a server at work may be slow to answer.
      failures: checks in a row after which a server is down, and its requests go elsewhere.
      successes: in a row after which one that was down is asked again.
    """

    interval_s: float = 2.0
    retry_s: float = 0.5
    timeout_s: float = 5.0
    failures: int = 3
    successes: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f'--health_{field.name}: got {value}, wanted more than 0')


def _origin(text: str) -> str:
    """A server's URL without what says nothing."""
    fault = f'--servers: got {text!r}, '
    if '@' in text:
        raise ValueError('--servers: a URL holds a name or password (@); keys come from clients')
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f'{fault}which is no URL ({error})') from None
    if parts.scheme not in ('http', 'https') or not parts.hostname:
        raise ValueError(f'{fault}wanted a URL such as http://10.0.0.5:8000')
    if parts.path not in ('', '/') or parts.query or parts.fragment:
        raise ValueError(f'{fault}wanted scheme, host and port alone')
    host = f'[{parts.hostname}]' if ':' in parts.hostname else parts.hostname
    usual = {'http': 80, 'https': 443}[parts.scheme]
    return f'{parts.scheme}://{host}:{usual if port is None else port}'


def read_servers(texts: Sequence[str]) -> tuple[str, ...]:
    """The servers that --servers names.

    Raises:
      ValueError: none, one twice, or something that is no URL of a server.
    """
    urls = [_origin(text.strip()) for text in texts if text.strip()]
    if not urls:
        raise ValueError('--servers: got none, wanted URLs such as http://10.0.0.5:8000,…')
    twice = [url for url in dict.fromkeys(urls) if urls.count(url) > 1]
    if twice:
        raise ValueError(f'--servers: got {twice[0]} more than once')
    return tuple(urls)


class Server:
    """One server as the checks see it; down until the first."""

    def __init__(self, url: str, policy: HealthPolicy):
        self.url, self.state = url, 'down'
        self._policy = policy
        self._num_failures, self._num_successes = 0, policy.successes - 1
        self._wake = asyncio.Event()
        self._awaited: set[asyncio.Timeout] = set()

    def saw(self, state: State) -> None:
        """What a check found."""
        before, policy = self.state, self._policy
        if state == 'down':
            self._num_failures, self._num_successes = self._num_failures + 1, 0
            if self._num_failures >= policy.failures:
                self.state = 'down'
        else:
            self._num_failures, self._num_successes = 0, self._num_successes + 1
            if before != 'down' or self._num_successes >= policy.successes:
                self.state = state
        if self.state == before:
            return
        logging.info('%s is %s', self.url, self.state)
        if self.state == 'down':
            for scope in self._awaited:
                scope.reschedule(asyncio.get_running_loop().time())
            self._awaited.clear()

    def suspect(self) -> None:
        """A request to it failed: it is checked at once."""
        self._wake.set()

    async def unless_down(self, awaitable: Awaitable[Result]) -> Result:
        """What `awaitable` gives; it is cancelled where the server is given up.

        Raises:
          ServerDown: it was.
        """
        try:
            # At once where it was given up while nothing was awaited of it.
            async with asyncio.timeout(0 if self.state == 'down' else None) as scope:
                self._awaited.add(scope)
                try:
                    return await awaitable
                finally:
                    self._awaited.discard(scope)
        except TimeoutError:
            if scope.expired():
                raise ServerDown from None
            raise

    async def check(self, client: httpx.AsyncClient) -> None:
        """Asks it how it is."""
        self.saw(await self._state(client))

    async def _state(self, client: httpx.AsyncClient) -> State:
        timeout_s = self._policy.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await client.get(f'{self.url}/health', timeout=timeout_s)
            if response.status_code == 200:
                return 'up'
            is_draining = response.status_code == 503 and json.loads(response.content)
            return 'draining' if is_draining == {'status': 'draining'} else 'down'
        except (httpx.HTTPError, OSError, ValueError):
            return 'down'

    async def watch(self, client: httpx.AsyncClient) -> None:
        """Checks it for ever."""
        while True:
            if self._num_failures and self.state != 'down':
                await asyncio.sleep(self._policy.retry_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._policy.interval_s):
                        await self._wake.wait()
            self._wake.clear()
            await self.check(client)


class Fleet:
    """All servers, and the conversations' order among them."""

    def __init__(self, urls: Sequence[str], policy: HealthPolicy | None = None):
        self.servers = [Server(url, policy or HealthPolicy()) for url in urls]
        self._by_url = {server.url: server for server in self.servers}
        self._places = Rendezvous(urls)
        self._moved: OrderedDict[str, tuple[Server, float]] = OrderedDict()

    def order(self, key: str) -> list[Server]:
        """A conversation's servers that are up: its primary first, then its secondary.

        One that had to go elsewhere stays there: when a server comes back its cache is empty, and
        all its conversations at once would be read anew by it alone.
        """
        servers = [self._by_url[url] for url in self._places.order(key)]
        moved, when = self._moved.get(key, (None, 0.0))
        if moved is not None and time.monotonic() < when + _STAY_S:
            servers = [moved, *(server for server in servers if server is not moved)]
        return [server for server in servers if server.state == 'up']

    def answered(self, key: str, server: Server) -> None:
        """A conversation is now that server's."""
        self._moved.pop(key, None)
        if server.url != self._places.order(key)[0]:
            self._moved[key] = (server, time.monotonic())
            if len(self._moved) > _MAX_MOVED:
                self._moved.popitem(last=False)

    @property
    def num_up(self) -> int:
        return sum(server.state == 'up' for server in self.servers)

    @contextlib.asynccontextmanager
    async def watched(self, client: httpx.AsyncClient, wait_s: float = 0.0) -> AsyncIterator[None]:
        """Checks all servers, and goes on doing so until the end of the block.

        Args:
          wait_s: how long the first of them may take to come up.

        Raises:
          ValueError: none did.
        """
        if not wait_s >= 0:
            raise ValueError(f'--wait_s: got {wait_s}, wanted 0 or more')
        deadline = time.monotonic() + wait_s
        while True:
            await asyncio.gather(*(server.check(client) for server in self.servers))
            if self.num_up:
                break
            if time.monotonic() >= deadline:
                urls = ', '.join(server.url for server in self.servers)
                raise ValueError(f'--servers: none of {urls} answers /health with 200')
            await asyncio.sleep(0.5)
        for server in self.servers:
            if server.state == 'down':
                logging.warning('%s does not answer; it is checked on', server.url)
        tasks = [asyncio.create_task(server.watch(client)) for server in self.servers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
