"""Does a server stand many clients? Streaming chats over plain sockets, some dropped midway.

The clients are as light as can be, so that what is measured on one machine is the server.
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

_WORDS = ('the', 'tree', 'runs', 'under', 'blue', 'who', 'why', '12', '3.5', 'naïve', '中文', '🚀')
TIMEOUT_S = 300  # that a client waits for the next event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients do.

    Attributes:
      streams: clients, each with one request at a time.
      seconds: after which no request is begun. warm_up_s: of these, not counted.
      max_words: of a prompt. max_tokens: of an answer, each at random up to here.
      drop_share: of the requests, whose client goes away after a few events or before the first.
      api_key: sent, if any.
    """

    streams: int = 200
    seconds: float = 300.0
    warm_up_s: float = 30.0
    max_words: int = 60
    max_tokens: int = 100
    drop_share: float = 0.2
    api_key: str | None = None
    seed: int = 0


class Refused(Exception):
    """An answer with another status than 200.

    Attributes:
      status, error: the body's `error`, or what came in its place.
    """

    def __init__(self, status: int, error: Any):
        super().__init__(f'status {status}: {error}')
        self.status, self.error = status, error


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Pieces of a chunked body."""
    while True:
        line = await reader.readline()
        if not line.strip():
            raise ConnectionError('the body ended early')
        size = int(line, 16)
        piece = await reader.readexactly(size + 2)
        if not size:
            return
        yield piece[:-2]


async def chat(url: str, body: dict[str, Any], api_key: str | None) -> AsyncIterator[Any]:
    """The events of a streaming chat, and None where it ends as it should.

    Raises:
      Refused: no stream came. ConnectionError, ValueError: it broke off or is none.
    """
    parts = urllib.parse.urlsplit(url)
    content = json.dumps(body | {'stream': True}).encode()
    head = (
        f'POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n'
        f'content-type: application/json\r\ncontent-length: {len(content)}\r\n'
    )
    if api_key is not None:
        head += f'authorization: Bearer {api_key}\r\n'
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        writer.write(head.encode() + b'\r\n' + content)
        answer = (await reader.readuntil(b'\r\n\r\n')).lower()
        status = int(answer.split(b' ', 2)[1])
        if status != 200:
            text = await reader.read(65536)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)['error']
            raise Refused(status, text)
        rest = b''
        async for piece in _body(reader):
            *events, rest = (rest + piece).split(b'\n\n')
            for event in events:
                if not event.startswith(b'data: '):
                    raise ValueError(f'got {event[:80]!r}, wanted an event')
                is_last = event == b'data: [DONE]'
                yield None if is_last else json.loads(event[6:])
                if is_last:
                    return
        raise ConnectionError('the stream ended without [DONE]')
    finally:
        writer.close()


class _Clients:
    """All clients of one load, and what they saw."""

    def __init__(self, url: str, load: Load):
        self.url, self.load = url, load
        self.start = time.perf_counter()
        self.counted_from = self.start + load.warm_up_s
        self.gaps, self.first = array.array('d'), array.array('d')
        self.errors: collections.Counter[str] = collections.Counter()
        self.answers = self.dropped = self.tokens = self.events = 0

    @property
    def is_counted(self) -> bool:
        return time.perf_counter() >= self.counted_from

    async def client(self, number: int) -> None:
        rng = random.Random(f'{self.load.seed}/{number}')
        # Not all at the same moment, as nobody would.
        await asyncio.sleep(rng.random() * min(5.0, self.load.warm_up_s))
        while time.perf_counter() - self.start < self.load.seconds:
            try:
                await self._one(rng)
            except Exception as error:  # whatever it is, it is counted
                self.errors[f'{type(error).__name__}: {error}'[:200]] += 1
                await asyncio.sleep(0.5)

    async def _one(self, rng: random.Random) -> None:
        load = self.load
        words = rng.choices(_WORDS, k=rng.randint(1, load.max_words))
        body = {
            'messages': [{'role': 'user', 'content': ' '.join(words)}],
            'max_tokens': rng.randint(1, load.max_tokens),
            'temperature': 1.0,
            'seed': rng.randrange(2**31),
        }
        drops_after = rng.randint(0, load.max_tokens // 2) if rng.random() < load.drop_share else -1
        asked, last = time.perf_counter(), None  # last: when a token came
        events, ended, usage = 0, False, None
        stream = chat(self.url, body, load.api_key)
        async with contextlib.aclosing(stream):
            if drops_after == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.02)
            while drops_after != events:
                event = await asyncio.wait_for(anext(stream), TIMEOUT_S)
                now = time.perf_counter()
                if event is None:
                    ended = True
                    break
                if 'error' in event:
                    raise ValueError(f'an event with an error: {event["error"]}')
                events += 1
                # What comes before the first token says nothing of one.
                if any(_has_text(choice.get('delta') or {}) for choice in event['choices']):
                    if self.is_counted:
                        (self.first if last is None else self.gaps).append(now - (last or asked))
                        self.events += 1
                    last = now
                for choice in event['choices']:
                    usage = choice.get('usage') or usage
        if not ended:
            self.dropped += 1
            return
        if usage is None:
            raise ValueError('the last event has no usage')
        self.answers += 1
        self.tokens += usage['completion_tokens'] if self.is_counted else 0


def _has_text(delta: dict[str, Any]) -> bool:
    return any(delta.get(name) for name in ('content', 'reasoning_content', 'tool_calls'))


def resident_bytes(pid: int) -> int:
    """Of a process on this machine."""
    text = pathlib.Path(f'/proc/{pid}/status').read_text()
    return int(text.partition('VmRSS:')[2].split()[0]) * 1024


def _quantiles(seconds: array.array) -> dict[str, float | None]:
    names = {'p50_ms': 50, 'p99_ms': 99, 'max_ms': 100}
    if not seconds:
        return dict.fromkeys(names)
    found = np.percentile(np.array(seconds) * 1e3, list(names.values()))
    return dict(zip(names, found.round(2).tolist(), strict=True))


async def run_load(url: str, load: Load, pid: int | None = None) -> dict[str, Any]:
    """What all clients saw.

    pid: the server's, to have its memory read: after the warm-up and every 10 s from then on.
    """
    clients, memory = _Clients(url, load), []

    async def watch_memory() -> None:
        await asyncio.sleep(load.warm_up_s)
        while True:
            memory.append(resident_bytes(pid))
            await asyncio.sleep(10)

    watcher = asyncio.create_task(watch_memory()) if pid is not None else None
    await asyncio.gather(*(clients.client(number) for number in range(load.streams)))
    counted_s = max(time.perf_counter() - clients.counted_from, 1e-9)
    if watcher is not None:
        watcher.cancel()
        memory.append(resident_bytes(pid))
    return {
        'answers': clients.answers,
        'dropped': clients.dropped,
        'errors': dict(clients.errors),
        'tokens_per_s': round(clients.tokens / counted_s, 1),
        'events_per_s': round(clients.events / counted_s, 1),
        'between_events': _quantiles(clients.gaps),
        'to_first_event': _quantiles(clients.first),
        'memory_mib': [round(x / 2**20, 1) for x in memory],
    }


async def flood(url: str, count: int, api_key: str | None = None) -> dict[str, Any]:
    """How a server takes `count` long requests at once: those refused with 429, and how soon.

    All are dropped once each has had its first event or its refusal, or after 20 s.
    """
    body = {'messages': [{'role': 'user', 'content': 'Count.'}], 'max_tokens': 200}
    refused, others = array.array('d'), collections.Counter()
    taken = 0

    async def ask() -> None:
        nonlocal taken
        start, stream = time.perf_counter(), chat(url, body, api_key)
        try:
            async with contextlib.aclosing(stream):
                await anext(stream)
                taken += 1
                await asyncio.sleep(3600)
        except Refused as error:
            if error.status == 429:
                refused.append(time.perf_counter() - start)
            else:
                others[str(error)[:200]] += 1

    tasks = [asyncio.create_task(ask()) for _ in range(count)]
    deadline = time.perf_counter() + 20
    while taken + len(refused) + others.total() < count and time.perf_counter() < deadline:
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    failed = [x for x in await asyncio.gather(*tasks, return_exceptions=True) if x is not None]
    for error in failed:
        if not isinstance(error, asyncio.CancelledError):
            others[f'{type(error).__name__}: {error}'[:200]] += 1
    return {
        'asked': count,
        'taken': taken,
        'refused': len(refused),
        'refused_after': _quantiles(refused),
        'errors': dict(others),
    }
