"""How arrays reach the kernels: layouts, padding of widths, grids, and the custom gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.platform import kernel_call
from pallas_kernels.common.segments import Runs
from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.kda.gate import GateArrays
from pallas_kernels.kda.tpu.backward import backward_kernel
from pallas_kernels.kda.tpu.forward import forward_kernel
from pallas_kernels.kda.tpu.plan import KernelPlan
from pallas_kernels.kda.tpu.words import CHUNK, constant_words

LANES = 128
VMEM_LIMIT = 64 * 2**20  # what a v5p core allows
SMALLEST_BETA = 2.0**-60  # the backward pass divides by beta; below this beta's effect rounds away
MAX_WIDTH = 256  # of K and V
# Heads a program at K = V = 128; more gain nothing, or do not fit in VMEM.
MOST_HEADS = {
    ('bfloat16', 'forward'): 16,
    ('bfloat16', 'backward'): 12,
    ('float32', 'forward'): 4,
    ('float32', 'backward'): 4,
}
LOWEST_BOUND = -5.0  # of g, for the dense tiles


def run_rows(runs: Runs | None, batch: int, length: int) -> jax.Array:
    """[B, N, 8, C] int32: run number of each token, of the token before the chunk, of the chunk's
    last token, and whether it is real; rows past T are padding."""
    if runs is None:
        runs = Runs(jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length), bool))
    padding = -length % CHUNK
    number = jnp.pad(runs.number, ((0, 0), (0, padding)), mode='edge').reshape(batch, -1, CHUNK)
    real = jnp.pad(runs.real, ((0, 0), (0, padding))).reshape(batch, -1, CHUNK)
    leaving = number[:, :, -1:]
    entering = jnp.pad(leaving[:, :-1], ((0, 0), (1, 0), (0, 0)))
    rows = [jnp.broadcast_to(x, number.shape) for x in (number, entering, leaving, real)]
    return jnp.pad(jnp.stack(rows, axis=2).astype(jnp.int32), ((0, 0), (0, 0), (0, 4), (0, 0)))


def _constants(plan: KernelPlan) -> dict[str, np.ndarray]:
    constants = {'masks': constant_words(plan.dtype)[1]}
    if not plan.bounded:
        constants['bits'] = constant_words(jnp.float32)[1]
    return constants


def _beta_rows(beta: jax.Array, heads: int) -> jax.Array:
    """[B, T, H] -> [B, H / heads, N, heads, C] float32, at least SMALLEST_BETA."""
    batch, length, num_heads = beta.shape
    beta = jnp.pad(beta.astype(jnp.float32), ((0, 0), (0, -length % CHUNK), (0, 0)))
    beta = jnp.maximum(beta, SMALLEST_BETA)
    beta = beta.reshape(batch, -1, CHUNK, num_heads // heads, heads)
    return jnp.transpose(beta, (0, 3, 1, 4, 2))


def _beta_of_rows(rows: jax.Array, length: int) -> jax.Array:
    """Undoes `_beta_rows`."""
    batch, programs, _, heads, _ = rows.shape
    beta = jnp.transpose(rows, (0, 2, 4, 1, 3)).reshape(batch, -1, programs * heads)
    return beta[:, :length]


class _Layout:
    """Block specs and whole shapes of the arrays that the kernels exchange, by name."""

    def __init__(self, plan: KernelPlan, arrays: dict[str, jax.Array], backward: bool) -> None:
        batch, length, width = arrays['q'].shape
        heads, key, value = plan.heads, plan.key_width, plan.value_width
        programs, steps = width // (heads * key), pl.cdiv(length, CHUNK)
        self.grid = (batch, programs, steps)
        self.constants = _constants(plan)

        def at(t):
            return steps - 1 - t if backward else t

        def tokens(width: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, CHUNK, heads * width), lambda b, h, t: (b, at(t), h))

        def by_chunk(rows: int, columns: int) -> pl.BlockSpec:
            shape = (1, 1, heads, rows, columns)
            return pl.BlockSpec(shape, lambda b, h, t: (b, at(t), h, 0, 0))

        def whole(x: np.ndarray) -> pl.BlockSpec:
            return pl.BlockSpec(x.shape, lambda b, h, t: (0, 0))

        keys, values = tokens(key), tokens(value)
        state = pl.BlockSpec((1, heads, key, value), lambda b, h, t: (b, h, 0, 0))
        beta = pl.BlockSpec((1, 1, 1, heads, CHUNK), lambda b, h, t: (b, h, at(t), 0, 0))
        self.specs = {name: whole(x) for name, x in self.constants.items()} | {
            'q': keys,
            'k': keys,
            'g': keys,
            'v': values,
            'beta': beta,
            'gate': pl.BlockSpec((8, heads * key), lambda b, h, t: (0, h)),
            'runs': pl.BlockSpec((1, 1, 8, CHUNK), lambda b, h, t: (b, at(t), 0, 0)),
            'initial': state,
            'o': values,
            'final': state,
            'states': by_chunk(key, value),
            'inverse': by_chunk(CHUNK, CHUNK),
            'u': values,
            'do': values,
            'd_final': state,
            'dq': keys,
            'dk': keys,
            'dg': keys,
            'dv': values,
            'd_beta': beta,
            'd_gate': pl.BlockSpec((1, 8, heads * key), lambda b, h, t: (b, 0, h)),
            'd_initial': state,
        }
        count, dtype = programs * heads, plan.dtype
        states = jax.ShapeDtypeStruct((batch, count, key, value), jnp.float32)
        keys, values = (batch, length, count * key), (batch, length, count * value)
        self.shapes = {
            'o': jax.ShapeDtypeStruct(values, arrays['v'].dtype) if 'v' in arrays else None,
            'final': states,
            'states': jax.ShapeDtypeStruct((batch, steps, count, key, value), dtype),
            'inverse': jax.ShapeDtypeStruct((batch, steps, count, CHUNK, CHUNK), dtype),
            'u': jax.ShapeDtypeStruct(values, dtype),
            'dq': jax.ShapeDtypeStruct(keys, arrays['q'].dtype),
            'dk': jax.ShapeDtypeStruct(keys, arrays['k'].dtype),
            'dg': jax.ShapeDtypeStruct(keys, arrays['g'].dtype),
            'dv': jax.ShapeDtypeStruct(values, arrays['do'].dtype) if 'do' in arrays else None,
            'd_beta': jax.ShapeDtypeStruct((batch, programs, steps, heads, CHUNK), jnp.float32),
            'd_gate': jax.ShapeDtypeStruct((batch, 8, count * key), jnp.float32),
            'd_initial': states,
        }


def _launch(
    plan: KernelPlan,
    kernel: Callable[..., None],
    name: str,
    arrays: dict[str, jax.Array],
    outputs: list[str],
    interpret: bool,
) -> dict[str, jax.Array]:
    arrays = arrays | {'beta': _beta_rows(arrays['beta'], plan.heads)}
    layout = _Layout(plan, arrays, backward=name == 'kda_backward')
    inputs = layout.constants | arrays
    names = [*inputs, *outputs, 'state']
    arrays_out = [layout.shapes[x] for x in outputs]
    batch, length, width = arrays['k'].shape
    products = 32 if name == 'kda_backward' else 14  # of K x V, a token and head
    results = pl.pallas_call(
        functools.partial(kernel, plan, names),
        name=name,
        grid=layout.grid,
        in_specs=[layout.specs[x] for x in inputs],
        out_specs=[layout.specs[x] for x in outputs],
        out_shape=arrays_out,
        cost_estimate=pl.CostEstimate(
            flops=products * batch * length * width * plan.value_width,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays.values(), *arrays_out)),
            transcendentals=0,
        ),
        scratch_shapes=[pltpu.VMEM((plan.heads, plan.key_width, plan.value_width), jnp.float32)],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _outputs(plan: KernelPlan, backward: bool) -> list[str]:
    if not backward:
        return ['o', 'final'] + (['states', 'inverse', 'u'] if plan.residuals else [])
    outputs = ['dq', 'dk', 'dg', 'dv', 'd_beta', 'd_initial']
    return outputs + (['d_gate'] if plan.gate != 'given' else [])


def result_shapes(
    plan: KernelPlan, arrays: dict[str, jax.ShapeDtypeStruct], backward: bool
) -> list[jax.ShapeDtypeStruct]:
    """What `forward_call` or `backward_call` writes, told without tracing it."""
    layout = _Layout(plan, arrays, backward)
    return [layout.shapes[name] for name in _outputs(plan, backward)]


@functools.partial(jax.jit, static_argnums=(0, 2))  # layers alike are traced once
def forward_call(
    plan: KernelPlan, arrays: dict[str, jax.Array], interpret: bool
) -> dict[str, jax.Array]:
    """One forward kernel.

    Args:
      arrays: q, k, g [B, T, H K], v [B, T, H V], beta [B, T, H]; where the plan has them gate
        [8, H K], runs [B, N, 8, C], initial [B, H, K, V].

    Returns:
      o [B, T, H V], final [B, H, K, V]; with residuals states [B, N, H, K, V], inverse
      [B, N, H, C, C], u [B, T, H V].
    """
    outputs = _outputs(plan, backward=False)
    return _launch(plan, forward_kernel, 'kda_forward', arrays, outputs, interpret)


@functools.partial(jax.jit, static_argnums=(0, 2))
def backward_call(
    plan: KernelPlan, arrays: dict[str, jax.Array], interpret: bool
) -> dict[str, jax.Array]:
    """One backward kernel.

    Args:
      arrays: as for `forward_call` without v and initial, and states, inverse, u as it left them,
        do [B, T, H V], d_final [B, H, K, V].

    Returns:
      dq, dk, dg [B, T, H K], dv [B, T, H V], d_beta as beta, d_initial [B, H, K, V]; with a gate
      d_gate [B, 8, H K], sums over T for the rate (or scale) and for the shift.
    """
    outputs = _outputs(plan, backward=True)
    grads = _launch(plan, backward_kernel, 'kda_backward', arrays, outputs, interpret)
    grads['d_beta'] = _beta_of_rows(grads['d_beta'], arrays['q'].shape[1])
    return grads


class Plans(NamedTuple):
    """interpret: None where the platform decides. alone: of a forward pass that nothing follows.
    forward, backward: of a pair; in the precise mode it computes in float32, since more of a
    gradient's products cancel."""

    interpret: bool | None
    alone: KernelPlan
    forward: KernelPlan
    backward: KernelPlan


