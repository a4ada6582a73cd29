"""What the routed experts compute when each rank of a mesh axis is home to some of them."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from k3jax.parallel.exchange import Axis, exchange
from k3jax.parallel.moe_ep_rows import (
    collect,
    exchange_messages,
    exchange_values,
    expand,
    layout_of,
    mix,
    num_received_rows,
    num_sent_rows,
    sends_of,
    spread,
)
from k3jax.parallel.moe_ep_weights import with_borrowed
from k3jax.parallel.moon_ep import (
    Grid,
    check_choices,
    count_entries,
    entry_rows,
    layout_tables,
    plan_entries,
)
from pallas_kernels.common.checks import check_floating, check_integer
from pallas_kernels.common.platform import Implementation
from pallas_kernels.grouped_mlp import (
    Experts,
    GatedActivation,
    Mxfp8,
    grouped_mlp,
    round_rows,
)

Method = Literal['moon', 'plain']


def _check(z, chosen, weights, experts, axis, grid, method) -> None:
    if method not in ('moon', 'plain'):
        raise ValueError(f"routed_mlp: method is {method!r}, wanted 'moon' or 'plain'")
    if lax.axis_size(axis) != grid.num_ranks:
        raise ValueError(
            f'routed_mlp: axis_size is {grid.num_ranks}, but mesh axis {axis!r} has '
            f'{lax.axis_size(axis)} ranks'
        )
    check_floating('routed_mlp', z=z, weights=weights)
    check_integer('routed_mlp', chosen=chosen)
    if z.shape != (grid.num_tokens, experts.width) or weights.shape != chosen.shape:
        raise ValueError(
            f'routed_mlp: z {z.shape}, weights {weights.shape}, wanted '
            f'{grid.num_tokens, experts.width} and {chosen.shape}'
        )
    check_choices('routed_mlp', chosen, grid)


@jax.named_scope('routed_mlp')
def routed_mlp(
    z: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Experts,
    activation: GatedActivation,
    *,
    axis: Axis = 'expert',
    axis_size: int,
    method: Method = 'moon',
    quantise: Mxfp8 | None = None,
    implementation: Implementation | None = None,
    token_padding: int = 1,
) -> jax.Array:
    """mixed_s = sum_j weights[s, j] expert_{chosen[s, j]}(z_s), experts spread over `axis`.

    Called inside a `jax.shard_map` that is manual over all axes of the mesh. A token travels once
    to each rank that computes something for it, in z's dtype, and so does the sum of the results;
    the sums are taken in float32. With 'moon' every rank computes S k rows, whatever the routing:
    ranks with less to do borrow experts for the call. With 'plain' experts stay at home, so that a
    rank has room for all R S k rows: simple, for few ranks and tests.

    Args:
      z: [S, L] this rank's tokens. chosen: [S, k] int32 expert ids; what is none, where it is not
        known before the program runs, counts nothing.
      weights: [S, k] float32. experts: this rank's [E / R, ...], arrays, or packed (forward only).
      axis: mesh axis or axes of the R ranks, in which expert e lives on rank e // (E / R).
      axis_size: R. quantise, implementation: of `grouped_mlp`.
      token_padding: groups of rows are padded to its multiples.

    Returns:
      [S, L], float32 or wider. Differentiable in z, weights and experts.

    Raises:
      ValueError: shapes disagree, known choices are no experts, or rows do not fit in int32.

    Source: Kimi K3 report, section 5.2.1 and appendix E (MoonEP).
    """
    if chosen.ndim != 2:
        raise ValueError(f'routed_mlp: chosen has shape {chosen.shape}, wanted [S, k]')
    grid = Grid(
        num_ranks=axis_size,
        num_experts=experts.num_experts * axis_size,
        num_tokens=chosen.shape[0],
        num_chosen=chosen.shape[1],
        lends=method == 'moon' and axis_size > 1,
        token_padding=token_padding,
    )
    _check(z, chosen, weights, experts, axis, grid, method)
    is_expert = (chosen >= 0) & (chosen < grid.num_experts)
    weights = jnp.where(is_expert, weights, 0)
    chosen = jnp.clip(chosen, 0, grid.num_experts - 1)

    z, quantise = round_rows(z, quantise)
    rank = lax.axis_index(axis)
    with jax.named_scope('plan'):
        counts = lax.all_gather(count_entries(chosen, grid.num_experts), axis)
        plan = plan_entries(jnp.sum(counts, axis=0), grid)
        tables = layout_tables(plan.amount, grid)
        sends = sends_of(entry_rows(chosen, counts, rank, plan.amount, tables, grid), grid, axis)
        layout = layout_of(exchange_messages(sends, grid, axis), rank, tables, grid)
        # So that a policy can keep what the backward pass would sort again.
        plan, copies, sends, layout = jax.tree.map(
            lambda x: checkpoint_name(x, 'moe_plan'),
            (plan, tables.experts_to_copy, sends, layout),
        )
    with jax.named_scope('dispatch'):
        weights = exchange_values(weights, sends, grid, axis)
        x = spread(z, sends.token, sends.row)
        x = exchange(x, sends.rows, num_received_rows(grid), axis)
        x = expand(x, layout, grid.num_chosen)
    if grid.lends:
        with jax.named_scope('borrow'):
            experts = with_borrowed(experts, plan, copies, grid, axis)
    y = grouped_mlp(
        *(x, experts, layout.group_sizes, activation),
        quantise=quantise,
        implementation=implementation,
    )
    with jax.named_scope('combine'):
        y = mix(y, weights, layout, grid.num_chosen)
        y = exchange(y, sends.rows.reversed(), num_sent_rows(grid), axis)
        return collect(y, sends.token, sends.row, y.dtype)
