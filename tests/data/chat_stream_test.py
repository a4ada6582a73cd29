"""Answers in XTML, read as they come: every state, every cut, and back to the same tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.chat import encode, render
from k3jax.data.chat_events import CallArguments, CallStart, Content, ParsedMessage, Reasoning
from k3jax.data.chat_stream import MARKERS, TextParser, TokenParser
from k3jax.data.conversation import Conversation, Message, ToolCall
from k3jax.data.tokenizer import byte_tokenizer
from tests.vocabulary import released_tokenizer, small_tokenizer

BYTES = byte_tokenizer()
SMALL = small_tokenizer()


def marked(text):
    """Readable answers: «name» opens a tag, «/name» closes one, ¶ ends the message."""
    text = text.replace('«/', '<|close|>').replace('«', '<|open|>').replace('»', '<|sep|>')
    return text.replace('¶', '<|end_of_msg|>')


def ids_of(text, tokenizer=BYTES):
    """Token ids with the markers as special tokens, whatever is between them as text."""
    ids, rest = [], marked(text)
    while rest:
        found = [(rest.find(needle), needle) for needle in MARKERS if needle in rest]
        start, needle = min(found, default=(len(rest), ''))
        ids += tokenizer.encode(rest[:start])
        ids += [tokenizer.special_tokens[needle]] if needle else []
        rest = rest[start + len(needle) :]
    return ids


def parsed(pieces, parser):
    message = ParsedMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message


def read(text, opened='think', tokenizer=BYTES, **options):
    """The message and the machine, read from token ids; text must read the same."""
    parser = TokenParser(tokenizer, opened, **options)
    message = parsed(ids_of(text, tokenizer), parser)
    from_text = TextParser(opened, **options)
    assert parsed([marked(text)], from_text) == message
    assert from_text.machine.was_cut == parser.machine.was_cut
    return message, parser


def summary(message):
    calls = [(call.name, call.arguments) for call in message.whole_calls]
    return message.reasoning, message.content, calls


CALL = '«call tool="f" index="1"»«argument key="a" type="number"»1«/argument»«/call»'
F1 = ('f', '{"a": 1}')


@pytest.mark.parametrize(
    'text, opened, expected',
    [
        ('t«/think»«response»r«/response»«/message»¶', 'think', ('t', 'r', [])),
        ('r«/response»«/message»¶', 'response', ('', 'r', [])),
        ('«/think»«response»r«/response»«/message»¶', 'think', ('', 'r', [])),
        ('t«response»r«/response»«/message»¶', 'think', ('t', 'r', [])),
        (f't«tools»{CALL}«/tools»«/message»¶', 'think', ('t', '', [F1])),
        ('answer«/response»«/message»¶', 'think', ('answer', 'answer', [])),
        ('answer«/response»«/think»«/message»¶', 'think', ('answer', 'answer', [])),
        ('t«/message»¶', 'think', ('t', '', [])),
        ('t¶', 'think', ('t', '', [])),
        ('t«/think»«response»r¶', 'think', ('t', 'r', [])),
        ('t«/think»r«response»s«/response»¶', 'think', ('t', 'rs', [])),
        ('r«/response»«/message»more¶even', 'response', ('', 'r', [])),
        (f'r«/response»«tools»{CALL}«/tools»prose«/message»¶', 'response', ('', 'rprose', [F1])),
        (f'r«tools»{CALL}«/tools»«/message»¶', 'response', ('', 'r', [F1])),
        ('r«/response»«tools»«/tools»«/message»¶', 'response', ('', 'r', [])),
        (
            f't\n«/think»\n «response»\nr«/response»\n«tools»\n {CALL}\n«/tools»\n«/message»¶',
            'think',
            ('t\n', '\nr', [F1]),
        ),
        ('t«/»«/think»«response»r«/»s«/response»«/message»¶', 'think', ('t', 'rs', [])),
        (
            't«/think»«response»r«/think»s«think»«/nonsense a="b"»«/response»¶',
            'think',
            ('t', 'rs', []),
        ),
        ('a » b«/response»¶', 'response', ('', 'a  b', [])),
        ('a«/«/response»b«response»c¶', 'response', ('', 'abc', [])),
    ],
)
def test_channels(text, opened, expected):
    message, parser = read(text, opened)
    assert summary(message) == expected
    assert parser.is_done and not parser.machine.was_cut


def test_a_message_closed_in_its_first_thought_can_be_taken_for_the_response():
    message, _ = read('answer«/message»¶', force_nonempty_content=True)
    assert summary(message) == ('answer', 'answer', [])
    message, _ = read('t«/think»«/message»¶', force_nonempty_content=True)
    assert summary(message) == ('t', '', [])


WHOLE = (
    'thought «/think»«response»said «/response»«tools»'
    '«call tool="f" index="1"»«argument key="s" type="string"»x"y«/argument»«/call»'
    '«call tool="g" index="2"»«json type="object"»{"a": 1}«/json»«/call»«/tools»«/message»¶'
)


def test_an_answer_cut_anywhere_keeps_what_was_whole():
    ids = ids_of(WHOLE)
    full, _ = read(WHOLE)
    for end in range(len(ids)):
        parser = TokenParser(BYTES, 'think')
        message = parsed(ids[:end], parser)
        assert full.reasoning.startswith(message.reasoning)
        assert full.content.startswith(message.content)
        assert full.whole_calls[: len(message.whole_calls)] == message.whole_calls
        assert parser.machine.was_cut == (len(message.calls) > len(message.whole_calls))
        assert '<|' not in message.reasoning + message.content
        assert all(call.name in 'fg' for call in message.calls)


def calls(text):
    message, parser = read(f'«tools»{text}«/tools»«/message»¶', 'response')
    return [(call.name, call.arguments) for call in message.whole_calls], parser.machine.warnings


def one(value, kind='string'):
    """The JSON text that one argument's value becomes."""
    attribute = '' if kind is None else f' type="{kind}"'
    found, warnings = calls(
        f'«call tool="f" index="1"»«argument key="k"{attribute}»{value}«/argument»«/call»'
    )
    ((_, arguments),) = found
    json.loads(arguments, parse_int=str)
    return arguments.removeprefix('{"k": ').removesuffix('}'), warnings


