"""Which types a JSON schema allows, and which plain texts where it allows strings.

XTML writes a string argument as it is, not as JSON: for those a schema's keywords become a terminal
of llguidance's Lark. All other values are left to llguidance's own JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import llguidance

TYPES = ('string', 'number', 'boolean', 'null', 'object', 'array')
_ROOT = 'whole'  # where the schema that references start from is put
# Formats that llguidance knows; the others are annotations, as JSON schema has them by default.
_FORMATS = (
    *('date-time', 'time', 'date', 'duration', 'email', 'hostname', 'ipv4', 'ipv6', 'uuid', 'uri'),
)


class UnsupportedSchema(ValueError):
    """A schema whose strings cannot be written as a terminal; says why."""


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return 'boolean'
        case int() | float():
            return 'number'
        case str():
            return 'string'
        case None:
            return 'null'
        case dict():
            return 'object'
    return 'array'


def _branches(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    for keyword in ('anyOf', 'oneOf'):
        if isinstance(schema.get(keyword), list):
            yield schema[keyword]


class SchemaReader:
    """Reads schemas that lie within one root, from which their references start."""

    def __init__(self, root: Mapping[str, Any]):
        self.root = root

    def target(self, reference: Any) -> Any:
        """What a `$ref` points to.

        Raises:
          UnsupportedSchema: nothing in this root.
        """
        if reference == '#':
            return self.root
        found: Any = self.root
        if not isinstance(reference, str) or not reference.startswith('#/'):
            raise UnsupportedSchema('$ref: wanted one within the schema, "#/..."')
        for part in reference[2:].split('/'):
            part = part.replace('~1', '/').replace('~0', '~')
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise UnsupportedSchema('$ref: there is nothing at its place')
        return found

    def types(self, schema: Any, seen: tuple[str, ...] = ()) -> frozenset[str]:
        """Those of `TYPES` that a value may have; some of them may still have no value."""
        everything = frozenset(TYPES)
        if isinstance(schema, bool) or not isinstance(schema, dict):
            return everything if schema is not False else frozenset()
        found = everything
        reference = schema.get('$ref')
        if reference is not None and reference not in seen:
            found &= self.types(self.target(reference), (*seen, reference))
        if 'type' in schema:
            named = schema['type'] if isinstance(schema['type'], list) else [schema['type']]
            found &= {'number' if name == 'integer' else name for name in named}
        if 'const' in schema:
            found &= {_type_of(schema['const'])}
        if isinstance(schema.get('enum'), list):
            found &= {_type_of(value) for value in schema['enum']}
        for branches in _branches(schema):
            found &= frozenset().union(*(self.types(branch, seen) for branch in branches))
        for part in schema.get('allOf') or ():
            found &= self.types(part, seen)
        return found

    def text(self, schema: Any, seen: tuple[str, ...] = ()) -> str | None:
        """The terminal of the strings that a schema allows; None for all of them.

        Raises:
          UnsupportedSchema: it uses what a terminal cannot say.
        """
        if not isinstance(schema, dict):
            return None
        for keyword in ('not', 'if', '$dynamicRef'):
            if keyword in schema:
                raise UnsupportedSchema(f'{keyword} for a string')
        parts: list[str | None] = []
        reference = schema.get('$ref')
        if reference is not None:
            if reference in seen:
                raise UnsupportedSchema('$ref to itself for a string')
            parts.append(self.text(self.target(reference), (*seen, reference)))
        values = [schema['const']] if 'const' in schema else schema.get('enum')
        if values is not None:
            parts.append(_any(json.dumps(value) for value in values if isinstance(value, str)))
        if 'pattern' in schema:
            parts.append(f'/{llguidance.regex_to_lark(_whole_regex(schema["pattern"]), "dw")}/')
        low, high = schema.get('minLength', 0), schema.get('maxLength')
        if low or high is not None:
            parts.append(f'/(?s:.{{{int(low)},{"" if high is None else int(high)}}})/')
        for branches in _branches(schema):
            fitting = [b for b in branches if 'string' in self.types(b)]
            texts = [self.text(branch, seen) for branch in fitting]
            parts.append(None if None in texts else _any(text for text in texts if text))
        parts += [self.text(part, seen) for part in schema.get('allOf') or ()]
        return ' & '.join(f'({part})' for part in parts if part is not None) or None

    def json(self, schema: Any, kind: str | None, **options: Any) -> str:
        """`schema`, restricted to one of `TYPES`, as llguidance takes it inside Lark.

        Args:
          options: of llguidance's compiler.
        """
        schema = dict(schema) if isinstance(schema, dict) else {}
        if kind is not None:
            if isinstance(schema.get('enum'), list):
                schema['enum'] = [v for v in schema['enum'] if _type_of(v) == kind]
            named = schema.get('type', kind)
            is_whole = 'integer' in (named if isinstance(named, list) else [named])
            is_any = 'number' in (named if isinstance(named, list) else [named])
            schema['type'] = 'integer' if is_whole and not is_any else kind
        moved = _moved(schema)
        if _has_reference(moved):
            moved['$defs'] = {_ROOT: _moved(self.root)}
        return '%json ' + json.dumps({'x-guidance': options} | moved)


def _any(literals: Iterator[str]) -> str:
    return ' | '.join(f'({literal})' for literal in literals)


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return '$ref' in value or any(map(_has_reference, value.values()))
    return isinstance(value, list) and any(map(_has_reference, value))


def _moved(value: Any, *, is_schema: bool = True) -> Any:
    """A schema whose references start where `SchemaReader.json` puts their root."""
    if isinstance(value, list):
        return [_moved(inner, is_schema=is_schema) for inner in value]
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, inner in value.items():
        if is_schema and key in ('const', 'enum', 'default', 'examples'):
            moved[key] = inner  # data, whatever it looks like
        elif is_schema and key == '$ref' and isinstance(inner, str) and inner.startswith('#'):
            moved[key] = f'#/$defs/{_ROOT}{inner[1:]}'
        elif is_schema and key == 'format' and inner not in _FORMATS:
            continue
        elif is_schema and key == 'uniqueItems' and inner is False:
            continue  # says nothing, and llguidance does not know the word
        else:
            names = ('properties', 'patternProperties', '$defs', 'definitions')
            moved[key] = _moved(inner, is_schema=not (is_schema and key in names))
    return moved


def _whole_regex(pattern: Any) -> str:
    """A regular expression for all of a text in which `pattern` is found.

    Raises:
      UnsupportedSchema: anchors inside it, or what looks ahead or behind.
    """
    if not isinstance(pattern, str):
        raise UnsupportedSchema('pattern: wanted a string')
    escaped = in_class = is_split = False
    depth, anchors, last_open = 0, [], False
    for position, char in enumerate(pattern):
        if escaped:
            escaped = False
            if char in 'bBAzZ' and not in_class or char.isdecimal() and char != '0':
                raise UnsupportedSchema(f'pattern with \\{char}')
        elif char == '\\':
            escaped = True
        elif in_class:
            in_class = char != ']'
        elif char == '[':
            in_class = True
        elif char == '(':
            depth += 1
        elif char == ')':
            depth -= 1
        elif char == '|' and depth == 0:
            is_split = True
        elif char in '^$':
            anchors.append(position)
        elif char in '=!<' and last_open:
            raise UnsupportedSchema('pattern that looks ahead or behind')
        last_open = pattern[max(0, position - 1) : position + 1] == '(?'
    starts, ends = 0 in anchors, len(pattern) - 1 in anchors
    if set(anchors) - {0, len(pattern) - 1} or (is_split and anchors):
        raise UnsupportedSchema('pattern with anchors inside')
    body = pattern[starts : len(pattern) - ends if len(pattern) > 1 or not starts else None]
    lead, tail = ('' if known else '(?s:.*)' for known in (starts, ends))
    return f'{lead}(?:{body}){tail}'
