"""A stream that breaks off anywhere, joined with another's rest, is the answer."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.serve.fleet.transcript import Diverged, Transcript
from tests.fleet_fakes import chunk

TOKENS = [('reasoning_content', t) for t in ('I ', 'think', ' 中')] + [
    ('content', t) for t in ('Hel', 'lo', ' ', 'world', '🚀')
]


def answer(number, sizes):
    """A chat's chunks with so many tokens in each, and two calls at the end."""
    chunks, left = [chunk({'role': 'assistant', 'content': ''}, number)], list(TOKENS)
    while left:
        size = sizes[len(chunks) % len(sizes)]
        group, left = left[:size], left[size:]
        delta = {}
        for name, text in group:
            delta[name] = delta.get(name, '') + text
        entries = [{'token': text} for name, text in group if name == 'content']
        chunks.append(chunk(delta, number, logprobs={'content': entries, 'refusal': None}))
    for index, name in enumerate('fg'):
        function = {'name': name, 'arguments': ''}
        call = {'index': index, 'id': f'call_{number}_{index}', 'type': 'function'}
        chunks.append(chunk({'tool_calls': [call | {'function': function}]}, number))
        for text in ('{"a":', ' 1}'):
            call = {'index': index, 'function': {'arguments': text}}
            chunks.append(chunk({'tool_calls': [call]}, number))
    chunks.append(chunk({}, number, 'tool_calls', usage={'cached_tokens': number}))
    return chunks


def joined(chunks):
    """What a client makes of chunks."""
    texts, calls, logprobs, reasons = {}, [], [], []
    for one in chunks:
        choice = one['choices'][0]
        for name, value in choice['delta'].items():
            if name != 'tool_calls':
                texts[name] = texts.get(name, '') + value
        for call in choice['delta'].get('tool_calls', ()):
            if call['index'] == len(calls):
                calls.append([call['function']['name'], '', call['id']])
            else:
                assert not call.keys() & {'id', 'type'} and 'name' not in call['function']
            calls[call['index']][1] += call['function']['arguments']
        logprobs += [e['token'] for e in (choice['logprobs'] or {}).get('content', ())]
        reasons += [choice['finish_reason']] * (choice['finish_reason'] is not None)
    assert len({call[2] for call in calls}) == len(calls)
    return texts, [call[:2] for call in calls], logprobs, reasons


WHOLE = joined(answer(1, [1]))
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 16)), min_size=1, max_size=3), SIZES)
def test_answers_that_break_off_again_and_again_join_to_one(cuts, last):
    transcript, sent = Transcript(), []
    for number, (sizes, length) in enumerate([*cuts, (last, None)]):
        continuation, is_first = transcript.continuation(), transcript.is_empty
        for one in answer(number, sizes)[:length]:
            shown = one if is_first else continuation.rest(copy.deepcopy(one))
            if shown is not None:
                transcript.add(shown)
                sent.append(shown)
        if transcript.is_whole:
            break
    assert joined(sent) == WHOLE
    assert len({(one['id'], one['created']) for one in sent}) == 1


def test_nothing_goes_on_that_does_not_say_what_was_sent():
    whole = answer(1, [1])
    for cut in range(2, len(whole)):
        transcript = Transcript()
        for one in whole[:cut]:
            transcript.add(one)
        for place in range(1, cut):
            continuation = transcript.continuation()
            with pytest.raises(Diverged):
                for one in copy.deepcopy(whole[:place] + whole[place + 1 :]):
                    continuation.rest(one)


def test_plain_completions_with_logprobs():
    def completion(number, texts, sizes):
        chunks = []
        while texts:
            group, texts = texts[: sizes[0]], texts[sizes[0] :]
            logprobs = {'tokens': group, 'token_logprobs': [-0.5] * len(group)}
            choice = {'text': ''.join(group), 'logprobs': logprobs, 'finish_reason': None}
            chunks.append({'id': str(number), 'created': number, 'choices': [choice]})
        return chunks

    transcript, texts = Transcript(), ['one', ' two', ' three']
    sent = completion(1, texts, [1])[:2]
    for one in sent:
        transcript.add(one)
    continuation = transcript.continuation()
    for one in completion(2, texts, [3]):
        sent.append(continuation.rest(one))
    assert ''.join(one['choices'][0]['text'] for one in sent) == 'one two three'
    tokens = [t for one in sent for t in one['choices'][0]['logprobs']['tokens']]
    assert tokens == texts
