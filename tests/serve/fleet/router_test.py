"""A router before fake servers: where requests go, and what becomes of them when servers fail."""

import contextlib
import json
import time
import types

import openai
import pytest

from k3jax.serve.fleet.asked import conversation_key
from tests.asking import ANSWER, LIMITS, ask, joined, parts, wait_until
from tests.fleet_fakes import SSE, Fake, chunk, fakes, routing, sse, whole, words
from tests.scripted_engine import ScriptedEngine, ids_of, running

HELLO = {'messages': [{'role': 'user', 'content': 'Hello'}]}
SECRET = 'sk-very-secret'
NONE = types.SimpleNamespace(content=())


def post(routed, body=HELLO, path='/v1/chat/completions', **options):
    return routed.client.post(path, json=body, **options)


def streamed(routed, body=HELLO, **options):
    """(text, reason, the error's code, ids) of a stream."""
    response = post(routed, {**body, 'stream': True}, **options)
    assert response.status_code == 200, response.text
    text, reason, code, ids, last = '', None, None, set(), None
    for event in response.text.split('\n\n'):
        if not event:
            continue
        last = event.removeprefix('data: ')
        if last == '[DONE]':
            continue
        found = json.loads(last)
        if 'error' in found:
            code = found['error']['code']
            assert '127.0.0.1' not in last
            continue
        ids.add((found['id'], found['created']))
        text += found['choices'][0]['delta'].get('content') or ''
        reason = found['choices'][0]['finish_reason'] or reason
    assert (last == '[DONE]') == (code is None)
    return text, reason, code, ids


def metric(routed, line):
    return line in routed.client.get('/metrics').text


def in_order(routed, servers, body=HELLO):
    """The servers as this conversation asks them."""
    by_url = {server.url: server for server in servers}
    return [by_url[one.url] for one in routed.router.fleet.order(conversation_key(None, body))]


@pytest.fixture(scope='module')
def fleet():
    with (
        fakes(Fake(), Fake(), Fake()) as servers,
        routing([server.url for server in servers]) as routed,
    ):
        wait_until(lambda: routed.router.fleet.num_up == 3)
        yield routed, servers


@pytest.fixture
def asked(fleet):
    """(router, primary, secondary, third) of HELLO, all well."""
    routed, servers = fleet
    for server in servers:
        server.script = lambda body: sse(*words('a b c'))
        server.health = whole({'status': 'ok'})
        server.bodies.clear()
        server.heads.clear()
        server.num_gone = 0
    wait_until(lambda: routed.router.fleet.num_up == 3)
    routed.router.fleet._moved.clear()
    return routed, *in_order(routed, servers)


def test_a_conversation_stays_with_its_server(asked):
    routed, primary, secondary, third = asked
    messages = list(HELLO['messages'])
    for turn in range(3):
        streamed(routed, {'messages': messages})
        messages += [{'role': 'assistant', 'content': 'x'}, {'role': 'user', 'content': str(turn)}]
    assert [len(server.bodies) for server in (primary, secondary, third)] == [3, 0, 0]
    for number in range(30):
        streamed(routed, headers={'X-Conversation': str(number)})
    assert all(server.bodies for server in (secondary, third))


def test_bytes_keys_and_bodies_pass_through(asked):
    routed, primary, *_ = asked
    bodies = {'chat/completions': {'choices': []}, 'completions': {'choices': [{'text': '中'}]}}
    for path, body in bodies.items():
        data = json.dumps(body, ensure_ascii=False, indent=3).encode()
        primary.script = lambda _, data=data: [whole(data)]
        content = b'{ "messages": [{"role": "user", "content": "Hello"}], "x": 1.50}  '
        response = routed.client.post(
            f'/v1/{path}',
            content=content,
            headers={'authorization': f'Bearer {SECRET}', 'cookie': 'a=b'},
        )
        assert (response.status_code, response.content) == (200, data)
        sent = primary.bodies[-1]
        assert sent.pop('seed') >= 0 and sent == json.loads(content)
        assert f'Bearer {SECRET}' in primary.heads[-1] and 'a=b' not in primary.heads[-1]
    for given in ({'seed': 5}, {'temperature': 0}, {'temperature': 0.0}):
        post(routed, {**HELLO, **given})
        assert primary.bodies[-1] == {**HELLO, **given}


