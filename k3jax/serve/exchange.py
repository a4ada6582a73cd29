"""How one request for a completion is answered, from its headers to the last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging
from starlette.types import Receive, Scope, Send

from k3jax.serve.admission import Keys, Limits, Rate, Slots
from k3jax.serve.answer import ChatAnswer, TextAnswer
from k3jax.serve.api.chat_request import ChatRequest, read_chat_request
from k3jax.serve.api.completion_request import CompletionRequest, read_completion_request
from k3jax.serve.api.errors import ApiError, internal_error, overloaded
from k3jax.serve.api.fields import parse_body
from k3jax.serve.api.responses import (
    Responder,
    Usage,
    chat_logprobs,
    completion_logprobs,
    with_usage,
)
from k3jax.serve.api.rules import Rules
from k3jax.serve.prepare import Prepared, Preparer
from k3jax.serve.request import Engine, Overloaded, Stream, Token
from k3jax.serve.server_metrics import ServerMetrics
from k3jax.serve.wire import (
    DONE,
    ClientGone,
    event,
    read_body,
    send_body,
    send_error,
    send_events,
    to_json,
    unless_gone,
)

_SEND_TIMEOUT_S = 30.0  # beyond the time that a request may take
_NUM_PREPARING = 2  # requests whose images and prompts are worked on at once


class EngineFailed(Exception):
    """The engine gave up on a request."""


class Exchange:
    """Answers requests for completions with one engine.

    Attributes:
      slots: of requests that are being answered.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Rules,
        limits: Limits,
        keys: Keys,
        preparer: Preparer,
        metrics: ServerMetrics,
    ):
        self.slots = Slots(limits.max_concurrent)
        self._engine, self._rules, self._limits = engine, rules, limits
        self._keys, self._rate = keys, Rate(limits.requests_per_minute)
        self._preparer, self._metrics = preparer, metrics
        # Not a semaphore: a client that leaves would give up its place while its thread works on.
        self._preparing = ThreadPoolExecutor(_NUM_PREPARING, 'prepare')

    def check_key(self, authorization: str | None) -> str | None:
        """Who asks; raises ApiError for somebody who may not."""
        return self._keys.check(authorization)

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, is_chat: bool) -> None:
        """Answers one request, whatever becomes of it."""
        route = 'chat' if is_chat else 'completions'
        status, has_started = 200, False

        async def sending(message: Any) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        error: ApiError | None = None
        try:
            with self._metrics.in_flight.track_inprogress():
                await self._answer(scope, receive, sending, is_chat=is_chat)
        except ClientGone:
            status = 499
            self._metrics.cancelled.inc()
        except ApiError as refused:
            error = refused
        except TimeoutError:
            error = ApiError('The client is too slow', status=408, code='request_timeout')
        except Overloaded:
            error = overloaded('The queue of requests is full')
        except Exception:
            logging.exception('%s: a request failed', route)
            error = internal_error()
        if error is not None:
            status = error.status
            if not has_started:
                await send_error(send, error)
        self._metrics.requests.labels(route, str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, *, is_chat: bool) -> None:
        started = time.monotonic()
        headers = dict(scope['headers'])
        who = self.check_key(headers.get(b'authorization', b'').decode('latin-1'))
        self._rate.check(who or str((scope.get('client') or ('',))[0]))
        with self.slots.take():
            limits = self._limits
            data = await read_body(scope, receive, limits.max_body_bytes, limits.body_timeout_s)
            work = self._work(data, send, started, is_chat=is_chat)
            # Answers are cut off in time; this is for a client that does not take what it is sent.
            async with asyncio.timeout(limits.request_timeout_s + _SEND_TIMEOUT_S):
                await unless_gone(receive, work)

    async def _work(self, data: bytes, send: Send, started: float, *, is_chat: bool) -> None:
        asked, prepared = await asyncio.get_running_loop().run_in_executor(
            self._preparing, self._prepared, data, is_chat
        )
        del data
        try:
            stream = self._engine.submit(prepared.request)
        except ValueError as error:  # such as a media token among the ids of a plain prompt
            raise ApiError(str(error)) from None
        # What is left of it may be large, and the engine has what it needs.
        prepared = prepared._replace(request=None)
        try:
            tokens = self._tokens(stream, started)
            if is_chat:
                await self._chat(asked, prepared, stream, tokens, send)
            else:
                await self._completion(asked, prepared, stream, tokens, send)
        finally:
            stream.cancel()

    def _prepared(
        self, data: bytes, is_chat: bool
    ) -> tuple[ChatRequest | CompletionRequest, Prepared]:
        body = parse_body(data)
        asked: ChatRequest | CompletionRequest
        if is_chat:
            asked = read_chat_request(body, self._rules)
            self._check_model(asked.common.model)
            return asked, self._preparer.chat(asked)
        asked = read_completion_request(body, self._rules, self._engine.tokenizer.vocab_size)
        self._check_model(asked.common.model)
        return asked, self._preparer.completion(asked)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._engine.model_name:
            shown = model if len(model) <= 60 else f'{model[:57]}...'
            raise ApiError(
                f'model: there is no {shown!r} here, only {self._engine.model_name!r}',
                status=404,
                type='resource_not_found_error',
                param='model',
                code='model_not_found',
            )

    async def _tokens(self, stream: Stream, started: float) -> AsyncIterator[Token | None]:
        """The stream's tokens; None as the last where time runs out.

        Raises:
          EngineFailed: the engine gave up.
        """
        last, deadline = started, started + self._limits.request_timeout_s
        loop_offset = asyncio.get_running_loop().time() - time.monotonic()
        iterator = aiter(stream)
        is_first = True
        while True:
            try:
                async with asyncio.timeout_at(deadline + loop_offset):
                    token = await anext(iterator, None)
            except TimeoutError:
                yield None
                return
            if token is None or token.finished == 'error':
                raise EngineFailed
            now = time.monotonic()
            timing = self._metrics.first_token if is_first else self._metrics.between_tokens
            timing.observe(now - last)
            self._metrics.generated_tokens.inc()
            is_first, last = False, now
            yield token
            if token.finished is not None:
                return

    def _usage(self, prepared: Prepared, stream: Stream, answer: ChatAnswer | TextAnswer) -> Usage:
        cached = min(stream.cached_tokens, prepared.num_prompt_tokens)
        self._metrics.prompt_tokens.inc(prepared.num_prompt_tokens)
        self._metrics.cached_tokens.inc(cached)
        reasoning = answer.num_reasoning_tokens if isinstance(answer, ChatAnswer) else None
        return Usage(prepared.num_prompt_tokens, answer.num_tokens, cached, reasoning)

    async def _chat(
        self,
        asked: ChatRequest,
        prepared: Prepared,
        stream: Stream,
        tokens: AsyncIterator[Token | None],
        send: Send,
    ) -> None:
        respond = Responder(self._engine.model_name, is_chat=True)
        answer = ChatAnswer(self._engine.tokenizer, prepared.opened, asked.common.stop)
        has_logprobs = asked.logprobs is not None

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            yield respond.chat_chunk({'role': 'assistant', 'content': ''})
            async for token in tokens:
                events = answer.feed_or_cut(token)
                logprobs = answer.take_logprobs() if has_logprobs else []
                deltas = [delta for e in events if (delta := respond.delta(e)) is not None]
                if logprobs and not deltas:
                    deltas = [{'content': ''}]
                for delta in deltas:
                    shown, logprobs = (chat_logprobs(logprobs) if logprobs else None), []
                    yield respond.chat_chunk(delta, logprobs=shown)
                if answer.is_done:
                    break
            for e in answer.finish():
                delta = respond.delta(e)
                if delta is not None:
                    yield respond.chat_chunk(delta)
            last = respond.chat_chunk({}, finish_reason=answer.finish_reason)
            usage = self._usage(prepared, stream, answer)
            yield with_usage(last, usage, at_top=asked.common.include_usage)

        if asked.common.stream:
            await send_events(send, _sse(chunks()))
            return
        logprobs = []
        async for token in tokens:
            answer.feed_or_cut(token)
            logprobs += answer.take_logprobs()
            if answer.is_done:
                break
        answer.finish()
        body = respond.chat_completion(
            answer.message,
            finish_reason=answer.finish_reason,
            usage=self._usage(prepared, stream, answer),
            logprobs=chat_logprobs(logprobs) if has_logprobs else None,
        )
        await send_body(send, to_json(body))

    async def _completion(
        self,
        asked: CompletionRequest,
        prepared: Prepared,
        stream: Stream,
        tokens: AsyncIterator[Token | None],
        send: Send,
    ) -> None:
        respond = Responder(self._engine.model_name, is_chat=False)
        tokenizer = self._engine.tokenizer
        answer = TextAnswer(tokenizer, asked.common.stop)
        has_logprobs = asked.logprobs is not None
        echoed = ''
        if asked.echo:
            given = asked.prompt
            echoed = given if isinstance(given, str) else tokenizer.decode(given)

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            offset = len(echoed)
            if echoed:
                yield respond.completion_chunk(echoed)
            async for token in tokens:
                text = answer.feed_or_cut(token)
                found = answer.take_logprobs() if has_logprobs else []
                if text or found:
                    logprobs = completion_logprobs(found, offset) if found else None
                    yield respond.completion_chunk(text, logprobs=logprobs)
                    offset += len(text)
                if answer.is_done:
                    break
            last = respond.completion_chunk(answer.finish(), finish_reason=answer.finish_reason)
            usage = self._usage(prepared, stream, answer)
            yield with_usage(last, usage, at_top=asked.common.include_usage)

        if asked.common.stream:
            await send_events(send, _sse(chunks()))
            return
        text, found = echoed, []
        async for token in tokens:
            text += answer.feed_or_cut(token)
            found += answer.take_logprobs()
            if answer.is_done:
                break
        text += answer.finish()
        body = respond.completion_chunk(
            text,
            finish_reason=answer.finish_reason,
            logprobs=completion_logprobs(found, len(echoed)) if has_logprobs else None,
        )
        body['usage'] = self._usage(prepared, stream, answer).body
        await send_body(send, to_json(body))


async def _sse(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as events; a failure of the engine is the last one."""
    try:
        async for chunk in chunks:
            yield event(chunk)
    except EngineFailed:
        yield event(internal_error().body)
        return
    yield DONE
