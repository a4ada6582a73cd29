"""A running server, asked by OpenAI's own client: answers and streams."""

import base64
import io
import json

import httpx
import openai
import pytest
from PIL import Image

from k3jax.data.images import ImageConfig
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.serve.prefix_figures import PrefixFigures
from tests.asking import ANSWER, HELLO, LIMITS, ask, joined, parts, wait_until
from tests.request_lists import ONLY_OPEN, REFUSED, TAKEN
from tests.scripted_engine import ScriptedEngine, ids_of, running

TOKENIZER = byte_tokenizer()


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
    for seed in (1, 2, 3):  # streamed, it is the same
        options = {'tools': tools, 'tool_choice': 'required', 'seed': seed}
        assert joined(ask(client, **options, stream=True))[:4] == parts(ask(client, **options))


def test_models_and_health(client, served):
    assert [model.id for model in client.models.list()] == ['tiny']
    assert client.models.retrieve('tiny').context_length == 4096
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve('other')
    assert httpx.get(f'{served.url}/health').json() == {'status': 'ok'}
    page = httpx.get(served.url)
    assert page.status_code == 200 and 'default-src' in page.headers['content-security-policy']


def test_metrics_tell_of_the_prefix_cache_if_there_is_one(served):
    page = lambda: httpx.get(f'{served.url}/metrics').text.splitlines()  # noqa: E731
    assert not any('prefix' in line for line in page())
    served.engine.prefix_figures = PrefixFigures(
        hits=3, hit_tokens=1536, offloads=2, fetches=1, corrupt_blocks=4, host_bytes=7 * 2**30
    )
    try:
        lines = page()
    finally:
        served.engine.prefix_figures = None
    for name, value in {
        'hits_total': 3, 'misses_total': 0, 'hit_tokens_total': 1536, 'evictions_total': 0,
        'offloads_total': 2, 'fetches_total': 1, 'host_evictions_total': 0,
        'corrupt_blocks_total': 4, 'refusals_total': 0, 'bytes{place="device"}': 0,
        'bytes{place="host"}': 7 * 2**30,
    }.items():  # fmt: skip
        (found,) = (line for line in lines if line.startswith(f'k3jax_prefix_{name} '))
        assert float(found.split()[-1]) == value


def test_metrics_count(client, served):
    ask(client)

    def shows(line):
        return line in httpx.get(f'{served.url}/metrics').text

    wait_until(lambda: shows('k3jax_requests_in_flight 0.0'))  # just after the answer
    for name in ('requests_total{route="chat",status="200"}', 'generated_tokens_total'):
        assert shows(f'k3jax_{name}') and not shows(f'k3jax_{name} 0.0')


@pytest.mark.parametrize('rules', ['open', 'kimi'])
def test_what_is_taken_and_what_is_refused(rules):
    engine = ScriptedEngine(lambda _: ids_of(ANSWER))
    taken = TAKEN + ONLY_OPEN * (rules == 'open')
    refused = [body for body, _ in REFUSED] + ONLY_OPEN * (rules == 'kimi')
    with (
        running(engine, rules, limits=LIMITS) as served,
        openai.OpenAI(base_url=f'{served.url}/v1', api_key='any', max_retries=0) as client,
    ):
        for body in taken:
            raw = client.chat.completions.with_raw_response
            response = raw.create(model='tiny', messages=HELLO, extra_body=body)
            assert response.status_code == 200, body
        for body in refused:
            num_asked = len(engine.requests)
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, extra_body={'stream': 'stream_options' not in body} | body)
            assert caught.value.type == 'invalid_request_error'
            assert len(engine.requests) == num_asked


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match='other'):
        ask(client, model='other')


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
