"""How gradients are computed on the TPU: tiles from the last to the first, one read of x and dy.

With c the convolution, s = sigmoid(c) and dc = dy s (1 + c (1 - s)):

    dx_t = sum_j weight[:, j] dc_{t + W - 1 - j}        dweight[:, j] = sum_t dc_t x_{t - W + 1 + j}

over the rows of one document. dx needs rows of dc after its own, which the tile done before holds.
"""

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
    load,
    masked,
    reach_masks,
    roll,
    spread_reach,
    up,
)
from pallas_kernels.short_conv.forward_kernel import half_total, rolled_rows_before


def _input_gradient(d_total, rolled_d, rolled_odd, masks, weight_ref, lanes):
    """dx of eight rows, dc one row after, and what the rows before need.

    As in `half_total`, with d = 2 dc where the row before may see it:

      odd_t = w_1 d_t + w_0 d_{t+1}        dx_t = w_3 d_t + w_2 d_{t+1} + odd_{t+2}
    """
    w_0, w_1, w_2, w_3 = (weight_ref[tap, :, lanes] for tap in range(TAPS))
    d_1, rolled_d = up(masked(d_total, masks[0]), rolled_d, 1)
    odd = masked(w_1 * d_total + w_0 * d_1, masks[1])
    odd_2, rolled_odd = up(odd, rolled_odd, 2)
    return w_3 * d_total + w_2 * d_1 + odd_2, d_1, rolled_d, rolled_odd


