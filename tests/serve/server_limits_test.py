"""A running server asked too much, too badly, too often or by nobody: limits and errors."""

import json
import socket
import threading
import time

import httpx
import openai
import pytest

from k3jax.serve import exchange
from k3jax.serve.admission import Limits
from k3jax.serve.api import fields
from tests.asking import ANSWER, HELLO, LIMITS, ask, joined, wait_until
from tests.scripted_engine import ScriptedEngine, ids_of, running

SECRET = 'sk-very-secret'


@pytest.fixture(scope='module')
def served():
    with running(ScriptedEngine(lambda _: ids_of(ANSWER)), limits=LIMITS) as found:
        yield found


@pytest.fixture
def client(served):
    engine = served.engine
    engine.script, engine.delay_s, engine.max_running = (lambda _: ids_of(ANSWER)), 0.0, 1000
    engine.cached_tokens = 0
    with openai.OpenAI(base_url=f'{served.url}/v1', api_key='any', max_retries=0) as found:
        yield found


def post(served, content, path='/v1/chat/completions', **options):
    return httpx.post(f'{served.url}{path}', content=content, timeout=20, **options)


BAD_BODIES = {
    'invalid_utf8': (b'{"messages": "\xff"}', 400, 'not UTF-8'),
    'not_json': (b'{', 400, 'not JSON'),
    'nan': (b'{"temperature": NaN}', 400, 'not JSON'),
    'no_object': (b'[]', 400, 'wanted an object'),
    'deep': (b'{"a":' * 50_00 + b'1' + b'}' * 50_00, 400, 'nested deeper'),
    'rather_deep': (b'{"metadata":' + b'[' * 200 + b']' * 200 + b'}', 400, 'nested deeper'),
    'long_number': (b'{"seed":' + b'9' * 6000 + b'}', 400, 'not JSON'),
    'unknown_field': (b'{"mesages": []}', 400, 'did you mean messages'),
    'empty': (b'', 400, 'not JSON'),
    'surrogates': (b'{"messages": [{"role": "\\ud800"}]}', 400, 'role'),
    'many_values': (b'{"messages": [' + b'[],' * 30_000 + b'[]]}', 400, 'more than 20000 values'),
    'too_large': (b' ' * 100_001, 413, 'at most 100000 bytes'),
}


@pytest.mark.parametrize('kind', BAD_BODIES)
@pytest.mark.parametrize('stream', [False, True])
def test_bad_bodies_are_refused_before_the_first_event(served, kind, stream, monkeypatch):
    monkeypatch.setattr(fields, 'MAX_VALUES', 20_000)
    body, status, message = BAD_BODIES[kind]
    response = post(served, body.replace(b'{', b'{"stream": true, ', stream))
    if status == 400 and kind in ('empty', 'no_object') and stream:
        return
    assert response.status_code == status
    assert response.headers['content-type'] == 'application/json'
    error = response.json()['error']
    assert error['type'] == 'invalid_request_error'
    assert message in error['message']


def test_a_body_of_100_megabytes_is_refused_while_it_comes(served, client):
    def pieces():
        for _ in range(100):
            yield b' ' * 2**20

    try:
        response = post(served, pieces())  # without a length
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # it was told while it was still sending
    assert ask(client).choices


def test_a_prompt_over_the_window_is_refused(client):
    with pytest.raises(openai.BadRequestError, match='wanted at most 4096 together') as caught:
        ask(client, messages=[{'role': 'user', 'content': 'x' * 5000}])
    assert caught.value.code == 'context_length_exceeded'
    with pytest.raises(openai.BadRequestError, match='4000 for the answer, wanted at most 4096'):
        ask(client, max_tokens=4000, stream=True)
    with pytest.raises(openai.BadRequestError, match='got more than 4096 tokens'):
        client.completions.create(model='tiny', prompt='x' * 5000)


def test_unknown_routes_and_methods_have_json_bodies(served):
    for response in (
        httpx.get(f'{served.url}/v2'),
        httpx.get(f'{served.url}/v1/chat/completions'),
        httpx.get(f'{served.url}/../etc/passwd'),
    ):
        assert response.status_code in (404, 405)
        assert response.json()['error']['type'] == 'invalid_request_error'


