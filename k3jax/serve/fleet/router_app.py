"""Which routes a router has, and how it runs."""

from __future__ import annotations

import urllib.parse
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from k3jax.serve.admission import Limits
from k3jax.serve.api.errors import ApiError
from k3jax.serve.fleet.asked import Asked
from k3jax.serve.fleet.budgets import Budgets
from k3jax.serve.fleet.router import Router, passed_headers
from k3jax.serve.fleet.servers import Fleet
from k3jax.serve.wire import to_json


class _Completions:
    """An ASGI endpoint for completions."""

    def __init__(self, router: Router):
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router.answer(scope, receive, send)


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type='application/json')


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: 'There is no such route', 405: 'This route does not take this method'}
    body = ApiError(texts.get(error.status_code, 'The request cannot be served')).body
    return Response(to_json(body), error.status_code, error.headers, 'application/json')


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body, error.status)


def build_router(fleet: Fleet, budgets: Budgets, limits: Limits) -> Starlette:
    """A router as an ASGI application; `app.state.exchange` is what answers.

    Keys are the servers' business. /health and /metrics are for anybody, and name no server.
    """
    router = Router(fleet, budgets, limits)

    async def show_models(request: Request) -> Response:
        path = urllib.parse.quote(request.scope['path'])
        asked = Asked('GET', path, passed_headers(request.scope), key='models')
        answer = await router.ask(asked)
        return Response(answer.body, answer.status, dict(answer.headers))

    async def show_health(request: Request) -> Response:
        count = {'servers': len(fleet.servers), 'up': fleet.num_up}
        if router.slots.draining:
            return _json({'status': 'draining', **count}, 503)
        if not count['up']:
            return _json({'status': 'down', **count}, 503)
        return _json({'status': 'ok', **count})

    async def show_metrics(request: Request) -> Response:
        page = router.metrics.page(fleet, budgets)
        return Response(page, media_type='text/plain; version=0.0.4; charset=utf-8')

    completions = _Completions(router)
    app = Starlette(
        routes=[
            Route('/health', show_health),
            Route('/metrics', show_metrics),
            Route('/v1/models', show_models),
            Route('/v1/models/{name:path}', show_models),
            Route('/v1/chat/completions', completions, methods=['POST']),
            Route('/v1/completions', completions, methods=['POST']),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    app.state.exchange = router
    return app


async def run(server: uvicorn.Server, router: Router, wait_s: float = 0.0) -> None:
    """Routes until a signal, and until the last request is answered.

    Raises:
      ValueError: no server came up within `wait_s`.
    """
    async with router.running(wait_s):
        await server.serve()
