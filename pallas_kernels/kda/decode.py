"""What serving computes a step: KDA decode on a pool of states, by slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.checks import check_floating, check_integer, check_not_empty
from pallas_kernels.common.platform import check_implementation, form_for, run_form
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.kda.decode_kernel import WIDTH, decode_call, default_tiles, plan_decode
from pallas_kernels.kda.gate import Gate, check_gate, kda_gate
from pallas_kernels.kda.reference import kda_decode_step, l2_normalize

Implementation = Literal['xla', 'pallas']


class Conv(NamedTuple):
    """Weights of the short convolutions of q, k and v, each [H * K, W]; the last tap is current."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Projected(NamedTuple):
    """What a KDA layer projects from its input, before convolutions, norms and gate.

    q, k, v, f: [B, H, K], or [B, W, H, K] for a window of W tokens. beta: [B, H] or [B, W, H],
    after its sigmoid.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    f: jax.Array
    beta: jax.Array


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token a sequence: `kda_decode_step` on the states that `slots` name, in place.

    Args:
      q, k, v, g: [B, H, K]; q and k normalised and q scaled, g the log decay. beta: [B, H].
      pool: [num_slots, H, K, V] float32; donate it, or it is copied.
      slots: [B] int32, one a row, no two the same. Rows with a slot outside the pool are idle:
        their output is 0, and nothing is read or written for them.
      implementation: 'xla' | 'pallas' | None (best for the platform lowered for).

    Returns:
      o: [B, H, V] in v's dtype; the pool after the step.

    Raises:
      ValueError: shapes or dtypes disagree; slots, where their values are known, are not those of
        the pool or -1, or are taken twice.
      NotImplementedError: 'pallas' with K or V other than 128.
    """
    tokens = Projected(q, k, v, g, beta)
    _check('kda_decode', tokens, pool, slots, window=False)
    tokens = Projected(*(x[:, None] for x in tokens))
    o, pool, _ = _run(None, None, tokens, None, pool, None, slots, implementation)
    return o[:, 0], pool


