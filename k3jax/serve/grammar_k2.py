"""Which answers a request allows of a model before K3, as a grammar over tokens."""

from __future__ import annotations

import json

from k3jax.data.chat import Channel
from k3jax.serve.api.chat_request import ChatRequest
from k3jax.serve.grammar import callable_tools, needs_grammar, response_json
from k3jax.serve.schema_text import SchemaReader


def k2_grammar(asked: ChatRequest, opened: Channel) -> str | None:
    """The grammar of a chat's answer, from where the prompt leaves off; None for any answer.

    As `grammar.chat_grammar`, also in what it raises; arguments are JSON here, and the calls' ids
    count anyhow.
    """
    if not needs_grammar(asked):
        return None
    mode, tools = asked.tool_choice.mode, callable_tools(asked)
    rules, calls = ['TEXT: /(?s:.*)/'], []
    for number, tool in enumerate(tools):
        function = tool['function']
        schema = function.get('parameters') or {'type': 'object'}
        options = {'whitespace_flexible': False, 'lenient': not function.get('strict')}
        rules.append(f't{number}: {SchemaReader(schema).json(schema, "object", **options)}')
        name = json.dumps(f'functions.{function["name"]}:')
        calls.append(f'{name} /[0-9]{{1,4}}/ <|tool_call_argument_begin|> t{number}')
    choices = []
    if tools:
        rules.append(f'call: <|tool_call_begin|> ({" | ".join(calls)}) <|tool_call_end|>')
        more = '+' if asked.parallel_tool_calls else ''
        section = f'<|tool_calls_section_begin|> call{more} <|tool_calls_section_end|>'
        choices.append(f'TEXT {section}')
    if mode != 'required':
        if asked.json_format is None:
            choices.append('TEXT')
        else:
            rules.append(f'answer: {response_json(asked.json_format)}')
            choices.append('answer')
    think = 'TEXT </think> ' if opened == 'think' else ''
    return '\n'.join([f'start: {think}({" | ".join(choices)})', *rules]) + '\n'
