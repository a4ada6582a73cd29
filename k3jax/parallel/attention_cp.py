"""How causal attention runs on chips that share a row, all doing the same amount of work.

The row is cut in 2 P pieces. For attention, chip r answers the queries of pieces r and
2 P - 1 - r (one early, one late), so each chip meets 2 P - 1 earlier pieces and its own two. Keys
and values never exist for the whole row: their narrow latents are gathered, and expanded piece by
piece. The backward pass expands them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.sequence import AXIS, Row
from pallas_kernels.common.platform import Implementation
from pallas_kernels.common.segments import Runs
from pallas_kernels.mla import Part, attend_part, merged, part_gradients

# (compressed [B, T, R], weight) -> keys [B, T, H, qk], values [B, T, H, V]
Expand = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _owner(piece: int, num_shards: int) -> int:
    """Which chip answers the queries of a piece."""
    return min(piece, 2 * num_shards - 1 - piece)


def to_balanced(x: jax.Array, num_shards: int) -> jax.Array:
    """This chip's tokens [B, T / P, ...] exchanged for those whose queries it answers."""
    halves = jnp.split(x, 2, axis=1)
    even, odd = (
        lax.ppermute(half, AXIS, [(r, _owner(2 * r + i, num_shards)) for r in range(num_shards)])
        for i, half in enumerate(halves)
    )
    return _in_order(even, odd)


def from_balanced(x: jax.Array, num_shards: int) -> jax.Array:
    """The inverse of `to_balanced`."""
    even, odd = jnp.split(_in_order(*jnp.split(x, 2, axis=1)), 2, axis=1)
    back = [
        lax.ppermute(half, AXIS, [(_owner(2 * r + i, num_shards), r) for r in range(num_shards)])
        for i, half in enumerate((even, odd))
    ]
    return jnp.concatenate(back, axis=1)


def _in_order(a: jax.Array, b: jax.Array) -> jax.Array:
    """a then b on chips with an even index, b then a on the others."""
    swapped = lax.axis_index(AXIS) % 2 == 1
    return jnp.concatenate([jnp.where(swapped, b, a), jnp.where(swapped, a, b)], axis=1)


class _Static(NamedTuple):
    expand: Expand
    num_shards: int
    implementation: Implementation | None


def sequence_attention(
    q: jax.Array,
    compressed: jax.Array,
    weight: jax.Array,
    row: Row,
    expand: Expand,
    *,
    num_shards: int,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of a row's documents.

    Args:
      q: [B, T / P, H, qk], queries of `to_balanced` tokens.
      compressed: [B, T / P, R], this chip's own tokens.
      weight: what `expand` needs to make keys and values; whole on every chip.
      row: the row's documents.
      expand: a function of the module level, or a partial of one: it is compared by identity.

    Returns:
      [B, T / P, H, V], for the tokens of q; and [H] float32, the largest logit of these tokens,
      scaled, -inf where they all are padding. No gradient flows through it.
    """
    static = _Static(expand, num_shards, implementation)
    return _attend(static, q, compressed, weight, row)


class _Pieces(NamedTuple):
    """compressed: [2 P, B, T / 2P, R], the whole row. runs: the row's, leaves [2 P, B, T / 2P]."""

    compressed: jax.Array
    runs: Runs | None


def _by_piece(x: jax.Array, num_shards: int) -> jax.Array:
    """[B, T, ...] -> [2 P, B, T / 2 P, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], 2 * num_shards, -1, *x.shape[2:]), 1, 0)


def _pieces(static: _Static, compressed: jax.Array, row: Row) -> _Pieces:
    whole = lax.all_gather(compressed, AXIS, axis=1, tiled=True)
    # What depends on the documents alone is the same in every layer: without the barrier, JAX takes
    # it out of a scan over layers, and keeps all masks of all steps at once.
    whole, runs = lax.optimization_barrier((whole, row.runs))
    split = functools.partial(_by_piece, num_shards=static.num_shards)
    return _Pieces(split(whole), None if runs is None else jax.tree.map(split, runs))


class _Step(NamedTuple):
    """One meeting of a piece of queries with an earlier piece of keys."""

    half: jax.Array  # 0: the early piece of queries, 1: the late one
    query: jax.Array  # their piece of the row
    key: jax.Array


def _step(s: jax.Array, row: Row, num_shards: int) -> _Step:
    early = row.index
    half = (s >= early).astype(jnp.int32)
    query = jnp.where(half == 1, 2 * num_shards - 1 - early, early)
    return _Step(half, query, s - half * early)


def _own_step(half: jax.Array, row: Row, num_shards: int) -> _Step:
    query = jnp.where(half == 1, 2 * num_shards - 1 - row.index, row.index)
    return _Step(half, query, query)


def _runs(pieces: _Pieces, step: _Step) -> tuple[Runs, Runs] | None:
    if pieces.runs is None:
        return None
    return tuple(jax.tree.map(lambda x, at=at: x[at], pieces.runs) for at in (step.query, step.key))


def _meets(runs: tuple[Runs, Runs] | None) -> jax.Array | bool:
    """Whether any query shares a document with a key."""
    if runs is None:
        return True
    return jnp.any(runs[1].number[:, -1] >= runs[0].number[:, 0])


def _when(meets: jax.Array | bool, function: Callable[[Any], Any], carry: Any) -> Any:
    return function(carry) if meets is True else lax.cond(meets, function, lambda c: c, carry)


def _halves(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [2, B, T / 2, ...]."""
    return jnp.stack(jnp.split(x, 2, axis=1))


def _forward(
    static: _Static, q: jax.Array, compressed: jax.Array, weight: jax.Array, row: Row
) -> tuple[Part, _Pieces]:
    """Part with a leading axis of the two pieces of queries."""
    pieces, queries = _pieces(static, compressed, row), _halves(q)

    def attend(step: _Step, causal: bool) -> Part:
        k, v = static.expand(pieces.compressed[step.key], weight)
        options = {'causal': causal, 'implementation': static.implementation}
        return attend_part(queries[step.half], k, v, _runs(pieces, step), **options)

    total = lax.map(
        lambda half: attend(_own_step(half, row, static.num_shards), True), jnp.arange(2)
    )

    def add(s: jax.Array, total: Part) -> Part:
        step = _step(s, row, static.num_shards)

        def meet(total: Part) -> Part:
            old = jax.tree.map(lambda x: x[step.half], total)
            new = merged(old, attend(step, False))
            return jax.tree.map(lambda x, y: x.at[step.half].set(y), total, new)

        return _when(_meets(_runs(pieces, step)), meet, total)

    return lax.fori_loop(0, 2 * static.num_shards - 1, add, total), pieces


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: _Static, q: jax.Array, compressed: jax.Array, weight: jax.Array, row: Row
) -> tuple[jax.Array, jax.Array]:
    return _attend_fwd(static, q, compressed, weight, row)[0]


