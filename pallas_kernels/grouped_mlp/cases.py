"""What of the routed experts is compiled and costed ahead of time: K3's real shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.case import Case, Tiles, abstract
from pallas_kernels.grouped_mlp import dense_kernels, mxfp4_kernels, token_kernel
from pallas_kernels.grouped_mlp.activations import SiTU
from pallas_kernels.grouped_mlp.experts import Experts, Kept
from pallas_kernels.grouped_mlp.mxfp4_tiles import Mxfp4Tiles
from pallas_kernels.grouped_mlp.mxfp8 import RoundedActivation
from pallas_kernels.grouped_mlp.visits import Uniform

LATENT = 3584  # K3 routed_expert_hidden_size
INNER = 3072  # K3 moe_intermediate_size
EXPERTS = 14  # of 896, on each of 64 chips
CHOSEN = 16
LANES, SUBLANES, SLOTS = 128, 8, 8
CODE_BYTES = 4.25 / 8
DECODE_OPERATIONS = 29  # on a vector of words of eight codes: README, "MXFP4"
_STATIC = 'equal groups of whole tiles, known while tracing: the stand-in for prefetched sizes'
_REAL = 'group sizes known at run time: to compile, not to cost (prefetched scalars read as 42)'


def _weights(num_experts: int, packed: bool) -> Experts:
    def one(outputs: int, inputs: int):
        if not packed:
            return abstract((num_experts, outputs, inputs))
        return Mxfp4Tiles(
            abstract((num_experts, inputs // 8, outputs), 'int32'),
            abstract((num_experts, inputs // 128, outputs), 'int32'),
        )

    return Experts(one(INNER, LATENT), one(INNER, LATENT), one(LATENT, INNER))


def _size(num_experts: int) -> int:
    return 3 * num_experts * LATENT * INNER


def _decode_work(num_experts: int, packed: bool) -> float:
    """Vector operations that decoding each weight once takes."""
    if not packed:
        return 0.0
    return _size(num_experts) / SLOTS / (SUBLANES * LANES) * DECODE_OPERATIONS


def _activation(rounds: bool) -> SiTU | RoundedActivation:
    return (
        RoundedActivation(SiTU(), 'ocp_floor', jnp.bfloat16, place='kernel') if rounds else SiTU()
    )


def _group_case(
    pass_name: str, per_expert: int, *, packed: bool, known: bool, rounds: bool = False
) -> Case:
    num_rows = EXPERTS * per_expert
    experts = _weights(EXPERTS, packed)
    kernels = mxfp4_kernels if packed else dense_kernels
    is_forward = pass_name == 'forward'
    activation = _activation(rounds)

    def build(tiles: Tiles | None):
        chosen = kernels.plan(pass_name, num_rows, experts, jnp.bfloat16) | dict(tiles or {})
        rows = chosen['rows']
        table = None if known else Uniform(per_expert // rows, EXPERTS, rows)
        settings = {'interpret': False, 'tiles': chosen}
        if is_forward:
            return functools.partial(
                kernels.forward, activation=activation, keep=False, table=table, **settings
            )
        if packed:

            def run(x, experts, sizes, kept, dy):
                del x
                args = (experts, sizes, kept, dy, activation)
                return kernels.backward(*args, table=table, **settings)

        else:

            def run(x, experts, sizes, kept, dy):
                return kernels.backward(
                    *(x, experts, sizes, kept, dy, activation),
                    dtypes=[jnp.bfloat16] * 3,
                    row_table=table,
                    group_table=table,
                    **settings,
                )

        return run

    rows, hidden = abstract((num_rows, LATENT)), abstract((num_rows, INNER))
    args: tuple[object, ...] = (rows, experts, jax.ShapeDtypeStruct((EXPERTS,), jnp.int32))
    if not is_forward:
        args += (Kept(hidden, hidden), rows)
    products = 3 if is_forward or packed else 6
    moved = 2 * 2 * num_rows * LATENT if is_forward else 2 * num_rows * (3 * LATENT + 2 * INNER)
    weights = _size(EXPERTS) * (CODE_BYTES if packed else 2 if is_forward else 4)
    return Case(
        kernel='grouped_mlp',
        name=f'k3_{EXPERTS}_experts_{per_expert}_tokens_each'
        + ('_mxfp4' if packed else '')
        + ('_rounded' if rounds else '')
        + ('_traced' if known else ''),
        pass_name=pass_name,
        shape={'M': num_rows, 'E': EXPERTS, 'L': LATENT, 'F': INNER},
        dtype='bfloat16',
        build=build,
        args=args,
        flops=2.0 * products * num_rows * LATENT * INNER,
        hbm_bytes=float(weights + moved),
        vector_ops=_decode_work(EXPERTS, packed),
        tile_space=tuple(
            {'rows': rows, 'inner': inner, 'width': width}
            for rows in sorted({min(per_expert, most) for most in (256, 512)})
            for inner, width in ((512, 512), (768, 896), (1536, 1792))
        ),
        note=_REAL if known else _STATIC,
    )


def _token_case(num_tokens: int, num_experts: int, *, packed: bool, rounds: bool = False) -> Case:
    needed = min(num_experts, num_tokens * CHOSEN)
    experts = _weights(num_experts, packed)

    def build(tiles: Tiles | None):
        return functools.partial(
            token_kernel.run,
            activation=_activation(rounds),
            interpret=False,
            columns=(tiles or {}).get('inner'),
            fixed=True,
        )

    weights = _size(needed) * (CODE_BYTES if packed else 2)
    return Case(
        kernel='grouped_mlp',
        name=f'k3_{num_tokens}_tokens_{num_experts}_experts'
        + ('_mxfp4' if packed else '')
        + ('_rounded' if rounds else ''),
        pass_name='decode',
        shape={'T': num_tokens, 'E': num_experts, 'L': LATENT, 'F': INNER},
        dtype='bfloat16',
        build=build,
        args=(
            abstract((num_tokens, LATENT)),
            experts,
            abstract((needed,), 'int32'),
            abstract((1,), 'int32'),
            abstract((needed, 1, num_tokens), 'float32'),
        ),
        flops=6.0 * num_tokens * needed * LATENT * INNER,
        hbm_bytes=float(weights + 4 * num_tokens * LATENT),
        vector_ops=_decode_work(needed, packed),
        tile_space=tuple({'inner': inner} for inner in (256, 512, 768)),
        note=f'the first {needed} experts, known while tracing: the stand-in for chosen ones',
    )


def cases() -> list[Case]:
    """Groups at the loads of decoding, prefill and training; tokens on one chip or on all."""
    found = []
    for packed in (False, True):
        for pass_name in ('forward', 'backward'):
            for per_expert in (16, 1024):
                found.append(_group_case(pass_name, per_expert, packed=packed, known=False))
            found.append(_group_case(pass_name, 1024, packed=packed, known=True))
        for num_tokens, num_experts in ((1, EXPERTS), (16, EXPERTS), (64, EXPERTS), (1, 896)):
            found.append(_token_case(num_tokens, num_experts, packed=packed))
        # Hidden values rounded to MXFP8, as training for it and serving after it have them.
        for pass_name in ('forward', 'backward'):
            for per_expert in (16, 1024):
                how = {'packed': packed, 'known': False, 'rounds': True}
                found.append(_group_case(pass_name, per_expert, **how))
        found.append(_token_case(16, EXPERTS, packed=packed, rounds=True))
    return found
