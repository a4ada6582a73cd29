"""How arguments of training attention reach the TPU kernels: whole blocks, whole registers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.segments import Runs
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.mla.backward_kernel import backward
from pallas_kernels.mla.blocks import (
    BLOCK,
    LANES,
    NO_KEY,
    NO_QUERY,
    ONE_ROW,
    How,
    Plan,
    heads_a_program,
    up_to,
)
from pallas_kernels.mla.forward_kernel import forward

PairOfRuns = tuple[Runs, Runs]  # of the queries, of the keys

_MOST_LANES = 512  # of q and k, and of v, in one program


def _default_block(length: int) -> int:
    """The largest block that adds at most an eighth of a row's tokens as padding."""
    for block in (BLOCK, BLOCK // 2):
        if up_to(length, block) - length <= length // 8:
            return block
    return min(LANES, BLOCK)


def plan_for(
    pass_name: str,
    q: jax.Array,
    v: jax.Array,
    packed: bool,
    block: int | None = None,
    how: How = ONE_ROW,
) -> Plan:
    """How a call is cut; `block` overrides what is stored for the shape."""
    batch, length, heads, key_width = q.shape
    shape = {'B': batch, 'T': length, 'H': heads, 'K': key_width, 'V': v.shape[-1]}
    default = {'block': _default_block(length)}
    size = block or tiles_for('mla', pass_name, shape, q.dtype.name, default)['block']
    together = heads_a_program(heads, key_width)
    return Plan(
        heads=together or 1,
        key_width=key_width if together else up_to(key_width, LANES),
        value_width=up_to(v.shape[-1], LANES),
        block=size,
        num_blocks=up_to(length, size) // size,
        packed=packed,
        skips=packed and how.causal,
        dtype=q.dtype,
        scale=key_width**-0.5,
        causal=how.causal,
        out_dtype=how.out_dtype or v.dtype,
    )


def unsupported(q: jax.Array, v: jax.Array) -> str | None:
    """Why the TPU kernels cannot take these arguments."""
    if q.dtype not in (jnp.bfloat16, jnp.float32) or v.dtype != q.dtype:
        return f'takes bfloat16 or float32 throughout, got {q.dtype} and {v.dtype}'
    plan = plan_for('forward', q, v, False, BLOCK)
    for name, width in (('q and k', plan.key_width), ('v', plan.value_width)):
        if plan.heads * width > _MOST_LANES:
            return f'takes {name} up to {_MOST_LANES // plan.heads} wide, got {width} (padded)'
    return None


def _rows(x: jax.Array, width: int, plan: Plan, runs: Runs | None) -> jax.Array:
    """[B, T, H, D] as [B, whole blocks, H * width]; zeros on padding and past T and D."""
    batch, length, heads, size = x.shape
    if runs is not None:
        x = jnp.where(runs.real[:, :, None, None], x, 0)
    past = plan.num_blocks * plan.block - length
    if past or width != size:
        x = jnp.pad(x, ((0, 0), (0, past), (0, 0), (0, width - size)))
    return x.reshape(batch, -1, heads * width)


def _operands(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, runs: PairOfRuns | None):
    query_runs, key_runs = runs or (None, None)
    return (
        _rows(q, plan.key_width, plan, query_runs),
        _rows(k, plan.key_width, plan, key_runs),
        _rows(v, plan.value_width, plan, key_runs),
    )


def _run_operands(plan: Plan, runs: PairOfRuns | None) -> tuple[jax.Array, ...]:
    """Query runs, key runs, first key block of each query block, last query block of each key's.

    Run numbers never fall along a row, so the blocks that share a document lie side by side.
    """
    if runs is None:
        return ()
    past = ((0, 0), (0, plan.num_blocks * plan.block - runs[0].number.shape[1]))
    rows, blocks = [], []
    for one, none in zip(runs, (NO_QUERY, NO_KEY), strict=True):
        number = jnp.where(one.real, one.number, none)
        rows.append(jnp.pad(number, past, constant_values=none)[:, None])
        number = jnp.pad(one.number, past, mode='edge')
        blocks.append(number.reshape(number.shape[0], plan.num_blocks, plan.block))
    starts, ends = blocks[0][:, :, 0], blocks[1][:, :, -1]
    meets = ends[:, None, :] >= starts[:, :, None]  # [B, query block, key block]
    first_key = jnp.sum(~meets, axis=2, dtype=jnp.int32)
    last_query = jnp.sum(meets, axis=1, dtype=jnp.int32) - 1
    return *rows, first_key, last_query


def _masked(q: jax.Array, runs: PairOfRuns | None, how: How, block: int) -> PairOfRuns | None:
    """Runs that keep keys past the last one out, where being causal does not."""
    if runs is not None or how.causal or q.shape[1] % block == 0:
        return runs
    one = Runs(jnp.zeros(q.shape[:2], jnp.int32), jnp.ones(q.shape[:2], bool))
    return one, one


def _unrows(x: jax.Array, like: jax.Array) -> jax.Array:
    """The inverse of `_rows`."""
    batch, length, heads, width = like.shape
    return x.reshape(batch, x.shape[1], heads, -1)[:, :length, :, :width]


def attention_on_tpu(
    how: How,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: PairOfRuns | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o [B, T, H, V], log denominators and largest logits a query, [B, H, T] float32."""
    runs = _masked(q, runs, how, plan_for('forward', q, v, False, how=how).block)
    plan = plan_for('forward', q, v, runs is not None, how=how)
    *given, first_key, _ = _run_operands(plan, runs) or (None, None)
    given = (*given, first_key) if given else ()
    call = functools.partial(forward, plan=plan, interpret=interpret)
    o, *stats = call(*_operands(plan, q, k, v, runs), given)
    batch, length, heads, _ = q.shape
    return _unrows(o, v), *(x.reshape(batch, heads, -1)[:, :, :length] for x in stats)


def gradients_on_tpu(
    how: How,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    runs: PairOfRuns | None,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v from what `attention_on_tpu` returned and the cotangent of o.

    With keys in several parts, o and lse are those of all parts together.
    """
    runs = _masked(q, runs, how, plan_for('backward', q, v, False, how=how).block)
    plan = plan_for('backward', q, v, runs is not None, how=how)
    *given, _, last_query = _run_operands(plan, runs) or (None, None)
    given = (*given, last_query) if given else ()
    do = do.astype(v.dtype)
    if runs is not None:
        do = jnp.where(runs[0].real[:, :, None, None], do, 0)
    delta = jnp.einsum(
        'bthv,bthv->bht', do.astype(jnp.float32), o.astype(jnp.float32), precision='highest'
    )

    def stats(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.num_blocks * plan.block - x.shape[2])))
        return x.reshape(-1, plan.heads, x.shape[2])

    operands = (*_operands(plan, q, k, v, runs), _rows(do, plan.value_width, plan, None))
    dq, dk, dv = backward(
        *operands, stats(lse), stats(delta), given, plan=plan, interpret=interpret
    )
    return _unrows(dq, q), _unrows(dk, k), _unrows(dv, v)
