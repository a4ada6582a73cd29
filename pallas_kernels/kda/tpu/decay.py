"""How much each channel forgets: the gate and sums of log2 decay over ranges of a chunk."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.tpu.words import CHUNK, stack

LOG2E = math.log2(math.e)
SUBLANES = 8


class GateRows(NamedTuple):
    """The gate of each channel, [1, K] float32: x = rate * f + shift enters the nonlinearity.

    scale multiplies it: exp(A_log) of the unbounded gate, unused by the bounded one.
    """

    rate: jax.Array
    shift: jax.Array
    scale: jax.Array


def bounded_gate(f: jax.Array, gate: GateRows, lower_bound: float) -> jax.Array:
    """log2(e) * lower_bound * sigmoid(x), float32 [C, K]."""
    x = f * gate.rate + gate.shift
    # One transcendental instead of two.
    return (0.5 * LOG2E * lower_bound) * (jnp.tanh(0.5 * x) + 1.0)


def softplus_gate(f: jax.Array, gate: GateRows) -> jax.Array:
    """-log2(e) * scale * log(1 + e^x), float32 [C, K]."""
    x = f * gate.rate + gate.shift
    softplus = jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))
    return (-LOG2E * gate.scale) * softplus


def _shifted(x: jax.Array, distance: int) -> jax.Array:
    """Each group of 8 rows rotated by `distance` rows. x: [8 n, K]."""
    return pltpu.roll(x, distance % SUBLANES, 0)


def _position(shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _groups(x: jax.Array) -> list[jax.Array]:
    return [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]


def running_sum(g: jax.Array) -> jax.Array:
    """Inclusive sums over rows, [C, K]."""
    position = _position((SUBLANES, g.shape[1]))
    sums, offset = [], None
    for group in _groups(g):
        for distance in (1, 2, 4):
            group = group + jnp.where(position >= distance, _shifted(group, distance), 0.0)
        if offset is not None:
            group = group + offset
        offset = jnp.broadcast_to(group[SUBLANES - 1 :], group.shape)
        sums.append(group)
    return stack(sums)


def sum_before(x: jax.Array) -> jax.Array:
    """Sums of the rows before each row, [C, K]."""
    first = _position(x.shape) == 0
    return running_sum(jnp.where(first, 0.0, pltpu.roll(x, 1, 0)))


def reverse_running_sum(x: jax.Array) -> jax.Array:
    """Inclusive sums from each row to the last, [C, K]."""
    position = _position((SUBLANES, x.shape[1]))
    sums, offset = [], None
    for group in reversed(_groups(x)):
        for distance in (1, 2, 4):
            inside = position < SUBLANES - distance
            group = group + jnp.where(inside, _shifted(group, -distance), 0.0)
        if offset is not None:
            group = group + offset
        offset = jnp.broadcast_to(group[:1], group.shape)
        sums.append(group)
    return stack(sums[::-1])


def _is_right(position: jax.Array, level: int) -> jax.Array:
    return ((position >> level) & 1) == 1


def _sibling_last(x: jax.Array, level: int) -> jax.Array:
    """Row of x at the end of the neighbouring block of 2^level rows, for blocks inside 8 rows."""
    size = 1 << level
    out = []
    for group in _groups(x):
        position = _position(group.shape)
        offset, right = position & (size - 1), _is_right(position, level)
        picked = jnp.zeros_like(group)
        for i in range(size):
            here = offset == i
            picked = jnp.where(here & right, _shifted(group, i + 1), picked)
            picked = jnp.where(here & ~right, _shifted(group, i + 1 - 2 * size), picked)
        out.append(picked)
    return stack(out)


class Ranges(NamedTuple):
    """Sums of log2 decay, each taken over its own range of tokens only; [C, K] float32.

    levels: by level l of blocks of 2^l tokens: from the block's start to the token in a right
    block, from behind the token to the block's end in a left block.
    from_start: of the chunk, to the token. to_end: from behind the token to the chunk's end.
    """

    levels: list[jax.Array]
    from_start: jax.Array
    to_end: jax.Array


def range_sums(g: jax.Array) -> Ranges:
    """All range sums by doubling; nothing is ever subtracted."""
    before, behind, levels = g, jnp.zeros_like(g), []
    for level in range(CHUNK.bit_length() - 1):
        size = 1 << level
        if size < SUBLANES:
            right = _is_right(_position(g.shape), level)
            levels.append(jnp.where(right, before, behind))
            sibling = _sibling_last(before, level)
            before, behind = (
                before + jnp.where(right, sibling, 0.0),
                behind + jnp.where(right, 0.0, sibling),
            )
            continue
        chosen, new_before, new_behind = [], [], []
        for start in range(0, CHUNK, 2 * size):
            middle, stop = start + size, start + 2 * size
            left, right = slice(start, middle), slice(middle, stop)
            chosen += [behind[left], before[right]]
            new_before += [before[left], before[right] + before[middle - 1 : middle]]
            new_behind += [behind[left] + before[stop - 1 : stop], behind[right]]
        levels.append(stack(chosen))
        before, behind = stack(new_before), stack(new_behind)
    return Ranges(levels, before, behind)


def range_sums_backward(d: Ranges, d_total: jax.Array) -> jax.Array:
    """Gradient of g from those of its range sums, and of its sum over the chunk [1, K]."""
    d_before, d_behind = d.from_start, d.to_end
    for level in reversed(range(CHUNK.bit_length() - 1)):
        size = 1 << level
        if size < SUBLANES:
            d_before, d_behind = _merge_small(d_before, d_behind, d.levels[level], level)
            continue
        new_before, new_behind = [], []
        for start in range(0, CHUNK, 2 * size):
            middle, stop = start + size, start + 2 * size
            left, right = slice(start, middle), slice(middle, stop)
            to_left = jnp.sum(d_before[right], axis=0, keepdims=True)
            to_right = jnp.sum(d_behind[left], axis=0, keepdims=True)
            here = d.levels[level]
            new_before += [
                _add_to_last(d_before[left], to_left),
                _add_to_last(d_before[right] + here[right], to_right),
            ]
            new_behind += [d_behind[left] + here[left], d_behind[right]]
        d_before, d_behind = stack(new_before), stack(new_behind)
    return d_before + d_total


def _add_to_last(x: jax.Array, row: jax.Array) -> jax.Array:
    tail = x[-SUBLANES:]
    last = _position(tail.shape) == SUBLANES - 1
    tail = tail + jnp.where(last, row, 0.0)
    return stack([x[:-SUBLANES], tail]) if x.shape[0] > SUBLANES else tail


def _merge_small(
    d_before: jax.Array, d_behind: jax.Array, d_level: jax.Array, level: int
) -> tuple[jax.Array, jax.Array]:
    """One level of `range_sums_backward` for blocks inside groups of 8 rows."""
    size = 1 << level
    out_before, out_behind = [], []
    parts = zip(_groups(d_before), _groups(d_behind), _groups(d_level), strict=True)
    for before, behind, here in parts:
        position = _position(before.shape)
        right, last = _is_right(position, level), (position & (size - 1)) == size - 1
        # Rows of a right block add up at the last row of the left one, and the other way round.
        moving = jnp.where(right, before, behind)
        total = jnp.zeros_like(before)
        for i in range(size):
            # Row i of the neighbouring block, seen from the last row of a block.
            from_right = _shifted(moving, -(i + 1))
            from_left = _shifted(moving, 2 * size - 1 - i)
            total = total + jnp.where(right, from_left, from_right)
        out_before.append(before + jnp.where(last, total, 0.0) + jnp.where(right, here, 0.0))
        out_behind.append(behind + jnp.where(right, 0.0, here))
    return stack(out_before), stack(out_behind)