def _attend_fwd(static: _Static, q, compressed, weight, row):
    total, _ = _forward(static, q, compressed, weight, row)
    o, top = total.o.astype(q.dtype), jnp.max(total.top, axis=(0, 1, 3))
    joined = jnp.concatenate(list(o), axis=1)
    return (joined, top), (q, compressed, weight, row, o, total.lse)


class _Gradients(NamedTuple):
    """q: [2, B, T / 2, H, qk]. compressed: [2 P, B, T / 2P, R]. weight. All float32 sums."""

    q: jax.Array
    compressed: jax.Array
    weight: jax.Array


def _attend_bwd(static: _Static, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]):
    do, _ = cotangents
    q, compressed, weight, row, o, lse = saved
    pieces, queries, do = _pieces(static, compressed, row), _halves(q), _halves(do)
    wide = lse.dtype

    def add(step: _Step, causal: bool, total: _Gradients) -> _Gradients:
        (k, v), pull = jax.vjp(static.expand, pieces.compressed[step.key], weight)
        half = step.half
        dq, dk, dv = part_gradients(
            queries[half],
            k,
            v,
            _runs(pieces, step),
            o[half],
            lse[half],
            do[half],
            causal=causal,
            implementation=static.implementation,
        )
        to_key, to_weight = pull((dk.astype(k.dtype), dv.astype(v.dtype)))
        return _Gradients(
            total.q.at[half].add(dq),
            total.compressed.at[step.key].add(to_key.astype(wide)),
            total.weight + to_weight.astype(wide),
        )

    zeros = (queries, pieces.compressed, weight)
    total = _Gradients(*(jnp.zeros(x.shape, wide) for x in zeros))
    total = lax.fori_loop(
        0, 2, lambda half, t: add(_own_step(half, row, static.num_shards), True, t), total
    )

    def earlier(s: jax.Array, total: _Gradients) -> _Gradients:
        step = _step(s, row, static.num_shards)
        meets = _meets(_runs(pieces, step))
        return _when(meets, functools.partial(add, step, False), total)

    total = lax.fori_loop(0, 2 * static.num_shards - 1, earlier, total)
    d_compressed = jnp.moveaxis(total.compressed, 0, 1)
    d_compressed = d_compressed.reshape(q.shape[0], -1, compressed.shape[-1])
    d_compressed = lax.psum_scatter(d_compressed, AXIS, scatter_dimension=1, tiled=True)
    dq = jnp.concatenate(list(total.q), axis=1)
    grads = (dq, q), (d_compressed, compressed), (total.weight, weight)
    return *(d.astype(x.dtype) for d, x in grads), None


_attend.defvjp(_attend_fwd, _attend_bwd)
