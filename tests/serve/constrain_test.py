"""Random tokens under the grammar of a request: valid calls and valid JSON, whatever the schema."""

import json
import re

import jsonschema
import numpy as np
import pytest

from k3jax.data.chat_events import ParsedMessage
from k3jax.data.chat_stream import TokenParser
from k3jax.serve.api.chat_request import read_chat_request
from k3jax.serve.api.rules import RULES
from k3jax.serve.constrain import Constrainer
from k3jax.serve.grammar import MAX_CALLS, chat_grammar
from k3jax.serve.grammar_k2 import k2_grammar
from k3jax.serve.schema_text import UnsupportedSchema
from tests.vocabulary import k2_tokenizer, released_tokenizer, small_tokenizer

TOKENIZER = small_tokenizer()
CONSTRAINER = Constrainer(TOKENIZER)


def sample(constrainer, tokenizer, grammar, seed):
    """Random ids that the grammar allows; special tokens more often, so that texts end."""
    rng = np.random.default_rng(seed)
    matcher, ids = constrainer.matcher(grammar), []
    while not matcher.is_finished:
        allowed = np.flatnonzero(matcher.mask())
        special = allowed[allowed >= tokenizer.num_ranks]
        if len(special) and rng.random() < 0.1:
            allowed = special
        ids.append(int(rng.choice(allowed)))
        matcher.advance(ids[-1])
        assert len(ids) < 20_000
    return ids


def answer(asked, seed, constrainer=CONSTRAINER, tokenizer=TOKENIZER):
    opened = 'think' if asked.conversation.thinking else 'response'
    grammar = chat_grammar(asked, opened)
    assert constrainer.fault(grammar) is None, grammar
    parser, message = TokenParser(tokenizer, opened), ParsedMessage()
    for token_id in sample(constrainer, tokenizer, grammar, seed):
        message.add(parser.feed(token_id))
    message.add(parser.finish())
    assert not parser.machine.warnings and not parser.machine.was_cut
    return message


def request(**fields):
    body = {'messages': [{'role': 'user', 'content': 'x'}], **fields}
    return read_chat_request(body, RULES['open'])


def function(name, parameters=None, **fields):
    described = {'name': name, **fields}
    return {
        'type': 'function',
        'function': described | ({} if parameters is None else {'parameters': parameters}),
    }


def object_of(properties, required=None, **fields):
    required = list(properties) if required is None else required
    return {'type': 'object', 'properties': properties, 'required': required, **fields}


