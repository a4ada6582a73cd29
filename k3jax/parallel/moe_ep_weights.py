"""How do experts get to the ranks that borrow them, and their gradients back home?"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.exchange import Axis, Transfers, exchange_into
from k3jax.parallel.moon_ep import Grid, Plan
from pallas_kernels.grouped_mlp import Experts


def _num_rounds(plan: Plan) -> jax.Array:
    """Rounds until every home has made its loans, the same number on every chip of the mesh.

    Chips of other groups along the axis have plans of their own; all leave the loop together, as
    the collectives in it may be scheduled across the whole mesh.
    """
    rounds = jnp.max(plan.num_loans)
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmax(rounds, axes)


def _round(t: jax.Array, plan: Plan, copies: jax.Array, grid: Grid) -> Transfers:
    """The t-th loan of every home: each sends one expert, straight into the receiver's slot."""
    ranks = jnp.arange(grid.num_ranks, dtype=jnp.int32)
    expert, receiver = plan.expert[t], plan.receiver[t]
    slot_of = copies[receiver] == (ranks * grid.experts_per_rank + expert)[:, None]
    slot = jnp.argmax(slot_of, axis=1).astype(jnp.int32)
    is_sent = (t < plan.num_loans)[:, None] & (receiver[:, None] == ranks)
    shape = (grid.num_ranks, grid.num_ranks)
    return Transfers(
        is_sent.astype(jnp.int32),
        jnp.broadcast_to(expert[:, None], shape),
        jnp.broadcast_to(grid.experts_per_rank + slot[:, None], shape),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def with_borrowed(
    experts: Experts, plan: Plan, copies: jax.Array, grid: Grid, axis: Axis
) -> Experts:
    """[2 E / R, ...] the home experts, then those in the slots; 0 in slots without one.

    The gradient of a slot is added to its home expert's in float32.

    Args:
      experts: this rank's home experts [E / R, ...], of any kind.
      copies: [R, slots] `Tables.experts_to_copy`.
    """

    def room(home: jax.Array) -> jax.Array:
        return jnp.pad(home, ((0, grid.num_slots), *((0, 0),) * (home.ndim - 1)))

    def one(t, held):
        transfers = _round(t, plan, copies, grid)
        return jax.tree.map(
            lambda out, home: exchange_into(out, home, transfers, axis), held, experts
        )

    return lax.fori_loop(0, _num_rounds(plan), one, jax.tree.map(room, experts))


def _backward(grid: Grid, axis: Axis, residuals: Any, gradient: Experts) -> tuple[Any, ...]:
    plan, copies = residuals
    rank = lax.axis_index(axis)
    leaves, structure = jax.tree.flatten(gradient)
    is_array = [g.dtype != jax.dtypes.float0 for g in leaves]
    arrays = [g for g, use in zip(leaves, is_array, strict=True) if use]

    def one(t, totals):
        back = _round(t, plan, copies, grid).reversed()
        back = back._replace(target=jnp.zeros_like(back.target))
        expert = plan.expert[t, rank]

        def add(total, held):
            got = exchange_into(jnp.zeros_like(held[:1]), held, back, axis)[0]
            old = lax.dynamic_index_in_dim(total, expert, keepdims=False)
            return lax.dynamic_update_index_in_dim(total, old + got.astype(total.dtype), expert, 0)

        return [add(total, held) for total, held in zip(totals, arrays, strict=True)]

    own = grid.experts_per_rank
    totals = [g[:own].astype(jnp.promote_types(g.dtype, jnp.float32)) for g in arrays]
    totals = lax.fori_loop(0, _num_rounds(plan), one, totals)
    found = iter(total.astype(g.dtype) for total, g in zip(totals, arrays, strict=True))
    experts = structure.unflatten([next(found) if use else None for use in is_array])
    return experts, None, None


with_borrowed.defvjp(
    lambda experts, plan, copies, grid, axis: (
        with_borrowed(experts, plan, copies, grid, axis),
        (plan, copies),
    ),
    _backward,
)
