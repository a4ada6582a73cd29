"""Whether tools, and the choice among them, are such that a model can be told of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.fields import Fields, show, wrong
from k3jax.serve.api.rules import Rules

_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_.-]{0,255}')


def tools_at(value: Any, param: str) -> tuple[dict[str, Any], ...]:
    """The tools of a list, as they were sent.

    Raises:
      ApiError: not a list of functions with names; names the first fault.
    """
    if not isinstance(value, list):
        raise wrong(param, value, 'an array of tools')
    for position, tool in enumerate(value):
        _check_tool(tool, f'{param}[{position}]')
    return tuple(value)


def _check_tool(tool: Any, param: str) -> None:
    fields = Fields(tool, param)
    kind = fields.get('type')
    if kind != 'function':
        raise wrong(fields.path('type'), kind, '"function"')
    if fields.get('function') is None:
        raise wrong(fields.path('function'), None, 'an object')
    function = Fields(fields.get('function'), fields.path('function'))
    name = function.get('name')
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            function.path('name'),
            name,
            'a name of 1 to 256 letters, digits, _, - and ., the first a letter or _',
        )
    function.string('description')
    function.object('parameters')
    function.boolean('strict')


def check_unique(tools: Iterable[dict[str, Any]]) -> None:
    """Raises ApiError where two tools of a request have one name."""
    seen: set[str] = set()
    for tool in tools:
        name = tool['function']['name']
        if name in seen:
            raise ApiError(f'tools: got two named {show(name)}, wanted one', param='tools')
        seen.add(name)


class ToolChoice(NamedTuple):
    """mode: what the model may do. name: the one tool that it must call, if one was named."""

    mode: Literal['auto', 'required', 'none'] = 'auto'
    name: str | None = None


def tool_choice_at(value: Any, tools: Sequence[dict[str, Any]], rules: Rules) -> ToolChoice:
    """The choice that a request makes.

    Raises:
      ApiError: none of the known forms, or one that needs tools that are not there.
    """
    param = 'tool_choice'
    if value is None:
        return ToolChoice()
    if isinstance(value, dict):
        if rules.ignores_unknown:
            return ToolChoice()
        fields = Fields(value, param)
        fields.only(('type', 'function'))
        if fields.choice('type', ('function',)) is None or fields.object('function') is None:
            raise wrong(param, value, "an object {'type': 'function', 'function': {'name': ...}}")
        name = Fields(fields.get('function'), fields.path('function')).string('name')
        if name not in {tool['function']['name'] for tool in tools}:
            raise wrong(f'{param}.function.name', name, 'the name of one of the tools')
        return ToolChoice('required', name)
    if not isinstance(value, str) or value not in ('auto', 'required', 'none'):
        raise wrong(param, value, 'one of auto, none, required')
    if value == 'required' and not tools:
        raise ApiError(f'{param}: got "required" without tools, wanted tools', param=param)
    return ToolChoice(value)
