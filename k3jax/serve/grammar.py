"""Which answers a request allows, as one grammar over tokens: llguidance's Lark.

Special tokens are named by their text. Free text is any text without special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from k3jax.data.chat import Channel
from k3jax.serve.api.chat_request import ChatRequest, JsonFormat
from k3jax.serve.schema_text import TYPES, SchemaReader, UnsupportedSchema, strings_at

MAX_CALLS = 16  # in one answer
_COMPACT = {'whitespace_flexible': False}
# As the model writes values: with spaces after commas and colons.
_SPACED = _COMPACT | {'item_separator': ', ', 'key_separator': ': '}
_OPEN, _CLOSE, _SEP = '<|open|>', '<|close|>', '<|sep|>'
# What a tool's parameters may say for its arguments to be written one by one.
_PLAIN = (
    *('type', 'properties', 'required', 'additionalProperties', '$defs', 'definitions'),
    *('title', 'description', 'default', 'examples', '$schema', '$id', '$comment', 'strict'),
)


def _literal(text: str) -> str:
    return json.dumps(text)


def _opening(head: str) -> str:
    return f'{_OPEN} {_literal(head)} {_SEP}'


def _closing(tag: str) -> str:
    return f'{_CLOSE} {_literal(tag)} {_SEP}'


def _escaped(text: str) -> str:
    return text.replace('&', '&amp;').replace('"', '&quot;')


class _ToolGrammar:
    """The rules of one tool's arguments.

    Attributes:
      rules: lines of Lark; `start` names the one to begin with.
    """

    def __init__(self, prefix: str, function: dict[str, Any]):
        self.start = f'{prefix}_args'
        self.rules: list[str] = []
        self._prefix = prefix
        self._options = _SPACED | {'lenient': not function.get('strict')}
        schema = function.get('parameters') or {'type': 'object', 'properties': {}}
        self._reader = SchemaReader(schema)
        try:
            schema = self._resolved(schema)
            if set(schema) - set(_PLAIN) or schema.get('type', 'object') != 'object':
                raise UnsupportedSchema('the arguments depend on each other')
            self._one_by_one(schema)
        except UnsupportedSchema:
            self._as_json(schema)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(16):
            if set(schema) - {'$ref', '$defs', 'definitions', 'title', 'description', '$schema'}:
                return schema
            if '$ref' not in schema:
                return schema
            schema = self._reader.target(schema['$ref'])
            if not isinstance(schema, dict):
                break
        raise UnsupportedSchema('$ref that does not end')

    def _as_json(self, schema: dict[str, Any]) -> None:
        """All arguments as one object, where they cannot be written one by one."""
        value = self._reader.json(schema, 'object', **self._options)
        head = _opening('json type="object"')
        self.rules = [f'{self.start}: {head} {value} {_closing("json")}']

    def _one_by_one(self, schema: dict[str, Any]) -> None:
        properties = schema.get('properties') or {}
        if not isinstance(properties, dict):
            raise UnsupportedSchema('properties: wanted an object')
        properties = dict(properties)
        extra = schema.get('additionalProperties')
        required = dict.fromkeys(strings_at(schema, 'required'))
        for name in required:
            properties.setdefault(name, True if extra is None else extra)
        pieces = []
        for number, (name, value) in enumerate(properties.items()):
            rule = self._argument(f'{self._prefix}_{number}', _literal(f'{_escaped(name)}"'), value)
            if rule is None and name in required:
                raise UnsupportedSchema(f'{name}: no value is allowed')
            if rule is not None:
                pieces.append(rule if name in required else f'{rule}?')
        if isinstance(extra, dict) or (extra is not False and not properties):
            terminal = f'{self._prefix}_KEY'.upper()
            known = ' | '.join(_literal(_escaped(name)) for name in properties)
            but = f' & ~({known})' if known else ''
            self.rules.append(f'{terminal}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/{but}')
            rule = self._argument(f'{self._prefix}_extra', f'{terminal} "\\""', extra)
            pieces += [f'{rule}*'] if rule else []
        self.rules.append(f'{self.start}: {" ".join(pieces)}')

    def _argument(self, rule: str, key: str, schema: Any) -> str | None:
        """Adds the rule of one argument, by the types it may have; None where there are none."""
        allowed = self._reader.types(schema)
        kinds = [kind for kind in TYPES if kind in allowed]
        choices = []
        for kind in kinds:
            value = f'{rule}_{kind}'
            self.rules.append(self._value(value, schema, kind))
            head = f'{_OPEN} "argument key=\\"" {key} {_literal(f" type={chr(34)}{kind}{chr(34)}")}'
            choices.append(f'{head} {_SEP} {value} {_closing("argument")}')
        if not choices:
            return None
        self.rules.append(f'{rule}: {" | ".join(choices)}')
        return rule

    def _value(self, rule: str, schema: Any, kind: str) -> str:
        if kind != 'string':
            return f'{rule}: {self._reader.json(schema, kind, **self._options)}'
        text = self._reader.text(schema)
        if text is None:
            return f'{rule}: TEXT'
        terminal = rule.upper()
        return f'{terminal}: {text}\n{rule}: {terminal}'


def _tools(tools: Sequence[dict[str, Any]], most: int) -> list[str]:
    """Rules of a section with 1 to `most` calls; the rule `tools` is all of it."""
    rules = [f'tools: {_opening("tools")} calls_1 {_closing("tools")}']
    names = []
    for number, tool in enumerate(tools):
        grammar = _ToolGrammar(f't{number}', tool['function'])
        rules += grammar.rules
        names.append((_escaped(tool['function']['name']), grammar.start))
    for index in range(1, most + 1):
        heads = [
            f'{_opening(f"call tool={chr(34)}{name}{chr(34)} index={chr(34)}{index}{chr(34)}")} '
            f'{start}'
            for name, start in names
        ]
        more = f' calls_{index + 1}?' if index < most else ''
        rules.append(f'calls_{index}: ({" | ".join(heads)}) {_closing("call")}{more}')
    return rules


def response_json(json_format: JsonFormat) -> str:
    """A response in JSON, compact, as a piece of Lark."""
    schema: dict[str, Any] = {'type': 'object'}
    if json_format.schema is not None:
        schema = json_format.schema if json_format.strict else {}
    return SchemaReader(schema).json(schema, None, **_COMPACT)


def needs_grammar(asked: ChatRequest) -> bool:
    """Whether not every answer will do."""
    tools = asked.conversation.all_tools
    if asked.json_format is not None or asked.tool_choice.mode == 'required':
        return True
    if not tools:
        return False
    is_strict = any(tool['function'].get('strict') for tool in tools)
    return asked.tool_choice.mode == 'none' or is_strict or not asked.parallel_tool_calls


def callable_tools(asked: ChatRequest) -> list[dict[str, Any]]:
    """Those that an answer may call."""
    mode, name = asked.tool_choice
    return [
        tool
        for tool in asked.conversation.all_tools
        if mode != 'none' and name in (None, tool['function']['name'])
    ]


def chat_grammar(asked: ChatRequest, opened: Channel) -> str | None:
    """The grammar of a chat's answer, from where the prompt leaves off; None for any answer.

    Arguments of tools are free unless a call is required, a tool is strict, or calls may not be
    parallel: then those of every tool follow its schema.

    Raises:
      UnsupportedSchema: one that says nothing that can be written, or too much.
    """
    if not needs_grammar(asked):
        return None
    mode, tools = asked.tool_choice.mode, callable_tools(asked)
    rules = ['TEXT: /(?s:.*)/']
    think = ''
    if opened == 'think':
        think = f'TEXT {_closing("think")} {_opening("response")} '
    text = f'TEXT {_closing("response")}'
    choices = [f'{text} tools'] if tools else []
    if asked.json_format is not None and mode != 'required':
        rules.append(f'answer: {response_json(asked.json_format)}')
        choices.append(f'answer {_closing("response")}')
    elif mode != 'required':
        choices.append(text)
    if tools:
        rules += _tools(tools, MAX_CALLS if asked.parallel_tool_calls else 1)
    start = f'start: {think}({" | ".join(choices)}) {_closing("message")}'
    return '\n'.join([start, *rules]) + '\n'
