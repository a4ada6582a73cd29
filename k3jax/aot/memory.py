"""How much HBM does a program need, and which buffers fill it?"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from k3jax.aot.chips import Chip

ASSIGNMENT, LIVE_RANGES = '*buffer-assignment.txt', '*live-range.txt'  # files of XLA's dump
LEAST_SHARE = 1e-4  # of the largest buffer, below which none is listed
GIB = 2**30

_TOTAL = re.compile(r'total memory required[^(]*\(([\d.]+)([KMGTP]?)\)')
_OUT_OF_MEMORY = re.compile(r'CompileTimeHbmOom|Ran out of memory (?:on HBM|in memory space hbm)')
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': GIB, 'T': 2**40, 'P': 2**50}
_ALLOCATION = re.compile(r'allocation \d+: size (\d+), (.*):$')
_VALUE = re.compile(
    r' value: <\d+ ([^ {]+)(\{[\d,]*\})? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$'
)
_RANGE = re.compile(r' +([^ {]+)(\{[\d,]*\}):(\d+)-(\d+)$')
_LAYOUT = re.compile(r'\{[^{}]*\}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one chip, None where unknown.

    argument, output, alias (outputs that lie in arguments), temp, code: as the compiler assigned
    them. peak: the most that is in use at once; None beside a use of the host's memory, which the
    compiler counts in. required: what a chip must have, argument + output - alias + temp + code;
    more than the peak where holes are left. host: in the host's memory.
    """

    limit: int
    argument: int | None = None
    output: int | None = None
    alias: int | None = None
    temp: int | None = None
    code: int | None = None
    peak: int | None = None
    required: int | None = None
    host: int | None = None

    @property
    def headroom(self) -> int | None:
        """What is left of the limit; negative where it does not fit."""
        return None if self.required is None else self.limit - self.required


def gib(number: float | None) -> str:
    """Bytes for a reader; '-' where unknown."""
    return '-' if number is None else f'{number / GIB:.2f} GiB'


class Buffer(NamedTuple):
    """Buffers alike, in use together at the peak. bytes: of all `count`."""

    bytes: int
    count: int
    shape: str
    kind: str  # argument, output, constant or temporary
    op_name: str


def memory_of(compiled: jax.stages.Compiled, chip: Chip) -> Memory:
    """What the compiler says of a program that fits."""
    stats = compiled.memory_analysis()
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temp = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    code = stats.generated_code_size_in_bytes
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    return Memory(
        limit=chip.hbm_bytes,
        argument=argument,
        output=output,
        alias=alias,
        temp=temp,
        code=code,
        peak=None if host else stats.peak_memory_in_bytes,
        required=argument + output - alias + temp + code,
        host=host,
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether a compilation failed because the program does not fit into HBM."""
    return _OUT_OF_MEMORY.search(str(error)) is not None


def memory_of_failure(error: Exception, dump: pathlib.Path, chip: Chip) -> Memory:
    """What is known of a program that does not fit: the compiler's message and its dump."""
    found = _TOTAL.search(str(error))
    required = int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None
    sizes: collections.Counter[str] = collections.Counter()
    for allocation in _allocations(_newest(dump, ASSIGNMENT)):
        sizes[allocation.kind] += allocation.size
    if not sizes:
        return Memory(limit=chip.hbm_bytes, required=required)
    return Memory(
        limit=chip.hbm_bytes,
        argument=sizes['argument'],
        output=sizes['output'],
        temp=sizes['temporary'],
        required=required or sum(sizes.values()),
    )


class _Value(NamedTuple):
    name: str  # with the index inside a tuple: fusion.1{0}
    size: int
    offset: int
    shape: str


class _Allocation(NamedTuple):
    size: int
    kind: str
    values: list[_Value]


def _newest(dump: pathlib.Path, pattern: str) -> str:
    """The text of the file, '' where there is none; the largest of several modules."""
    files = sorted(dump.glob(pattern), key=lambda path: path.stat().st_size)
    return files[-1].read_text() if files else ''


def _kind(description: str) -> str | None:
    """None for what is not in HBM (another color) or part of something else."""
    if 'color ' in description or 'thread-local' in description:
        return None
    for word, kind in (
        ('parameter', 'argument'),
        ('preallocated-temp', 'temporary'),
        ('constant', 'constant'),
        ('maybe-live-out', 'output'),
    ):
        if word in description:
            return kind
    return 'temporary'


def _allocations(text: str) -> Iterator[_Allocation]:
    """HBM allocations of XLA's buffer assignment."""
    current = None
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            if current is not None:
                yield current
            kind = _kind(allocation.group(2))
            current = _Allocation(int(allocation.group(1)), kind, []) if kind else None
        elif current is not None and (value := _VALUE.match(line)):
            name, index, color, size, offset, shape = value.groups()
            if color == '0':
                full = f'{name}{index or "{}"}'
                current.values.append(_Value(full, int(size), int(offset), shape))
    if current is not None:
        yield current


def _live_at_peak(values: list[_Value], ranges: dict[str, tuple[int, int]]) -> list[_Value]:
    """Of values in one region, those in use when most is; values in the same place once."""
    events = []
    for value in values:
        first, last = ranges.get(value.name, (0, 1 << 60))
        events += [(first, 1, value), (last + 1, 0, value)]
    used: collections.Counter[tuple[int, int]] = collections.Counter()
    total = most = 0
    peak = 0
    for time, begins, value in sorted(events, key=lambda event: event[:2]):
        place = (value.offset, value.size)
        if begins:
            total += value.size if not used[place] else 0
            used[place] += 1
            if total > most:
                most, peak = total, time
        else:
            used[place] -= 1
            total -= value.size if not used[place] else 0
    places = {}
    for value in values:
        first, last = ranges.get(value.name, (0, 1 << 60))
        if first <= peak <= last:
            places.setdefault((value.offset, value.size), value)
    return list(places.values())


def largest_buffers(dump: pathlib.Path, op_names: dict[str, str], count: int) -> list[Buffer]:
    """The buffers that take most of HBM at the peak, largest first.

    Args:
      dump: folder that XLA wrote its buffer assignment and live ranges into.
      op_names: instruction -> where in the model it comes from.
    """
    ranges = {}
    for line in _newest(dump, LIVE_RANGES).splitlines():
        if found := _RANGE.match(line):
            ranges[found.group(1) + found.group(2)] = (int(found.group(3)), int(found.group(4)))
    sizes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for allocation in _allocations(_newest(dump, ASSIGNMENT)):
        values = allocation.values
        if allocation.kind == 'temporary':
            values = _live_at_peak(values, ranges)
        for value in values if allocation.kind == 'temporary' else values[:1]:
            instruction = value.name.partition('{')[0]
            shape = value.shape
            while _LAYOUT.search(shape):
                shape = _LAYOUT.sub('', shape)
            key = (shape, allocation.kind, op_names.get(instruction) or instruction)
            sizes[key] += value.size
            counts[key] += 1
    found = [Buffer(size, counts[key], *key) for key, size in sizes.most_common(count)]
    return [buffer for buffer in found if buffer.bytes >= found[0].bytes * LEAST_SHARE]