def test_a_stream_is_passed_on_as_it_comes(asked):
    routed, primary, *_ = asked
    steps = sse(*words('a b'))
    primary.script = lambda _: [steps[0], steps[1], steps[2][:9], 0.1, steps[2][9:], 5.0]
    start = time.monotonic()
    with routed.client.stream(
        'POST', '/v1/chat/completions', json={**HELLO, 'stream': True}
    ) as response:
        pieces = response.iter_raw()
        assert next(pieces) + next(pieces) == steps[1] + steps[2]
    assert time.monotonic() - start < 2
    wait_until(lambda: primary.num_gone == 1)  # this client left
    wait_until(lambda: routed.router.slots.num_taken == 0)


BAD = {
    'no_answer': [b''],
    'no_http': [b'hello\r\n\r\n'],
    'html': [whole(b'<p>10.0.0.5', headers='content-type: text/html')],
    'no_json': [whole(b'{')],
    'error': [whole({'error': {'message': 'at 10.0.0.5'}}, '500 Oops')],
    'redirect': [whole({}, '302 Found', 'location: http://10.0.0.5')],
    'cut_short': [whole({'choices': []})[:-3]],
    'stopping': [whole({'error': {}}, '503 Stopping')],
    'not_found_in_html': [whole(b'10.0.0.5', '404 No', 'content-type: text/html')],
}


@pytest.mark.parametrize('kind', BAD)
@pytest.mark.parametrize('stream', [False, True])
def test_bad_answers_are_made_again_by_the_secondary(asked, kind, stream):
    routed, primary, secondary, _ = asked
    primary.script = lambda _: BAD[kind]
    if stream:
        assert streamed(routed)[:3] == ('a b c ', 'stop', None)
    else:
        secondary.script = lambda _: [whole({'choices': ['right']})]
        assert post(routed).json() == {'choices': ['right']}
    assert primary.bodies == secondary.bodies  # with the same seed
    secondary.script = primary.script
    response = post(routed, {**HELLO, 'stream': stream})
    expected = (200, 503) if kind == 'stopping' else (502,)  # the third may answer then
    assert response.status_code in expected and '10.0.0.5' not in response.text


def test_what_a_client_did_wrong_is_told_as_the_server_says_it(asked):
    routed, primary, secondary, _ = asked
    body = {'error': {'message': 'tempersture: unknown field', 'code': 'unknown_field'}}
    for status in ('400 Bad', '401 Who', '404 None', '429 Busy'):
        headers = 'content-type: application/json\r\nretry-after: 7'
        primary.script = lambda _, s=status, h=headers: [whole(body, s, h)]
        for stream in (False, True):
            response = post(routed, {**HELLO, 'stream': stream})
            assert (response.status_code, response.json()) == (int(status[:3]), body)
            assert response.headers['retry-after'] == '7'
    assert not secondary.bodies


CALL = {'index': 0, 'function': {'arguments': '{}'}}
START = {'index': 0, 'id': 'call_1', 'type': 'function', 'function': {'name': 'f', 'arguments': ''}}


def test_a_stream_that_breaks_off_goes_on(asked):
    routed, primary, secondary, _ = asked
    text = 'one two three four'
    for count in range(len(words(text)) + 1):
        primary.script = lambda _, n=count: sse(*words(text, 1)[:n], done=False)
        secondary.script = lambda _: sse(*words(text, 2))
        routed.router.fleet._moved.clear()
        found = streamed(routed)
        assert found[:3] == ('one two three four ', 'stop', None)
        assert found[3] == ({('chat-1', 1)} if count else {('chat-2', 2)})
        assert count == len(words(text)) or primary.bodies[-1] == secondary.bodies[-1]
    assert len(secondary.bodies) == len(words(text))  # a whole one lacked [DONE] alone
    assert not metric(routed, 'k3jax_router_continued_total 0.0')


def test_an_event_that_is_cut_is_not_sent_by_half(asked):
    routed, primary, *_ = asked
    steps = sse(*words('a b c', 1))
    primary.script = lambda _: [*steps[:3], steps[3][:20]]
    assert streamed(routed)[:3] == ('a b c ', 'stop', None)


