"""What every config says where a value cannot work: got, wanted and where."""

from __future__ import annotations

import math
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field."""


def require(ok: bool, where: str, got: Any, wanted: str) -> None:
    """Raises ConfigError with what came, and what was wanted, unless `ok`."""
    if not ok:
        raise ConfigError(f'{where}: got {got!r}, wanted {wanted}')


def positive(where: str, **fields: int | float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f'{where}.{name}', value, 'a finite number')
        require(value > 0, f'{where}.{name}', value, 'a number above 0')


def not_negative(where: str, **fields: int | float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f'{where}.{name}', value, 'a finite number')
        require(value >= 0, f'{where}.{name}', value, '0 or more')


def check_seed(where: str, value: int) -> None:
    require(0 <= value < 2**32, where, value, 'a whole number in 0..2**32 - 1')
