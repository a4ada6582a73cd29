"""Which rank computes which entry, so that every rank gets the same number of them?

An entry is one (token, chosen expert) pair. Everything here is integers, the same on every rank
and without collectives: the plan from the experts' loads, then the tables that follow from it.
Source: Kimi K3 report, section 5.2.1 and appendix E (MoonEP).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.checks import check_integer

_INT32_END = 2**31
_BLOCK = 256  # keys that are compared with each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The static sizes of expert parallelism: R ranks, each home to E / R experts.

    num_tokens (S) and num_chosen (k) are a rank's; lends: experts may be copied to other ranks.
    token_padding: groups of rows are padded to its multiples.

    Raises:
      ValueError: an axis is empty, E is no multiple of R, rows of all ranks do not fit in int32.
    """

    num_ranks: int
    num_experts: int
    num_tokens: int
    num_chosen: int
    lends: bool = True
    token_padding: int = 1

    def __post_init__(self) -> None:
        for field in ('num_ranks', 'num_experts', 'num_tokens', 'num_chosen', 'token_padding'):
            if getattr(self, field) < 1:
                raise ValueError(f'Grid: {field} is {getattr(self, field)}, wanted at least 1')
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f'Grid: num_experts is {self.num_experts}, wanted a multiple of the '
                f'{self.num_ranks} ranks of the expert axis'
            )
        if self.num_ranks * self.num_rows >= _INT32_END:
            raise ValueError(
                f'Grid: {self.num_ranks} ranks of {self.num_rows} rows are numbered in int32, '
                f'wanted fewer than {_INT32_END} in all; use fewer tokens a rank or '
                "method='moon', whose ranks need num_tokens * num_chosen rows each"
            )

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """Experts of other ranks that a rank can hold: always enough of them."""
        return self.experts_per_rank if self.lends else 0

    @property
    def num_groups(self) -> int:
        return self.experts_per_rank + self.num_slots

    @property
    def num_entries(self) -> int:
        return self.num_tokens * self.num_chosen

    @property
    def max_entries(self) -> int:
        """What a rank may have to compute."""
        return self.num_entries * (1 if self.lends else self.num_ranks)

    @property
    def num_rows(self) -> int:
        """Rows of a rank's layout (NvS of the source): entries, and padding of each group."""
        most = self.max_entries + self.num_groups * (self.token_padding - 1)
        return -(-most // self.token_padding) * self.token_padding

    @property
    def num_rounds(self) -> int:
        """The most (expert, receiver) pairs of one home: each ends an expert or a quota."""
        return self.experts_per_rank + self.num_ranks - 1 if self.lends else 0


class Plan(NamedTuple):
    """Who computes what. amount: [E, R] entries of each expert on each rank.

    The t-th loan of home h is its expert number expert[t, h] (0 to E / R), to rank
    receiver[t, h], if t < num_loans[h]. expert, receiver: [rounds, R].
    """

    amount: jax.Array
    expert: jax.Array
    receiver: jax.Array
    num_loans: jax.Array


def _quotas(surplus: jax.Array) -> jax.Array:
    """[home, receiver] entries to move, from each home's load less the mean: the greedy stage 1."""
    num_ranks = surplus.shape[0]
    rank = jnp.arange(num_ranks)

    def one(_, state):
        surplus, quota = state
        home, receiver = jnp.argmax(surplus), jnp.argmin(surplus)
        amount = jnp.where(surplus[home] > 0, -surplus[receiver], 0)
        from_home, to_receiver = rank == home, rank == receiver
        moved = jnp.where(to_receiver, amount, 0) - jnp.where(from_home, amount, 0)
        quota += jnp.where(from_home[:, None] & to_receiver, amount, 0)
        return surplus + moved, quota

    quota = jnp.zeros((num_ranks, num_ranks), jnp.int32)
    return lax.fori_loop(0, num_ranks - 1, one, (surplus, quota))[1]


def _loans(load: jax.Array, quota: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[rounds] expert, receiver and amount of one home's loans, most loaded first: stage 2.

    load: [E / R] of the home's experts. quota: [R] entries for each receiver.
    """

    def one(state, _):
        load, quota = state
        expert, receiver = jnp.argmax(load), jnp.argmax(quota)
        amount = jnp.minimum(jnp.max(load), jnp.max(quota))
        load = jnp.where(jnp.arange(load.shape[0]) == expert, load - amount, load)
        quota = jnp.where(jnp.arange(quota.shape[0]) == receiver, quota - amount, quota)
        return (load, quota), (expert.astype(jnp.int32), receiver.astype(jnp.int32), amount)

    return lax.scan(one, (load, quota), length=load.shape[0] + quota.shape[0] - 1)[1]


def plan_entries(load: jax.Array, grid: Grid) -> Plan:
    """Where each expert's entries are computed.

    With `grid.lends` every rank gets exactly S k entries and at most E / R experts of other ranks,
    all of one home; without, every entry stays with its expert.

    Args:
      load: [E] int32, entries of each expert on all ranks, summing to R S k.
    """
    check_integer('plan_entries', load=load)
    if load.shape != (grid.num_experts,):
        raise ValueError(f'plan_entries: load has shape {load.shape}, wanted {(grid.num_experts,)}')
    ranks, own = grid.num_ranks, grid.experts_per_rank
    by_home = load.astype(jnp.int32).reshape(ranks, own)
    is_home = jnp.eye(ranks, dtype=jnp.int32)
    if not grid.lends:
        amount = by_home[:, :, None] * is_home[:, None, :]
        none = jnp.zeros((0, ranks), jnp.int32)
        return Plan(amount.reshape(-1, ranks), none, none, jnp.zeros(ranks, jnp.int32))
    quota = _quotas(jnp.sum(by_home, axis=1) - grid.num_entries)
    expert, receiver, lent = jax.vmap(_loans, out_axes=1)(by_home, quota)
    is_expert = expert[..., None] == jnp.arange(own)  # [rounds, home, E / R]
    is_receiver = receiver[..., None] == jnp.arange(ranks)
    moved = jnp.sum(
        jnp.where(is_expert[..., None] & is_receiver[:, :, None], lent[..., None, None], 0), axis=0
    )
    kept = by_home - jnp.sum(moved, axis=2)
    amount = moved + kept[:, :, None] * is_home[:, None, :]
    return Plan(amount.reshape(-1, ranks), expert, receiver, jnp.sum(lent > 0, axis=0))


class Tables(NamedTuple):
    """Where the rows of each group lie on each rank; home experts first, then the slots.

    experts_to_copy: [R, slots] the expert in each slot, ascending, -1 for none.
    group_end: [R, G] end of each group, padding included (cu_seqlens of the source).
    padding: [R, G, 2] first row of a group's padding, and how many.
    start: [E, R] first row of an expert on a rank; of use only where it has entries there.
    """

    experts_to_copy: jax.Array
    group_end: jax.Array
    padding: jax.Array
    start: jax.Array


def layout_tables(amount: jax.Array, grid: Grid) -> Tables:
    """The tables that follow from amount [E, R]."""
    ranks, own = grid.num_ranks, grid.experts_per_rank
    expert = jnp.arange(grid.num_experts, dtype=jnp.int32)[:, None]
    is_home = expert // own == jnp.arange(ranks)
    is_copy = ~is_home & (amount > 0)
    slot = jnp.cumsum(is_copy, axis=0, dtype=jnp.int32) - 1
    in_slot = is_copy[..., None] & (slot[..., None] == jnp.arange(grid.num_slots))  # [E, R, slots]
    copied = jnp.max(jnp.where(in_slot, expert[..., None], -1), axis=0, initial=-1)
    at_home = jnp.sum(jnp.where(is_home, amount, 0).reshape(ranks, own, ranks), axis=2)
    in_slots = jnp.sum(jnp.where(in_slot, amount[..., None], 0), axis=0)
    size = jnp.concatenate([at_home, in_slots], axis=1).astype(jnp.int32)  # [R, G]
    padded = -(-size // grid.token_padding) * grid.token_padding
    end = jnp.cumsum(padded, axis=1, dtype=jnp.int32)
    begin = end - padded
    group = jnp.where(is_home, expert % own, jnp.clip(own + slot, 0, grid.num_groups - 1))
    start = jnp.take_along_axis(begin, group.T, axis=1).T
    return Tables(copied, end, jnp.stack([begin + size, padded - size], axis=-1), start)


def count_entries(chosen: jax.Array, num_experts: int) -> jax.Array:
    """[E] int32 how often each expert is chosen; a comparison where bincount would scatter."""
    matches = chosen.reshape(-1)[:, None] == jnp.arange(num_experts)
    return jnp.sum(matches, axis=0, dtype=jnp.int32)


def count_earlier(keys: jax.Array, num_keys: int) -> jax.Array:
    """[N] int32 how many earlier keys [N], in 0 .. num_keys - 1, equal each; without a sort."""
    num = keys.shape[0]
    blocks = jnp.pad(keys, (0, -num % _BLOCK), constant_values=num_keys - 1).reshape(-1, _BLOCK)
    same = (blocks[:, :, None] == blocks[:, None, :]) & np.tri(_BLOCK, k=-1, dtype=bool)
    in_block = jnp.sum(same, axis=2, dtype=jnp.int32)
    of_block = jax.vmap(lambda block: count_entries(block, num_keys))(blocks)
    before = jnp.cumsum(of_block, axis=0, dtype=jnp.int32) - of_block
    return (in_block + jnp.take_along_axis(before, blocks, axis=1)).reshape(-1)[:num]


def entry_rows(
    chosen: jax.Array,
    counts: jax.Array,
    rank: jax.Array | int,
    amount: jax.Array,
    tables: Tables,
    grid: Grid,
    *,
    dedup: bool = True,
) -> jax.Array:
    """[S, k] int32 the row where each entry of a rank is computed: its rank times NvS, plus a row.

    With `dedup`, x is stored as -x - 1 where an earlier entry of the token goes to the same rank,
    whose copy of the token serves both.

    Args:
      chosen: [S, k] int32, the rank's choices, in 0 .. E - 1.
      counts: [R, E] int32, `count_entries` of every rank.
      amount: [E, R] of the plan.

    Raises:
      ValueError: shapes disagree with the grid, known choices are out of range.
    """
    check_integer('entry_rows', chosen=chosen, counts=counts)
    check_choices('entry_rows', chosen, grid)
    wanted = (grid.num_ranks, grid.num_experts)
    if counts.shape != wanted:
        raise ValueError(f'entry_rows: counts has shape {counts.shape}, wanted {wanted}')
    expert = chosen.astype(jnp.int32).reshape(-1)
    earlier = jnp.arange(grid.num_ranks)[:, None] < rank
    before = jnp.sum(jnp.where(earlier, counts, 0), axis=0)
    # The place of each entry among all that chose its expert, on lower ranks first.
    place = before[expert] + count_earlier(expert, grid.num_experts)
    filled = jnp.cumsum(amount, axis=1)
    receiver = jnp.sum(filled[expert] <= place[:, None], axis=1, dtype=jnp.int32)
    first = jnp.arange(grid.num_ranks) * grid.num_rows + tables.start - (filled - amount)
    row = place + first.reshape(-1)[expert * grid.num_ranks + receiver]
    row = row.astype(jnp.int32).reshape(chosen.shape)
    if not dedup:
        return row
    receiver = row // grid.num_rows
    same = receiver[:, :, None] == receiver[:, None, :]
    lower = np.tri(grid.num_chosen, k=-1, dtype=bool)
    return jnp.where(jnp.any(same & lower, axis=2), -row - 1, row)


def check_choices(name: str, chosen: jax.Array, grid: Grid) -> None:
    """Raises ValueError for a wrong shape, and for known choices that are no experts."""
    wanted = (grid.num_tokens, grid.num_chosen)
    if chosen.shape != wanted:
        raise ValueError(f'{name}: chosen has shape {chosen.shape}, wanted {wanted}')
    if isinstance(chosen, jax.core.Tracer):
        return
    low, high = np.min(chosen), np.max(chosen)
    if low < 0 or high >= grid.num_experts:
        raise ValueError(
            f'{name}: chosen holds {low} to {high}, wanted expert ids in 0 to '
            f'{grid.num_experts - 1}'
        )