def test_calls_count_as_they_come_whatever_their_index_says():
    text = ''.join(
        f'«call tool="f" index="{index}"»«argument key="k" type="number"»{k}«/argument»«/call»'
        for k, index in enumerate((3, 1, 1))
    )
    assert calls(text)[0] == [('f', f'{{"k": {k}}}') for k in range(3)]


@pytest.mark.parametrize(
    'kind, value',
    [
        *(('number', text) for text in ('-0', '1e3', '1.10', '7', '-2.5E-7', '9' * 5000)),
        *(('boolean', 'true'), ('boolean', 'false'), ('null', 'null')),
        ('object', '{"a": {"b": "} \\" {"}, "c": []}'),
        ('array', '[1, [2, "]"], {}]'),
    ],
)
def test_values_that_are_json_keep_their_text(kind, value):
    assert one(value, kind) == (value, [])


@pytest.mark.parametrize(
    'value',
    ['', 'a\nb\tc', '"', '\\', '\\n', '{"a":1}', '7', 'null', ' x ', '中🚀e\u0301\ufffd\x00'],
)
def test_strings_are_strings_whatever_they_look_like(value):
    assert one(value) == (json.dumps(value, ensure_ascii=False), [])
    assert one(value, None) == one(value)


@pytest.mark.parametrize('kind', ['number', 'object', 'array', 'boolean', 'null', 'nonsense'])
@pytest.mark.parametrize('value', ['', '01', '{"a": ', 'x"y', 'NaN', '[' * 5000 + ']' * 5000])
def test_values_that_are_not_json_become_strings_with_a_warning(kind, value):
    text, warnings = one(value, kind)
    assert text == json.dumps(value) and len(warnings) == 1


