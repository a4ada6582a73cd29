"""How often does the body of an HLO while loop run?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from k3jax.aot.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"?known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)')
_INDEX = re.compile(r'index=(\d+)')
_DIRECTION = re.compile(r'direction=(\w+)')
_TRANSPARENT = ('copy', 'bitcast', 'convert', 'reshape')

Callers = tuple[tuple[Computation, Instruction], ...]  # (computation, while), from the outside in


class Trips(NamedTuple):
    """Runs of a loop's body. exact: false where they depend on data and are `count` at most."""

    count: int
    exact: bool = True


class _Value(NamedTuple):
    """A whole number: what a loop carries at `element` (0 where None) plus `offset`, or less."""

    element: int | None
    offset: int
    exact: bool = True


def _sum(a: _Value | None, b: _Value | None, sign: int) -> _Value | None:
    if a is None or b is None or b.element is not None and (a.element is not None or sign < 0):
        return None
    if not b.exact and sign < 0:
        return None
    element = b.element if a.element is None else a.element
    return _Value(element, a.offset + sign * b.offset, a.exact and b.exact)


def _least(a: _Value | None, b: _Value | None) -> _Value | None:
    """At most either of them, of which one may be unknown."""
    known = [x for x in (a, b) if x is not None]
    if len(known) == 2 and known[0].element == known[1].element:
        return min(known, key=lambda x: x.offset)
    # Which of several is the least is not known; constants say most.
    known.sort(key=lambda x: x.element is not None)
    return known[0]._replace(exact=False) if known else None


def _value(
    module: Module,
    computation: Computation,
    instruction: Instruction | None,
    bound: Sequence[_Value | None] | None = None,
) -> _Value | None:
    """What an instruction of a loop's body or condition results in, None where it is not plain.

    bound: of a fused computation, what its parameters are.
    """
    if instruction is None:
        return None

    def operand(index: int) -> _Value | None:
        return _value(module, computation, computation.operand(instruction, index), bound)

    match instruction.opcode:
        case 'constant':
            whole = re.fullmatch(r'-?\d+', instruction.literal)
            return _Value(None, int(instruction.literal)) if whole else None
        case 'parameter':
            return bound[int(instruction.literal)] if bound is not None else None
        case 'get-tuple-element':
            source = computation.operand(instruction, 0)
            if source is None or source.opcode != 'parameter' or bound is not None:
                return None
            return _Value(instruction.number(_INDEX), 0)
        case 'add' | 'subtract':
            sign = 1 if instruction.opcode == 'add' else -1
            return _sum(operand(0), operand(1), sign)
        case 'minimum':
            return _least(operand(0), operand(1))
        case 'fusion':
            (fused,) = module.named(instruction, 'calls')
            values = [operand(i) for i in range(len(instruction.operands))]
            return _value(module, fused, fused.root, values)
        case opcode if opcode in _TRANSPARENT:
            return operand(0)
    return None


def _carried_on(module: Module, loop: Instruction, element: int) -> _Value | None:
    """What the body makes of an element for its next run."""
    (body,) = module.named(loop, 'body')
    if body.root.opcode != 'tuple':
        return None
    return _value(module, body, body.operand(body.root, element))


def _at_start(
    module: Module, computation: Computation, loop: Instruction, element: int, callers: Callers
) -> Trips | None:
    """What an element of the carried tuple is before the first run."""
    carried = computation.operand(loop, 0)
    if carried is None or carried.opcode != 'tuple':
        return None
    value = _value(module, computation, computation.operand(carried, element))
    if value is None or value.element is None:
        return None if value is None else Trips(value.offset, value.exact)
    # It comes from the loop around this one, where it must stay what it was.
    if not callers:
        return None
    *outer, (around, outer_loop) = callers
    if _carried_on(module, outer_loop, value.element) != _Value(value.element, 0):
        return None
    start = _at_start(module, around, outer_loop, value.element, tuple(outer))
    if start is None:
        return None
    return Trips(start.count + value.offset, start.exact and value.exact)


def _compared(module: Module, condition: Computation) -> tuple[_Value, str, _Value] | None:
    computation, root, bound = condition, condition.root, None
    if root.opcode == 'fusion':
        names = [condition.instructions.get(name) for name in root.operands]
        bound = [_value(module, condition, x) for x in names]
        (computation,) = module.named(root, 'calls')
        root = computation.root
    if root.opcode != 'compare':
        return None
    sides = [_value(module, computation, computation.operand(root, i), bound) for i in (0, 1)]
    if None in sides:
        return None
    return sides[0], _DIRECTION.search(root.attributes).group(1), sides[1]


def trip_count(
    module: Module, computation: Computation, loop: Instruction, callers: Callers = ()
) -> Trips | None:
    """Runs of a while loop's body, None where the text does not say.

    Either the compiler wrote it down, or the condition compares a counter that starts at, grows by
    and ends at constants, or ends at the least of a constant and something else.
    """
    known = loop.number(_KNOWN)
    if known is not None:
        return Trips(known)
    (condition,) = module.named(loop, 'condition')
    compared = _compared(module, condition)
    if compared is None:
        return None
    left, direction, right = compared
    if left.element is None:
        left, right = right, left
        direction = {'LT': 'GT', 'GT': 'LT', 'LE': 'GE', 'GE': 'LE'}.get(direction, direction)
    if left.element is None:
        return None
    step = _carried_on(module, loop, left.element)
    start = _at_start(module, computation, loop, left.element, callers)
    limit: Trips | None = Trips(right.offset, right.exact)
    if right.element is not None:
        if _carried_on(module, loop, right.element) != _Value(right.element, 0):
            return None
        limit = _at_start(module, computation, loop, right.element, callers)
        if limit is not None:
            limit = Trips(limit.count + right.offset, limit.exact and right.exact)
    if step is None or step.element != left.element or None in (start, limit):
        return None
    if not (step.exact and left.exact and start.exact):
        return None
    if not limit.exact and (direction not in ('LT', 'LE') or step.offset <= 0):
        return None
    count = _runs(start.count + left.offset, limit.count, step.offset, direction)
    return None if count is None else Trips(count, limit.exact)


def _runs(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ('GT', 'GE'):
        start, limit, step = -start, -limit, -step
        direction = {'GT': 'LT', 'GE': 'LE'}[direction]
    if direction == 'LE':
        limit, direction = limit + 1, 'LT'
    if step <= 0 or direction not in ('LT', 'NE'):
        return None
    if direction == 'NE' and (limit - start) % step:
        return None
    return max(0, -(-(limit - start) // step))
