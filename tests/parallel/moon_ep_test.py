"""MoonEP's planner: the published example, thousands of routings against the NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.parallel.moon_ep import (
    Grid,
    count_entries,
    entry_rows,
    layout_tables,
    plan_entries,
)
from tests.oracles import moon_ep as oracle

# The specification's worked example: 4 ranks, 8 experts, 5 tokens of 2 choices, padding to 4.
EXAMPLE = Grid(num_ranks=4, num_experts=8, num_tokens=5, num_chosen=2, token_padding=4)
CHOSEN = np.array(
    [
        [(0, 2), (0, 2), (0, 1), (0, 2), (0, 1)],
        [(0, 2), (0, 1), (2, 0), (1, 2), (4, 0)],
        [(1, 2), (3, 4), (7, 0), (1, 2), (3, 4)],
        [(5, 7), (0, 1), (2, 3), (4, 5), (6, 7)],
    ],
    np.int32,
)
AMOUNT = [(5, 0, 0, 6), (3, 0, 4, 0), (2, 7, 0, 0), (0, 3, 0, 0)]
AMOUNT += [(0, 0, 4, 0), (0, 0, 2, 0), (0, 0, 0, 1), (0, 0, 0, 3)]
ROWS = {
    False: [
        [0, 12, 1, 13, 2, 8, 3, 24, 4, 9],
        [80, 25, 81, 10, 26, 82, 56, 27, 48, 83],
        [57, 28, 32, 49, 76, 84, 58, 29, 33, 50],
        [52, 77, 85, 59, 30, 34, 51, 53, 72, 78],
    ],
    True: [
        [0, -13, 1, -14, 2, -9, 3, 24, 4, -10],
        [80, 25, 81, 10, 26, 82, 56, 27, 48, 83],
        [57, 28, 32, 49, 76, -85, 58, 29, 33, 50],
        [52, 77, 85, 59, 30, -35, 51, -54, 72, -79],
    ],
}
GRIDS = [
    Grid(num_ranks=2, num_experts=8, num_tokens=13, num_chosen=3),
    Grid(num_ranks=4, num_experts=8, num_tokens=16, num_chosen=2, token_padding=4),
    Grid(num_ranks=8, num_experts=32, num_tokens=24, num_chosen=4, token_padding=8),
]


@functools.partial(jax.jit, static_argnums=1)
def planned(load, grid):
    plan = plan_entries(load, grid)
    return plan, layout_tables(plan.amount, grid)


@functools.partial(jax.jit, static_argnums=1)
def many_planned(loads, grid):
    return jax.vmap(lambda load: planned(load, grid))(loads)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rows_of_all(chosen, grid, dedup):
    counts = jax.vmap(lambda c: count_entries(c, grid.num_experts))(chosen)
    plan, tables = planned(jnp.sum(counts, axis=0), grid)
    ranks = jnp.arange(grid.num_ranks)
    rows = jax.vmap(lambda c, r: entry_rows(c, counts, r, plan.amount, tables, grid, dedup=dedup))(
        chosen, ranks
    )
    return plan.amount, rows


def random_loads(grid, count, seed):
    """[count, E]: even, skewed, one hot expert, one hot rank, empty ranks, already balanced."""
    rng = np.random.default_rng(seed)
    ranks, own, experts = grid.num_ranks, grid.experts_per_rank, grid.num_experts
    total = ranks * grid.num_entries
    loads = np.zeros((count, experts), np.int32)
    for i in range(count):
        kind = i % 6
        if kind == 5:  # balanced ranks, whatever the experts of each get
            for r in range(ranks):
                share = rng.dirichlet(np.full(own, 0.3))
                loads[i, r * own : (r + 1) * own] = rng.multinomial(grid.num_entries, share)
            continue
        share = rng.dirichlet(np.full(experts, rng.choice([0.05, 0.3, 10.0])))
        if kind == 1:
            share = np.eye(experts)[rng.integers(experts)]
        if kind == 2:
            share = share * (np.arange(experts) // own == rng.integers(ranks)) + 1e-30
        if kind == 3:
            share = share * (np.arange(experts) // own != rng.integers(ranks)) + 1e-30
        if kind == 4:
            share = share * np.repeat(rng.random(ranks) < 0.4, own) + 1e-30
        loads[i] = rng.multinomial(total, share / share.sum())
    return loads


def check_plan(load, grid, plan, tables):
    ranks, own = grid.num_ranks, grid.experts_per_rank
    amount = np.asarray(plan.amount)
    assert (amount >= 0).all()
    np.testing.assert_array_equal(amount.sum(axis=1), load)
    np.testing.assert_array_equal(amount.sum(axis=0), grid.num_entries)
    is_home = np.arange(grid.num_experts)[:, None] // own == np.arange(ranks)
    lent = np.where(is_home, 0, amount)
    assert (lent > 0).sum(axis=0).max() <= own
    if (load.reshape(ranks, own).sum(axis=1) == grid.num_entries).all():
        assert not lent.any()
    # Every loan is listed once, by its home.
    listed = np.zeros_like(lent, dtype=bool)
    for h in range(ranks):
        for t in range(plan.num_loans[h]):
            e, d = h * own + plan.expert[t, h], plan.receiver[t, h]
            assert not listed[e, d]
            listed[e, d] = True
    np.testing.assert_array_equal(listed, lent > 0)
    assert tables.group_end.max() <= grid.num_rows


def test_worked_example_to_the_integer():
    load = CHOSEN.reshape(-1)
    load = np.bincount(load, minlength=8).astype(np.int32)
    plan, tables = planned(load, EXAMPLE)
    assert EXAMPLE.num_rows == 24
    np.testing.assert_array_equal(load, [11, 7, 9, 3, 4, 2, 1, 3])
    np.testing.assert_array_equal(plan.amount, AMOUNT)
    np.testing.assert_array_equal(tables.experts_to_copy, [[2, -1], [-1, -1], [1, -1], [0, -1]])
    np.testing.assert_array_equal(
        tables.group_end, [[8, 12, 16, 16], [8, 12, 12, 12], [4, 8, 12, 12], [4, 8, 16, 16]]
    )
    for dedup, rows in ROWS.items():
        got = rows_of_all(CHOSEN, EXAMPLE, dedup)[1]
        np.testing.assert_array_equal(got.reshape(4, 10), rows)


@pytest.mark.parametrize('grid', GRIDS, ids=lambda grid: f'{grid.num_ranks} ranks')
def test_a_thousand_routings_are_balanced_and_equal_the_oracle(grid):
    loads = random_loads(grid, 1000, seed=grid.num_ranks)
    plans, tables = jax.tree.map(np.asarray, many_planned(loads, grid))
    for i, load in enumerate(loads):
        plan, table = jax.tree.map(lambda x, i=i: x[i], (plans, tables))
        check_plan(load, grid, plan, table)
        counts = np.zeros((grid.num_ranks, grid.num_experts), int)
        counts[0] = load
        np.testing.assert_array_equal(plan.amount, oracle.plan(counts, grid.num_entries))
        ends, first, fill = oracle.layout(plan.amount, grid.token_padding)
        np.testing.assert_array_equal(table.experts_to_copy, oracle.copies(plan.amount))
        np.testing.assert_array_equal(table.group_end, ends)
        np.testing.assert_array_equal(table.padding, fill)
        for (d, e), row in first.items():
            if e >= 0 and plan.amount[e, d]:
                assert table.start[e, d] == row


@pytest.mark.parametrize('grid', GRIDS, ids=lambda grid: f'{grid.num_ranks} ranks')
def test_rows_of_entries_equal_the_oracle_and_fill_each_rank_once(grid):
    rng = np.random.default_rng(7)
    shape = (grid.num_ranks, grid.num_tokens, grid.num_chosen)
    for skew in (0.1, 1.0, 20.0):
        share = rng.dirichlet(np.full(grid.num_experts, skew))
        chosen = rng.choice(grid.num_experts, shape, p=share).astype(np.int32)
        for dedup in (False, True):
            amount, rows = jax.tree.map(np.asarray, rows_of_all(chosen, grid, dedup))
            want = oracle.destinations(chosen, amount, grid.token_padding, dedup)
            np.testing.assert_array_equal(rows, want)
            rows = np.where(rows < 0, -rows - 1, rows).reshape(-1)
            assert len(np.unique(rows)) == rows.size
            np.testing.assert_array_equal(
                np.bincount(rows // grid.num_rows), [grid.num_entries] * grid.num_ranks
            )


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_any_load_is_planned_within_the_slots(data):
    grid = GRIDS[1]
    total = grid.num_ranks * grid.num_entries
    cuts = data.draw(st.lists(st.integers(0, total), min_size=7, max_size=7).map(sorted))
    load = np.diff([0, *cuts, total]).astype(np.int32)
    check_plan(load, grid, *jax.tree.map(np.asarray, planned(load, grid)))


def test_without_loans_every_entry_stays_at_home():
    grid = Grid(num_ranks=4, num_experts=8, num_tokens=5, num_chosen=2, lends=False)
    load = np.bincount(CHOSEN.reshape(-1), minlength=8).astype(np.int32)
    plan, tables = planned(load, grid)
    np.testing.assert_array_equal(plan.amount.sum(axis=0), [18, 12, 6, 4])
    np.testing.assert_array_equal(tables.group_end, [[11, 18], [9, 12], [4, 6], [1, 4]])
    assert grid.num_rows == 40 and grid.num_groups == 2


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'num_experts': 10}, 'num_experts is 10, wanted a multiple of the 4 ranks'),
        ({'num_tokens': 0}, 'num_tokens is 0, wanted at least 1'),
        ({'token_padding': 0}, 'token_padding is 0, wanted at least 1'),
        ({'num_tokens': 2**28}, 'wanted fewer than 2147483648'),
        ({'num_tokens': 2**26, 'lends': False}, "method='moon'"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
    sizes = dict(num_ranks=4, num_experts=8, num_tokens=5, num_chosen=2)
    with pytest.raises(ValueError, match=message):
        Grid(**sizes | change)


def test_wrong_shapes_and_unknown_experts_are_refused():
    counts = np.zeros((4, 8), np.int32)
    plan, tables = planned(np.full(8, 5, np.int32), EXAMPLE)
    with pytest.raises(ValueError, match='chosen holds 1 to 8, wanted expert ids in 0 to 7'):
        entry_rows(CHOSEN[3] + 1, counts, 0, plan.amount, tables, EXAMPLE)
    with pytest.raises(ValueError, match=r'chosen has shape \(4, 2\), wanted \(5, 2\)'):
        entry_rows(CHOSEN[0, 1:], counts, 0, plan.amount, tables, EXAMPLE)
    with pytest.raises(ValueError, match=r'counts has shape \(4, 7\), wanted \(4, 8\)'):
        entry_rows(CHOSEN[0], counts[:, 1:], 0, plan.amount, tables, EXAMPLE)
    with pytest.raises(ValueError, match=r'load has shape \(4,\), wanted \(8,\)'):
        plan_entries(np.zeros(4, np.int32), EXAMPLE)
    with pytest.raises(ValueError, match='load is float32, wanted integers'):
        plan_entries(np.zeros(8, np.float32), EXAMPLE)
