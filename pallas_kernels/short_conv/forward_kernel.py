"""How the convolution and its SiLU are computed on the TPU with one read and one write."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.short_conv.blocks import (
    F32,
    GROUP,
    LANES,
    SUBLANES,
    TAPS,
    Plan,
    compiler_params,
    down,
    load,
    masked,
    reach_masks,
    roll,
    spread_reach,
)


def half_total(x, rolled_x, rolled_odd, masks, weight_ref, lanes):
    """Half the convolution of eight rows, x two rows before, and what the next rows need.

    The taps are summed in pairs, so that four taps take two shifts, not three:

      odd_t = w_2 x_t + w_0 x_{t-2}        total_t = w_3 x_t + w_1 x_{t-2} + odd_{t-1}

    A row that x_{t-2} or odd_{t-1} may not see is masked, and x_{t-3} with either of them.

    Args:
      x: [8, 128]; rolled_x, rolled_odd: x rolled by two and odd by one, of the eight rows before.
      weight_ref: [W, 8, P], half the weights, which is what both SiLU and its slope need.
    """
    w_0, w_1, w_2, w_3 = (weight_ref[tap, :, lanes] for tap in range(TAPS))
    x_2, rolled_x = down(x, rolled_x, 2)
    x_2 = masked(x_2, masks[1])
    odd_1, rolled_odd = down(w_2 * x + w_0 * x_2, rolled_odd, 1)
    total = w_3 * x + w_1 * x_2 + masked(odd_1, masks[0])
    return total, x_2, rolled_x, rolled_odd


def rolled_rows_before(x, weight_ref, lanes, mask=None) -> tuple[jax.Array, jax.Array]:
    """rolled_x and rolled_odd of `half_total` for eight rows before, of which the last ones count.

    mask: [8, 128], whether the row after may see the row three before it; None if it may.
    """
    rolled_x = roll(x, 2)
    odd = weight_ref[2, :, lanes] * x + masked(weight_ref[0, :, lanes] * rolled_x, mask)
    return rolled_x, roll(odd, 1)


def _kernel(*refs, plan: Plan) -> None:
    x_ref, weight_ref, tail_ref, *refs = refs
    reach_ref = refs.pop(0) if plan.packed else None
    y_ref, before_ref, *refs = refs
    spread_ref = refs[0] if plan.packed else None
    if plan.packed:
        spread_reach(reach_ref, spread_ref, plan)

    @pl.when(pl.program_id(2) == 0)
    def _():
        for lanes in (lanes for columns in plan.steps for lanes in columns):
            rolled = rolled_rows_before(tail_ref[:, lanes], weight_ref, lanes)
            before_ref[0, :, lanes], before_ref[1, :, lanes] = rolled

    for columns in plan.steps:

        def body(group, carry, columns=columns):
            start = group * GROUP
            masks = [reach_masks(spread_ref, start, half) for half in (0, 1)]
            following = []
            for lanes, rolled in zip(columns, carry, strict=True):
                results = []
                for half, x in enumerate(load(x_ref, start, lanes)):
                    total, _, *rolled = half_total(x, *rolled, masks[half], weight_ref, lanes)
                    results.append(total + total * jnp.tanh(total))
                following.append(rolled)
                y = jnp.concatenate(results).astype(y_ref.dtype)
                y_ref[pl.ds(pl.multiple_of(start, GROUP), GROUP), lanes] = y
            return following

        carry = [[before_ref[0, :, lanes], before_ref[1, :, lanes]] for lanes in columns]
        carry = lax.fori_loop(0, plan.rows // GROUP, body, carry, unroll=plan.unroll)
        for lanes, rolled in zip(columns, carry, strict=True):
            before_ref[0, :, lanes], before_ref[1, :, lanes] = rolled


def forward(
    x: jax.Array,
    weight: jax.Array,
    tail: jax.Array,
    reach: jax.Array | None,
    *,
    plan: Plan,
    interpret: bool,
) -> jax.Array:
    """y [B, T, P] in x's dtype.

    Args:
      x: [B, T, P]. weight: [W, 8, P] float32, half the taps, repeated over eight rows.
      tail: [B, 8, P] float32, the rows before x at the end.
      reach: [B, 1, plan.padded] float32, how many rows before each belong to its document, for a
        packed plan.
    """
    tile = pl.BlockSpec((None, plan.rows, plan.lanes), lambda b, p, t: (b, t, p))
    in_specs = [
        tile,
        pl.BlockSpec((TAPS, SUBLANES, plan.lanes), lambda b, p, t: (0, 0, p)),
        pl.BlockSpec((None, SUBLANES, plan.lanes), lambda b, p, t: (b, 0, p)),
    ]
    scratch = [pltpu.VMEM((2, SUBLANES, plan.lanes), F32)]
    args = [x, weight, tail]
    if plan.packed:
        in_specs.append(pl.BlockSpec((None, 1, plan.rows), lambda b, p, t: (b, 0, t)))
        scratch.append(pltpu.VMEM((plan.rows, LANES), F32))
        args.append(reach)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=plan.grid,
        in_specs=in_specs,
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=scratch,
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * x.size * x.dtype.itemsize, transcendentals=x.size
        ),
        interpret=interpret,
        name='short_conv_forward',
    )(*args)
