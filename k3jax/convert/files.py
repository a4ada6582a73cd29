"""What the small files of a checkpoint folder hold, and which they are."""

from __future__ import annotations

import json
from typing import Any

from etils import epath


class ConversionError(ValueError):
    """A checkpoint that cannot be converted as asked; the message names the file or tensor."""


def is_empty(folder: epath.Path) -> bool:
    """Whether the folder holds nothing, or nothing that ever became whole."""
    return not folder.exists() or all(p.name.endswith('.partial') for p in folder.iterdir())


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConversionError(f'{twice!r} is given twice')
    return found


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` begins the message of any error.

    Raises:
      ConversionError: not UTF-8 JSON, not an object, or a key given twice.
    """
    try:
        value = json.loads(data.decode('utf-8'), object_pairs_hook=_unique_keys)
    except ConversionError as error:
        raise ConversionError(f'{where}: {error}; wanted each name once') from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConversionError(
            f'{where}: not valid JSON ({error}); copy the file again from its origin'
        ) from None
    if not isinstance(value, dict):
        raise ConversionError(f'{where}: got a JSON {type(value).__name__}, wanted an object')
    return value


def read_json_object(path: epath.Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
      ConversionError: no such file, or not one JSON object.
    """
    if not path.exists():
        raise ConversionError(f'{path}: no such file')
    return parse_json_object(path.read_bytes(), str(path))


def small_files(folder: epath.Path) -> list[str]:
    """Every file of `folder` but the weights, also one folder level down; relative, sorted.

    Hidden folders are left out (caches and version control, not the release).
    """
    found = []
    for path in folder.iterdir():
        if path.is_dir():
            if not path.name.startswith('.'):
                found += [f'{path.name}/{p.name}' for p in path.iterdir() if not p.is_dir()]
        else:
            found.append(path.name)
    return sorted(name for name in found if not name.endswith(('.safetensors', '.partial')))