def _run(
    call: Callable[..., Any], plan: KernelPlan, interpret: bool | None, arrays: dict[str, jax.Array]
) -> Any:
    def on_tpu(interpret: bool, arrays: dict[str, jax.Array]) -> Any:
        return call(plan, arrays, interpret)

    return kernel_call(on_tpu, arrays) if interpret is None else on_tpu(interpret, arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plans: Plans, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H V] and the final state; `arrays` as in `forward_call`."""
    results = _run(forward_call, plans.alone, plans.interpret, arrays)
    return results['o'], results['final']


def _kda_forward(plans, arrays):
    results = _run(forward_call, plans.forward, plans.interpret, arrays)
    kept = {name: x for name, x in arrays.items() if name not in ('v', 'initial')}
    kept |= {name: results[name] for name in ('states', 'inverse', 'u')}
    return (results['o'], results['final']), kept


def _kda_backward(plans, kept, cotangents):
    plan = plans.backward
    do, d_final = cotangents
    d = _run(backward_call, plan, plans.interpret, kept | {'do': do, 'd_final': d_final})
    grads = {'q': d['dq'], 'k': d['dk'], 'v': d['dv'], 'g': d['dg']}
    grads['beta'] = d['d_beta'].astype(kept['beta'].dtype)
    if plan.gate != 'given':
        nonlinear, shift = jnp.sum(d['d_gate'], axis=0)[:2]
        rows = jnp.zeros_like(kept['gate']).at[1].set(shift)
        if plan.gate == 'bounded':
            rows = rows.at[0].set(nonlinear)
        else:
            scale = kept['gate'][2]
            rows = rows.at[2].set(nonlinear / jnp.where(scale == 0, 1.0, scale))
        grads['gate'] = rows
    if plan.packed:
        grads['runs'] = None
    if plan.initial:
        grads['initial'] = d['d_initial']
    return (grads,)


_kda.defvjp(_kda_forward, _kda_backward)


def _gate_rows(
    gate: GateArrays, is_bounded: bool, heads: int, width: int, padded: int
) -> jax.Array:
    """`GateRows` of all heads, [8, H K] float32."""
    rate = jnp.exp(gate.A_log.astype(jnp.float32))[:, None]
    bias = gate.dt_bias.astype(jnp.float32).reshape(heads, width)
    one = jnp.ones_like(bias)
    rows = (rate * one, rate * bias, one) if is_bounded else (one, bias, rate * one)
    rows = [jnp.pad(row, ((0, 0), (0, padded - width))).reshape(-1) for row in rows]
    return jnp.pad(jnp.stack(rows), ((0, 5), (0, 0)))


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def heads_a_program(batch: int, heads: int, key: int, value: int, most: int) -> int:
    """Heads that one program interleaves: many, and an even number of programs for two cores."""
    limit = max(1, most * LANES * LANES // (key * value))
    choices = [n for n in range(1, heads + 1) if heads % n == 0 and n <= limit]
    return max(choices, key=lambda n: (batch * heads // n % 2 == 0, n))


def why_unsupported(q: jax.Array, v: jax.Array) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    widths = {'K': q.shape[-1], 'V': v.shape[-1]}
    for name, width in widths.items():
        if width > MAX_WIDTH:
            return f'{name} is {width}, wanted at most {MAX_WIDTH}'
    if v.dtype not in (jnp.bfloat16, jnp.float32):
        return f'v is {v.dtype}, wanted bfloat16 or float32'
    return None


def tpu_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    gate: GateArrays | None,
    initial_state: jax.Array | None,
    runs: Runs | None,
    *,
    lower_bound: float | None,
    qk_l2norm: bool,
    precise: bool,
    interpret: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """KDA by the TPU kernels; arguments as in `kda`.

    lower_bound: of the gate or, without one, what g is promised to stay above; None for none.
    interpret: None where the platform lowered for decides.

    Returns:
      o: [B, T, H, V] in v's dtype; final state [B, H, K, V] float32.
    """
    batch, length, heads, width = q.shape
    value_width = v.shape[-1]
    key, value = _padded(width), _padded(value_width)
    dtype = jnp.dtype(v.dtype)
    kind = 'given' if gate is None else 'softplus' if lower_bound is None else 'bounded'
    shape = {'B': batch, 'H': heads, 'K': key, 'V': value}

    def plan_of(pass_name: str, operands: str, **rest: Any) -> KernelPlan:
        most = heads_a_program(batch, heads, key, value, MOST_HEADS[operands, pass_name])
        return KernelPlan(
            heads=tiles_for('kda', pass_name, shape, operands, {'heads': most})['heads'],
            key_width=key,
            value_width=value,
            dtype=jnp.dtype(operands),
            gate=kind,
            lower_bound=lower_bound if kind == 'bounded' else None,
            bounded=lower_bound is not None and lower_bound >= LOWEST_BOUND,
            l2norm=qk_l2norm,
            scale=width**-0.5,
            initial=initial_state is not None,
            packed=runs is not None or length % CHUNK != 0,
            **rest,
        )

    split = precise and dtype == jnp.bfloat16
    trained = 'float32' if precise else dtype.name
    plans = Plans(
        interpret,
        plan_of('forward', dtype.name, precise=split),
        plan_of('forward', trained, residuals=True),
        plan_of('backward', trained),
    )

    def flat(x: jax.Array, padded: int) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padded - x.shape[-1])))
        return x.reshape(batch, length, heads * padded)

    if gate is None:
        g = g.astype(jnp.float32)
    arrays = {'q': flat(q, key), 'k': flat(k, key), 'v': flat(v, value), 'g': flat(g, key)}
    # 0 on padding, as everything that the kernel reads; there it clears only what is wide.
    arrays['beta'] = beta if runs is None else jnp.where(runs.real[..., None], beta, 0)
    if gate is not None:
        arrays['gate'] = _gate_rows(gate, kind == 'bounded', heads, width, key)
    if plans.alone.packed:
        arrays['runs'] = run_rows(runs, batch, length)
    if initial_state is not None:
        space = ((0, 0), (0, 0), (0, key - width), (0, value - value_width))
        arrays['initial'] = jnp.pad(initial_state.astype(jnp.float32), space)
    o, final = _kda(plans, arrays)
    o = o.reshape(batch, length, heads, value)[..., :value_width]
    return o, final[:, :, :width, :value_width]
