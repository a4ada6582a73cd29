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


# Of a schema's parts looked at, and of one inside another by way of references: llguidance takes
# time and memory for each of those that it has to merge, which may double with every reference.
_MAX_LOOKS, _MAX_NESTING = 100_000, 200
# What merges schemas; and where they have schemas of their own, that are then merged with others'.
_MERGED = ('allOf', 'anyOf', 'oneOf')
_NAMED = ('properties', 'patternProperties')
_INNER = ('items', 'prefixItems', 'additionalProperties', *_NAMED)


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


def array_at(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """A keyword's array, empty where there is none; raises UnsupportedSchema for what is none."""
    value = schema.get(keyword)
    if value is not None and not isinstance(value, list):
        raise UnsupportedSchema(f'{keyword}: wanted an array')
    return value or []


def strings_at(schema: Mapping[str, Any], keyword: str) -> list[str]:
    """As `array_at`, of strings alone."""
    found = array_at(schema, keyword)
    if not all(isinstance(value, str) for value in found):
        raise UnsupportedSchema(f'{keyword}: wanted an array of strings')
    return found


def _is_index(part: str, values: list[Any]) -> bool:
    return part.isdecimal() and len(part) < 10 and int(part) < len(values)


def _length_at(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is not None and (type(value) is not int or value < 0):
        raise UnsupportedSchema(f'{keyword}: wanted a whole number from 0 up')
    return value


def _branches(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    for keyword in ('anyOf', 'oneOf'):
        if schema.get(keyword) is not None:
            yield array_at(schema, keyword)


class InvolvedSchema(UnsupportedSchema):
    """A schema that nothing can be made of in a reasonable time."""


def _parts(value: Any) -> Iterator[Any]:
    """`value` and everything inside it."""
    left = [value]
    while left:
        part = left.pop()
        yield part
        if isinstance(part, dict | list):
            left += part.values() if isinstance(part, dict) else part


class SchemaReader:
    """Reads schemas that lie within one root, from which their references start."""

    def __init__(self, root: Mapping[str, Any]):
        """Raises InvolvedSchema for one that is small, but would become very large."""
        self.root = root
        self._looks = 0
        for part in _parts(root):
            self._look(part, (), 0, is_merged=False)

    def _look(self, schema: Any, seen: tuple[str, ...], depth: int, *, is_merged: bool) -> None:
        """Counts what has to be merged with `schema`, or followed to know its types."""
        self._looks += 1
        if self._looks > _MAX_LOOKS or depth > _MAX_NESTING:
            raise InvolvedSchema('references that multiply')
        if not isinstance(schema, dict):
            return
        is_merged |= 'allOf' in schema or ('$ref' in schema and len(schema) > 1)
        inner: list[Any] = []
        for keyword in _MERGED + _INNER * is_merged:
            value = schema.get(keyword)
            if keyword in _NAMED and isinstance(value, dict):
                inner += value.values()
            else:
                inner += value if isinstance(value, list) else [value]
        for part in filter(None, inner):
            self._look(part, seen, depth + 1, is_merged=is_merged)
        reference = schema.get('$ref')
        if reference is not None and reference not in seen:
            try:
                target = self.target(reference)
            except UnsupportedSchema:
                return
            self._look(target, (*seen, reference), depth + 1, is_merged=is_merged)

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
            if isinstance(found, list) and _is_index(part, found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise UnsupportedSchema('$ref: there is nothing at its place')
        return found

    def types(self, schema: Any, seen: tuple[str, ...] = ()) -> frozenset[str]:
        """Those of `TYPES` that a value may have; some of them may still have no value.

        Raises:
          UnsupportedSchema: it is none.
        """
        everything = frozenset(TYPES)
        if isinstance(schema, bool) or not isinstance(schema, dict):
            return everything if schema is not False else frozenset()
        found = everything
        reference = schema.get('$ref')
        if reference is not None and reference not in seen:
            found &= self.types(self.target(reference), (*seen, reference))
        if 'type' in schema:
            named = schema['type'] if isinstance(schema['type'], list) else [schema['type']]
            if not all(isinstance(name, str) for name in named):
                raise UnsupportedSchema('type: wanted a string, or an array of strings')
            found &= {'number' if name == 'integer' else name for name in named}
        if 'const' in schema:
            found &= {_type_of(schema['const'])}
        if schema.get('enum') is not None:
            found &= {_type_of(value) for value in array_at(schema, 'enum')}
        for branches in _branches(schema):
            found &= frozenset().union(*(self.types(branch, seen) for branch in branches))
        for part in array_at(schema, 'allOf'):
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
        if 'const' in schema or schema.get('enum') is not None:
            values = [schema['const']] if 'const' in schema else array_at(schema, 'enum')
            parts.append(_any(json.dumps(value) for value in values if isinstance(value, str)))
        if 'pattern' in schema:
            parts.append(_pattern(schema['pattern']))
        low, high = _length_at(schema, 'minLength') or 0, _length_at(schema, 'maxLength')
        if low or high is not None:
            parts.append(f'/(?s:.{{{low},{"" if high is None else high}}})/')
        for branches in _branches(schema):
            fitting = [b for b in branches if 'string' in self.types(b)]
            texts = [self.text(branch, seen) for branch in fitting]
            parts.append(None if None in texts else _any(text for text in texts if text))
        parts += [self.text(part, seen) for part in array_at(schema, 'allOf')]
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


def _pattern(pattern: Any) -> str:
    try:
        return f'/{llguidance.regex_to_lark(_whole_regex(pattern), "dw")}/'
    except UnicodeEncodeError:
        raise UnsupportedSchema('pattern with half a character') from None


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
