"""How configs are stored: as plain dicts, and configs back from them."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from k3jax.config import Config, ConfigError, DataConfig, ModelConfig, require

T = TypeVar('T')


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON-able dict of any config dataclass."""
    return dataclasses.asdict(config)


def _check_fields(fields: Any, config_class: type, where: str) -> None:
    """Checks that the dict `fields` has every field that `config_class` needs and no other."""
    thing = where.partition('.')[0]
    require(isinstance(fields, dict), where, fields, f'an object with the fields of the {thing}')
    known = dataclasses.fields(config_class)
    names = [field.name for field in known]
    for name, value in fields.items():
        require(name in names, f'{where}.{name}', value, f'one of {", ".join(names)}')
    for field in known:
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in fields:
            raise ConfigError(
                f'{where}.{field.name}: got nothing, wanted the {field.type} that '
                f'{config_class.__name__} needs'
            )


def _from_dict(config_class: type[T], fields: Any, where: str) -> T:
    """Inverse of `to_dict` for a config dataclass, also after JSON made its tuples lists."""
    _check_fields(fields, config_class, where)
    hints, values = typing.get_type_hints(config_class), {}
    for field in dataclasses.fields(config_class):
        if field.name not in fields:
            continue
        value, path = fields[field.name], f'{where}.{field.name}'
        if 'of' in field.metadata:  # changes of some fields of another config
            require(isinstance(value, dict), path, value, 'an object')
            other = typing.get_type_hints(field.metadata['of'])
            values[field.name] = {
                name: _value(x, other.get(name), f'{path}.{name}') for name, x in value.items()
            }
        else:
            values[field.name] = _value(value, hints[field.name], path)
    return config_class(**values)


def _value(value: Any, annotation: Any, where: str) -> Any:
    """What a field of this type held when JSON made it `value`."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        annotation = next(arg for arg in args if arg is not type(None))
        args = typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return _from_dict(annotation, value, where)
    if typing.get_origin(annotation) is tuple:
        kind = args[0].__name__ if isinstance(args[0], type) else 'value'
        require(isinstance(value, list | tuple), where, value, f'a list, each of it a {kind}')
        return tuple(_value(x, args[0], f'{where}.{n}') for n, x in enumerate(value))
    return value


def model_config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """Inverse of `to_dict` for a ModelConfig, also after JSON made its tuples lists.

    Raises:
      ConfigError: a field is missing, unknown or out of range; the message names it.
    """
    return _from_dict(ModelConfig, fields, 'model')


def data_config_from_dict(fields: dict[str, Any]) -> DataConfig:
    """As `model_config_from_dict`, for a DataConfig."""
    return _from_dict(DataConfig, fields, 'data')


def config_from_dict(fields: dict[str, Any]) -> Config:
    """As `model_config_from_dict`, for the whole Config of a run."""
    hints = typing.get_type_hints(Config)
    return Config(**{name: _from_dict(hints[name], x, name) for name, x in fields.items()})
