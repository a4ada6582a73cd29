"""What stands in the text of an optimised HLO program."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

HBM, VMEM, HOST = 0, 1, 5  # memory spaces in a layout: S(n), 0 where it is not written

# Bits an element; other names are refused, so that nothing is counted as nothing.
_BITS = {'token': 0, 'opaque': 0, 'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128}
_BITS |= {f'{kind}{bits}': bits for kind in 'su' for bits in (1, 2, 4, 8, 16, 32, 64)}
_BITS |= {f'f{bits}': bits for bits in (16, 32, 64)}
_SMALL_FLOAT = re.compile(r'f(4|6|8)e\w+')  # f8e4m3fn, f8e8m0fnu, f4e2m1fn, ...

_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
_START = re.compile(r'\s+(ROOT )?%([\w.\-]+) = ')
_OPCODE = re.compile(r'([\w\-]+)\(')
_ESCAPED = re.compile(r'\\.')
_COMMENT = re.compile(r'/\*.*?\*/')
# A kernel's own program, tens of kilobytes of base64.
_BODY = re.compile(r'"body":"[^"]*"')
_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?')
_SPACE = re.compile(r'S\((\d+)\)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r'(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations'
    r'|called_computations)=(\{[^}]*\}|%[\w.\-]+)'
)
_NAME = re.compile(r'%([\w.\-]+)')


class HloError(ValueError):
    """The text is not an HLO program that can be read; the message names the line."""


class Array(NamedTuple):
    """One array of a shape. space: HBM, VMEM, HOST or another number that libtpu gives."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without the padding of tiles."""
        return (self.size * _bits(self.dtype) + 7) // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line. shape: its text; operands: names; literal: the text between its parentheses;
    attributes: the text after them."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it results in, tuples flattened."""
        return arrays(self.shape)

    @property
    def op_name(self) -> str:
        """The path of scopes and the primitive that it comes from, '' where unknown."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ''

    def called(self, attribute: str | None = None) -> tuple[str, ...]:
        """Names of the computations that it uses, all or those of one attribute."""
        names = []
        for found in _CALLED.finditer(self.attributes):
            if attribute is None or found.group(0).startswith(f'{attribute}='):
                names += _NAME.findall(found.group(1))
        return tuple(names)

    def number(self, pattern: re.Pattern[str]) -> int | None:
        """The whole number that `pattern` finds among the attributes."""
        found = pattern.search(self.attributes)
        return int(found.group(1)) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """Marked ROOT, or else the last."""
        roots = [x for x in self if x.is_root]
        return roots[0] if roots else list(self)[-1]

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(x.literal): x for x in self if x.opcode == 'parameter'}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instructions that read a name, in the order of the text."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                found.setdefault(name, []).append(instruction)
        return {name: tuple(readers) for name, readers in found.items()}

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.instructions.get(instruction.operands[index])


class Module(NamedTuple):
    computations: Mapping[str, Computation]
    entry: Computation

    def named(self, instruction: Instruction, attribute: str | None = None) -> list[Computation]:
        """The computations that an instruction uses."""
        names = instruction.called(attribute)
        return [self.computations[name] for name in names if name in self.computations]


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    small = _SMALL_FLOAT.fullmatch(dtype)
    if small is None:
        raise HloError(f'an array of {dtype!r}: wanted one of {", ".join(_BITS)} or f8e4m3fn, ...')
    return int(small.group(1))


@functools.lru_cache(maxsize=1 << 14)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape's text, tuples flattened."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = _SPACE.search(layout)
        sizes = tuple(int(n.lstrip('<=')) for n in dims.split(',') if n)
        found.append(Array(dtype, sizes, int(space.group(1)) if space else HBM))
    return tuple(found)


def op_names(text: str) -> dict[str, str]:
    """Instruction -> the path of scopes that it comes from, of a program's text."""
    named = re.finditer(r'^\s+(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', text, re.MULTILINE)
    return {found.group(1): found.group(2) for found in named}


def total_bytes(instruction: Instruction) -> int:
    """Of all arrays that it results in."""
    return sum(array.bytes for array in instruction.arrays)


def _end_of(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one at `start`; -1 where none does."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        if quoted:
            if text[i] == '\\':
                i += 1
            elif text[i] == '"':
                quoted = False
        elif text[i] == '"':
            quoted = True
        elif text[i] in '({':
            depth += 1
        elif text[i] in ')}':
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return -1


def _in_string(text: str) -> bool:
    """Whether the text ends inside quotes."""
    return (_ESCAPED.sub('', text) if '\\' in text else text).count('"') % 2 == 1


def _instruction(text: str, line: int) -> Instruction:
    found = _START.match(text)
    rest = _COMMENT.sub('', text[found.end() :]) if found else ''
    cut = _end_of(rest, 0) if rest.startswith('(') else rest.find(' ')
    opcode = _OPCODE.match(rest, cut + (rest[cut : cut + 1] == ' ')) if cut > 0 else None
    end = _end_of(rest, opcode.end() - 1) if opcode else -1
    if end < 0:
        raise HloError(
            f'HLO text, line {line}: got {text.strip()[:80]!r}, wanted an instruction such as '
            "'%name = f32[8] add(%a, %b)'"
        )
    literal = rest[opcode.end() : end - 1]
    constant = opcode.group(1) in ('constant', 'parameter')
    return Instruction(
        name=found.group(2),
        shape=rest[:cut],
        opcode=opcode.group(1),
        operands=() if constant else tuple(_NAME.findall(literal)),
        literal=literal if constant else '',
        attributes=rest[end:],
        is_root=bool(found.group(1)),
    )


def parse(text: str) -> Module:
    """The computations of a program, as `compiled.as_text()` or a dump writes it.

    Raises:
      HloError: a line of a computation is no instruction, or there is no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    pending, pending_line = '', 0

    def close() -> None:
        nonlocal pending
        if pending:
            instruction = _instruction(_BODY.sub('"body":""', pending), pending_line)
            current[instruction.name] = instruction
            pending = ''

    for number, line in enumerate(text.splitlines(), 1):
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = {}
                computations[header.group(2)] = Computation(header.group(2), current)
                entry = header.group(2) if header.group(1) else entry
        elif pending and _in_string(pending):
            pending += line  # a string that goes over several lines
        elif line.startswith('}'):
            close()
            current = None
        elif line.strip():
            close()
            pending, pending_line = line, number
    if current is not None:
        raise HloError(f'HLO text, line {number}: the text ends inside a computation')
    if entry is None:
        raise HloError('HLO text: got no ENTRY computation, wanted the text of a compiled program')
    return Module(computations, computations[entry])