def _kernel(*refs, plan: Plan) -> None:
    x_ref, before_ref, dy_ref, weight_ref, tail_ref, *refs = refs
    reach_ref = refs.pop(0) if plan.packed else None
    dx_ref, d_weight_ref, d_tail_ref, after_ref, *refs = refs
    spread_ref = refs[0] if plan.packed else None
    tile = plan.tiles - 1 - pl.program_id(2)
    if plan.packed:
        spread_reach(reach_ref, spread_ref, plan)

    @pl.when(pl.program_id(2) == 0)
    def _():
        after_ref[...] = jnp.zeros(after_ref.shape, F32)
        d_weight_ref[...] = jnp.zeros(d_weight_ref.shape, F32)

    for columns in plan.steps:

        def group_of(start, befores, carry, columns=columns):
            masks = [reach_masks(spread_ref, start, half) for half in (0, 1)]
            sees_three = None
            if spread_ref is not None:
                sees_three = (
                    jnp.broadcast_to(spread_ref[pl.ds(start, 1), :], (SUBLANES, LANES)) >= 3
                )
            at = start if isinstance(start, int) else pl.multiple_of(start, GROUP)
            following = []
            for lanes, before, (after, sums) in zip(columns, befores, carry, strict=True):
                rolled = rolled_rows_before(before, weight_ref, lanes, sees_three)
                forwards = []
                for half, x in enumerate(load(x_ref, start, lanes)):
                    total, x_2, *rolled = half_total(x, *rolled, masks[half], weight_ref, lanes)
                    forwards.append((x, x_2, total))
                slopes, results = load(dy_ref, start, lanes), [None, None]
                for half in (1, 0):
                    x, x_2, total = forwards[half]
                    tanh = jnp.tanh(total)
                    # Twice dc, since sigmoid is (1 + tanh) / 2; the weights come halved.
                    d_total = slopes[half] * ((1.0 + total) + tanh * (1.0 - total * tanh))
                    if plan.length % plan.rows:
                        row = lax.broadcasted_iota(jnp.int32, d_total.shape, 0)
                        inside = tile * plan.rows + start + half * SUBLANES + row < plan.length
                        d_total, x, x_2 = (masked(r, inside) for r in (d_total, x, x_2))
                    results[half], d_1, *after = _input_gradient(
                        d_total, *after, masks[half], weight_ref, lanes
                    )
                    # Products of rows three, two, one and none apart: taps 0 to 3.
                    pairs = ((d_1, x_2), (d_total, x_2), (d_1, x), (d_total, x))
                    sums = [s + d * r for s, (d, r) in zip(sums, pairs, strict=True)]
                following.append((after, sums))
                dx_ref[pl.ds(at, GROUP), lanes] = jnp.concatenate(results).astype(dx_ref.dtype)
            return following

        def body(index, carry, columns=columns, group_of=group_of):
            start = (plan.rows // GROUP - 1 - index) * GROUP
            befores = [load(x_ref, start - GROUP, lanes)[1] for lanes in columns]
            return group_of(start, befores, carry)

        nothing = jnp.zeros((SUBLANES, LANES), F32)
        carry = [
            ([after_ref[0, :, lanes], after_ref[1, :, lanes]], [nothing] * TAPS)
            for lanes in columns
        ]
        carry = lax.fori_loop(0, plan.rows // GROUP - 1, body, carry, unroll=plan.unroll)
        befores = [
            jnp.where(tile == 0, tail_ref[:, lanes], load(before_ref, 0, lanes)[1])
            for lanes in columns
        ]
        carry = group_of(0, befores, carry)
        for lanes, (after, sums) in zip(columns, carry, strict=True):
            after_ref[0, :, lanes], after_ref[1, :, lanes] = after
            for tap in range(TAPS):
                d_weight_ref[tap, :, lanes] += sums[tap]
            # The rows before x, where d is zero: their dx is that of the tail, and the first row of
            # x is one after the tail's last and three after its first.
            tail = tail_ref[:, lanes]
            d_tail, d_1, *_ = _input_gradient(nothing, *after, (None, None), weight_ref, lanes)
            d_tail_ref[:, lanes] = d_tail
            d_1 = jnp.where(tile == 0, d_1, 0.0)
            d_weight_ref[2, :, lanes] += d_1 * tail
            d_weight_ref[0, :, lanes] += d_1 * roll(tail, 2)


def backward(
    x: jax.Array,
    dy: jax.Array,
    weight: jax.Array,
    tail: jax.Array,
    reach: jax.Array | None,
    *,
    plan: Plan,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx [B, T, P] in x's dtype; dweight [B, W, 8, P] and dtail [B, 8, P] float32.

    Arguments as in `forward`. dweight is to be halved and summed over batch and its eight rows;
    dtail belongs to the rows before x, the last of which is row 7.
    """
    last = plan.tiles - 1
    tile = pl.BlockSpec((None, plan.rows, plan.lanes), lambda b, p, t: (b, last - t, p))
    groups = plan.rows // GROUP
    before = pl.BlockSpec(
        (None, GROUP, plan.lanes),
        lambda b, p, t: (b, jnp.maximum((last - t) * groups - 1, 0), p),
    )
    eight = pl.BlockSpec((None, SUBLANES, plan.lanes), lambda b, p, t: (b, 0, p))
    in_specs = [
        tile,
        before,
        tile,
        pl.BlockSpec((TAPS, SUBLANES, plan.lanes), lambda b, p, t: (0, 0, p)),
        eight,
    ]
    scratch = [pltpu.VMEM((2, SUBLANES, plan.lanes), F32)]
    args = [x, x, dy, weight, tail]
    if plan.packed:
        in_specs.append(pl.BlockSpec((None, 1, plan.rows), lambda b, p, t: (b, 0, last - t)))
        scratch.append(pltpu.VMEM((plan.rows, LANES), F32))
        args.append(reach)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=plan.grid,
        in_specs=in_specs,
        out_specs=[
            tile,
            pl.BlockSpec((None, TAPS, SUBLANES, plan.lanes), lambda b, p, t: (b, 0, 0, p)),
            eight,
        ],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((plan.batch, TAPS, SUBLANES, plan.width), F32),
            jax.ShapeDtypeStruct((plan.batch, SUBLANES, plan.width), F32),
        ],
        scratch_shapes=scratch,
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=3 * x.size * x.dtype.itemsize, transcendentals=x.size
        ),
        interpret=interpret,
        name='short_conv_backward',
    )(*args)
