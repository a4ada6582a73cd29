"""How `--set a.b=value` changes a nested frozen dataclass: typed, and with the name you meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, Union

from k3jax.config import ConfigError

T = TypeVar('T')

_TRUE, _FALSE = ('true', '1', 'yes'), ('false', '0', 'no')


def apply_overrides(config: T, overrides: Iterable[str]) -> T:
    """`config` with each `path=value` applied, validated as a whole.

    Values are read by the type of the field: numbers (`3e-4`; `1e5` also where an int is wanted),
    `true` / `false`, `None` where the field allows it, `1,2,3` for tuples, text as it stands. All
    changes are made together, so fields that must agree may be changed one by one; of two values
    for one path the later holds.

    Args:
      config: a frozen dataclass, its fields values or further dataclasses.
      overrides: strings such as 'optimizer.learning_rate=1e-3'.

    Raises:
      ConfigError: not `path=value`, an unknown name, a value of the wrong type, or a combination
        that the config refuses.
    """
    overrides = list(overrides)
    changes: dict[str, Any] = {}
    for override in overrides:
        path, equals, text = override.partition('=')
        path = path.strip()
        if not equals or not path:
            raise ConfigError(
                f'--set: got {override!r}, wanted path=value, such as data.batch_size=16'
            )
        _add_change(config, changes, path, text.strip())
    try:
        return _replace(config, changes)
    except ValueError as e:
        raise ConfigError(f'{e} (after --set {" --set ".join(overrides)})') from e


class _Changes(NamedTuple):
    """A group that changes some fields of another config; as in a stage of a run."""

    of: type
    values: Mapping[str, Any]


def _fields(group: Any) -> dict[str, Any] | None:
    """Name -> type of what can be set in a group; None if it is none."""
    if isinstance(group, _Changes):
        return typing.get_type_hints(group.of)
    if dataclasses.is_dataclass(group):
        return typing.get_type_hints(type(group))
    if isinstance(group, tuple) and any(map(dataclasses.is_dataclass, group)):
        return {str(number): type(member) for number, member in enumerate(group)}
    return None


def _member(group: Any, name: str) -> Any:
    """What a group holds by this name."""
    if isinstance(group, _Changes):
        return group.values.get(name)
    if isinstance(group, tuple):
        return group[int(name)]
    value, (field,) = getattr(group, name), (f for f in dataclasses.fields(group) if f.name == name)
    return _Changes(field.metadata['of'], value) if 'of' in field.metadata else value


def _add_change(config: Any, changes: dict[str, Any], path: str, text: str) -> None:
    """Puts the parsed value at its place in `changes`, a tree of field names."""
    *groups, name = path.split('.')
    where = ''
    for group in groups:
        _check_name(config, group, where, path)
        where = f'{where}.{group}'.lstrip('.')
        config = _member(config, group)
        changes = changes.setdefault(group, {})
        if _fields(config) is None:
            shown = config.values if isinstance(config, _Changes) else config
            raise ConfigError(
                f'--set {path}: {where} is {shown!r}, a value without fields; set {where} itself'
            )
    _check_name(config, name, where, path)
    group = _member(config, name)
    members = _fields(group)
    if members is not None and not (isinstance(group, tuple) and text == '()'):  # none of them
        fields = ', '.join(members)
        raise ConfigError(f'--set {path}: is a group, wanted one of its fields: {fields}')
    annotation = _fields(config)[name]
    try:
        changes[name] = _parse(text, annotation)
    except ValueError:
        raise ConfigError(f'--set {path}: got {text!r}, wanted {_describe(annotation)}') from None


def _check_name(config: Any, name: str, where: str, path: str) -> None:
    names = list(_fields(config))
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    near = f'did you mean {f"{where}.{close[0]}".lstrip(".")!r}? ' if close else ''
    raise ConfigError(
        f'--set {path}: {where or "the config"} has no field {name!r}; {near}'
        f'It has: {", ".join(names)}'
    )


def _replace(config: T, changes: dict[str, Any]) -> T:
    """`config` with a tree of changes, innermost groups first."""
    if isinstance(config, Mapping):
        return {**config, **changes}
    if isinstance(config, tuple):
        members = enumerate(config)
        return tuple(_replace(x, changes[str(n)]) if str(n) in changes else x for n, x in members)
    fields = {
        name: _replace(getattr(config, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **fields)


def _parse(text: str, annotation: Any) -> Any:
    """The value that `text` means for a field of this type.

    Raises:
      ValueError: it means none.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _parse_union(text, args)
    if origin is Literal:
        return {str(choice): choice for choice in args}[text] if text in map(str, args) else _no()
    if origin is tuple:
        return _parse_tuple(text, args)
    if annotation is bool:
        word = text.lower()
        return True if word in _TRUE else False if word in _FALSE else _no()
    if annotation is int:
        return _parse_int(text)
    if annotation is float:
        return float(text)
    if annotation is str:
        return text
    return _no()


def _parse_union(text: str, choices: tuple[Any, ...]) -> Any:
    """The first choice that takes `text`; None only by its name."""
    if type(None) in choices and text.lower() in ('none', 'null'):
        return None
    for choice in choices:
        if choice is not type(None):
            try:
                return _parse(text, choice)
            except ValueError:
                continue
    return _no()


def _parse_tuple(text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`1,2,3`, with or without brackets; the empty text is the empty tuple."""
    if text[:1] + text[-1:] in ('()', '[]'):
        text = text[1:-1]
    parts = [part.strip() for part in text.split(',')]
    if parts[-1] == '':
        parts.pop()
    kinds = [args[0]] * len(parts) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(parts):
        _no()
    return tuple(_parse(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        return int(value) if value.is_integer() else _no()


def _no() -> Any:
    raise ValueError


def _describe(annotation: Any) -> str:
    """What a person should write for a field of this type."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return ' or '.join(_describe(choice) for choice in args)
    if origin is Literal:
        return ' or '.join(repr(choice) for choice in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f'values with commas, each {_describe(args[0])}'
        return f'{len(args)} values with commas: {", ".join(_describe(arg) for arg in args)}'
    names = {
        bool: "'true' or 'false'",
        int: 'an integer',
        float: 'a number',
        str: 'text',
        type(None): "'None'",
    }
    if dataclasses.is_dataclass(annotation):
        return f'{annotation.__name__}s: to be given in the config file'
    return names.get(annotation, f'nothing: a field of type {annotation} cannot be set by a flag')
