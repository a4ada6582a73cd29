"""A router before servers that do what they are told, also what no server should."""

import asyncio
import contextlib
import json
import threading
import time

import httpx

from k3jax.serve.admission import Limits
from k3jax.serve.fleet.budgets import Budgets, read_classes
from k3jax.serve.fleet.router_app import build_router, run
from k3jax.serve.fleet.servers import Fleet, HealthPolicy
from k3jax.serve.server import make_server

POLICY = HealthPolicy(interval_s=0.1, retry_s=0.05, timeout_s=2.0, failures=2, successes=2)
SSE = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n'


def whole(body, status='200 OK', headers='content-type: application/json'):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f'HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n\r\n'.encode() + body


def chunk(delta, number=0, reason=None, **more):
    choice = {'index': 0, 'delta': delta, 'logprobs': None, 'finish_reason': reason, **more}
    return {'id': f'chat-{number}', 'created': number, 'choices': [choice]}


def sse(*chunks, done=True):
    events = [b'data: ' + json.dumps(one).encode() + b'\n\n' for one in chunks]
    return [SSE, *events, *([b'data: [DONE]\n\n'] if done else [])]


def words(text, number=0, reason='stop'):
    """The chunks of a streamed answer."""
    deltas = [{'role': 'assistant', 'content': ''}, *({'content': f'{w} '} for w in text.split())]
    return [*(chunk(delta, number) for delta in deltas), chunk({}, number, reason)]


class Fake:
    """A server.

    Attributes:
      script: of a request's body, what is sent: bytes, or seconds to wait; then it closes.
      health: what /health says; None: nothing.
      bodies: of requests that came. num_gone: clients that went away before the end.
    """

    def __init__(self, script=None):
        self.script = script or (lambda body: sse(*words('a b c')))
        self.health, self.bodies, self.heads, self.num_gone = whole({'status': 'ok'}), [], [], 0
        self.url = ''

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b'\r\n\r\n')).decode()
            if head.startswith('GET /health'):
                writer.write(self.health or b'')
                await writer.drain()
            else:
                lengths = [line for line in head.lower().splitlines() if 'content-length' in line]
                size = int(lengths[0].split(':')[1]) if lengths else 0
                body = await reader.readexactly(size)
                self.heads.append(head)
                self.bodies.append(json.loads(body) if body else None)
                await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader, writer):
        gone = asyncio.ensure_future(reader.read(1))
        for step in self.script(self.bodies[-1]):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
                continue
            await asyncio.wait([gone], timeout=step)
            if gone.done():
                self.num_gone += 1
                return
        gone.cancel()


class Loop:
    """An event loop in a thread."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def __exit__(self, *_):
        async def stop():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()


@contextlib.contextmanager
def fakes(*servers):
    """The servers, each with its URL, until the end of the block."""
    with Loop() as loop:
        listening = []
        for server in servers:
            listening.append(loop.run(asyncio.start_server(server.serve, '127.0.0.1', 0)))
            port = listening[-1].sockets[0].getsockname()[1]
            server.url, server.close = f'http://127.0.0.1:{port}', listening[-1].close
            server.loop = loop
        yield servers
        for one in listening:
            loop.loop.call_soon_threadsafe(one.close)


class Routing:
    """A router in a thread. client: of it. router: what answers. server: uvicorn's."""

    def __init__(self, client, router, server):
        self.client, self.router, self.server = client, router, server


@contextlib.contextmanager
def routing(urls, classes=('2K:8:64K', 'rest:2:64K'), policy=POLICY, **limits):
    """Routes to the servers on a free port until the end of the block."""
    limits = Limits(**{'drain_timeout_s': 1.0, 'max_body_bytes': 100_000} | limits)
    app = build_router(Fleet(urls, policy), Budgets(read_classes(classes)), limits)
    server = make_server(app, '127.0.0.1', 0, limits)
    router = app.state.exchange
    thread = threading.Thread(target=lambda: asyncio.run(run(server, router)))
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f'http://127.0.0.1:{port}'
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
            yield Routing(client, router, server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
