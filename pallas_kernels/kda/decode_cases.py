"""What of KDA decode is compiled and costed ahead of time: batches and heads of serving."""

from __future__ import annotations

import jax

from pallas_kernels.common.case import Case, Tiles, abstract
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.kda.decode_kernel import WIDTH, decode_call, default_tiles, plan_decode

TAPS = 4  # K3 linear_attn_config.short_conv_kernel_size
WINDOW = 8
BATCHES = (8, 64)
# K3's 96 heads, whole and on 4, 8 and 16 chips; Kimi Linear's 32.
HEADS = {'k3_96': 96, 'k3_24': 24, 'k3_12': 12, 'k3_6': 6, 'kimi_linear_32': 32}
_STATIC = 'every row active, slots as the simulator takes them: the stand-in for slots of a run'
_WHOLE = '; all heads in one copy, since the simulator loses count of its loops over tiles'


def _case(form: str, name: str, heads: int, rows: int, *, is_static: bool = True) -> Case:
    taps = 0 if form == 'plain' else TAPS
    replayed, ahead = (WINDOW, WINDOW) if form == 'window' else (1, 0)
    dtype = 'float32' if form == 'plain' else 'bfloat16'
    key = {'B': rows, 'H': heads, 'W': replayed}

    def build(tiles: Tiles | None):
        if tiles is None:
            tiles = tiles_for('kda', 'decode', key, dtype, default_tiles(heads))
            if is_static and tiles['heads'] < heads:
                tiles = {'heads': heads, 'buffers': 3}
        plan = plan_decode(
            rows,
            heads,
            rows,
            replayed=replayed,
            ahead=ahead,
            taps=taps,
            lower_bound=-5.0,
            tiles=dict(tiles),
            all_active=is_static,
        )

        def run(slots, accepted, tokens, conv, pool, tails=None):
            return decode_call(
                slots, accepted, tokens, conv, pool, tails, plan=plan, interpret=False
            )

        return run

    token = abstract((rows, replayed + ahead, heads, WIDTH), dtype)
    tokens: tuple[jax.ShapeDtypeStruct, ...] = (
        *[token] * 4,
        abstract(token.shape, 'float32'),
    )
    slots, pool = abstract((rows,), 'int32'), abstract((rows, heads, WIDTH, WIDTH), 'float32')
    args = [slots, slots, tokens, (), pool]
    if taps:
        gate = abstract((heads, WIDTH), 'float32')
        args[3] = (abstract((3, taps, heads, WIDTH), 'float32'), gate, gate)
        args.append(abstract((rows, 3, taps - 1, heads, WIDTH)))
    states = 2.0 * 4 * rows * heads * WIDTH * WIDTH
    note = 'slots of a run: to compile, not to cost'
    if is_static:
        note = _STATIC + (_WHOLE if default_tiles(heads)['heads'] < heads else '')
    return Case(
        kernel='kda',
        name=f'{form}_{name}_heads_{rows}_rows' + ('' if is_static else '_masked'),
        pass_name='decode',
        shape={'B': rows, 'H': heads, 'K': WIDTH, 'V': WIDTH, 'W': replayed},
        dtype=dtype,
        build=build,
        args=tuple(args),
        flops=8.0 * (replayed + ahead) * rows * heads * WIDTH * WIDTH,
        hbm_bytes=states,
        vector_ops=5.0 * rows * heads * WIDTH * WIDTH // 1024,
        tile_space=tuple(
            {'heads': tile, 'buffers': buffers}
            for tile in (6, 8, 12, 16, 24)
            if heads % tile == 0
            for buffers in (4, 6, 8)
        ),
        note=note,
    )


def decode_cases() -> list[Case]:
    """Prepared inputs ('plain'), from projections ('fused') and a window of speculation."""
    found = []
    for form in ('plain', 'fused', 'window'):
        for name, heads in HEADS.items():
            found += [_case(form, name, heads, rows) for rows in BATCHES]
        found.append(_case(form, 'k3_24', 24, 64, is_static=False))
        found.append(_case(form, 'k3_96', 96, 64, is_static=False))
    found.append(_case('fused', 'k3_96', 96, 1))
    return found