def test_odd_calls():
    argument = '«argument key="k" type="number"»1«/argument»'
    assert calls(f'«call index="1"»{argument}«/call»{CALL}')[0] == [F1]
    assert calls('«call tool="f" index="1"»«/call»')[0] == [('f', '{}')]
    assert calls('«call tool="f"»«argument type="string"»x«/argument»«/call»')[0] == [('f', '{}')]
    assert calls('«call tool="f"»«json»{"a":«/json»«/call»')[0] == [('f', '{"a":')]
    assert calls('«call tool="f"»«json»«/json»«/call»')[0] == [('f', '{}')]
    assert calls(f'«call tool="f"»«json»[1]«/json»{argument}«/call»')[0] == [('f', '[1]')]
    assert calls(f'«call tool="f"»{argument}«json»[1]«/json»«/call»')[0] == [('f', '{"k": 1}')]
    assert calls(f'«call tool="a&amp;quot;&quot;<"»{argument}«/call»')[0] == [
        ('a&quot;"<', '{"k": 1}')
    ]
    twice = f'«call tool="f"»{argument}«argument key="k" type="string"»2«/argument»«/call»'
    ((_, arguments),) = calls(twice)[0]
    assert json.loads(arguments) == {'k': '2'}


def test_closings_that_are_missing_are_taken_as_meant():
    head = '«call tool="f" index="1"»«argument key="k" type="number"»1'
    for tail in ('«/argument»', ''):
        assert calls(f'{head}{tail}')[0] == [('f', '{"k": 1}')]
    assert calls(f'{head}«/argument»«call tool="g"»«/call»')[0] == [('f', '{"k": 1}'), ('g', '{}')]
    assert calls(f'{head}«/call»')[0] == [('f', '{"k": 1}')]
    assert calls(f'{head}«argument key="l" type="number"»2«/argument»«/call»')[0] == [
        ('f', '{"k": 1, "l": 2}')
    ]
    message, parser = read(f'«tools»{head}«/argument»¶', 'response')
    assert len(message.whole_calls) == 1 and not parser.machine.was_cut
    message, parser = read(f'«tools»{head}¶', 'response')
    assert not message.whole_calls and parser.machine.was_cut


def test_arguments_stream_as_they_come():
    parser = TextParser('response')
    parser.feed(marked('«tools»«call tool="write" index="1"»«argument key="text" type="string"»'))
    assert parser.feed('one\n') == [CallArguments(0, 'one\\n')]
    assert parser.feed('"two"') == [CallArguments(0, '\\"two\\"')]
    assert parser.feed('<|close|') == []
    assert parser.feed('x') == [CallArguments(0, '<|close|x')]


def test_the_name_comes_before_the_arguments():
    parser = TokenParser(BYTES, 'response')
    events = [event for i in ids_of(f'«tools»{CALL}') for event in parser.feed(i)]
    assert events[0] == CallStart(0, 'f')


def test_markers_in_values_are_text_for_tokens_and_markers_for_text():
    value = '<|close|>argument<|sep|><|end_of_msg|>[EOS]'
    head = ids_of('«tools»«call tool="f" index="1"»«argument key="k" type="string"»')
    ids = head + BYTES.encode(value) + ids_of('«/argument»«/call»«/tools»«/message»¶')
    message = parsed(ids, TokenParser(BYTES, 'response'))
    assert json.loads(message.whole_calls[0].arguments) == {'k': value}


def test_other_special_tokens_never_reach_the_content():
    special = BYTES.special_tokens
    ids = [97, special['<|media_pad|>'], special['<|reserved_token_300|>'], 98]
    for stop in ('[EOS]', '[EOT]', '<|end_of_msg|>'):
        parser = TokenParser(BYTES, 'response')
        assert parsed([*ids, special[stop], 99], parser).content == 'ab'
        assert parser.is_done


def test_characters_wait_until_they_are_whole():
    parser = TokenParser(BYTES, 'response')
    pieces = [parser.feed(byte) for byte in '中'.encode()]
    assert pieces == [[], [], [Content('中')]]
    assert parser.feed('中'.encode()[0]) == []
    assert parser.feed(BYTES.special_tokens['<|close|>']) == [Content('\ufffd')]
    parser = TokenParser(BYTES, 'think')
    assert parser.feed(0xE4) == [] and parser.finish() == [Reasoning('\ufffd')]