def kda_decode_fused(
    tokens: Projected,
    pool: jax.Array,
    tails: jax.Array,
    slots: jax.Array,
    *,
    conv: Conv,
    gate: Gate,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token a sequence from its projections: convolutions, norms, gate and recurrence.

    Args:
      tokens: of one token a row.
      pool, slots, implementation: as for `kda_decode`.
      tails: [num_slots, 3, W - 1, H, K], the rows of q, k and v before this token, oldest first,
        in q's dtype; donate it too.

    Returns:
      o: [B, H, V] in v's dtype; the pools of states and of tails after the token.
    """
    _check('kda_decode_fused', tokens, pool, slots, window=False)
    _check_tails('kda_decode_fused', tokens, conv, tails, pool)
    check_gate('kda_decode_fused', tokens.f, *gate)
    tokens = Projected(*(x[:, None] for x in tokens))
    o, pool, tails = _run(None, None, tokens, (conv, gate), pool, tails, slots, implementation)
    return o[:, 0], pool, tails


def kda_decode_window(
    previous: Projected,
    accepted: jax.Array,
    tokens: Projected,
    pool: jax.Array,
    tails: jax.Array,
    slots: jax.Array,
    *,
    conv: Conv,
    gate: Gate,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of speculative decoding: commits what was accepted, then looks ahead.

    The pools come back as if `previous[:, :accepted]` had been decoded one by one; the outputs are
    those of `tokens` after that, of which nothing is committed. So a caller keeps the projections
    of a window and hands them in again as `previous`, with the number that verification accepted.

    Args:
      previous: the window before, [B, W', ...].
      accepted: [B] int32, how many of its tokens to commit, 0 to W'; clipped where traced.
      tokens: this window, [B, W, ...]: the token that verification gave, then the draft.
      pool, tails, slots, conv, gate, implementation: as for `kda_decode_fused`.

    Returns:
      o: [B, W, H, V] in v's dtype; the pools of states and of tails after the accepted tokens.

    Raises:
      ValueError: also for accepted, where its values are known, outside 0 to W'.

    Source: Kimi K3 report, speculative decoding with replayed projections.
    """
    name = 'kda_decode_window'
    _check(name, previous, pool, slots, window=True)
    _check(name, tokens, pool, slots, window=True)
    _check_tails(name, tokens, conv, tails, pool)
    check_gate(name, tokens.f, *gate)
    check_integer(name, accepted=accepted)
    if accepted.shape != slots.shape:
        raise ValueError(f'{name}: accepted has shape {accepted.shape}, wanted {slots.shape}')
    known, width = _known(accepted), previous.q.shape[1]
    if known is not None and ((known < 0) | (known > width)).any():
        raise ValueError(f'{name}: accepted is {known.tolist()}, wanted 0 to {width}, the window')
    return _run(previous, accepted, tokens, (conv, gate), pool, tails, slots, implementation)


Layer = tuple[Conv, Gate]


def _run(
    previous: Projected | None,
    accepted: jax.Array | None,
    tokens: Projected,
    layer: Layer | None,
    pool: jax.Array,
    tails: jax.Array | None,
    slots: jax.Array,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    check_implementation('kda_decode', implementation, get_args(Implementation))
    lower_bound = layer[1].lower_bound if layer else None
    # The bound is a number of the program, not an array of it.
    arrays = (previous, accepted, tokens, layer and (layer[0], layer[1][:2]), pool, tails, slots)

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args):
            *args, layer, pool, tails, slots = args
            if layer:
                layer = (layer[0], Gate(*layer[1], lower_bound))
            return function(*args, layer, pool, tails, slots)

        return run

    implementation = form_for('kda_decode', implementation, _unsupported(tokens, pool))
    # NumPy's arrays too, and slots of a type that cannot count the pool.
    arrays = jax.tree.map(jnp.asarray, arrays)
    arrays = (*arrays[:-1], arrays[-1].astype(jnp.int32))
    return run_form('kda_decode', implementation, of(_on_tpu), of(_in_xla), *arrays)


def _token(
    token: Projected, layer: Layer | None, state: jax.Array, tail: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """o [B, H, V], the state [B, H, K, V] and the tail [B, 3, W - 1, H, K] after one token."""
    q, k, v, f, beta = token
    if layer is None:
        return *kda_decode_step(q, k, v, f, beta, state), tail
    conv, gate = layer
    wide = state.dtype
    rows = jnp.concatenate([tail, jnp.stack([q, k, v], axis=1)[:, :, None].astype(tail.dtype)], 2)
    weight = jnp.stack(conv).astype(wide).reshape(3, *q.shape[1:], -1)
    total = jnp.sum(rows.astype(wide) * jnp.moveaxis(weight, -1, 1), axis=2)
    y = jax.nn.silu(total)
    q, k = l2_normalize(y[:, 0]) * q.shape[-1] ** -0.5, l2_normalize(y[:, 1])
    o, state = kda_decode_step(q, k, y[:, 2], kda_gate(f, *gate), beta, state)
    return o.astype(v.dtype), state, rows[:, :, 1:]


def _in_xla(
    previous: Projected | None,
    accepted: jax.Array | None,
    tokens: Projected,
    layer: Layer | None,
    pool: jax.Array,
    tails: jax.Array | None,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The definition: gather, one token after another, scatter."""
    active = (slots >= 0) & (slots < pool.shape[0])
    source = jnp.where(active, slots, 0)
    kept = pool[source], None if tails is None else tails[source]
    outputs, committed = [], kept
    if previous is not None:
        for i in range(previous.q.shape[1]):
            _, *after = _token(Projected(*(x[:, i] for x in previous)), layer, *committed)
            committed = [
                jnp.where((i < accepted).reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(after, committed, strict=True)
            ]
    carry = committed
    for i in range(tokens.q.shape[1]):
        o, *carry = _token(Projected(*(x[:, i] for x in tokens)), layer, *carry)
        outputs.append(jnp.where(active[:, None, None], o, 0))
    state, tail = carry if previous is None else committed
    target = jnp.where(active, slots, pool.shape[0])
    pool = pool.at[target].set(state, mode='drop')
    if tails is not None:
        tails = tails.at[target].set(tail, mode='drop')
    return jnp.stack(outputs, axis=1), pool, tails


def _on_tpu(
    interpret: bool,
    previous: Projected | None,
    accepted: jax.Array | None,
    tokens: Projected,
    layer: Layer | None,
    pool: jax.Array,
    tails: jax.Array | None,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    num_slots, heads = pool.shape[:2]
    rows, dtype = slots.shape[0], tokens.v.dtype
    replayed, ahead = tokens.q.shape[1], 0
    if previous is not None:
        replayed, ahead = previous.q.shape[1], tokens.q.shape[1]
        tokens = Projected(
            *(jnp.concatenate(pair, axis=1) for pair in zip(previous, tokens, strict=True))
        )
    shape = {'B': rows, 'H': heads, 'W': replayed}
    plan = plan_decode(
        rows,
        heads,
        num_slots,
        replayed=replayed,
        ahead=ahead,
        taps=0 if layer is None else layer[0].q.shape[-1],
        lower_bound=None if layer is None else layer[1].lower_bound,
        tiles=tiles_for('kda', 'decode', shape, str(tokens.q.dtype), default_tiles(heads)),
    )
    if accepted is None:
        accepted = jnp.ones((rows,), jnp.int32)
    more = plan.rows - rows
    slots = jnp.pad(slots.astype(jnp.int32), (0, more), constant_values=-1)
    accepted = jnp.pad(accepted.astype(jnp.int32), (0, more))
    beta = jnp.broadcast_to(tokens.beta[..., None].astype(jnp.float32), tokens.q.shape)
    arrays = [
        jnp.pad(x, ((0, more), (0, 0), (0, 0), (0, 0))) if more else x for x in (*tokens[:4], beta)
    ]
    conv = ()
    if layer is not None:
        (q, k, v), gate = layer
        weight = jnp.stack([q, k, v]).astype(jnp.float32).reshape(3, heads, WIDTH, -1)
        rate = jnp.exp(gate.A_log.astype(jnp.float32))[:, None]
        conv = (
            jnp.moveaxis(weight, -1, 1),
            jnp.broadcast_to(rate, (heads, WIDTH)),
            gate.dt_bias.astype(jnp.float32).reshape(heads, WIDTH),
        )
    o, pool, *tails = decode_call(
        slots,
        accepted,
        tuple(arrays),
        conv,
        pool,
        tails,
        plan=plan,
        interpret=interpret,
    )
    return o[:rows].astype(dtype), pool, tails[0] if tails else None


def _unsupported(tokens: Projected, pool: jax.Array) -> str | None:
    """Why the TPU kernel cannot take these arguments."""
    if pool.shape[2:] != (WIDTH, WIDTH):
        return f'takes K = V = {WIDTH}, got {pool.shape[2:]}'
    if pool.dtype != jnp.float32:
        return f'takes a float32 pool, got {pool.dtype}'
    if tokens.v.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes bfloat16 or float32 tokens, got {tokens.v.dtype}'
    return None


def _known(array: jax.Array) -> np.ndarray | None:
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def _check(name: str, tokens: Projected, pool: jax.Array, slots: jax.Array, window: bool) -> None:
    q = tokens.q
    rank = 4 if window else 3
    if q.ndim != rank:
        raise ValueError(f'{name}: q has shape {q.shape}, wanted {rank} axes')
    if slots.ndim != 1 or pool.ndim != 4:
        raise ValueError(
            f'{name}: got slots {slots.shape} and pool {pool.shape}, wanted [B] and '
            '[num_slots, H, K, V]'
        )
    num_slots, heads, key_dim, value_dim = pool.shape
    lead = (slots.shape[0], *q.shape[1:-2], heads)
    wanted = dict.fromkeys(('q', 'k', 'f'), (*lead, key_dim)) | {'v': (*lead, value_dim)}
    for field, array in tokens._asdict().items():
        want = wanted.get(field, lead)
        if array.shape != want:
            raise ValueError(
                f'{name}: {field} has shape {array.shape}, wanted {want} '
                f'for slots {slots.shape} and pool {pool.shape}'
            )
    check_not_empty(name, q=q, pool=pool)
    check_floating(name, **tokens._asdict())
    check_integer(name, slots=slots)
    if pool.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f'{name}: pool is {pool.dtype}, wanted float32')
    known = _known(slots)
    if known is None:
        return
    if (known < -1).any() or (known >= num_slots).any():
        raise ValueError(
            f'{name}: slots are {known.tolist()}, wanted 0 to {num_slots - 1}, or -1 for idle rows'
        )
    active = known[known >= 0]
    if len(np.unique(active)) < len(active):
        raise ValueError(f'{name}: slots {known.tolist()} name a slot twice')


def _check_tails(
    name: str, tokens: Projected, conv: Conv, tails: jax.Array, pool: jax.Array
) -> None:
    num_slots, heads, key_dim, value_dim = pool.shape
    taps = conv.q.shape[-1]
    if key_dim != value_dim:
        raise ValueError(f'{name}: K is {key_dim} and V {value_dim}, wanted equal ones')
    for field, weight in conv._asdict().items():
        if weight.shape != (heads * key_dim, taps):
            raise ValueError(
                f'{name}: conv.{field} has shape {weight.shape}, wanted {(heads * key_dim, taps)}'
            )
    want = (num_slots, 3, taps - 1, heads, key_dim)
    if tails.shape != want or tails.dtype != tokens.q.dtype:
        raise ValueError(
            f'{name}: tails are {tails.shape} {tails.dtype}, wanted {want} {tokens.q.dtype}'
        )
