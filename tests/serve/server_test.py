"""A running server, asked by OpenAI's own client: answers, streams, limits and errors."""

import base64
import io
import json
import threading
import time

import httpx
import openai
import pytest
from PIL import Image

from k3jax.data.images import ImageConfig
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.serve.admission import Limits
from tests.request_lists import ONLY_OPEN, REFUSED, TAKEN
from tests.scripted_engine import ScriptedEngine, ids_of, running

TOKENIZER = byte_tokenizer()
ANSWER = (
    'Thinking — 中.«/think»«response»Hello, 🚀 world«/response»«tools»'
    '«call tool="f" index="1"»«argument key="s" type="string"»a "b"«/argument»'
    '«argument key="n" type="number"»1e3«/argument»«/call»'
    '«call tool="g" index="2"»«/call»«/tools»«/message»¶'
)
HELLO = [{'role': 'user', 'content': 'Hello'}]
LIMITS = Limits(max_body_bytes=100_000, body_timeout_s=5.0, max_concurrent=8, drain_timeout_s=1.0)
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


def ask(client, **options):
    return client.chat.completions.create(**{'model': 'tiny', 'messages': HELLO, **options})


def joined(stream):
    """(reasoning, content, [(name, arguments)], finish reason, usage) of a stream's chunks."""
    reasoning = content = ''
    calls, reason, usage = [], None, None
    for chunk in stream:
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, 'reasoning_content', None) or ''
        content += choice.delta.content or ''
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert call.id.startswith('call_') and call.type == 'function'
                calls.append([call.function.name, ''])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
        usage = choice.model_extra.get('usage') or usage
    return reasoning, content, [tuple(call) for call in calls], reason, usage


def parts(completion):
    choice = completion.choices[0]
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, 'reasoning_content', '')
    return reasoning, choice.message.content, calls, choice.finish_reason


def test_an_answer_has_its_parts(client):
    completion = ask(client)
    calls = [('f', '{"s": "a \\"b\\"", "n": 1e3}'), ('g', '{}')]
    assert parts(completion) == ('Thinking — 中.', 'Hello, 🚀 world', calls, 'tool_calls')
    assert completion.object == 'chat.completion' and completion.model == 'tiny'
    ids = [call.id for call in completion.choices[0].message.tool_calls]
    assert len(set(ids)) == 2


def test_a_stream_joined_is_the_answer(client):
    stream = ask(client, stream=True, stream_options={'include_usage': True})
    *found, usage = joined(stream)
    completion = ask(client)
    assert tuple(found) == parts(completion)
    assert usage == completion.model_dump(exclude_none=True)['usage']


def test_usage_counts_all_of_it(client, served):
    served.engine.cached_tokens = 7
    usage = ask(client).usage
    prompt = served.engine.requests[-1].prompt_ids
    assert usage.prompt_tokens == len(prompt) - 3
    assert usage.completion_tokens == len(ids_of(ANSWER)) - 1  # the message closed before its end
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.cached_tokens == usage.prompt_tokens_details.cached_tokens == 7
    thought = len(ids_of('Thinking — 中.«/think»'))
    assert usage.completion_tokens_details.reasoning_tokens == thought


def test_the_last_chunk_has_the_usage_in_both_places(client):
    chunks = list(ask(client, stream=True, stream_options={'include_usage': True}))
    assert chunks[0].choices[0].delta.role == 'assistant'
    assert chunks[-1].usage.model_dump() == chunks[-1].usage.model_dump()
    assert chunks[-1].choices[0].usage['total_tokens'] == chunks[-1].usage.total_tokens
    chunks = list(ask(client, stream=True))
    assert chunks[-1].usage is None and chunks[-1].choices[0].usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_content_and_the_engine(client, served):
    for stream in (False, True):
        made = ask(client, stop=['world', 'nothing'], stream=stream)
        found = joined(made)[:4] if stream else parts(made)
        assert found == ('Thinking — 中.', 'Hello, 🚀 ', [], 'stop')
        assert served.engine.streams[-1].is_cancelled


@pytest.mark.parametrize('limit', [1, 5, 30, len(ids_of(ANSWER)) - 40])
def test_an_answer_that_is_cut_says_so(client, limit):
    *found, usage = joined(ask(client, max_completion_tokens=limit, stream=True))
    completion = ask(client, max_tokens=limit)
    whole = completion.choices[0].message.tool_calls
    assert completion.choices[0].finish_reason == ('tool_calls' if whole else 'length')
    assert completion.usage.completion_tokens == usage['completion_tokens'] == limit
    reasoning, content, calls, reason = parts(completion)
    assert (reasoning, content, reason) == (found[0], found[1], found[3])
    assert found[2][: len(calls)] == calls


