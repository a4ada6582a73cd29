"""What one chip does in a step, by the text of the optimised program."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

from k3jax.aot.dumps import custom_calls
from k3jax.aot.hlo import (
    HBM,
    HOST,
    VMEM,
    Computation,
    HloError,
    Instruction,
    Module,
    parse,
    total_bytes,
)
from k3jax.aot.trips import Callers, trip_count
from k3jax.aot.work import (
    COLLECTIVES,
    KERNEL,
    group_size,
    kernel_cost,
    matmul_flops,
    moved_bytes,
    sent_bytes,
)

OP, KERNEL_OP = 'op', 'kernel'  # kinds beside those of COLLECTIVES
_ENDS = ('-done', '-update')  # of asynchronous operations, whose start was counted
_SUFFIX = re.compile(r'(\.\d+|\.clone|\.remat\d*)*$')


class Op(NamedTuple):
    """One top-level operation, its work that of one execution.

    kind: OP, KERNEL_OP or a collective's HLO name. op_name: where in the model it comes from.
    times: executions in a step. flops: of products; mxu_flops: counting each product as often as
    the matrix unit goes over it. sent_bytes: to other chips, in groups of `group`. host_bytes:
    between HBM and the host's memory. has_cost: false for a kernel without a CostEstimate, whose
    flops are unknown and counted as 0.
    """

    name: str
    kind: str
    op_name: str
    times: int
    flops: float = 0.0
    mxu_flops: float = 0.0
    hbm_bytes: float = 0.0
    sent_bytes: float = 0.0
    host_bytes: float = 0.0
    group: int = 1
    vmem_bytes: int = 0
    has_cost: bool = True


class Loop(NamedTuple):
    """trips: of one execution, None where unknown and then counted as 1; exact: false where that is
    the most that data may ask for; times: executions."""

    name: str
    op_name: str
    trips: int | None
    exact: bool
    times: int


class Program(NamedTuple):
    """conditionals: how many there are; of each the branch with the most work was counted."""

    ops: tuple[Op, ...]
    loops: tuple[Loop, ...]
    conditionals: int

    def total(self, field: str) -> float:
        """Sum of a field of the ops over a step."""
        return float(sum(op.times * getattr(op, field) for op in self.ops))

    @property
    def unknown_loops(self) -> list[str]:
        """Names of loops whose trips are unknown."""
        return [loop.name for loop in self.loops if loop.trips is None]


def kernel_name(op: str) -> str:
    """'mla_forward.1.clone' -> 'mla_forward'."""
    return _SUFFIX.sub('', op)


def collective_bytes(program: Program) -> dict[str, float]:
    """Bytes that a chip sends in a step, by kind."""
    sent: collections.Counter[str] = collections.Counter()
    for op in program.ops:
        if op.kind in COLLECTIVES:
            sent[op.kind] += op.times * op.sent_bytes
    return dict(sent)


def analyse(text: str, num_devices: int) -> Program:
    """Every operation of a program, with how often it runs.

    Args:
      text: the optimised program of one chip, as `compiled.as_text()` gives it.
      num_devices: chips that run it.

    Raises:
      HloError: the text is not such a program; the message names the line.
    """
    walk = _Walk(parse(text), custom_calls(text), num_devices)
    ops = walk.run(walk.module.entry, 1, ())
    return Program(tuple(ops), tuple(walk.loops), walk.conditionals)


class _Walk:
    """Collects the operations of a module, bodies of loops as often as they run."""

    def __init__(self, module: Module, vmem: dict[str, int], num_devices: int):
        self.module, self.vmem, self.num_devices = module, vmem, num_devices
        self.loops: list[Loop] = []
        self.conditionals = 0

    def run(self, computation: Computation, times: int, callers: Callers) -> list[Op]:
        ops, prefetched = [], _prefetched(self.module, computation)
        for instruction in computation:
            if instruction.name in prefetched.copies:
                continue
            try:
                found = self._instruction(computation, instruction, times, callers)
            except HloError:
                raise
            except (AttributeError, IndexError, KeyError, ValueError) as error:
                raise HloError(
                    f'HLO instruction %{instruction.name} of {computation.name}: got {error!r}; '
                    f'its text is {instruction.opcode}(...){instruction.attributes[:120]}'
                ) from error
            extra = prefetched.read.get(instruction.name, 0.0)
            # A CostEstimate counts operands wherever they are.
            if extra and found and not (found[-1].kind == KERNEL_OP and found[-1].has_cost):
                found[-1] = found[-1]._replace(hbm_bytes=found[-1].hbm_bytes + extra)
            ops += found
        return [op for op in ops if op.kind != OP or op.flops or op.hbm_bytes or op.host_bytes]

    def _instruction(
        self, computation: Computation, instruction: Instruction, times: int, callers: Callers
    ) -> list[Op]:
        module, opcode = self.module, instruction.opcode
        if opcode == 'while':
            trips = trip_count(module, computation, instruction, callers)
            name = _op_name(module, computation, instruction)
            count, exact = trips or (None, True)
            self.loops.append(Loop(instruction.name, name, count, exact, times))
            (body,) = module.named(instruction, 'body')
            inner = times * (1 if count is None else count)
            return self.run(body, inner, (*callers, (computation, instruction)))
        if opcode == 'conditional':
            self.conditionals += 1
            branches = [self.run(branch, times, callers) for branch in module.named(instruction)]
            return max(branches, key=_weight, default=[])
        if opcode in ('call', 'async-start') or _is_call(module, computation, instruction):
            return [
                op for inner in module.named(instruction) for op in self.run(inner, times, callers)
            ]
        if opcode.endswith(_ENDS):
            return []
        return list(self._ops(computation, instruction, times))

    def _ops(self, computation: Computation, instruction: Instruction, times: int) -> Iterator[Op]:
        module = self.module
        op = Op(instruction.name, OP, _op_name(module, computation, instruction), times)
        kind = instruction.opcode.removesuffix('-start')
        if kind in COLLECTIVES:
            yield self._collective(op, kind, computation, instruction)
        elif instruction.opcode.endswith('-start'):
            copy = _copy(computation, instruction)
            yield op._replace(hbm_bytes=copy.hbm_bytes, host_bytes=copy.host_bytes)
        elif KERNEL in instruction.attributes:
            cost = kernel_cost(instruction)
            flops, moved = cost or (0.0, 0.0)
            yield op._replace(
                kind=KERNEL_OP,
                flops=flops,
                mxu_flops=flops,
                hbm_bytes=moved or moved_bytes(module, computation, instruction, HBM),
                vmem_bytes=self.vmem.get(instruction.name, 0),
                has_cost=cost is not None,
            )
        else:
            exchanged = list(self._fused_collectives(op, instruction))
            yield from exchanged
            flops, mxu_flops = matmul_flops(module, computation, instruction)
            if not exchanged or flops:
                hbm, host = (
                    moved_bytes(module, computation, instruction, space) for space in (HBM, HOST)
                )
                yield op._replace(flops=flops, mxu_flops=mxu_flops, hbm_bytes=hbm, host_bytes=host)

    def _collective(
        self, op: Op, kind: str, computation: Computation, instruction: Instruction
    ) -> Op:
        sources = [computation.instructions.get(name) for name in instruction.operands]
        if kind == 'ragged-all-to-all':
            sources = sources[:1]  # the others are the buffer of the result, offsets and sizes
        moved = sum(total_bytes(source) for source in sources if source is not None)
        size = group_size(instruction, self.num_devices)
        return op._replace(kind=kind, sent_bytes=sent_bytes(kind, moved, size), group=size)

    def _fused_collectives(self, op: Op, instruction: Instruction) -> Iterator[Op]:
        """Collectives in a fusion, such as a reduce-scatter made of an all-reduce and a slice."""
        if instruction.opcode != 'fusion':
            return
        for fused in self.module.named(instruction, 'calls'):
            for inner in fused:
                kind = inner.opcode
                if kind == 'all-reduce' and fused.root.opcode == 'dynamic-slice':
                    kind = 'reduce-scatter'
                if kind in COLLECTIVES:
                    yield self._collective(op, kind, fused, inner)
                yield from self._fused_collectives(op, inner)


def _is_call(module: Module, computation: Computation, instruction: Instruction) -> bool:
    """Whether a custom call runs a computation on its operands, as those of sparse cores do."""
    if instruction.opcode != 'custom-call':
        return False
    operands = [computation.instructions.get(name) for name in instruction.operands]
    wanted = [x.arrays[0].dims for x in operands if x is not None]
    return any(
        [x.arrays[0].dims for _, x in sorted(called.parameters.items())] == wanted
        for called in module.named(instruction, 'called_computations')
    )


def _weight(ops: list[Op]) -> tuple[float, float]:
    return sum(op.times * op.flops for op in ops), sum(op.times * op.hbm_bytes for op in ops)


class _Copy(NamedTuple):
    """What an asynchronous copy or slice moves; to_vmem: from HBM."""

    hbm_bytes: float
    host_bytes: float
    to_vmem: bool


def _copy(computation: Computation, start: Instruction) -> _Copy:
    source = computation.operand(start, 0)
    done = [x for x in computation.users.get(start.name, ()) if x.opcode.endswith('-done')]
    if source is None or not done:
        return _Copy(0.0, 0.0, False)
    moved, spaces = float(total_bytes(done[0])), (source.arrays[0].space, done[0].arrays[0].space)
    return _Copy(
        hbm_bytes=moved * spaces.count(HBM),
        host_bytes=moved if HOST in spaces else 0.0,
        to_vmem=spaces == (HBM, VMEM),
    )


class _Prefetched(NamedTuple):
    """copies: names of copies into VMEM that are counted with their reader; read: the bytes of
    those, by the reader's name."""

    copies: set[str]
    read: dict[str, float]