TREE = {
    'type': 'object',
    'properties': {'v': {'type': 'integer'}, 'next': {'$ref': '#/$defs/tree'}},
    'required': ['v'],
    'additionalProperties': False,
}
SCHEMAS = {
    'none': None,
    'empty': {'type': 'object', 'properties': {}},
    'no_more': {'type': 'object', 'properties': {}, 'additionalProperties': False},
    'types': object_of(
        {
            's': {'type': 'string'},
            'i': {'type': 'integer'},
            'n': {'type': 'number'},
            'b': {'type': 'boolean'},
            'z': {'type': 'null'},
            'a': {'type': 'array', 'maxItems': 3},
            'o': {'type': 'object', 'maxProperties': 2},
        }
    ),
    'some_required': object_of({k: {'type': 'integer'} for k in 'abcd'}, ['b', 'd']),
    'none_required': object_of({k: {'type': 'boolean'} for k in 'ab'}, []),
    'type_list': object_of({'x': {'type': ['string', 'null', 'integer']}}),
    'any_type': object_of({'x': {}, 'y': True}),
    'enum': object_of({'x': {'enum': ['a"b', 'c&d', 3, None, True, '中']}, 'y': {'const': 'k'}}),
    'enum_of_strings': object_of({'unit': {'type': 'string', 'enum': ['celsius', 'kelvin', '']}}),
    'ranges': object_of(
        {
            'i': {'type': 'integer', 'minimum': -3, 'maximum': 12},
            'n': {'type': 'number', 'exclusiveMinimum': 0, 'maximum': 1},
            'm': {'type': 'integer', 'multipleOf': 5, 'minimum': 5, 'maximum': 95},
        }
    ),
    'lengths': object_of(
        {
            's': {'type': 'string', 'minLength': 2, 'maxLength': 5},
            'a': {'type': 'array', 'items': {'type': 'boolean'}, 'minItems': 1, 'maxItems': 3},
        }
    ),
    'pattern': object_of(
        {
            'code': {'type': 'string', 'pattern': '^[A-Z]{2}-\\d+$'},
            'part': {'type': 'string', 'pattern': 'a[^/]/b', 'maxLength': 9},
            'either': {'type': 'string', 'pattern': '^(?:x|y)$'},
        }
    ),
    'nested_arrays': object_of(
        {
            'grid': {
                'type': 'array',
                'maxItems': 3,
                'items': {'type': 'array', 'maxItems': 2, 'items': {'type': 'integer'}},
            }
        }
    ),
    'nested_objects': object_of(
        {'o': object_of({'p': object_of({'q': {'type': 'string', 'maxLength': 4}})})}
    ),
    'refs': object_of(
        {
            'tree': {'$ref': '#/$defs/tree'},
            'unit': {'$ref': '#/$defs/unit'},
            'same': {'$ref': '#/properties/unit'},
            'list': {'type': 'array', 'items': {'$ref': '#/$defs/unit'}, 'maxItems': 2},
        },
        **{'$defs': {'tree': TREE, 'unit': {'type': 'string', 'enum': ['m', 's']}}},
    ),
    'root_ref': {
        '$ref': '#/definitions/args',
        'definitions': {'args': object_of({'x': {'type': 'integer'}})},
    },
    'any_of': object_of(
        {
            'x': {
                'anyOf': [
                    {'type': 'string', 'maxLength': 3},
                    {'type': 'integer'},
                    {'type': 'array', 'items': {'type': 'null'}, 'maxItems': 2},
                ]
            },
            'y': {'anyOf': [{'type': 'string', 'enum': ['a']}, {'type': 'null'}]},
            'z': {'type': 'string', 'anyOf': [{'pattern': '^a+$'}, {'minLength': 4}]},
        }
    ),
    'all_of': object_of(
        {'x': {'allOf': [{'type': 'string', 'minLength': 2}, {'pattern': '^[ab]*$'}]}}
    ),
    'any_of_at_root': {
        'type': 'object',
        'anyOf': [
            object_of({'a': {'type': 'integer'}}, additionalProperties=False),
            object_of({'b': {'type': 'string'}}, additionalProperties=False),
        ],
    },
    'string_that_needs_json': object_of({'x': {'type': 'string', 'pattern': '^a$|^b$'}}),
    'additional': object_of(
        {'a': {'type': 'integer'}}, additionalProperties={'type': ['integer', 'string']}
    ),
    'map': {'type': 'object', 'additionalProperties': {'type': 'array', 'maxItems': 1}},
    'required_only': {'type': 'object', 'required': ['x'], 'additionalProperties': {'const': 1}},
    'odd_names': object_of({'a "b" & <c>': {'type': 'integer'}, '中': {'type': 'string'}}),
    'odd_words': object_of(
        {
            'x': {'type': 'string', 'format': 'postcode'},
            'y': {'type': 'array', 'maxItems': 2, 'uniqueItems': False, 'title': '$ref'},
            'z': {'type': 'string', 'format': 'date', 'enum': ['2026-01-01']},
        }
    ),
}


@pytest.mark.parametrize('kind', SCHEMAS)
def test_a_required_call_is_valid_for_any_schema(kind):
    schema = SCHEMAS[kind]
    asked = request(
        tools=[function('f', schema), function('g.h-2', object_of({'n': {'type': 'integer'}}))],
        tool_choice={'type': 'function', 'function': {'name': 'f'}},
    )
    for seed in range(3):
        message = answer(asked, seed)
        assert 1 <= len(message.whole_calls) <= MAX_CALLS
        for call in message.whole_calls:
            assert call.name == 'f'
            jsonschema.validate(json.loads(call.arguments), schema or {'type': 'object'})


def test_a_released_vocabulary_gives_valid_calls_too():
    tokenizer = released_tokenizer()
    constrainer = Constrainer(tokenizer)
    for kind in ('types', 'refs', 'any_of', 'pattern'):
        asked = request(tools=[function('f', SCHEMAS[kind])], tool_choice='required')
        message = answer(asked, 0, constrainer, tokenizer)
        for call in message.whole_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[kind])


TOOLS = [
    function('one', object_of({'a': {'type': 'integer'}})),
    function('two', object_of({'b': {'type': 'string', 'maxLength': 5}})),
]


def test_required_calls_the_declared_tools_and_no_others():
    names = set()
    for seed in range(8):
        message = answer(request(tools=TOOLS, tool_choice='required'), seed)
        assert message.whole_calls
        names |= {call.name for call in message.whole_calls}
    assert names == {'one', 'two'}