def test_logprobs_are_those_of_the_content(client):
    completion = ask(client, logprobs=True, top_logprobs=1)
    entries = completion.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == 'Hello, 🚀 world'
    assert all(e.logprob == -0.5 and len(e.top_logprobs) == 1 for e in entries)
    chunks = list(ask(client, logprobs=True, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.bytes for e in streamed] == [e.bytes for e in entries]


def test_plain_completions(client, served):
    served.engine.script = lambda _: [*b'one two', TOKENIZER.eos_id]
    for prompt in ('text', list(b'text'), ['text']):
        completion = client.completions.create(model='tiny', prompt=prompt, max_tokens=100)
        assert served.engine.requests[-1].prompt_ids in (list(b'text'), tuple(b'text'))
        assert completion.choices[0].text == 'one two'
        assert completion.choices[0].finish_reason == 'stop'
        assert completion.usage.prompt_tokens == 4
    chunks = client.completions.create(model='tiny', prompt='x', stream=True, stop=' t')
    assert ''.join(chunk.choices[0].text for chunk in chunks) == 'one'
    completion = client.completions.create(model='tiny', prompt='x', echo=True, logprobs=1)
    assert completion.choices[0].text == 'xone two'
    assert completion.choices[0].logprobs.text_offset == list(range(1, 8))
    assert (
        client.completions.create(model='tiny', prompt='x', max_tokens=3).choices[0].finish_reason
        == 'length'
    )


def test_sampling_reaches_the_engine(client, served):
    ask(
        client,
        temperature=0.3,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        extra_body={'top_k': 5, 'min_p': 0.1, 'repetition_penalty': 1.2},
    )
    got = served.engine.requests[-1].sampling
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.3, 0.9, 5, 0.1)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.5, -0.5, 1.2)
    assert got.seed == 7 and got.stop_ids == TOKENIZER.stop_ids
    assert got.max_new_tokens == served.engine.max_length - len(
        served.engine.requests[-1].prompt_ids
    )


def test_required_tools_are_called_and_json_is_json(client):
    parameters = {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n']}
    tools = [{'type': 'function', 'function': {'name': 'count', 'parameters': parameters}}]
    completion = ask(client, tools=tools, tool_choice='required')
    for call in completion.choices[0].message.tool_calls:
        assert call.function.name == 'count'
        assert isinstance(json.loads(call.function.arguments)['n'], int)
    completion = ask(client, response_format={'type': 'json_object'})
    assert isinstance(json.loads(completion.choices[0].message.content), dict)


def test_models_and_health(client, served):
    assert [model.id for model in client.models.list()] == ['tiny']
    assert client.models.retrieve('tiny').context_length == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve('other')
    assert httpx.get(f'{served.url}/health').json() == {'status': 'ok'}
    page = httpx.get(served.url)
    assert page.status_code == 200 and 'default-src' in page.headers['content-security-policy']


def test_metrics_count(client, served):
    ask(client)
    text = httpx.get(f'{served.url}/metrics').text
    for name in ('requests_total{route="chat",status="200"}', 'generated_tokens_total'):
        line = next(x for x in text.splitlines() if x.startswith(f'k3jax_{name}'))
        assert float(line.split()[-1]) > 0
    assert 'k3jax_requests_in_flight 0.0' in text


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
    'too_large': (b' ' * 100_001, 413, 'at most 100000 bytes'),
}


@pytest.mark.parametrize('kind', BAD_BODIES)
@pytest.mark.parametrize('stream', [False, True])
def test_bad_bodies_are_refused_before_the_first_event(served, kind, stream):
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
    with pytest.raises(openai.BadRequestError, match='wanted at most 4096 together'):
        ask(client, max_tokens=4000, stream=True)


@pytest.mark.parametrize('rules', ['open', 'kimi'])
def test_what_is_taken_and_what_is_refused(rules):
    engine = ScriptedEngine(lambda _: ids_of(ANSWER))
    taken = TAKEN + ONLY_OPEN * (rules == 'open')
    refused = [fields for fields, _ in REFUSED] + ONLY_OPEN * (rules == 'kimi')
    with (
        running(engine, rules, limits=LIMITS) as served,
        openai.OpenAI(base_url=f'{served.url}/v1', api_key='any', max_retries=0) as client,
    ):
        for fields in taken:
            raw = client.chat.completions.with_raw_response
            response = raw.create(model='tiny', messages=HELLO, extra_body=fields)
            assert response.status_code == 200, fields
        for fields in refused:
            num_asked = len(engine.requests)
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, extra_body={'stream': 'stream_options' not in fields} | fields)
            assert caught.value.type == 'invalid_request_error'
            assert len(engine.requests) == num_asked


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match='other'):
        ask(client, model='other')


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


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_images_become_patches(served, client):
    file = io.BytesIO()
    Image.new('RGB', (60, 40), 'red').save(file, 'PNG')
    url = f'data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}'
    part = {'type': 'image_url', 'image_url': {'url': url}}
    content = [{'type': 'text', 'text': 'x'}, part, part]
    with pytest.raises(openai.BadRequestError, match='takes no images'):
        ask(client, messages=[{'role': 'user', 'content': content}])
    engine = ScriptedEngine(lambda _: ids_of(ANSWER))
    with (
        running(engine, limits=LIMITS, images=ImageConfig(max_pixels=10_000)) as other,
        openai.OpenAI(base_url=f'{other.url}/v1', api_key='any', max_retries=0) as seeing,
    ):
        usage = ask(seeing, messages=[{'role': 'user', 'content': content}]).usage
        request = engine.requests[-1]
        pad = TOKENIZER.special_tokens['<|media_pad|>']
        assert list(request.prompt_ids).count(pad) == len(request.media) == 2
        assert request.media[0].grid == (1, 4, 6)
        assert usage.prompt_tokens == len(request.prompt_ids) - 3 + 2 * (6 - 1)

        bomb = io.BytesIO()
        Image.new('1', (9_000, 9_000)).save(bomb, 'PNG')
        for data, message in (
            (bomb.getvalue(), 'pixels'),
            (file.getvalue()[:60], 'damaged|cannot be read'),
            (b'%!PS-Adobe', 'type png'),
            (b'', 'type png'),
        ):
            url = f'data:image/png;base64,{base64.b64encode(data).decode()}'
            bad = [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': url}]}]
            with pytest.raises(openai.BadRequestError, match=message):
                ask(seeing, messages=bad, stream=True)


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
