"""Where chunked KDA is compiled and costed: the models' heads on one chip, lengths, and modes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.case import Case, Tiles, abstract
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.kda.tpu.call import (
    MOST_HEADS,
    backward_call,
    forward_call,
    heads_a_program,
    result_shapes,
)
from pallas_kernels.kda.tpu.plan import KernelPlan
from pallas_kernels.kda.tpu.words import CHUNK

WIDTH = 128  # K and V of every released model
# K3 has 96 heads, so 24, 12 and 6 on one of 4, 8 and 16 chips; Kimi Linear has 32.
HEADS = {'k3': (96, 24, 12, 6), 'kimi_linear': (32,)}
# Name -> what the plan says, beside a bounded g that is given.
MODES: dict[str, dict[str, Any]] = {
    'given_g': {'bounded': True},
    'bounded_gate': {'bounded': True, 'gate': 'bounded', 'lower_bound': -5.0, 'l2norm': True},
    'packed': {'bounded': True, 'packed': True},
    'any_g': {},
    'softplus_gate': {'gate': 'softplus', 'l2norm': True},
}


def _arrays(plan: KernelPlan, heads: int, length: int, gradients: bool) -> dict[str, Any]:
    rows, chunks, name = (1, length), -(-length // CHUNK), plan.dtype.name
    keys, values = (*rows, heads * plan.key_width), (*rows, heads * plan.value_width)
    state = (heads, plan.key_width, plan.value_width)
    given = plan.gate == 'given'
    arrays = {
        'q': abstract(keys, name),
        'k': abstract(keys, name),
        'g': abstract(keys, 'float32' if given else name),
        'beta': abstract((*rows, heads), 'float32'),
    }
    if not given:
        arrays['gate'] = abstract((8, heads * plan.key_width), 'float32')
    if plan.packed:
        arrays['runs'] = abstract((1, chunks, 8, CHUNK), 'int32')
    if not gradients:
        return arrays | {'v': abstract(values, name)}
    return arrays | {
        'states': abstract((1, chunks, *state), name),
        'inverse': abstract((1, chunks, heads, CHUNK, CHUNK), name),
        'u': abstract(values, name),
        'do': abstract(values, name),
        'd_final': abstract((1, *state), 'float32'),
    }


def _size(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _products(gradients: bool) -> int:
    """Products of C x C x C that a head's chunk cannot do without, K = V = C.

    Forward: L, A, K_in S, Q_in S, U, A U, K_out^T U, and one third for the inverse of a triangle.
    Backward: A again; for each product of the forward pass but the inverse one by either operand,
    where the inverse's is dR U^T.
    """
    return 16 if gradients else 7


def _case(
    name: str, heads: int, length: int, gradients: bool, dtype: str, mode: dict[str, Any]
) -> Case:
    pass_name = 'backward' if gradients else 'forward'
    shape = {'B': 1, 'T': length, 'H': heads, 'K': WIDTH, 'V': WIDTH}

    def plan_of(tiles: Tiles | None) -> KernelPlan:
        most = heads_a_program(1, heads, WIDTH, WIDTH, MOST_HEADS[dtype, pass_name])
        key = {axis: size for axis, size in shape.items() if axis != 'T'}
        tiles = tiles or tiles_for('kda', pass_name, key, dtype, {'heads': most})
        return KernelPlan(
            heads=tiles['heads'],
            key_width=WIDTH,
            value_width=WIDTH,
            dtype=jnp.dtype(dtype),
            scale=WIDTH**-0.5,
            **mode,
        )

    arrays = _arrays(plan_of(None), heads, length, gradients)
    call = backward_call if gradients else forward_call

    def build(tiles: Tiles | None):
        plan = plan_of(tiles)
        return lambda arrays: call(plan, arrays, False)

    results = result_shapes(plan_of(None), arrays, gradients)
    chunks = heads * -(-length // CHUNK)
    return Case(
        kernel='kda',
        name=name,
        pass_name=pass_name,
        shape=shape,
        dtype=dtype,
        build=build,
        args=(arrays,),
        flops=2.0 * _products(gradients) * CHUNK**3 * chunks,
        hbm_bytes=float(_size(arrays) + _size(results)),
        tile_space=tuple({'heads': n} for n in (2, 3, 4, 6, 8, 12, 16) if heads % n == 0),
    )


def cases() -> list[Case]:
    """Training's forward pass writes what the backward pass reads: 'saving'."""
    out = []
    for model, counts in HEADS.items():
        for heads in counts:
            for length in (1, 1024, 8192, 131072):
                name = f'{model}_{heads}_heads_{length}'
                for mode in MODES:
                    if mode != 'given_g' and (heads, length) != (24, 1024):
                        continue
                    label, facts = f'{name}_{mode}', dict(MODES[mode])
                    out.append(_case(label, heads, length, False, 'bfloat16', facts))
                    if mode == 'given_g':
                        kept = facts | {'residuals': True}
                        out.append(_case(f'{label}_saving', heads, length, False, 'bfloat16', kept))
                    out.append(_case(label, heads, length, True, 'bfloat16', facts))
    for length in (1024,):
        name = f'k3_24_heads_{length}_given_g'
        precise = MODES['given_g'] | {'precise': True}
        out.append(_case(f'{name}_precise', 24, length, False, 'bfloat16', precise))
        kept = MODES['given_g'] | {'residuals': True}
        out.append(_case(f'{name}_float32_saving', 24, length, False, 'float32', kept))
        out.append(_case(f'{name}_float32', 24, length, True, 'float32', MODES['given_g']))
    return out
