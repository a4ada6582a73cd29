"""Requests that are taken and refused, by the hosted API's rules and by the open ones."""

import copy
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.chat_events import CallArguments, CallEnd, CallStart, Content, ParsedMessage
from k3jax.serve.api.chat_request import JsonFormat, read_chat_request
from k3jax.serve.api.completion_request import read_completion_request
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import parse_body
from k3jax.serve.api.responses import Responder, TokenText, Usage, completion_logprobs
from k3jax.serve.api.rules import RULES
from k3jax.serve.api.tools import ToolChoice
from tests.request_lists import (
    CALLED,
    HELLO,
    ONLY_OPEN,
    REFUSED,
    RESULT,
    TAKEN,
    schema,
    tool,
)


def read(rules='open', **fields):
    return read_chat_request({'messages': [HELLO]} | fields, RULES[rules])


def refusal(rules='open', **fields):
    with pytest.raises(ApiError) as caught:
        read(rules, **fields)
    assert caught.value.status == 400
    assert caught.value.body['error']['type'] == 'invalid_request_error'
    return caught.value.message


BOTH = ('open', 'kimi')


@pytest.mark.parametrize('rules', BOTH)
@pytest.mark.parametrize('fields', TAKEN, ids=lambda fields: json.dumps(fields)[:60])
def test_taken(rules, fields):
    read(rules, **fields)


@pytest.mark.parametrize('rules', BOTH)
@pytest.mark.parametrize('fields, message', REFUSED, ids=lambda x: json.dumps(x)[:60])
def test_refused(rules, fields, message):
    assert re.search(message, refusal(rules, **fields))


@pytest.mark.parametrize('arguments', ['[1]', '7', 'null', '"x"', [], 5])
def test_arguments_that_are_no_object_are_refused(arguments):
    call = copy.deepcopy(CALLED)
    call['tool_calls'][0]['function']['arguments'] = arguments
    assert 'arguments' in refusal(messages=[HELLO, call, RESULT])


def test_arguments_may_be_an_object_or_text_that_is_no_json():
    for arguments, shown in (({'x': 'é'}, '{"x": "é"}'), ('{"x', '{"x'), (None, ''), ('', '')):
        call = copy.deepcopy(CALLED)
        call['tool_calls'][0]['function']['arguments'] = arguments
        message = read(messages=[HELLO, call, RESULT]).conversation.messages[1]
        assert message.tool_calls[0].arguments == shown


@pytest.mark.parametrize('fields', ONLY_OPEN, ids=json.dumps)
def test_the_hosted_rules_take_less(fields):
    read('open', **fields)
    refusal('kimi', **fields)


def test_the_hosted_rules_ignore_what_they_do_not_know():
    named = {'type': 'function', 'function': {'name': 'f'}}
    found = read('kimi', tools=[tool()], tool_choice=named, reasoning_effort='xhigh')
    assert found.tool_choice == ToolChoice()
    assert found.conversation.effort == 'max'
    assert 'reasoning_effort' in refusal(reasoning_effort='medium')
    found = read('open', tools=[tool(), tool('g')], tool_choice=named)
    assert found.tool_choice == ToolChoice('required', 'f')
    other = {'type': 'function', 'function': {'name': 'other'}}
    assert 'name of one of the tools' in refusal(tools=[tool()], tool_choice=other)


@pytest.mark.parametrize(
    'fields, thinking, effort',
    [
        ({}, True, 'max'),
        ({'reasoning_effort': 'low'}, True, 'low'),
        ({'reasoning_effort': 'none'}, False, None),
        ({'thinking': {'type': 'disabled'}, 'reasoning_effort': 'high'}, False, None),
        ({'thinking': {'type': 'enabled'}, 'reasoning_effort': 'none'}, True, 'max'),
        (
            {'thinking': {'type': 'enabled', 'effort': 'low'}, 'reasoning_effort': 'high'},
            True,
            'low',
        ),
        ({'chat_template_kwargs': {'thinking': False}}, False, None),
        ({'chat_template_kwargs': {'thinking_effort': 'high'}}, True, 'high'),
        (
            {'chat_template_kwargs': {'thinking_effort': 'high'}, 'reasoning_effort': 'low'},
            True,
            'low',
        ),
    ],
)
@pytest.mark.parametrize('rules', BOTH)
def test_which_effort_counts(rules, fields, thinking, effort):
    found = read(rules, **fields).conversation
    assert (found.thinking, found.effort) == (thinking, effort)


def test_defaults_and_what_goes_before():
    assert read('kimi').common.sampling.top_p == 0.95
    assert read('open').common.sampling.top_p == 1.0
    assert read().common.max_tokens is None and read().json_format is None
    assert read(max_tokens=5, max_completion_tokens=7).common.max_tokens == 7
    assert read(top_k=-1).common.sampling.top_k == 0
    assert read(response_format=schema(schema={'a': 1})).json_format == JsonFormat({'a': 1})
    assert read(response_format=schema()).conversation.response_format == {}
    assert (
        read(messages=[{'role': 'developer', 'content': 'x'}, HELLO]).conversation.messages[0].role
        == 'system'
    )


