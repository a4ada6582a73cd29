"""How tests ask a server, and what they make of its answer."""

import time

from k3jax.serve.admission import Limits

ANSWER = (
    'Thinking — 中.«/think»«response»Hello, 🚀 world«/response»«tools»'
    '«call tool="f" index="1"»«argument key="s" type="string"»a "b"«/argument»'
    '«argument key="n" type="number"»1e3«/argument»«/call»'
    '«call tool="g" index="2"»«/call»«/tools»«/message»¶'
)
HELLO = [{'role': 'user', 'content': 'Hello'}]
LIMITS = Limits(max_body_bytes=100_000, body_timeout_s=5.0, max_concurrent=8, drain_timeout_s=1.0)


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


def wait_until(condition):
    deadline = time.monotonic() + 120  # of a machine that may have other work
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
