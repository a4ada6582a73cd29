"""How long does a step take, and how well does it use the chip: an estimate, not a measurement.

Every top-level operation takes the larger of its products at the matrix unit's peak and its bytes
at HBM's bandwidth, and is booked under the larger. Collectives take their bytes at the bandwidth
between chips. All of these are summed: nothing overlaps.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

from etils import epath

from k3jax.aot.chips import Chip
from k3jax.aot.program import KERNEL_OP, Op, Program, kernel_name
from k3jax.aot.work import COLLECTIVES
from k3jax.model.scopes import scope_of

# Bytes a second that a chip sends: 90 GB/s one way for each axis of the torus.
ICI_BANDWIDTH = {'v5p': 270e9, 'v6e': 180e9}

# Share of its own roofline that a kernel reaches by libtpu's static simulator at K3's shapes in
# training, or at those of decoding where it is for that: the READMEs under pallas_kernels.
KERNEL_EFFICIENCY: Mapping[str, float] = {
    'attn_res_forward': 0.82,
    'attn_res_backward': 0.96,
    'grouped_gate_up': 0.95,
    'grouped_down': 0.94,
    'grouped_hidden_gradient': 0.89,
    'grouped_input_gradient': 0.96,
    'grouped_weight_gradient': 0.84,
    'grouped_gate_up_mxfp4': 0.86,
    'grouped_down_mxfp4': 0.87,
    'token_mlp': 0.98,
    'token_mlp_mxfp4': 0.60,
    'kda_forward': 0.48,
    'kda_backward': 0.24,
    'kda_decode': 0.97,
    'mla_forward': 0.65,
    'mla_backward': 0.75,
    'mla_paged_decode': 0.68,
    'short_conv_forward': 0.80,
    'short_conv_backward': 0.53,
}

# What limits these is neither the matrix unit nor HBM; booked as compute.
VECTOR_BOUND = frozenset({'kda_forward', 'kda_backward', 'short_conv_backward', 'token_mlp_mxfp4'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What the seconds are made from.

    ici_bandwidth: bytes a second that a chip sends. matmul_efficiency: share of the peak that XLA's
    products reach; its 4096^3 takes 1.03 times the bound in libtpu's simulator. kernel_seconds: of
    one call, by kernel, where known; otherwise a kernel takes its roofline over its share in
    kernel_efficiency, or over other_kernels where it is not there.
    """

    chip: Chip
    ici_bandwidth: float
    matmul_efficiency: float = 1 / 1.03
    kernel_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernel_efficiency: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: KERNEL_EFFICIENCY
    )
    other_kernels: float = 0.5


class Seconds(NamedTuple):
    """Of one chip in a step, by what limits."""

    compute: float = 0.0
    memory: float = 0.0
    communication: float = 0.0

    @property
    def step(self) -> float:
        """Without overlap."""
        return self.compute + self.memory + self.communication

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))


class Estimate(NamedTuple):
    """total: of the step. by_scope: (part of the model, direction) -> seconds."""

    total: Seconds
    by_scope: Mapping[tuple[str, str], Seconds]


def read_kernel_seconds(path: str) -> dict[str, float]:
    """Seconds of one call by kernel, from a JSON file.

    Raises:
      ValueError: it holds something else.
    """
    try:
        found = json.loads(epath.Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f'--kernel_seconds={path}: not JSON: {error}') from error
    numbers = isinstance(found, dict) and all(
        isinstance(x, int | float) and x > 0 for x in found.values()
    )
    if not numbers:
        raise ValueError(
            f'--kernel_seconds={path}: wanted an object of seconds above 0, such as '
            '{"mla_forward": 3.1e-4}'
        )
    return found


def direction_of(op_name: str) -> str:
    """'forward', 'recompute' (of the forward pass, in the backward pass) or 'backward'."""
    if 'rematted_computation' in op_name:
        return 'recompute'
    return 'backward' if 'transpose(' in op_name else 'forward'


def seconds_of(op: Op, rates: Rates) -> Seconds:
    """Of one execution."""
    if op.kind in COLLECTIVES:
        return Seconds(communication=op.sent_bytes / rates.ici_bandwidth)
    compute, memory = op.mxu_flops / rates.chip.flops, op.hbm_bytes / rates.chip.hbm_bandwidth
    if op.kind == KERNEL_OP:
        name = kernel_name(op.name)
        share = rates.kernel_efficiency.get(name, rates.other_kernels)
        taken = rates.kernel_seconds.get(name, max(compute, memory) / share)
        computes = compute > memory or name in VECTOR_BOUND
        return Seconds(compute=taken) if computes else Seconds(memory=taken)
    compute /= rates.matmul_efficiency
    return Seconds(compute=compute) if compute > memory else Seconds(memory=memory)


def estimate(program: Program, rates: Rates) -> Estimate:
    """Seconds of a step."""
    by_scope: dict[tuple[str, str], Seconds] = collections.defaultdict(Seconds)
    for op in program.ops:
        one = seconds_of(op, rates)
        key = (scope_of(op.op_name), direction_of(op.op_name))
        by_scope[key] = by_scope[key].plus(Seconds(*(op.times * part for part in one)))
    total = Seconds()
    for part in by_scope.values():
        total = total.plus(part)
    return Estimate(total, dict(by_scope))


def mfu(model_flops: float, step_seconds: float, num_chips: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: FLOPs that the model needs over those that the chips could do.

    Args:
      model_flops: of one step, all chips, without recomputation.
      step_seconds: of the step.
      peak_flops: a second, of one chip.
    """
    return model_flops / (step_seconds * num_chips * peak_flops)
