"""What is told from a request: its conversation, its length, its class and its seed."""

import json

import pytest

from k3jax.serve.api.errors import ApiError
from k3jax.serve.fleet.asked import conversation_key, num_prompt_tokens, read_asked
from k3jax.serve.fleet.budgets import DEFAULT_CLASSES, Budgets, read_classes
from k3jax.serve.fleet.servers import read_servers

SYSTEM = {'role': 'system', 'content': 'Be brief.'}
HELLO = {'role': 'user', 'content': 'Hello'}
REST = [{'role': 'assistant', 'content': 'Hi.'}, {'role': 'user', 'content': 'Why?'}]


def key(body, header=None):
    return conversation_key(header, body)


def test_a_conversation_keeps_its_key_from_turn_to_turn():
    for beginning in ([HELLO], [SYSTEM, HELLO]):
        first = {'model': 'k3', 'messages': beginning, 'temperature': 1}
        assert key(first) == key({'model': 'k3', 'messages': beginning + REST})
        assert key(first) != key({'model': 'k2', 'messages': beginning})
    assert key({'messages': [HELLO]}) != key({'messages': [SYSTEM, HELLO]})
    assert key({'messages': [SYSTEM]}) != key({'messages': [HELLO]})
    text = 'It was a dark and stormy night. ' * 20
    assert key({'prompt': text}) == key({'prompt': text + text}) == key({'prompt': [text]})
    ids = list(range(100))
    assert key({'prompt': ids}) == key({'prompt': ids + ids}) == key({'prompt': [ids]})


def test_what_a_client_names_goes_before_its_words():
    named = {'messages': [HELLO], 'user': 'u', 'prompt_cache_key': 'p'}
    other = {'messages': [SYSTEM], 'user': 'v', 'prompt_cache_key': 'p'}
    assert key(named, 'h') == key(other, 'h') != key(named)
    assert key(named) == key(other)
    assert key({'messages': [HELLO], 'user': 'u'}) == key({'messages': [SYSTEM], 'user': 'u'})
    for body in ({'user': 5, 'messages': [HELLO]}, {'user': '', 'messages': [HELLO]}):
        assert key(body) == key({'messages': [HELLO]})


@pytest.mark.parametrize('value', [None, 5, 'x', [], [5], [[]], {'a': 1}, [None, {'role': []}]])
def test_bodies_that_no_server_takes_have_a_key_and_a_length(value):
    for name in ('messages', 'prompt', 'tools'):
        assert key({name: value})
        assert num_prompt_tokens({name: value}) >= 0


def test_lengths_are_about_those_of_the_prompt():
    assert num_prompt_tokens({'prompt': [1, 2, 3]}) == 3
    assert num_prompt_tokens({'prompt': 'four' * 100}) == 100
    image = {'type': 'image_url', 'image_url': {'url': 'data:' + 'x' * 10**6}}
    body = {'messages': [{'role': 'user', 'content': [image, image]}], 'metadata': 'x' * 10**6}
    assert 2048 <= num_prompt_tokens(body) < 2100


@pytest.mark.parametrize(
    ('data', 'is_seeded'),
    [
        (b' {"prompt": "x", "temperature": 0.5}\n', True),
        (b'{"prompt": "x", "seed": null}', True),
        (b'{"prompt": "x", "seed": 0}', False),
        (b'{"prompt": "x", "temperature": 0}', False),
        (b'{}', False),
    ],
)
def test_an_answer_that_could_not_be_made_again_gets_a_seed(data, is_seeded):
    asked = read_asked('/v1/completions', {}, data, None)
    assert (asked.data != data) == is_seeded
    found = json.loads(asked.data)
    assert not is_seeded or 0 <= found['seed'] < 2**31
    assert {**found, 'seed': None} == {**json.loads(data), 'seed': None} or not is_seeded


def test_a_class_takes_only_from_its_own_budget():
    budgets = Budgets(read_classes(['10:2:15', '100:2:1K', 'rest:1:1K']))
    assert budgets.max_requests == 5
    assert [budgets.class_of(n) for n in (0, 9, 10, 99, 100, 10**9)] == [
        *('10', '10', '100', '100', 'rest', 'rest')
    ]

    def is_refused(num_tokens):
        with pytest.raises(ApiError, match='too many requests with prompts') as caught:
            budgets.take(num_tokens).__enter__()
        return caught.value.status == 429 and caught.value.retry_after_s == 1

    with budgets.take(8):
        assert is_refused(8)  # tokens
        with budgets.take(7):
            assert is_refused(0)  # requests
            with budgets.take(50), budgets.take(5000):  # larger than its budget, but alone
                assert is_refused(100)
                assert budgets.in_flight() == {'10': (2, 15), '100': (1, 50), 'rest': (1, 5000)}
    with pytest.raises(KeyError), budgets.take(8):
        raise KeyError
    assert set(budgets.in_flight().values()) == {(0, 0)}


def test_classes_are_read():
    found = read_classes(DEFAULT_CLASSES)
    assert [one.below for one in found] == [2048, 16384, 131072, 524288, None]
    assert found[2].num_tokens == 4 * 2**20
    # One request of any length that the class may have fits its budget.
    assert all(one.num_tokens >= one.below for one in found[:-1])


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        ([], "the last must be 'rest'"),
        (['2K:1:1'], "the last must be 'rest'"),
        (['rest:1:1', 'rest:1:1'], 'growing lengths'),
        (['2K:1:1', '1K:1:1', 'rest:1:1'], 'growing lengths'),
        (['2K:0:1', 'rest:1:1'], "got '2K:0:1'"),
        (['2Q:1:1', 'rest:1:1'], "got '2Q:1:1'"),
        (['2K:1', 'rest:1:1'], "got '2K:1'"),
        (['-1:1:1', 'rest:1:1'], "got '-1:1:1'"),
    ],
)
def test_classes_that_are_none_are_named(texts, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_classes(texts)
    assert '--classes' in str(caught.value)


def test_servers_are_read():
    given = ['http://A:8000/', ' https://b', 'http://[::1]:80']
    assert read_servers(given) == ('http://a:8000', 'https://b:443', 'http://[::1]:80')


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        ([], 'got none'),
        ([' '], 'got none'),
        (['http://a', 'http://A:80/'], 'http://a:80 more than once'),
        (['a:8000'], 'wanted a URL'),
        (['http://'], 'wanted a URL'),
        (['ftp://a'], 'wanted a URL'),
        (['http://a:x'], 'no URL'),
        (['http://a:99999'], 'no URL'),
        (['http://a/v1'], 'scheme, host and port alone'),
        (['http://me:secret@a'], 'name or password'),
    ],
)
def test_servers_that_are_none_are_named(texts, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_servers(texts)
    assert '--servers' in str(caught.value) and 'secret' not in str(caught.value)
