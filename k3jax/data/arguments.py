"""How a call's arguments change between JSON text and XTML's typed values, and back.

Numbers keep the text that they were written with, both ways: then the prompt of the next turn is,
token by token, what the model generated.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from k3jax.data.conversation import ChatError


class Argument(NamedTuple):
    """type: string, number, boolean, null, object or array. text: as XTML holds the value."""

    key: str
    type: str
    text: str


class _Number(str):
    """The text of a JSON number."""


def _refuse_constant(text: str) -> Any:
    raise ValueError(f'{text} is not JSON')


def _loads(text: str) -> Any:
    return json.loads(text, parse_float=_Number, parse_int=_Number, parse_constant=_refuse_constant)


def _dumps(value: Any) -> str:
    match value:
        case _Number():
            return str(value)
        case dict():
            return f'{{{", ".join(f"{_dumps(k)}: {_dumps(v)}" for k, v in value.items())}}}'
        case list():
            return f'[{", ".join(map(_dumps, value))}]'
    return json.dumps(value, ensure_ascii=False)


def _type(value: Any) -> str:
    match value:
        case _Number():
            return 'number'
        case bool():
            return 'boolean'
        case None:
            return 'null'
        case str():
            return 'string'
        case dict():
            return 'object'
    return 'array'


def split_arguments(text: str) -> list[Argument] | None:
    """The arguments of a call in the order of their JSON text; None where that is not JSON.

    Raises:
      ChatError: JSON that is not an object, or is too deep.
    """
    if not text:
        return []
    try:
        values = _loads(text)
        if not isinstance(values, dict):
            raise ChatError(f'tool call arguments: got a JSON {_type(values)}, wanted an object')
        return [
            Argument(key, _type(value), value if _type(value) == 'string' else _dumps(value))
            for key, value in values.items()
        ]
    except RecursionError:
        raise ChatError('tool call arguments: nested too deeply') from None
    except ChatError:
        raise
    except ValueError:
        return None


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, with space around it or not."""
    try:
        _loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_string(text: str) -> str:
    """`text` as a JSON string; of two texts together it is that of each, less the inner quotes."""
    return json.dumps(text, ensure_ascii=False)
