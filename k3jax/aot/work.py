"""How much work one HLO instruction is: FLOPs of products, bytes of memory and to other chips."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from k3jax.aot.hlo import Array, Computation, Instruction, Module, total_bytes

COLLECTIVES = (
    'all-gather',
    'all-reduce',
    'reduce-scatter',
    'all-to-all',
    'ragged-all-to-all',
    'collective-permute',
    'collective-broadcast',
)
KERNEL = 'custom_call_target="tpu_custom_call"'

_NO_TRAFFIC = {
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'after-all',
    'partition-id',
    'replica-id',
    'opt-barrier',
    'optimization-barrier',
    'add-dependency',
    'domain',
}
# Custom calls that only tell the compiler something.
_NO_TRAFFIC_TARGETS = re.compile(
    r'custom_call_target="(AllocateBuffer|AssumeGatherIndicesInBound|Sharding|ConsumeStandIn'
    r'|annotate_device_placement|MoveToDevice|MoveToHost)"'
)
_SLICES = ('dynamic-slice', 'slice', 'gather')
_SAME_BYTES = ('bitcast', 'reshape')
_COST_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_CONTRACTING = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}')
_DIM_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
_WINDOW = re.compile(r'window=\{([^}]*)\}')
_BATCH_GROUPS = re.compile(r'batch_group_count=(\d+)')
_GROUPS_LISTED = re.compile(r'replica_groups=\{\{([\d,]*)\}')
_GROUPS_IOTA = re.compile(r'replica_groups=\[(\d+),(\d+)\]<=')
_GROUPS_MESH = re.compile(r'replica_groups=\w*\s*\[([^\]]*=[^\]]*)\]\s*\{([^}]*)\}')


def _window(instruction: Instruction, key: str, dimension: int, default: str) -> str:
    window = _WINDOW.search(instruction.attributes)
    for field in window.group(1).split() if window else ():
        name, _, value = field.partition('=')
        if name == key:
            return value.split('x')[dimension]
    return default


def _valid_positions(
    instruction: Instruction, dimension: int, num_out: int, num_kernel: int, num_in: int
) -> int:
    """Pairs of an output and a kernel position that meet an element, not padding or a hole."""
    stride = int(_window(instruction, 'stride', dimension, '1'))
    holes = int(_window(instruction, 'lhs_dilate', dimension, '1'))
    spread = int(_window(instruction, 'rhs_dilate', dimension, '1'))
    low = int(_window(instruction, 'pad', dimension, '0_0').split('_')[0])
    starts = np.arange(num_out)[:, None] * stride - low
    position = starts + np.arange(num_kernel)[None] * spread
    inside = (position >= 0) & (position <= (num_in - 1) * holes) & (position % holes == 0)
    return int(inside.sum())


def _convolution_flops(instruction: Instruction, lhs: Array, rhs: Array) -> float:
    lhs_labels, rhs_labels, out_labels = _DIM_LABELS.search(instruction.attributes).groups()
    out = instruction.arrays[0].dims
    pairs = out[out_labels.index('b')] * out[out_labels.index('f')]
    pairs *= rhs.dims[rhs_labels.index('i')]
    # libtpu writes batched products as convolutions over a dimension of batches.
    for label in (x for x in out_labels if x.isdigit()):
        pairs *= _valid_positions(
            instruction,
            int(label),
            out[out_labels.index(label)],
            rhs.dims[rhs_labels.index(label)],
            lhs.dims[lhs_labels.index(label)],
        )
    return 2.0 * pairs / (instruction.number(_BATCH_GROUPS) or 1)


def _product_flops(instruction: Instruction, computation: Computation) -> float:
    lhs, rhs = (computation.operand(instruction, i).arrays[0] for i in (0, 1))
    if instruction.opcode == 'convolution':
        return _convolution_flops(instruction, lhs, rhs)
    contracted = _CONTRACTING.search(instruction.attributes)
    dims = contracted.group(1).split(',') if contracted else []
    return 2.0 * instruction.arrays[0].size * math.prod(lhs.dims[int(d)] for d in dims if d)


def _passes(instruction: Instruction, computation: Computation) -> int:
    """Times that the matrix unit, which multiplies bfloat16, goes over a product."""
    operands = [computation.operand(instruction, i).arrays[0].dtype for i in (0, 1)]
    if operands != ['f32', 'f32']:
        return 1
    return {'highest': 6, 'high': 3}.get(_precision(instruction), 1)


def _precision(instruction: Instruction) -> str:
    found = re.search(r'operand_precision=\{(\w+)', instruction.attributes)
    return found.group(1) if found else 'default'


def matmul_flops(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[float, float]:
    """FLOPs of the products in an instruction and in what it fuses, and the same with each product
    counted as often as the matrix unit goes over it."""
    if instruction.opcode in ('dot', 'convolution'):
        flops = _product_flops(instruction, computation)
        return flops, flops * _passes(instruction, computation)
    if instruction.opcode != 'fusion':
        return 0.0, 0.0
    parts = [
        matmul_flops(module, inner, x)
        for inner in module.named(instruction, 'calls')
        for x in inner
    ]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def kernel_cost(instruction: Instruction) -> tuple[float, float] | None:
    """FLOPs and bytes of a Pallas kernel's CostEstimate, None without one."""
    found = _COST_ESTIMATE.search(instruction.attributes)
    if found is None:
        return None
    cost = json.loads(found.group(1))
    return float(cost.get('flops', 0)), float(cost.get('bytes_accessed', 0))


