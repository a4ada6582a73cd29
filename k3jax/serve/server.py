"""Which routes the HTTP server has, and how it starts and stops."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from k3jax.data.images import ImageConfig
from k3jax.serve.admission import Keys, Limits
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.responses import models
from k3jax.serve.api.rules import Rules
from k3jax.serve.constrain import Constrainer
from k3jax.serve.exchange import Exchange
from k3jax.serve.prepare import Preparer
from k3jax.serve.request import Engine
from k3jax.serve.server_metrics import ServerMetrics
from k3jax.serve.wire import header, to_json

_PAGE = pathlib.Path(__file__).with_name('chat_page.html')
# The page is one file that loads nothing and talks to nobody else.
_PAGE_HEADERS = {
    'content-security-policy': (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    'x-content-type-options': 'nosniff',
    'referrer-policy': 'no-referrer',
}


class _Completions:
    """An ASGI endpoint for completions of one kind."""

    def __init__(self, exchange: Exchange, *, is_chat: bool):
        self._exchange, self._is_chat = exchange, is_chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange.answer(scope, receive, send, is_chat=self._is_chat)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type='application/json')


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: 'There is no such route', 405: 'This route does not take this method'}
    message = texts.get(error.status_code, 'The request cannot be served')
    body = ApiError(message, status=error.status_code).body
    headers = dict(error.headers or {})
    return Response(to_json(body), error.status_code, headers, 'application/json')


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body, error.status)


def build_app(
    engine: Engine,
    rules: Rules,
    *,
    limits: Limits | None = None,
    api_keys: Sequence[str] = (),
    images: ImageConfig | None = None,
    constrainer: Constrainer | None = None,
) -> Starlette:
    """The server as an ASGI application; `app.state.exchange` is what answers.

    /health and the page at / are for anybody; everything else wants a key where there are keys.

    Args:
      images: None for a model that takes none.
      constrainer: the engine's, if it has one already; it takes a second to make.
    """
    limits, metrics = limits or Limits(), ServerMetrics(lambda: engine.prefix_figures)
    preparer = Preparer(engine, rules, images, constrainer or Constrainer(engine.tokenizer))
    exchange = Exchange(engine, rules, limits, Keys(api_keys), preparer, metrics)
    created, page = int(time.time()), _PAGE.read_bytes()

    async def show_models(request: Request) -> Response:
        exchange.check_key(header(request.scope, 'authorization'))
        found = models(engine.model_name, engine.max_length, created)
        name = request.path_params.get('name')
        if name is None:
            return _json(found)
        if name != engine.model_name:
            raise ApiError(
                'There is no such model', status=404, type='resource_not_found_error', param='model'
            )
        return _json(found['data'][0])

    async def show_health(request: Request) -> Response:
        if exchange.slots.draining:
            return _json({'status': 'draining'}, 503)
        return _json({'status': 'ok'})

    async def show_metrics(request: Request) -> Response:
        exchange.check_key(header(request.scope, 'authorization'))
        return Response(metrics.page(), media_type='text/plain; version=0.0.4; charset=utf-8')

    async def show_page(request: Request) -> Response:
        return Response(page, headers=_PAGE_HEADERS, media_type='text/html; charset=utf-8')

    chat, text = (_Completions(exchange, is_chat=is_chat) for is_chat in (True, False))
    app = Starlette(
        routes=[
            Route('/', show_page),
            Route('/health', show_health),
            Route('/metrics', show_metrics),
            Route('/v1/models', show_models),
            Route('/v1/models/{name:path}', show_models),
            Route('/v1/chat/completions', chat, methods=['POST']),
            Route('/v1/completions', text, methods=['POST']),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    app.state.exchange = exchange
    return app


class _Server(uvicorn.Server):
    """At a signal refuses new requests and lets running ones go on; a second one ends those."""

    def __init__(self, config: uvicorn.Config, exchange: Exchange):
        super().__init__(config)
        self._exchange = exchange

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._exchange.slots.draining = True
        # Not super(): that would raise the signal again at the end, and the caller cannot clean up.
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def make_server(app: Starlette, host: str, port: int, limits: Limits) -> uvicorn.Server:
    """A server for `app`; its `run` returns after SIGTERM, when the last request is answered."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level='warning',
        lifespan='off',
        ws='none',
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=64 * 2**10,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(limits.drain_timeout_s) + 1,
    )
    return _Server(config, app.state.exchange)
