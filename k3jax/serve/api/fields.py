"""Whether the fields of a JSON object are what they should be."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from k3jax.serve.api.errors import ApiError

_NAMES = {str: 'a string', bool: 'a boolean', dict: 'an object', list: 'an array'}
MAX_DEPTH = 128  # of arrays and objects in a body
# Values in a body, about: each takes far more memory than its bytes.
MAX_VALUES = 4_000_000


def show(value: Any) -> str:
    """A value of the client's, short enough for a message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value).__name__)
    return text if len(text) <= 60 else f'{text[:57]}...'


def wrong(param: str, value: Any, wanted: str) -> ApiError:
    """The error for a field that is not as it should be."""
    return ApiError(f'{param}: got {show(value)}, wanted {wanted}', param=param)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f'{text} is not JSON')


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body.

    Raises:
      ApiError: not UTF-8, not JSON, not an object, nested deeper than `MAX_DEPTH`, or with more
        values than `MAX_VALUES`.
    """
    if sum(map(data.count, (b'[', b'{', b','))) > MAX_VALUES:
        raise ApiError(f'body: got more than {MAX_VALUES} values')
    try:
        body = json.loads(data.decode('utf-8'), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f'body: not UTF-8 at byte {error.start}') from None
    except RecursionError:
        raise ApiError(f'body: nested deeper than {MAX_DEPTH}') from None
    except ValueError as error:  # also of a number with too many digits
        raise ApiError(f'body: not JSON ({str(error)[:100]})') from None
    if not isinstance(body, dict):
        raise wrong('body', body, 'an object')
    check_depth(body, 'body')
    return body


def check_depth(value: Any, param: str) -> None:
    """Raises ApiError where arrays and objects are nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise ApiError(f'{param}: nested deeper than {MAX_DEPTH}', param=param)


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class Fields:
    """Reads the fields of one object; null counts as absent.

    Methods named for a type raise ApiError for another one.
    """

    def __init__(self, value: Any, param: str):
        """Raises ApiError where `value` is no object; `param` names it in messages."""
        if not isinstance(value, dict):
            raise wrong(param or 'body', value, 'an object')
        self._value, self._param = value, param

    def path(self, name: str) -> str:
        """The field's name for messages."""
        return f'{self._param}.{name}' if self._param else name

    def get(self, name: str) -> Any:
        """The field as it is, or None."""
        return self._value.get(name)

    def _typed(self, name: str, kind: type) -> Any:
        value = self._value.get(name)
        if value is not None and type(value) is not kind:
            raise wrong(self.path(name), value, _NAMES[kind])
        return value

    def string(self, name: str) -> str | None:
        return self._typed(name, str)

    def boolean(self, name: str) -> bool | None:
        return self._typed(name, bool)

    def object(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict)

    def array(self, name: str) -> list[Any] | None:
        return self._typed(name, list)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self._value.get(name)
        if value is None:
            return None
        ok = type(value) in (int, float) and low <= value <= high
        if not ok:
            raise wrong(self.path(name), value, f'a number from {low:g} to {high:g}')
        return float(value)

    def integer(self, name: str, low: int, high: float = math.inf) -> int | None:
        """A whole number in [low, high]."""
        value = self._value.get(name)
        if value is None:
            return None
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            upper = f' to {high}' if high < math.inf else ' up'
            raise wrong(self.path(name), value, f'a whole number from {low}{upper}')
        return value

    def choice(self, name: str, options: Collection[str]) -> str | None:
        """One of some strings."""
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in options:
            raise wrong(self.path(name), value, f'one of {", ".join(options)}')
        return value

    def only(self, known: Collection[str]) -> None:
        """Raises ApiError for a field that is not known, with the name that it probably means."""
        for name in self._value:
            if name not in known:
                shown = name if len(name) <= 60 else f'{name[:57]}...'
                # Of a long name the comparison alone would take seconds and gigabytes.
                close = difflib.get_close_matches(name, known, 1) if name == shown else ()
                hint = f'; did you mean {close[0]}?' if close else ''
                param = self.path(shown)
                raise ApiError(f'{param}: unknown field{hint}', param=param, code='unknown_field')
