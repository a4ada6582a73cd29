"""What a decode step computes on registers: tokens made ready, one token, several tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kda.reference import L2_EPS

F32 = jnp.float32
WIDTH = 128  # K and V
_SUBLANES = 8


def gate(f: jax.Array, rate: jax.Array, bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """`kda_gate` of f [n, heads, K]; rate and bias [heads, K]."""
    shifted = f + bias
    if lower_bound is None:
        return -rate * (jnp.maximum(shifted, 0) + jnp.log1p(jnp.exp(-jnp.abs(shifted))))
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def normalised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def convolved(taps: list[jax.Array], weight_ref, part: int) -> jax.Array:
    """SiLU of the weighted sum of rows [n, heads, K], oldest first."""
    total = taps[0] * weight_ref[part, 0]
    for tap in range(1, len(taps)):
        total = total + taps[tap] * weight_ref[part, tap]
    return total * jax.nn.sigmoid(total)


def _column(value: jax.Array, head: int) -> jax.Array:
    """Row `head` [128] as a column on every lane: a transpose of repeated rows."""
    return jnp.broadcast_to(value[head : head + 1], (WIDTH, WIDTH)).T


def _exact_product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a and b contracted over `axis` of a and rows of b, in float32."""
    return lax.dot_general(
        a,
        b,
        (((axis,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=F32,
    )


def step(state_ref, q, k, v, decay, beta) -> list[jax.Array]:
    """One token of some heads: state_ref [heads, K, V] moves on; outputs as rows [1, V].

    q, k, v, decay, beta: [heads, 128]. Both reads of a state are one product, of rows k * decay and
    q * decay; decay and k are needed as columns.
    """
    k_row, q_row = k * decay, q * decay
    k_dot_q = jnp.sum(k * q, axis=1, keepdims=True)
    filling = jnp.zeros((_SUBLANES - 2, WIDTH), F32)
    outputs = []
    for head in range(k.shape[0]):
        row, state = slice(head, head + 1), state_ref[head]
        rows = jnp.concatenate([k_row[row], q_row[row], filling])
        reads = _exact_product(rows, state, 1)
        u = beta[row] * (v[row] - reads[:1])
        state_ref[head] = state * _column(decay, head) + _column(k, head) * u
        outputs.append(reads[1:2] + k_dot_q[row] * u)
    return outputs


def chunk(tokens, state_ref, rows_ref, reads_ref, is_commit: bool) -> list[jax.Array]:
    """Several tokens of some heads at once: their outputs, or the state after them in its place.

    With G the decays summed from the first token on and S the state before it,

      u_i = beta_i (v_i - S^T (exp(G_i) k_i) - sum_{j<i} (k_i . exp(G_i - G_j) k_j) u_j)
      o_i = S^T (exp(G_i) q_i) + sum_{j<=i} (q_i . exp(G_i - G_j) k_j) u_j
      S'  = exp(G_n) S + sum_j (exp(G_n - G_j) k_j) u_j^T

    so that a state is multiplied once for all of them, and no exponent is positive.

    Args:
      tokens: q, k, v, g, beta of each, [heads, 128]. state_ref: [heads, K, V].
      rows_ref, reads_ref: [rows * heads, 128], where rows of tokens become rows of heads and back.
    """
    heads, count = tokens[0][0].shape[0], len(tokens)
    sums = [tokens[0][3]]
    for token in tokens[1:]:
        sums.append(sums[-1] + token[3])

    def of_head(ref, head: int, rows: int) -> jax.Array:
        return ref[pl.ds(head, rows, stride=heads), :]

    def put(rows: list[jax.Array]) -> None:
        for i, row in enumerate(rows):
            rows_ref[pl.ds(i * heads, heads), :] = row

    def along(i: int, j: int, part: int) -> jax.Array:
        product = tokens[i][part] * tokens[j][1]
        if i != j:
            product = product * jnp.exp(sums[i] - sums[j])
        return jnp.sum(product, axis=1, keepdims=True)

    powers = [jnp.exp(g) for g in sums]
    parts = (1,) if is_commit else (1, 0)
    put([powers[i] * tokens[i][part] for part in parts for i in range(count)])
    num_rows = len(parts) * count
    for head in range(heads):
        reads_ref[pl.ds(head, num_rows, stride=heads), :] = _exact_product(
            of_head(rows_ref, head, num_rows), state_ref[head], 1
        )
    u, outputs = [], []
    for i, (_, _, v, _, beta) in enumerate(tokens):
        value = v - reads_ref[pl.ds(i * heads, heads), :]
        for j in range(i):
            value = value - along(i, j, 1) * u[j]
        u.append(beta * value)
        if not is_commit:
            o = reads_ref[pl.ds((count + i) * heads, heads), :]
            for j in range(i + 1):
                o = o + along(i, j, 0) * u[j]
            outputs.append(o)
    if not is_commit:
        return outputs
    put([jnp.exp(sums[-1] - sums[j]) * tokens[j][1] for j in range(count)])
    for j in range(count):
        reads_ref[pl.ds(j * heads, heads), :] = u[j]
    for head in range(heads):
        rows, values = (of_head(ref, head, count) for ref in (rows_ref, reads_ref))
        decayed = state_ref[head] * _column(powers[-1], head)
        state_ref[head] = decayed + _exact_product(rows, values, 0)
    return []