def test_a_server_that_fails_in_the_middle_is_replaced(asked):
    routed, primary, secondary, _ = asked
    for last in ({'error': {'message': 'x'}}, [], {'choices': 5}, {'choices': [5]}):
        primary.script = lambda _, e=last: [
            *sse(*words('a b c', 1)[:2], done=False),
            b'data: ' + json.dumps(e).encode() + b'\n\n',
            5.0,
        ]
        routed.router.fleet._moved.clear()
        assert streamed(routed)[:3] == ('a b c ', 'stop', None)
    assert len(primary.bodies) == len(secondary.bodies) == 4


def test_another_text_is_never_gone_on_with(asked):
    routed, primary, secondary, third = asked
    primary.script = lambda _: sse(*words('a b c', 1)[:3], done=False)
    for other in ('a x c', 'a', 'x'):
        secondary.script = lambda _, o=other: sse(*words(o, 2))
        text, reason, code, _ = streamed(routed)
        assert (text, reason, code) == ('a b ', None, 'answer_diverged')
    secondary.script = lambda _: [whole({'error': {}}, '400 Bad')]
    assert streamed(routed)[:3] == ('a b ', None, 'answer_cut')
    assert not third.bodies


def test_one_request_brings_down_two_servers_at_most(asked):
    routed, primary, secondary, third = asked
    for server in (primary, secondary):
        server.script = lambda _: sse(*words('a b c', 1)[:3], done=False)
    assert streamed(routed)[:3] == ('a b ', None, 'servers_failed')
    assert not third.bodies


def test_a_full_secondary_is_waited_for_by_streams_that_broke_off(asked):
    routed, primary, secondary, third = asked
    primary.script = lambda _: sse(*words('a b c', 1)[:3], done=False)
    busy = whole({'error': {}}, '429 Busy')

    def once_busy(_):
        return [busy] if len(secondary.bodies) == 1 else sse(*words('a b c', 2))

    secondary.script, third.script = once_busy, lambda _: [busy]
    assert streamed(routed)[:3] == ('a b c ', 'stop', None)


def test_a_silent_server_loses_its_streams_when_its_health_does(asked):
    routed, primary, secondary, _ = asked
    steps = sse(*words('a b c', 1)[:3], done=False)

    def silent(_):
        primary.health = b''
        return [*steps, 30.0]

    primary.script = silent
    start = time.monotonic()
    assert streamed(routed)[:3] == ('a b c ', 'stop', None)
    assert time.monotonic() - start < 10
    assert routed.client.get('/health').json() == {'status': 'ok', 'servers': 3, 'up': 2}
    streamed(routed)
    assert len(secondary.bodies) == 2 and len(primary.bodies) == 1
    primary.health = whole({'status': 'ok'})
    wait_until(lambda: routed.router.fleet.num_up == 3)
    primary.script = secondary.script
    streamed(routed)
    assert len(secondary.bodies) == 3  # it stays, since the primary knows nothing of it now
    secondary.health = b''
    wait_until(lambda: routed.router.fleet.num_up == 2)
    streamed(routed)
    assert len(primary.bodies) == 2


def test_a_server_that_drains_keeps_what_it_has(asked):
    routed, primary, secondary, _ = asked
    steps = sse(*words('a b c', 1))

    def drains(_):
        primary.health = whole({'status': 'draining'}, '503 Draining')
        return [*steps[:3], 0.8, *steps[3:]]

    primary.script = drains
    assert streamed(routed)[3] == {('chat-1', 1)}
    streamed(routed)
    assert len(primary.bodies) == len(secondary.bodies) == 1


def test_a_class_can_use_up_only_its_own_budget(asked):
    routed, primary, *_ = asked
    long = {'messages': [{'role': 'user', 'content': 'x' * 20_000}]}
    for server in asked[1:]:
        server.script = lambda _: [*sse(*words('a b')[:2], done=False), 20.0]
    with contextlib.ExitStack() as held:
        for _ in range(2):
            body = {**long, 'stream': True}
            held.enter_context(routed.client.stream('POST', '/v1/chat/completions', json=body))
        start = time.monotonic()
        response = post(routed, long)
        assert time.monotonic() - start < 1 and response.status_code == 429
        error = response.json()['error']
        assert (error['type'], error['code']) == ('rate_limit_reached_error', 'rate_limit_exceeded')
        assert response.headers['retry-after'] == '1'
        assert metric(routed, 'k3jax_router_refused_total{class="rest"} 1.0')
        primary.script = lambda _: sse(*words('a b'))
        assert streamed(routed)[1] == 'stop'  # a short one goes through
    wait_until(lambda: metric(routed, 'k3jax_router_in_flight{class="rest"} 0.0'))
    for server in asked[1:]:
        server.script = lambda _: sse(*words('a b'))
    assert streamed(routed, long)[1] == 'stop'


