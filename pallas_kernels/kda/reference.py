"""What KDA computes: the recurrence, one token at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.segments import Runs

L2_EPS = 1e-6  # added to the sum of squares, inside the root


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def kda_decode_step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token a sequence: output and next state.

    D = exp(g) * state;  u = beta (v - D^T k);  state' = D + k u^T;  o = state'^T q

    Args:
      q, k: [B, H, K], normalised, q scaled. v: [B, H, V]. g: [B, H, K]. beta: [B, H].
      state: [B, H, K, V] float32.

    Returns:
      o: [B, H, V] in v's dtype; state': [B, H, K, V] in state's dtype.
    """
    if not jnp.issubdtype(state.dtype, jnp.floating):
        raise ValueError(f'kda_decode_step: state is {state.dtype}, wanted float32')
    lead = state.shape[:2]
    wanted = {'v': (*lead, *state.shape[3:]), 'beta': lead}
    for name, array in {'q': q, 'k': k, 'v': v, 'g': g, 'beta': beta}.items():
        want = wanted.get(name, state.shape[:3])
        if array.shape != want:
            raise ValueError(
                f'kda_decode_step: {name} has shape {array.shape}, wanted {want} for a state of '
                f'{state.shape}'
            )
    wide = state.dtype
    q, k, v32, g, beta = (x.astype(wide) for x in (q, k, v, g, beta))
    decayed = jnp.exp(g)[..., None] * state
    # o = state'^T q = D^T q + (k . q) u: both reads of D in one product.
    both = jnp.stack([k, q], axis=-2)
    read = jnp.einsum('bhik,bhkv->bhiv', both, decayed, precision=lax.Precision.HIGHEST)
    u = beta[..., None] * (v32 - read[..., 0, :])
    state = decayed + k[..., None] * u[..., None, :]
    o = read[..., 1, :] + jnp.sum(k * q, axis=-1, keepdims=True) * u
    return o.astype(v.dtype), state


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    runs: Runs | None,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over T by scan; arguments as in `kda`, q and k normalised."""

    def step(carry, x):
        state, previous = carry
        q_t, k_t, v_t, g_t, beta_t, number, real = x
        fresh = jnp.where((number == previous)[:, None, None, None], state, 0)
        o, new = kda_decode_step(q_t, k_t, v_t, g_t, beta_t, fresh)
        keep = real[:, None, None, None]
        return (jnp.where(keep, new, state), jnp.where(real, number, previous)), jnp.where(
            real[:, None, None], o, 0
        )

    batch, length = q.shape[:2]
    if runs is None:
        runs = Runs(jnp.zeros((batch, length), jnp.int32), jnp.ones((batch, length), bool))
    else:
        # Whatever padding holds stays out of the gradients too, where 0 * inf would be NaN.
        q, k, v, g = (jnp.where(runs.real[:, :, None, None], x, 0) for x in (q, k, v, g))
        beta = jnp.where(runs.real[:, :, None], beta, 0)
    over_time = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, *runs)]
    (state, _), o = lax.scan(
        step, (initial_state, jnp.zeros((batch,), jnp.int32)), tuple(over_time)
    )
    return jnp.moveaxis(o, 0, 1), state
