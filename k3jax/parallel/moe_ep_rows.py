"""How do a rank's tokens become the rows that it sends, and received rows those it computes?

Four steps, each a gather of rows, each the transpose of another: `spread` (tokens to sent rows)
and `collect`, `expand` (received rows to the layout of groups) and `mix`. The tables that they
read are integers, derived once and used in both passes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.exchange import Axis, Transfers, exchange, exchange_into, packed
from k3jax.parallel.moon_ep import Grid, Tables, count_earlier, count_entries

LANES = 128  # values beside each other in a block: rows of single values would be padded to it
NO_ENTRY = jnp.iinfo(jnp.int32).max


def _rows_at(rows: jax.Array, index: jax.Array) -> jax.Array:
    """rows[index], 0 where `index` is past the end."""
    return rows.at[index].get(mode='fill', fill_value=0)


def _inverse(place: jax.Array, filler: jax.Array, length: int) -> jax.Array:
    """[length] which of the places [N] each number is; N for filler, and after the last.

    Places and filler together are the numbers from 0 on, and NO_ENTRY any number of times: sorting
    them needs no scatter.
    """
    num = place.shape[0]
    missing = max(0, length - num - filler.shape[0])
    keys = jnp.concatenate([place, jnp.pad(filler, (0, missing), constant_values=NO_ENTRY)])
    index = jnp.where(keys < NO_ENTRY, jnp.arange(keys.shape[0], dtype=jnp.int32), num)
    return lax.sort((keys, jnp.minimum(index, num)), num_keys=1)[1][:length]


class Sends(NamedTuple):
    """What one rank sends: a row a (token, rank) pair, and values of each entry in blocks.

    Entries lie in order of receiver, then of token, in blocks of LANES per receiver.

    token: [rows sent] the token of each row; S for none.
    row: [S, k] the row that stands for each entry; past the end for an entry whose token goes to
      the same rank for an earlier choice.
    message: [blocks, LANES] row of the receiver's layout of each entry, r, or -r - 1 where an
      earlier entry brings the token; NO_ENTRY for none.
    entry: [blocks * LANES] number of the entry at each place; S k for none. place: its inverse.
    rows, blocks: how many go where.
    """

    token: jax.Array
    row: jax.Array
    message: jax.Array
    entry: jax.Array
    place: jax.Array
    rows: Transfers
    blocks: Transfers


def num_sent_rows(grid: Grid) -> int:
    """The most rows that a rank sends."""
    return grid.num_tokens * min(grid.num_chosen, grid.num_ranks)


def num_received_rows(grid: Grid) -> int:
    """The most rows that a rank receives: one a token of each rank, and one an entry."""
    return min(grid.num_tokens * grid.num_ranks, grid.max_entries)


def _num_blocks(num_entries: int, grid: Grid) -> int:
    return num_entries // LANES + grid.num_ranks


def sends_of(rows: jax.Array, grid: Grid, axis: Axis) -> Sends:
    """What this rank sends, from `entry_rows` [S, k] with dedup; gathers all ranks' counts."""
    num_ranks, num_entries = grid.num_ranks, grid.num_entries
    is_first = (rows >= 0).reshape(-1)
    row = jnp.where(rows < 0, -rows - 1, rows).reshape(-1)
    receiver, row = row // grid.num_rows, row % grid.num_rows
    index = jnp.arange(num_entries, dtype=jnp.int32)

    entries_to = count_entries(receiver, num_ranks)
    first_to = jnp.where(is_first, receiver, num_ranks)
    rows_to = count_entries(first_to, num_ranks)
    blocks_to = -(-entries_to // LANES)
    sizes = lax.all_gather(jnp.stack([rows_to, blocks_to]), axis)

    sent_row = (jnp.cumsum(rows_to) - rows_to)[receiver] + count_earlier(first_to, num_ranks + 1)
    no_token = num_ranks * grid.num_tokens
    token = receiver * grid.num_tokens + index // grid.num_chosen
    token = jnp.sort(jnp.where(is_first, token, no_token))[: num_sent_rows(grid)]
    token = jnp.where(token < no_token, token % grid.num_tokens, grid.num_tokens)

    begin = (jnp.cumsum(blocks_to) - blocks_to) * LANES
    place = begin[receiver] + count_earlier(receiver, num_ranks)
    filler = jnp.arange(LANES) + entries_to[:, None]  # of each receiver's last block
    filler = jnp.where(filler < blocks_to[:, None] * LANES, begin[:, None] + filler, NO_ENTRY)
    entry = _inverse(place, filler.reshape(-1), _num_blocks(num_entries, grid) * LANES)
    message = jnp.where(is_first, row, -row - 1)
    message = message.at[entry].get(mode='fill', fill_value=NO_ENTRY)
    return Sends(
        token=token,
        row=jnp.where(is_first, sent_row, num_sent_rows(grid)).reshape(rows.shape),
        message=message.reshape(-1, LANES),
        entry=entry,
        place=place,
        rows=packed(sizes[:, 0]),
        blocks=packed(sizes[:, 1]),
    )


@jax.custom_vjp
def spread(z: jax.Array, token: jax.Array, row: jax.Array) -> jax.Array:
    """[rows sent, L] tokens z [S, L] in the order of `Sends.token`."""
    return _rows_at(z, token)


def _sum_of_copies(rows: jax.Array, row: jax.Array) -> jax.Array:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(_rows_at(rows, row).astype(wide), axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def collect(rows: jax.Array, token: jax.Array, row: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[S, L] float32 or wider: the sum of each token's rows, which are in `dtype`."""
    del token, dtype
    return _sum_of_copies(rows, row)


spread.defvjp(
    lambda z, token, row: (_rows_at(z, token), row),
    lambda row, d: (_sum_of_copies(d, row).astype(d.dtype), None, None),
)
collect.defvjp(
    lambda rows, token, row, dtype: (_sum_of_copies(rows, row), token),
    lambda dtype, token, d: (_rows_at(d.astype(dtype), token), None, None),
)


@jax.custom_vjp
def _ordered(values: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    return _rows_at(values, order)


_ordered.defvjp(
    lambda values, order, inverse: (_rows_at(values, order), inverse),
    lambda inverse, d: (_rows_at(d, inverse), None, None),
)


def exchange_messages(sends: Sends, grid: Grid, axis: Axis) -> jax.Array:
    """[blocks received * LANES] the messages to this rank, in order of arrival."""
    none = jnp.full((_num_blocks(grid.max_entries, grid), LANES), NO_ENTRY, jnp.int32)
    return exchange_into(none, sends.message, sends.blocks, axis).reshape(-1)


def exchange_values(values: jax.Array, sends: Sends, grid: Grid, axis: Axis) -> jax.Array:
    """[blocks received * LANES] a value of each entry, values [S, k], in order of arrival."""
    blocks = _ordered(values.reshape(-1), sends.entry, sends.place).reshape(-1, LANES)
    num_blocks = _num_blocks(grid.max_entries, grid)
    return exchange(blocks, sends.blocks, num_blocks, axis).reshape(-1)


class Layout(NamedTuple):
    """What one rank computes. Arrivals: entries as they come in, those of one token together.

    received: [NvS] the received row that each row of the layout reads; past the end for padding.
    arrival: [NvS] the arrival that it belongs to; past the end for none.
    row: [arrivals] its inverse; NvS for none. run: [arrivals] the received row of each arrival.
    is_first: [arrivals] whether an arrival brings its token. start: [received rows] that arrival.
    group_sizes: [G] rows of each group, padding included.
    """

    received: jax.Array
    arrival: jax.Array
    row: jax.Array
    run: jax.Array
    is_first: jax.Array
    start: jax.Array
    group_sizes: jax.Array


def layout_of(message: jax.Array, rank: jax.Array, tables: Tables, grid: Grid) -> Layout:
    """The layout from the received messages [arrivals]."""
    num_rows, num_arrivals = grid.num_rows, message.shape[0]
    is_entry = message != NO_ENTRY
    is_first = is_entry & (message >= 0)
    row = jnp.where(is_entry, jnp.where(message < 0, -message - 1, message), num_rows)
    run = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    index = jnp.arange(num_arrivals, dtype=jnp.int32)

    first, count = lax.dynamic_index_in_dim(tables.padding, rank, 0, False).T
    step = jnp.arange(grid.token_padding - 1)
    padding = jnp.where(step < count[:, None], first[:, None] + step, NO_ENTRY).reshape(-1)
    arrival = _inverse(jnp.where(is_entry, row, NO_ENTRY), padding, num_rows)
    ends = lax.dynamic_index_in_dim(tables.group_end, rank, 0, False)
    return Layout(
        received=run.at[arrival].get(mode='fill', fill_value=num_received_rows(grid)),
        arrival=arrival,
        row=row,
        run=run,
        is_first=is_first,
        start=jnp.sort(jnp.where(is_first, index, num_arrivals))[: num_received_rows(grid)],
        group_sizes=jnp.diff(ends, prepend=0),
    )


def _windows(x: jax.Array, tile: int, overlap: int, fill: int | bool) -> jax.Array:
    """[tiles, tile + overlap] x [A] in tiles, each followed by the head of the next one."""
    tiles = -(-x.shape[0] // tile)
    x = jnp.pad(x, (0, (tiles + 1) * tile - x.shape[0]), constant_values=fill)
    x = x.reshape(-1, tile)
    return jnp.concatenate([x[:-1], x[1:, :overlap]], axis=1)


def _sum_of_runs(
    rows: jax.Array, weights: jax.Array | None, layout: Layout, num_chosen: int
) -> jax.Array:
    """[received rows, L] the (weighted) sum of the layout's rows [NvS, L] that read each.

    Entries that share a received row arrive together, at most `num_chosen` of them. So each tile
    of arrivals, with the next few, is multiplied by a matrix that adds the rest of a run to its
    first entry: a scatter would add row after row.
    """
    window = -(-2 * num_chosen // LANES) * LANES
    tile = window - num_chosen
    cut = functools.partial(_windows, tile=tile, overlap=num_chosen)
    values = _rows_at(rows, cut(layout.row, fill=rows.shape[0]))
    run, is_first = cut(layout.run, fill=-1), cut(layout.is_first, fill=False)
    adds = is_first[:, :tile, None] & (run[:, :tile, None] == run[:, None, :])
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    matrix = adds.astype(wide)
    if weights is not None:
        matrix = matrix * cut(weights, fill=0).astype(wide)[:, None, :]
    # bfloat16 rows need no third part of the weights.
    precision = lax.Precision.HIGH if rows.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    sums = jnp.einsum('tji,til->tjl', matrix, values.astype(wide), precision=precision)
    return _rows_at(sums.astype(rows.dtype).reshape(-1, rows.shape[1]), layout.start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def expand(x: jax.Array, layout: Layout, num_chosen: int) -> jax.Array:
    """[NvS, L] received rows in the layout, 0 in padding."""
    return _rows_at(x, layout.received)


expand.defvjp(
    lambda x, layout, num_chosen: (_rows_at(x, layout.received), layout),
    lambda num_chosen, layout, d: (_sum_of_runs(d, None, layout, num_chosen), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def mix(y: jax.Array, weights: jax.Array, layout: Layout, num_chosen: int) -> jax.Array:
    """[received rows, L] in y's dtype: the sum of the rows y [NvS, L] of a received row's entries.

    weights: [arrivals] float32. The sum is taken in float32.
    """
    return _sum_of_runs(y, weights, layout, num_chosen)


def _mix_backward(num_chosen, residuals, d):
    y, weights, layout = residuals
    wide = jnp.promote_types(y.dtype, jnp.float32)
    d = _rows_at(d, layout.received).astype(wide)
    dy = d * _rows_at(weights, layout.arrival)[:, None]
    of_row = jnp.sum(d * y.astype(wide), axis=1)
    return dy.astype(y.dtype), _rows_at(of_row, layout.row).astype(weights.dtype), None


mix.defvjp(
    lambda y, weights, layout, num_chosen: (
        _sum_of_runs(y, weights, layout, num_chosen),
        (y, weights, layout),
    ),
    _mix_backward,
)
