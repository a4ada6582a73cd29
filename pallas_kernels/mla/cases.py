"""Where MLA is compiled and costed: the models' heads on one chip, lengths, and modes."""

from __future__ import annotations

from pallas_kernels.common.case import Case, Tiles, abstract
from pallas_kernels.mla.backward_kernel import backward
from pallas_kernels.mla.blocks import Plan
from pallas_kernels.mla.forward_kernel import forward
from pallas_kernels.mla.on_tpu import plan_for as training_plan
from pallas_kernels.mla.paged import page_width, plan_for
from pallas_kernels.mla.paged_kernel import paged_decode_kernel

KEY, VALUE = 192, 128  # 128 nope + 64 rope, and V
LATENT, ROPE = 512, 64
# K3 has 96 heads, so 24, 12 and 6 on one of 4, 8 and 16 chips; Kimi Linear has 32.
HEADS = {'k3': (96, 24, 12, 6), 'kimi_linear': (32,)}
LENGTHS = (1, 1024, 8192, 131072)
_STAND_IN = 'stand-in: the skipping of blocks without a common document is left out'


def _training(
    name: str, heads: int, length: int, gradients: bool, packed: bool = False, dtype='bfloat16'
) -> Case:
    q, v = abstract((1, length, heads, KEY), dtype), abstract((1, length, heads, VALUE), dtype)
    pass_name = 'backward' if gradients else 'forward'

    def plan_of(tiles: Tiles | None) -> Plan:
        plan = training_plan(pass_name, q, v, packed, tiles and tiles['block'])
        return plan._replace(skips=False)

    plan = plan_of(None)
    rows = plan.num_blocks * plan.block
    keys, values = (
        abstract((1, rows, heads * KEY), dtype),
        abstract((1, rows, heads * VALUE), dtype),
    )
    stats = abstract((heads // plan.heads, plan.heads, rows), 'float32')
    row, block = abstract((1, 1, rows), 'int32'), abstract((1, plan.num_blocks), 'int32')
    runs = (row, row, block) if packed else ()

    def build(tiles: Tiles | None):
        plan = plan_of(tiles)
        if gradients:
            return lambda *args: backward(*args, plan=plan, interpret=False)
        return lambda *args: forward(*args, plan=plan, interpret=False)

    args = (keys, keys, values, values, stats, stats) if gradients else (keys, keys, values)
    products = 3 * KEY + 2 * VALUE if gradients else KEY + VALUE
    size = v.dtype.itemsize * length * heads
    # Backward reads q, k, v, do and writes dq, dk, dv, with lse and delta; forward writes o and two
    # statistics.
    wide = 4 * KEY + 3 * VALUE if gradients else 2 * KEY + 2 * VALUE
    return Case(
        kernel='mla',
        name=name,
        pass_name=pass_name,
        shape={'B': 1, 'T': length, 'H': heads, 'K': KEY, 'V': VALUE},
        dtype=dtype,
        build=build,
        args=(*args, runs),
        flops=2.0 * products * heads * length * (length + 1) / 2,
        hbm_bytes=float(size * wide + 8 * length * heads),
        tile_space=tuple({'block': b} for b in (128, 256, 512, 1024) if length % b == 0),
        note=_STAND_IN if packed else '',
    )


def _decode(batch: int, heads: int, context: int, page: int) -> Case:
    rows = -(-heads // 16) * 16
    width, most = page_width(LATENT, ROPE), context // page
    pages = abstract((batch * most, page, width))

    def build(tiles: Tiles | None):
        plan = plan_for(batch, heads, LATENT, pages, KEY**-0.5, context)
        plan = plan._replace(**(tiles or {}))
        return lambda *args: paged_decode_kernel(*args, plan=plan, interpret=False)

    moved = 2 * batch * (context * (LATENT + ROPE) + heads * (2 * LATENT + ROPE))
    return Case(
        kernel='mla',
        name=f'{heads}_heads_{batch}_sequences_{context}_page_{page}',
        pass_name='decode',
        shape={'B': batch, 'H': heads, 'S': context, 'P': page, 'R': LATENT},
        dtype='bfloat16',
        build=build,
        args=(
            abstract((batch,), 'int32'),
            abstract((batch, most), 'int32'),
            abstract((batch, rows, width)),
            pages,
        ),
        flops=2.0 * batch * heads * context * (2 * LATENT + ROPE),
        hbm_bytes=float(moved),
        tile_space=tuple({'tile': t // page} for t in (512, 1024, 2048, 4096) if t >= page),
        note='stand-in: every sequence has this length, and its pages lie in order; '
        'a token takes 640 lanes, of which 576 count as needed',
    )


def cases() -> list[Case]:
    out = []
    for model, counts in HEADS.items():
        for heads in counts:
            # No chip attends with all heads over the longest row: its tokens are shared out first.
            for length in LENGTHS[:-1] if heads == 96 else LENGTHS:
                for gradients in (False, True):
                    out.append(
                        _training(f'{model}_{heads}_heads_{length}', heads, length, gradients)
                    )
    for gradients in (False, True):
        name = 'k3_24_heads_8192'
        out.append(_training(f'{name}_packed', 24, 8192, gradients, packed=True))
        out.append(_training(f'{name}_float32', 24, 8192, gradients, dtype='float32'))
    for heads in (96, 24, 12, 6):
        for batch, context in ((8, 8192), (64, 8192), (8, 131072)):
            out.append(_decode(batch, heads, context, 64))
    out.extend(_decode(8, 24, 8192, page) for page in (16, 32, 128))
    return out