def test_thought_tokens_are_counted():
    parser = TokenParser(BYTES, 'think')
    parsed(ids_of('abc«/think»«response»de«/response»¶'), parser)
    assert parser.num_reasoning_tokens == 3 + len(ids_of('«/think»'))


def test_an_endless_stray_model_does_not_fill_the_warnings():
    parser = TextParser('response')
    for _ in range(1000):
        parser.feed(marked('«/nothing»'))
    assert len(parser.machine.warnings) == 100


PIECES = [
    *('«', '«/', '»', '¶', 'think', 'response', 'tools', 'call', 'argument', 'json', 'message'),
    *(' tool="f"', ' key="k"', ' type="string"', ' type="number"', '1', '{', 'é', '🚀', ' '),
    *('close', '"', '\n', CALL, '«/think»', '«response»', '«tools»'),
]
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=25).map(''.join)
# Here markers may arise by joining pieces that are none.
ODD_ANSWERS = st.lists(st.sampled_from([*PIECES, '<|', '|>']), max_size=25).map(''.join)


@settings(max_examples=200, deadline=None)
@given(ODD_ANSWERS, st.sampled_from(['think', 'response']), st.data())
def test_any_cut_of_the_text_gives_the_same_message(text, opened, data):
    text = marked(text)
    whole = parsed([text], TextParser(opened))
    assert parsed(text, TextParser(opened)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    borders = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    assert parsed(pieces, TextParser(opened)) == whole


def test_every_marker_cut_at_every_character():
    text = marked(WHOLE)
    whole = parsed([text], TextParser('think'))
    for cut in range(len(text)):
        assert parsed([text[:cut], text[cut:]], TextParser('think')) == whole


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.sampled_from(['think', 'response']))
def test_tokens_read_as_text_does_however_words_are_cut(text, opened):
    expected = parsed([marked(text)], TextParser(opened))
    for tokenizer in (BYTES, SMALL):
        assert parsed(ids_of(text, tokenizer), TokenParser(tokenizer, opened)) == expected


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TOOL_CALLS = st.builds(
    ToolCall,
    name=st.text(min_size=1, max_size=8),
    arguments=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=3).map(
        lambda value: json.dumps(value, ensure_ascii=False)
    )
    | st.sampled_from(['{"a": 1e3, "b": -0, "c": [1.10, 2E5]}', '', '{"a": ', '{}']),
)


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=12).filter(lambda text: not text or text.strip()),
    st.text(max_size=12),
    st.lists(TOOL_CALLS, max_size=3),
    st.booleans(),
)
@pytest.mark.parametrize('name', ['bytes', 'small', 'released'])
def test_what_was_read_renders_to_the_same_tokens(name, reasoning, content, made, thinking):
    tokenizers = {'bytes': lambda: BYTES, 'small': lambda: SMALL, 'released': released_tokenizer}
    tokenizer = tokenizers[name]()

    def prompts(message):
        asked = Message(role='user', content=('x',))
        return [
            encode(tokenizer, render(Conversation(messages=messages, thinking=thinking))).ids
            for messages in ((asked,), (asked, message))
        ]

    message = Message(
        role='assistant',
        content=(content,),
        reasoning=reasoning if thinking else '',
        tool_calls=tuple(made),
    )
    before, after = prompts(message)
    end = after.index(tokenizer.end_of_msg_id, len(before))
    generated = after[len(before) : end + 1]
    assert after[: len(before)] == before
    parser = TokenParser(tokenizer, 'think' if thinking else 'response')
    answer = parsed(generated, parser)
    assert not parser.machine.warnings
    again = Message(
        role='assistant',
        content=(answer.content,),
        reasoning=answer.reasoning,
        tool_calls=tuple(
            ToolCall(name=call.name, arguments=call.arguments) for call in answer.whole_calls
        ),
    )
    assert prompts(again)[1] == after