@pytest.mark.parametrize('thinking', ['enabled', 'disabled'])
def test_calls_that_are_not_parallel_are_one(thinking):
    numbers = set()
    for seed in range(8):
        asked = request(tools=TOOLS, parallel_tool_calls=False, thinking={'type': thinking})
        numbers.add(len(answer(asked, seed).whole_calls))
        asked = request(tools=TOOLS, parallel_tool_calls=False, tool_choice='required')
        assert len(answer(asked, seed).whole_calls) == 1
    assert numbers == {0, 1}


def test_none_means_no_call():
    for seed in range(4):
        assert not answer(request(tools=TOOLS, tool_choice='none'), seed).calls


def test_tools_added_by_a_message_count():
    asked = read_chat_request(
        {
            'messages': [
                {'role': 'system', 'tools': TOOLS},
                {'role': 'user', 'content': 'x'},
            ],
            'tool_choice': 'required',
        },
        RULES['open'],
    )
    assert answer(asked, 0).whole_calls


def json_schema(schema, **fields):
    return {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': schema, **fields}}


@pytest.mark.parametrize('kind', [kind for kind in SCHEMAS if kind != 'none'])
def test_a_response_follows_its_schema_and_is_compact(kind):
    message = answer(request(response_format=json_schema(SCHEMAS[kind])), 1)
    value = json.loads(message.content)
    jsonschema.validate(value, SCHEMAS[kind])
    assert not set('\n\t') & set(message.content)


def test_any_object_is_an_object():
    for seed in range(4):
        message = answer(request(response_format={'type': 'json_object'}), seed)
        assert isinstance(json.loads(message.content), dict)


def test_a_response_in_json_may_be_a_call_instead():
    asked = request(response_format=json_schema({'const': 7}), tools=TOOLS)
    grammar = chat_grammar(asked, 'response')

    def is_allowed(text):
        matcher = CONSTRAINER.matcher(grammar)
        try:
            for token_id in TOKENIZER.encode(text, allow_special=True):
                matcher.advance(token_id)
        except ValueError:
            return False
        return matcher.is_finished

    close = '<|close|>{}<|sep|>'.format
    call = (
        '<|open|>tools<|sep|><|open|>call tool="one" index="1"<|sep|><|open|>argument key="a" '
        f'type="number"<|sep|>5{close("argument")}{close("call")}{close("tools")}'
    )
    end = f'{close("message")}<|end_of_msg|>'
    assert is_allowed(f'7{close("response")}{end}')
    assert not is_allowed(f'8{close("response")}{end}')
    assert is_allowed(f'I will.{close("response")}{call}{end}')
    assert is_allowed(f'7{close("response")}{call}{end}')
    assert not is_allowed(f'7{close("response")}{call.replace("one", "two")}{end}')


def test_most_requests_need_no_grammar():
    assert chat_grammar(request(), 'think') is None
    assert chat_grammar(request(tools=TOOLS), 'think') is None
    assert chat_grammar(request(tool_choice='none'), 'think') is None
    strict = [function('f', SCHEMAS['types'], strict=True)]
    assert chat_grammar(request(tools=strict), 'think') is not None


def test_what_cannot_be_enforced_is_named():
    schema = object_of({'x': {'type': 'array', 'uniqueItems': True}})
    grammar = chat_grammar(request(response_format=json_schema(schema)), 'think')
    assert 'uniqueItems' in CONSTRAINER.fault(grammar)
    with pytest.raises(ValueError, match='uniqueItems'):
        CONSTRAINER.matcher(grammar)
    strict = [function('f', schema, strict=True)]
    grammar = chat_grammar(request(tools=strict), 'think')
    assert 'uniqueItems' in CONSTRAINER.fault(grammar)
    # Where nobody said strict, calls follow the rest of the schema.
    loose = [function('f', schema)]
    grammar = chat_grammar(request(tools=loose, tool_choice='required'), 'think')
    assert CONSTRAINER.fault(grammar) is None


@pytest.mark.parametrize('depth', [4, 40])
@pytest.mark.parametrize(
    'both',
    [
        lambda schema: {'allOf': [schema] * 2},
        lambda schema: {'anyOf': [schema] * 2},
        lambda schema: schema | {'allOf': [schema]},
        lambda schema: {'allOf': [{'properties': {'y': schema}}] * 2},
        lambda schema: {'allOf': [{'items': schema}] * 2},
        lambda schema: {'allOf': [{'additionalProperties': schema}] * 2},
    ],
    ids=('allOf', 'anyOf', '$ref', 'properties', 'items', 'additional'),
)
def test_a_schema_whose_references_multiply_is_refused_before_it_grows(both, depth):
    defs = {f'd{i}': both({'$ref': f'#/$defs/d{i + 1}'}) for i in range(depth)}
    defs[f'd{depth}'] = {'type': 'string', 'enum': ['q']}
    schema = object_of({'x': {'$ref': '#/$defs/d0'}}) | {'$defs': defs}
    for asked in (
        request(response_format=json_schema(schema)),
        request(tools=[function('f', schema)], tool_choice='required'),
    ):
        for make in (chat_grammar, k2_grammar):
            if depth == 4:
                assert make(asked, 'response')
                continue
            with pytest.raises(UnsupportedSchema, match='multiply'):
                make(asked, 'response')


@pytest.mark.parametrize(
    'schema',
    [
        {'required': 5},
        {'required': [1]},
        {'required': [['x']]},
        {'required': 'abc'},
        {'properties': 5},
        {'properties': [1]},
        *(
            {'properties': {'x': value}}
            for value in (
                {'type': 5},
                {'type': {}},
                {'type': [[]]},
                {'enum': 5},
                {'allOf': 5},
                {'anyOf': 5},
                {'type': 'string', 'minLength': 'abc'},
                {'type': 'string', 'minLength': [1]},
                {'type': 'string', 'minLength': -5},
                {'type': 'string', 'maxLength': float('inf')},
                {'type': 'string', 'pattern': '\ud800'},
                {'type': 'string', 'pattern': '('},
                {'$ref': 5},
                {'$ref': '#/nowhere'},
                {'$ref': '#/required/' + '9' * 5000},
            )
        ),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_a_schema_that_is_none_is_told_and_no_fault_of_ours(schema):
    tools = [function('f', {'type': 'object', 'required': []} | schema)]
    grammar = chat_grammar(request(tools=tools, tool_choice='required'), 'response')
    assert CONSTRAINER.fault(grammar)


def test_a_grammar_that_would_take_long_is_refused_and_one_that_is_taken_does_not_fail_later():
    many = {f'p{i}': {'type': 'string'} for i in range(20_000)}
    asked = request(response_format=json_schema(object_of(many)))
    assert re.search('too (big|large)', CONSTRAINER.fault(chat_grammar(asked, 'response')))
    tools = [function('f', object_of(many))]
    grammar = chat_grammar(request(tools=tools, tool_choice='required'), 'response')
    assert CONSTRAINER.fault(grammar).startswith('too large')
    some = {f'p{i}': {'type': 'string'} for i in range(1000)}
    asked = request(response_format=json_schema({'type': 'object', 'properties': some}))
    matcher = CONSTRAINER.matcher(chat_grammar(asked, 'response'))
    for token_id in TOKENIZER.encode('{"p7":"x","p900":"'):
        assert matcher.mask()[token_id]
        matcher.advance(token_id)


def test_a_token_that_is_not_allowed_is_refused():
    grammar = chat_grammar(request(tools=TOOLS, tool_choice='required'), 'response')
    matcher = CONSTRAINER.matcher(grammar)
    assert not matcher.mask()[TOKENIZER.end_of_msg_id]
    with pytest.raises(ValueError, match='not allowed'):
        matcher.advance(TOKENIZER.end_of_msg_id)


def test_models_before_k3_are_constrained_too():
    tokenizer = k2_tokenizer()
    constrainer = Constrainer(tokenizer)

    def answers(opened, **fields):
        grammar = k2_grammar(request(**fields), opened)
        assert constrainer.fault(grammar) is None
        for seed in range(4):
            parser, message = TokenParser(tokenizer, opened), ParsedMessage()
            for token_id in sample(constrainer, tokenizer, grammar, seed):
                message.add(parser.feed(token_id))
            message.add(parser.finish())
            assert not parser.machine.warnings
            yield message

    for opened in ('think', 'response'):
        for kind in ('types', 'any_of', 'refs'):
            tools = [function('f', SCHEMAS[kind])]
            for message in answers(opened, tools=tools, tool_choice='required'):
                assert message.whole_calls
                for call in message.whole_calls:
                    jsonschema.validate(json.loads(call.arguments), SCHEMAS[kind])
        for message in answers(opened, response_format=json_schema(SCHEMAS['ranges'])):
            jsonschema.validate(json.loads(message.content), SCHEMAS['ranges'])
    assert k2_grammar(request(), 'think') is None