def _is_copy(module: Module, start: Instruction) -> bool:
    """Whether an asynchronous operation only copies, whole or a slice."""
    if start.opcode == 'async-start':
        roots = [called.root.opcode for called in module.named(start, 'calls')]
        return all(root in ('copy', 'slice', 'dynamic-slice') for root in roots)
    return start.opcode.endswith('-start') and start.opcode[:-6] not in COLLECTIVES


def _prefetched(module: Module, computation: Computation) -> _Prefetched:
    """What the compiler copies into VMEM ahead of an operation.

    Such a copy runs beside other work. Counted with its reader, an operation costs the same
    wherever the compiler had its operands brought from.
    """
    found = _Prefetched(set(), {})
    for start in computation:
        if _is_copy(module, start):
            copy = _copy(computation, start)
            reader = _reader(computation, start) if copy.to_vmem else None
            if reader is not None:
                found.copies.add(start.name)
                found.read[reader] = found.read.get(reader, 0.0) + copy.hbm_bytes
    return found


def _reader(computation: Computation, start: Instruction) -> str | None:
    """The first operation of the same computation that works on what was copied."""
    names = [start.name]
    while names:
        for user in computation.users.get(names.pop(0), ()):
            if user.opcode in ('bitcast', 'get-tuple-element') or user.opcode.endswith('-done'):
                names.append(user.name)
            elif user.opcode in ('fusion', 'convolution', 'dot', 'custom-call', 'copy'):
                return user.name
    return None


def _op_name(module: Module, computation: Computation, instruction: Instruction) -> str:
    """Its own, or that of a product or anything in it, or that of what it reads."""
    for inner in module.named(instruction, 'calls') if instruction.opcode == 'fusion' else ():
        products = [x.op_name for x in inner if x.opcode in ('convolution', 'dot') and x.op_name]
        inside = [x.op_name for x in inner if x.op_name]
        for name in (*products[:1], instruction.op_name, *inside[:1]):
            if name:
                return name
    step: Instruction | None = instruction
    for _ in range(4):
        if step is None or step.op_name or step.opcode == 'parameter':
            break
        step = computation.operand(step, 0)
    return step.op_name if step is not None and step.opcode != 'parameter' else instruction.op_name