@pytest.mark.parametrize('stream', [False, True])
def test_an_engine_that_fails_is_said_without_a_reason(served, client, stream):
    served.engine.script = lambda _: [97, -1]
    with pytest.raises(openai.APIError, match='failed to answer'):
        made = ask(client, stream=stream)
        list(made)

    def broken(_):
        raise RuntimeError('/secret/path')

    served.engine.script = broken
    with pytest.raises(openai.APIError) as caught:
        list(ask(client, stream=stream))
    assert 'secret' not in str(caught.value)
    served.engine.script = lambda _: ids_of(ANSWER)
    assert ask(client).choices


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_frees_the_engine(served, stream):
    engine = served.engine
    engine.script, engine.delay_s = (lambda _: [97] * 4000), 0.01
    before = len(engine.streams)
    body = {'messages': HELLO, 'stream': stream, 'thinking': {'type': 'disabled'}}
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(timeout=httpx.Timeout(5, read=0.3)) as client,
        client.stream('POST', f'{served.url}/v1/chat/completions', json=body) as response,
    ):
        for number, _ in enumerate(response.iter_lines()):
            if number == 3:
                raise httpx.ReadTimeout('enough')
    wait_until(lambda: len(engine.streams) > before and engine.streams[-1].is_cancelled)
    wait_until(lambda: served.app.state.exchange.slots.num_taken == 0)


def test_an_overloaded_server_says_so_at_once(served, client):
    served.engine.max_running = 0
    with pytest.raises(openai.RateLimitError):
        ask(client)
    served.engine.max_running, served.engine.delay_s = 1000, 0.02
    served.engine.script = lambda _: [97] * 4000
    streams = [ask(client, stream=True) for _ in range(8)]
    for stream in streams:
        next(iter(stream))
    start = time.monotonic()
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client)
    assert time.monotonic() - start < 1
    assert caught.value.response.headers['retry-after'] == '1'
    for stream in streams:
        stream.close()
    wait_until(lambda: served.app.state.exchange.slots.num_taken == 0)


def test_keys_rates_and_time():
    limits = Limits(requests_per_minute=3, request_timeout_s=0.3, drain_timeout_s=1.0)
    engine = ScriptedEngine(lambda _: [97] * 4000)
    engine.delay_s = 0.05
    with running(engine, limits=limits, api_keys=[SECRET, 'other']) as served:

        def client(key):
            return openai.OpenAI(base_url=f'{served.url}/v1', api_key=key, max_retries=0)

        for key in ('wrong', SECRET[:-1], f'{SECRET}x'):
            with client(key) as wrong, pytest.raises(openai.AuthenticationError) as caught:
                ask(wrong)
            assert SECRET not in str(caught.value.response.text)
        for path in ('/v1/models', '/metrics'):
            assert httpx.get(f'{served.url}{path}').status_code == 401
        assert httpx.get(f'{served.url}/health').status_code == 200
        with client(SECRET) as known:
            start = time.monotonic()
            completion = ask(known)  # cut off by time
            assert completion.choices[0].finish_reason == 'length'
            assert 0.2 < time.monotonic() - start < 3
            ask(known, max_tokens=1)
            ask(known, max_tokens=1)
            with pytest.raises(openai.RateLimitError, match='3 requests a minute'):
                ask(known, max_tokens=1)
        with client('other') as other:
            assert ask(other, max_tokens=1).choices


def test_a_server_that_stops_lets_requests_end():
    engine = ScriptedEngine(lambda _: ids_of(ANSWER))
    engine.delay_s = 0.005
    limits = Limits(drain_timeout_s=10.0)
    with running(engine, limits=limits) as served:
        found = []

        def work():
            with openai.OpenAI(base_url=f'{served.url}/v1', api_key='x', max_retries=0) as client:
                found.append(joined(ask(client, stream=True)))

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: engine.num_running)
        served.server.handle_exit(15, None)
        assert served.app.state.exchange.slots.draining
        thread.join(20)
    assert found[0][1] == 'Hello, 🚀 world'


def test_a_client_that_does_not_read_is_let_go(monkeypatch):
    monkeypatch.setattr(exchange, '_SEND_TIMEOUT_S', 0.5)
    engine = ScriptedEngine(lambda _: [97] * 100_000)
    engine.max_length = 200_000
    limits = Limits(request_timeout_s=1.0, drain_timeout_s=1.0)
    with running(engine, limits=limits) as served, socket.socket() as client:
        # Small buffers, so that what is not read soon stops the server.
        listening = served.server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening.getsockname())
        body = json.dumps({'messages': HELLO, 'stream': True}).encode()
        head = (
            f'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n'
        )
        client.sendall(head.encode() + body)
        wait_until(lambda: engine.streams)
        wait_until(lambda: engine.streams[-1].is_cancelled)
        wait_until(lambda: served.app.state.exchange.slots.num_taken == 0)
        counted = 'k3jax_requests_total{route="chat",status="408"} 1.0'
        wait_until(lambda: counted in httpx.get(f'{served.url}/metrics').text)
