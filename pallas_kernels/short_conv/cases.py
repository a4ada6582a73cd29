"""What of the short convolution is compiled and costed ahead of time: real widths and lengths."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.case import Case, Tiles, abstract
from pallas_kernels.short_conv.backward_kernel import backward
from pallas_kernels.short_conv.blocks import LANES, SUBLANES, TAPS, plan_for
from pallas_kernels.short_conv.forward_kernel import forward

HEAD_DIM = 128  # K3 and Kimi Linear linear_attn_config.head_dim
# K3's 96 heads, whole and on 4, 8 and 16 chips; Kimi Linear's 32.
HEADS = {'k3_96': 96, 'k3_24': 24, 'k3_12': 12, 'k3_6': 6, 'kimi_linear_32': 32}


def _case(pass_name: str, name: str, heads: int, length: int, *, packed: bool) -> Case:
    width, is_forward = heads * HEAD_DIM, pass_name == 'forward'
    shape = (1, length, width)

    def build(tiles: Tiles | None):
        plan = plan_for(pass_name, shape, jnp.bfloat16, packed=packed, tiles=tiles)
        kernel = forward if is_forward else backward

        def run(*args: jax.Array):
            reach = args[-1] if packed else None
            return kernel(*(args[:-1] if packed else args), reach, plan=plan, interpret=False)

        return run

    padded = plan_for(pass_name, shape, jnp.bfloat16, packed=packed).padded
    x = abstract(shape)
    args = [x] * (1 if is_forward else 2)
    args += [
        abstract((TAPS, SUBLANES, width), 'float32'),
        abstract((1, SUBLANES, width), 'float32'),
    ]
    if packed:
        args.append(abstract((1, 1, padded), 'float32'))
    return Case(
        kernel='short_conv',
        name=f'{name}_heads_{length}_tokens' + ('_packed' if packed else ''),
        pass_name=pass_name,
        shape={'B': 1, 'T': length, 'P': width},
        dtype='bfloat16',
        build=build,
        args=tuple(args),
        flops=0.0,
        hbm_bytes=2.0 * (2 if is_forward else 3) * length * width,
        vector_ops=float((16 if is_forward else 42) * length * width // (SUBLANES * LANES)),
        tile_space=tuple(
            {'rows': rows, 'lanes': lanes, 'step': step}
            for rows in (256, 512, 1024)
            for lanes in (512, 1024, 2048)
            for step in (2, 4)
        ),
        note='documents by segment ids, whose places cost the same' if packed else '',
    )


def cases() -> list[Case]:
    """Forward and backward of one projection (q, k or v); a single token goes through XLA."""
    found = []
    for pass_name in ('forward', 'backward'):
        for name, heads in HEADS.items():
            lengths = (1024, 8192, 131072) if name == 'k3_24' else (8192,)
            for length in lengths:
                found.append(_case(pass_name, name, heads, length, packed=False))
        found.append(_case(pass_name, 'k3_24', 24, 8192, packed=True))
        found.append(_case(pass_name, 'k3_96', 96, 8192, packed=True))
    return found