def image(url):
    return {'messages': [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': url}]}]}


def test_images_are_data_urls():
    url = 'data:image/png;base64,aGk='
    for value in (url, {'url': url}, {'url': url, 'detail': 'high'}):
        assert read(**image(value)).images[0].url == url
    for bad in (
        'http://x/y.png',
        'file:///etc/passwd',
        'ms://id',
        'data:text/html;base64,aGk=',
        '',
    ):
        message = refusal(**image(bad))
        assert 'wanted' in message and 'passwd' not in message
    assert 'url' in refusal(**image({'detail': 'high'}))
    content = image(url)['messages'][0]['content'] * 17
    assert '17 images' in refusal(messages=[{'role': 'user', 'content': content}])
    assert 'type' in refusal(messages=[{'role': 'assistant', 'content': content}, HELLO])


def test_plain_completions_take_text_or_ids():
    def prompt(value, **fields):
        return read_completion_request({'prompt': value} | fields, RULES['open'], 512)

    assert prompt('x').prompt == 'x' == prompt(['x']).prompt
    assert prompt([5, 6]).prompt == (5, 6) == prompt([[5, 6]]).prompt
    for bad in ('', [], ['x', 'y'], [[5], [6]], [512], [-1], [1.0], [True], None, 5, {}):
        with pytest.raises(ApiError, match='prompt'):
            prompt(bad)
    for fields in ({'suffix': 'x'}, {'best_of': 2}, {'logprobs': 6}, {'messages': []}):
        with pytest.raises(ApiError, match=next(iter(fields))):
            prompt('x', **fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(['role', 'content', 'type', 'text', 'function', 'name', 'tools', 'id']),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
NAMES = ['messages', 'tools', 'tool_choice', 'response_format', 'stop', 'seed', 'thinking']
NAMES += ['temperature', 'max_tokens', 'stream', 'stream_options', 'logprobs', 'logit_bias']


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.booleans())
def test_no_body_breaks_the_reader(fields, has_message):
    body = ({'messages': [HELLO]} if has_message else {}) | fields
    try:
        read_chat_request(parse_body(json.dumps(body).encode()), RULES['open'])
    except ApiError as error:
        assert error.status == 400 and json.dumps(error.body)


def test_a_long_unknown_name_is_not_compared_and_limits_are_whole_numbers():
    with pytest.raises(ApiError, match='unknown field$'):
        read_chat_request({'messages': [], 'temperatur' + 'e' * 1_000_000: 1}, RULES['open'])
    with pytest.raises(ApiError, match='did you mean temperature'):
        read_chat_request({'messages': [], 'temperatur': 1}, RULES['open'])
    with pytest.raises(ApiError, match='from 1 to 1048576$'):
        read_chat_request({'messages': [], 'max_tokens': 0}, RULES['open'])


def test_usage_has_the_cached_tokens_twice():
    body = Usage(10, 5, 7, 2).body
    assert (body['prompt_tokens'], body['completion_tokens'], body['total_tokens']) == (10, 5, 15)
    assert body['cached_tokens'] == body['prompt_tokens_details']['cached_tokens'] == 7
    assert body['completion_tokens_details'] == {'reasoning_tokens': 2}
    assert Usage(3, 1, 7).body['cached_tokens'] == 3


def test_deltas_and_the_whole_name_calls_alike():
    respond = Responder('m', is_chat=True)
    message = ParsedMessage()
    events = [
        Content('x'),
        CallStart(0, 'f'),
        CallArguments(0, '{}'),
        CallEnd(0),
        CallStart(1, 'g'),
    ]
    message.add(events)
    deltas = [respond.delta(event) for event in events]
    assert deltas[3] is None and deltas[2] == {
        'tool_calls': [{'index': 0, 'function': {'arguments': '{}'}}]
    }
    body = respond.chat_completion(message, finish_reason='tool_calls', usage=Usage(1, 1))
    (call,) = body['choices'][0]['message']['tool_calls']  # the one that was cut off is left out
    assert call['id'] == deltas[1]['tool_calls'][0]['id']
    assert call['function'] == {'name': 'f', 'arguments': '{}'}
    assert body['id'] == respond.chat_chunk({})['id']


def test_logprobs_of_bytes_that_are_no_text():
    tokens = [TokenText(b'\xe4', -1.0, []), TokenText(b'ab', float('-inf'), [(b'c', -2.0)])]
    found = completion_logprobs(tokens, 3)
    assert found['tokens'] == ['\ufffd', 'ab'] and found['text_offset'] == [3, 4]
    assert found['token_logprobs'] == [-1.0, -9999.0] and found['top_logprobs'][1] == {'c': -2.0}