def _within(instruction: Instruction, space: int) -> int:
    return sum(array.bytes for array in instruction.arrays if array.space == space)


def _update_of(computation: Computation, instruction: Instruction) -> Instruction | None:
    """The part that an instruction writes into an array that it updates in place."""
    index = {'dynamic-update-slice': 1, 'scatter': 2}.get(instruction.opcode)
    return None if index is None else computation.operand(instruction, index)


def _is_renamed(fused: Computation, parameter: Instruction) -> bool:
    """Whether a fused computation results in its parameter as it is."""
    root: Instruction | None = fused.root
    while root is not None and root.opcode in _SAME_BYTES:
        root = fused.operand(root, 0)
    return root is parameter


def _read_of_parameter(module: Module, fused: Computation, parameter: Instruction) -> float:
    """Bytes of a fusion's operand that the fusion reads; all of it unless it only takes slices."""
    whole, read = float(total_bytes(parameter)), 0.0
    for user in fused.users.get(parameter.name, ()):
        first = user.operands[0] == parameter.name
        if user.opcode in _SLICES and first and user.operands.count(parameter.name) == 1:
            read += total_bytes(user)
        elif user.opcode in ('dynamic-update-slice', 'scatter') and first:
            continue  # in place: what it writes is counted with the result
        elif user.opcode in _SAME_BYTES and user is not fused.root:
            read += _read_of_parameter(module, fused, user)
        elif user.opcode == 'fusion' and user is not fused.root:
            for inner in module.named(user, 'calls'):
                for index, name in enumerate(user.operands):
                    if name != parameter.name:
                        continue
                    own = inner.parameters[index]
                    where = (fused, user) if _is_renamed(inner, own) else (inner, own)
                    read += _read_of_parameter(module, *where)
        else:
            return whole
    return min(read, whole)


def _written_by_root(module: Module, fused: Computation, root: Instruction | None) -> list[float]:
    """Bytes that a fusion writes, by array of its result."""
    while root is not None and root.opcode in (*_SAME_BYTES, 'convert', 'copy'):
        producer = fused.operand(root, 0)
        if producer is None or producer.opcode == 'parameter':
            break
        root = producer
    if root is None:
        return [0.0]
    if root.opcode == 'tuple':
        parts = [fused.instructions.get(name) for name in root.operands]
        return [size for part in parts for size in _written_by_root(module, fused, part)]
    if root.opcode == 'fusion' and len(root.arrays) == 1:
        inner = module.named(root, 'calls')[0]
        return _written_by_root(module, inner, inner.root)
    update = _update_of(fused, root)
    if update is not None:
        return [float(total_bytes(update))]
    return [float(array.bytes) for array in root.arrays]


def _fusion_bytes(
    module: Module, computation: Computation, instruction: Instruction, space: int
) -> float:
    fused = module.named(instruction, 'calls')[0]
    total = 0.0
    for index, name in enumerate(instruction.operands):
        operand = computation.instructions.get(name)
        if operand is not None and index in fused.parameters and _within(operand, space):
            total += _read_of_parameter(module, fused, fused.parameters[index])
    written = _written_by_root(module, fused, fused.root)
    results = instruction.arrays
    if len(written) != len(results):
        written = [float(array.bytes) for array in results]
    pairs = zip(written, results, strict=True)
    return total + sum(min(size, array.bytes) for size, array in pairs if array.space == space)


def moved_bytes(
    module: Module, computation: Computation, instruction: Instruction, space: int
) -> float:
    """Bytes that one execution of an instruction reads from a memory space and writes to it.

    Of an array that is only sliced or updated in place the slice counts.
    """
    opcode = instruction.opcode
    if opcode in _NO_TRAFFIC or _NO_TRAFFIC_TARGETS.search(instruction.attributes):
        return 0.0
    if opcode == 'fusion':
        return _fusion_bytes(module, computation, instruction, space)
    update = _update_of(computation, instruction)
    if update is not None:
        written = total_bytes(update) if _within(instruction, space) else 0
        return float(_within(update, space) + written)
    operands = [computation.instructions.get(name) for name in instruction.operands]
    if opcode in _SLICES:
        read = total_bytes(instruction) if operands[0] and _within(operands[0], space) else 0
        return float(read + _within(instruction, space))
    read = sum(_within(x, space) for x in operands if x is not None)
    return float(_within(instruction, space) + read)


def group_size(instruction: Instruction, num_devices: int) -> int:
    """Chips that take part in one exchange.

    Reads {{0,1},{2,3}}, [2,4]<=[8], mesh['a'=2,'b'=4] {'b'}; {} is all.
    """
    listed = _GROUPS_LISTED.search(instruction.attributes)
    if listed:
        return len(listed.group(1).split(','))
    iota = _GROUPS_IOTA.search(instruction.attributes)
    if iota:
        return int(iota.group(2))
    mesh = _GROUPS_MESH.search(instruction.attributes)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        size = 1
        # An axis may stand for a part of itself: 'a':(1)2.
        for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh.group(2)):
            size *= int(part or sizes[axis])
        return size
    return num_devices


def sent_bytes(kind: str, operand_bytes: float, size: int) -> float:
    """Bytes that each chip must send for a collective among `size` chips."""
    if kind in ('collective-permute', 'collective-broadcast'):
        return operand_bytes
    share = (size - 1) / size
    factor = {'all-gather': size - 1.0, 'all-reduce': 2 * share}.get(kind, share)
    return operand_bytes * factor
