"""How KDA runs on chips that share a row: what each part does to a state, and its prefix.

A part of a row acts on the state that comes into it as S_out = M S_in + S. Running the ordinary
chunk kernel once on [v | 0] from the state [0 | 1] gives both S and M, in float32; they are
gathered, every chip replays the parts before its own, and runs its part from the state it finds.
Backwards, dS_in = M^T dS_out + dS, with dS the part's own for dS_out = 0, replays the parts behind.

Source: Kimi K3 report, context parallelism of KDA (KCP).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.parallel.sequence import AXIS, Row
from pallas_kernels.common.platform import Implementation
from pallas_kernels.kda import Gate, kda

EXACT = lax.Precision.HIGHEST  # products of many transitions lose everything in bfloat16


class _Static(NamedTuple):
    lower_bound: float | None
    implementation: Implementation | None


class _Arrays(NamedTuple):
    """What has gradients: the inputs of `kda` with a gate."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    f: jax.Array
    beta: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array


def sequence_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    f: jax.Array,
    beta: jax.Array,
    gate: Gate,
    row: Row,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`kda` with a gate and norms of q and k, on one chip's part of each row.

    Args: as of `kda`, T being this chip's tokens; initial_state is the row's, on every chip.

    Returns:
      o: this chip's part; final_state: the row's, on every chip, without a gradient.
    """
    arrays = _Arrays(q, k, v, f, beta, gate.A_log, gate.dt_bias)
    batch, _, heads, width = q.shape
    if initial_state is None:
        wide = jnp.promote_types(v.dtype, jnp.float32)
        initial_state = jnp.zeros((batch, heads, width, v.shape[-1]), wide)
    static = _Static(gate.lower_bound, implementation)
    return _run(static, arrays, segment_ids, row, initial_state)


def _local(
    static: _Static, segment_ids: jax.Array | None, arrays: _Arrays, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    *inputs, A_log, dt_bias = arrays
    return kda(
        *inputs,
        gate=Gate(A_log, dt_bias, static.lower_bound),
        initial_state=state,
        segment_ids=segment_ids,
        qk_l2norm=True,
        implementation=static.implementation,
    )


class _Effects(NamedTuple):
    """transition: [P, B, H, K, K]; state: [P, B, H, K, V]; both float32."""

    transition: jax.Array
    state: jax.Array


def _effects(
    static: _Static, segment_ids: jax.Array | None, arrays: _Arrays, like: jax.Array
) -> _Effects:
    """What each part of the row does to a state; `like` is one."""
    width, num_values = like.shape[-2:]
    v = jnp.pad(arrays.v, ((0, 0), (0, 0), (0, 0), (0, width)))
    start = jnp.broadcast_to(jnp.eye(width, dtype=like.dtype), (*like.shape[:-1], width))
    start = jnp.concatenate([jnp.zeros_like(like), start], axis=-1)
    _, final = _local(static, segment_ids, arrays._replace(v=v), start)
    parts = lax.all_gather(final, AXIS)
    return _Effects(parts[..., num_values:], parts[..., :num_values])


def _expand(flags: jax.Array) -> jax.Array:
    """[B] -> [B, 1, 1, 1]."""
    return flags[:, None, None, None]


def _forward(effects: _Effects, row: Row, initial_state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state that comes into this chip's part, and the one that leaves the row."""

    def step(p: jax.Array, carry: tuple[jax.Array, jax.Array]):
        state, own = carry
        state = jnp.where(_expand(row.continues[p]), state, 0)
        own = jnp.where(p == row.index, state, own)
        moved = jnp.matmul(effects.transition[p], state, precision=EXACT)
        return moved + effects.state[p], own

    # What comes into the row belongs to its first document.
    row = row._replace(continues=row.continues.at[0].set(True))
    final, own = lax.fori_loop(
        0, row.continues.shape[0], step, (initial_state, jnp.zeros_like(initial_state))
    )
    return own, final


def _backward(effects: _Effects, row: Row) -> jax.Array:
    """The gradient of the state that leaves this chip's part; effects.state: dS of each part."""
    num = row.continues.shape[0]

    def step(i: jax.Array, gradient: jax.Array) -> jax.Array:
        p = num - 1 - i
        moved = jnp.einsum('bhij,bhiv->bhjv', effects.transition[p], gradient, precision=EXACT)
        before = jnp.where(_expand(row.continues[p]), moved + effects.state[p], 0)
        return jnp.where(p > row.index, before, gradient)

    return lax.fori_loop(0, num, step, jnp.zeros_like(effects.state[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    static: _Static,
    arrays: _Arrays,
    segment_ids: jax.Array | None,
    row: Row,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    effects = _effects(static, segment_ids, arrays, initial_state)
    own, final = _forward(effects, row, initial_state)
    o, _ = _local(static, segment_ids, arrays, own)
    return o, final


def _run_fwd(static: _Static, arrays: _Arrays, segment_ids, row: Row, initial_state: jax.Array):
    effects = _effects(static, segment_ids, arrays, initial_state)
    own, final = _forward(effects, row, initial_state)
    (o, _), pull = jax.vjp(functools.partial(_local, static, segment_ids), arrays, own)
    return (o, final), (pull, effects.transition, row)


def _run_bwd(static: _Static, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]):
    del static
    pull, transition, row = saved
    do, _ = cotangents
    nothing = jnp.zeros(transition.shape[1:-1] + do.shape[-1:], transition.dtype)
    _, own = pull((do, nothing))
    behind = _backward(_Effects(transition, lax.all_gather(own, AXIS)), row)
    arrays, _ = pull((do, behind))
    return arrays, None, None, None


_run.defvjp(_run_fwd, _run_bwd)
