"""What one compiled KDA kernel is specialised to, and how a chunk is read under it."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda.reference import L2_EPS
from pallas_kernels.kda.tpu.decay import LOG2E, GateRows, bounded_gate, softplus_gate
from pallas_kernels.kda.tpu.scores import BOUNDED, EXACT, Form
from pallas_kernels.kda.tpu.words import CHUNK, mask_words, split_constants, stack

NUMBER, ENTERING, LEAVING, REAL = range(4)  # rows of the run information of a chunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Static facts of a kernel.

    heads: a program. key_width, value_width: K and V, multiples of 128. dtype: of the operands.
    gate: what g holds: 'given' log decay, or f of the 'bounded' or 'softplus' gate. bounded:
    whether g >= -5 holds. l2norm: q and k are raw. precise: operands that meet U keep 16 bits of
    mantissa. initial: whether the state starts from an input. packed: whether runs are given.
    residuals: whether what the backward pass reads is written.
    """

    heads: int
    key_width: int
    value_width: int
    dtype: jnp.dtype
    gate: Literal['given', 'bounded', 'softplus'] = 'given'
    lower_bound: float | None = None
    bounded: bool = False
    l2norm: bool = False
    scale: float = 1.0
    precise: bool = False
    initial: bool = False
    packed: bool = False
    residuals: bool = False

    @property
    def form(self) -> Form:
        return BOUNDED if self.bounded else EXACT

    def key(self, head: int) -> slice:
        return slice(head * self.key_width, (head + 1) * self.key_width)

    def value(self, head: int) -> slice:
        return slice(head * self.value_width, (head + 1) * self.value_width)


class ChunkRuns(NamedTuple):
    """Packed documents in one chunk.

    real: [C, 1], bool. cont: [C, 1] bool, token of the run that the incoming state belongs to, and
    reads: the same as words [2 C, K]. last: [1, C] float32, 1 for tokens of the run that leaves,
    and last_column: the same as [C, 1]. goes_on: [1, 1] float32, 1 if the incoming run is the one
    that leaves.
    """

    real: jax.Array
    cont: jax.Array
    reads: jax.Array
    last: jax.Array
    last_column: jax.Array
    goes_on: jax.Array


class Norm(NamedTuple):
    """What `l2norm` multiplied by, [C, 1]; for q with the scale."""

    q: jax.Array
    k: jax.Array


class HeadChunk(NamedTuple):
    """One head's chunk, float32: q, k as the recurrence takes them, log2 decay g, [C, K]; the raw
    gate input, and the norms, where the plan has them."""

    q: jax.Array
    k: jax.Array
    g: jax.Array
    f: jax.Array
    norm: Norm | None


def read_masks(plan: KernelPlan, refs: dict) -> dict[str, jax.Array]:
    masks = split_constants(refs['masks'][...], plan.dtype)
    if plan.form is EXACT:
        bits = split_constants(refs['bits'][...], jnp.float32)
        masks |= {f'{name}_bits': x for name, x in bits.items()}
    return masks


def read_runs(plan: KernelPlan, refs: dict, masks: dict) -> tuple[ChunkRuns | None, dict]:
    """The chunk's runs, and `masks` with strict and causal cut to pairs of one run."""
    if not plan.packed:
        return None, masks
    info = refs['runs'][0, 0]
    columns = info.astype(jnp.float32).T
    number = columns[:, NUMBER : NUMBER + 1]
    same = mask_words(number == info[NUMBER : NUMBER + 1].astype(jnp.float32), plan.dtype)
    cont = number == columns[:, ENTERING : ENTERING + 1]
    words = mask_words(jnp.broadcast_to(cont, (CHUNK, plan.key_width)), plan.dtype)
    runs = ChunkRuns(
        real=columns[:, REAL : REAL + 1] != 0,
        cont=cont,
        reads=stack([words, words]),
        last_column=(number == columns[:, LEAVING : LEAVING + 1]).astype(jnp.float32),
        last=(info[NUMBER : NUMBER + 1] == info[LEAVING : LEAVING + 1]).astype(jnp.float32),
        goes_on=(info[ENTERING : ENTERING + 1, :1] == info[LEAVING : LEAVING + 1, :1]).astype(
            jnp.float32
        ),
    )
    return runs, masks | {name: masks[name] & same for name in ('strict', 'causal')}


def clear(x: jax.Array, runs: ChunkRuns | None) -> jax.Array:
    """x [C, w] with 0 on padding, whatever it held."""
    return x if runs is None else jnp.where(runs.real, x, 0.0)


def read_gate(plan: KernelPlan, refs: dict, head: int) -> GateRows:
    rows = refs['gate'][:, plan.key(head)]
    return GateRows(rows[0:1], rows[1:2], rows[2:3])


def load(refs: dict, name: str, columns: slice, runs: ChunkRuns | None) -> jax.Array:
    """Columns of a token array's chunk, float32 [C, w]."""
    return clear(refs[name][0, :, columns].astype(jnp.float32), runs)


def read_head(plan: KernelPlan, refs: dict, runs: ChunkRuns | None, head: int) -> HeadChunk:
    q, k, f = (load(refs, name, plan.key(head), runs) for name in ('q', 'k', 'g'))
    norm = None
    if plan.l2norm:
        norm = Norm(
            lax.rsqrt(jnp.sum(q * q, axis=1, keepdims=True) + L2_EPS) * plan.scale,
            lax.rsqrt(jnp.sum(k * k, axis=1, keepdims=True) + L2_EPS),
        )
        q, k = q * norm.q, k * norm.k
    match plan.gate:
        case 'given':
            g = f * LOG2E
        case 'bounded':
            g = bounded_gate(f, read_gate(plan, refs, head), plan.lower_bound)
        case 'softplus':
            g = softplus_gate(f, read_gate(plan, refs, head))
    if plan.gate != 'given':
        g = clear(g, runs)
    return HeadChunk(q, k, g, f, norm)


def column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def row(column: jax.Array) -> jax.Array:
    """[n, 1] -> [1, n]."""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]
