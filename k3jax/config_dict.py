"""How configs are stored: as plain dicts, and those of a model and its data back from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from k3jax.config import (
    ConfigError,
    DataConfig,
    LinearAttnConfig,
    ModelConfig,
    NeedlesConfig,
    require,
)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON-able dict of any config dataclass."""
    return dataclasses.asdict(config)


def _check_fields(fields: Any, config_class: type, where: str) -> None:
    """Checks that the dict `fields` has every field that `config_class` needs and no other."""
    require(isinstance(fields, dict), where, fields, 'an object with its fields')
    known = dataclasses.fields(config_class)
    names = [field.name for field in known]
    for name, value in fields.items():
        require(name in names, f'{where}.{name}', value, f'one of {", ".join(names)}')
    for field in known:
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise ConfigError(
                f'{where}.{field.name}: got nothing, wanted the {field.type} that '
                f'{config_class.__name__} needs'
            )


def model_config_from_dict(fields: dict[str, Any]) -> ModelConfig:
    """Inverse of `to_dict` for a ModelConfig, also after JSON made its tuples lists.

    Raises:
      ConfigError: a field is missing, unknown or out of range; the message names it.
    """
    where = 'model.linear_attn_config'
    _check_fields(fields, ModelConfig, 'model')
    _check_fields(fields['linear_attn_config'], LinearAttnConfig, where)
    linear = dict(fields['linear_attn_config'])
    for key in ('kda_layers', 'full_attn_layers'):
        layers = linear[key]
        require(isinstance(layers, list | tuple), f'{where}.{key}', layers, 'a list of layers')
        linear[key] = tuple(layers)
    return ModelConfig(**{**fields, 'linear_attn_config': LinearAttnConfig(**linear)})


def data_config_from_dict(fields: dict[str, Any]) -> DataConfig:
    """Inverse of `to_dict` for a DataConfig, also after JSON made its tuples lists.

    Fields that are missing have their defaults: a run may be older than a field.

    Raises:
      ConfigError: a field is unknown or out of range; the message names it.
    """
    _check_fields(fields, DataConfig, 'data')
    changed: dict[str, Any] = {
        name: tuple(value) for name, value in fields.items() if isinstance(value, list)
    }
    if 'needles' in fields:
        _check_fields(fields['needles'], NeedlesConfig, 'data.needles')
        changed['needles'] = NeedlesConfig(**fields['needles'])
    return DataConfig(**(fields | changed))
