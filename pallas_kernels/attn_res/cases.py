"""What of the attention residual is compiled and costed ahead of time: K3's real shapes."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.attn_res.backward_kernel import backward
from pallas_kernels.attn_res.blocks import GROUP, LANES, STATS, plan_for
from pallas_kernels.attn_res.forward_kernel import forward
from pallas_kernels.common.case import Case, Tiles, abstract

HIDDEN = 7168  # K3 hidden_size; Kimi Linear has plain residuals
SNAPSHOTS = (1, 4, 8)  # K3's bank grows to eight snapshots of twelve layers each
EPS = 1e-5
_STATIC = 'all snapshots live, known while tracing: the stand-in for counts known at run time'


def _case(pass_name: str, num: int, rows: int, *, is_static: bool, note: str) -> Case:
    is_forward = pass_name == 'forward'
    flags = (
        {'num_live': num, 'use_prefix': True}
        if is_static
        else dict.fromkeys(('num_live', 'use_prefix'))
    )

    def build(tiles: Tiles | None):
        plan = plan_for(
            pass_name, rows, HIDDEN, num, jnp.bfloat16, **flags, eps=EPS, **(tiles or {})
        )
        if is_forward:
            return functools.partial(forward, plan=plan, with_stats=True, interpret=False)
        return functools.partial(backward, plan=plan, interpret=False, separate=is_static)

    matrix, vector = abstract((rows, HIDDEN)), abstract((HIDDEN,), 'float32')
    args = [abstract((2,), 'int32'), abstract((num, rows, HIDDEN)), matrix, vector, vector]
    if not is_forward:
        args += [matrix, abstract((rows, STATS), 'float32')]
    moved = num + 2 if is_forward else 2 * (num + 1) + 1  # rows of D read or written a token
    # Vector operations on eight rows of 128 lanes a candidate, beside those of the final norm.
    work = 8 * (num + 1) + 6 if is_forward else 15 * (num + 1) + 14
    return Case(
        kernel='attn_res',
        name=f'k3_{num}_snapshots_{rows}_tokens' + ('' if is_static else '_traced'),
        pass_name=pass_name,
        shape={'N': num, 'B': 1, 'T': rows, 'D': HIDDEN},
        dtype='bfloat16',
        build=build,
        args=tuple(args),
        flops=0.0,
        hbm_bytes=2.0 * moved * rows * HIDDEN,
        vector_ops=float(work * rows * HIDDEN // (8 * LANES)),
        tile_space=tuple({'tile': tile} for tile in (GROUP, 32, 64, 128, 256)),
        note=note,
    )


def cases() -> list[Case]:
    """Forward (with the statistics that training saves) and backward; T is all rows of a call."""
    found = []
    for pass_name in ('forward', 'backward'):
        separate = '; gradients of snapshots as separate arrays' if pass_name == 'backward' else ''
        for rows in (1, 1024, 8192, 131072):
            # At 131,072 tokens a bank of eight and its gradient do not fit a v6e's memory.
            for num in SNAPSHOTS if rows in (1024, 8192) else SNAPSHOTS[1:2]:
                note = _STATIC + separate
                found.append(_case(pass_name, num, rows, is_static=True, note=note))
        note = 'counts known at run time: to compile, not to cost (branches have no figure)'
        found.append(_case(pass_name, SNAPSHOTS[-1], 8192, is_static=False, note=note))
    return found