def test_bad_requests(asked):
    routed, primary, *_ = asked
    url = '/v1/chat/completions'
    cases = {b'{': 400, b'[]': 400, b'\xff': 400, b'': 400, b' ' * 100_001: 413}
    for content, status in cases.items():
        response = routed.client.post(url, content=content)
        assert response.status_code == status
        assert response.json()['error']['type'] == 'invalid_request_error'
    assert routed.client.get(url).status_code == 405
    assert routed.client.get('/v2').json()['error']['message'] == 'There is no such route'
    assert not primary.bodies


def test_models_come_from_any_server(fleet, asked):
    routed = asked[0]
    for server in asked[1:]:
        server.script = lambda _: [whole({'data': ['tiny']})]
    assert routed.client.get('/v1/models').json() == {'data': ['tiny']}
    assert routed.client.get('/v1/models/a?b').json() == {'data': ['tiny']}


def test_servers_that_cannot_be_reached():
    with fakes(Fake(), Fake()) as servers:
        urls = [server.url for server in servers]
        with routing([*urls, 'http://127.0.0.1:9']) as routed:
            assert routed.router.fleet.num_up == 2
            order = in_order(routed, servers)
            first = order[0]
            first.loop.run(_closed(first))
            # Asked before any check has found it dead, or after: the client does not see it.
            assert streamed(routed)[:3] == ('a b c ', 'stop', None)
            order[1].loop.run(_closed(order[1]))
            wait_until(lambda: routed.router.fleet.num_up == 0)
            start = time.monotonic()
            response = post(routed, {**HELLO, 'stream': True})
            assert time.monotonic() - start < 1
            assert response.status_code == 503
            assert response.json()['error']['code'] == 'unavailable'
            assert routed.client.get('/v1/models').status_code == 503
            assert routed.client.get('/health').json()['status'] == 'down'


async def _closed(server):
    server.close()


def test_a_router_that_stops_lets_answers_end():
    server = Fake(lambda _: [SSE, *sse(*words('a b'))[1:3], 0.5, *sse(chunk({}, 0, 'stop'))[1:]])
    with fakes(server), routing([server.url], drain_timeout_s=10.0) as routed:
        body = {**HELLO, 'stream': True}
        with routed.client.stream('POST', '/v1/chat/completions', json=body) as response:
            pieces = response.iter_raw()
            next(pieces)
            routed.server.handle_exit(15, None)
            assert b'[DONE]' in b''.join(pieces)
    assert routed.router.slots.draining


def test_answers_of_real_servers_go_on_wherever_their_engine_fails():
    engines = [ScriptedEngine(lambda _: ids_of(ANSWER)) for _ in range(2)]
    with (
        running(engines[0], limits=LIMITS, api_keys=[SECRET]) as one,
        running(engines[1], limits=LIMITS, api_keys=[SECRET]) as other,
        routing([one.url, other.url]) as routed,
        openai.OpenAI(
            base_url=str(routed.client.base_url.join('/v1')), api_key=SECRET, max_retries=0
        ) as client,
    ):
        options = {'logprobs': True, 'top_logprobs': 1}
        whole = ask(client, **options)
        count = len(ids_of(ANSWER))
        for broken in range(1, count, 41):
            # Whoever is asked first fails after so many tokens.
            asked = []

            def script(request, broken=broken, asked=asked):
                asked.append(request)
                ids = ids_of(ANSWER)
                return ids if len(asked) == 2 else [*ids[:broken], -1]

            for engine in engines:
                engine.script = script
            chunks = list(ask(client, stream=True, seed=1, **options))
            assert len(asked) == 2
            assert tuple(joined(chunks)[:4]) == parts(whole)
            entries = [e for c in chunks for e in (c.choices[0].logprobs or NONE).content]
            assert [e.token for e in entries] == [
                e.token for e in whole.choices[0].logprobs.content
            ]
        assert [model.id for model in client.models.list()] == ['tiny']
        with pytest.raises(openai.AuthenticationError):
            ask(client, extra_headers={'authorization': 'Bearer other'})
