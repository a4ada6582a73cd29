"""How fast does the state forget: the per-channel log decay of KDA."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Gate(NamedTuple):
    """Parameters that turn the raw projection f into log decay g.

    A_log: [H] float32, one rate a head. dt_bias: [H * K] or [H, K] float32. lower_bound: negative
    number (bounded sigmoid gate of K3) or None (softplus gate of Kimi Linear).
    """

    A_log: jax.Array
    dt_bias: jax.Array
    lower_bound: float | None = -5.0


class GateArrays(NamedTuple):
    """A `Gate` without its static bound."""

    A_log: jax.Array
    dt_bias: jax.Array


def check_gate(
    name: str,
    f: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    lower_bound: float | None,
) -> None:
    """Raises ValueError where the gate does not fit f [..., H, K], or has no negative bound."""
    heads, width = f.shape[-2:]
    if A_log.shape != (heads,):
        raise ValueError(
            f'{name}: A_log has shape {A_log.shape}, wanted ({heads},) for f {f.shape}'
        )
    if dt_bias.shape not in ((heads * width,), (heads, width)):
        raise ValueError(
            f'{name}: dt_bias has shape {dt_bias.shape}, '
            f'wanted ({heads * width},) or ({heads}, {width}) for f {f.shape}'
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f'{name}: lower_bound is {lower_bound}, wanted a negative number or None')


def kda_gate(
    f: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None = -5.0
) -> jax.Array:
    """Log decay g, float32, at most 0.

    lower_bound given: g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)), in (lower_bound, 0).
    lower_bound None:  g = -exp(A_log) * softplus(f + dt_bias), unbounded below.

    Args:
      f: [..., H, K] raw decay projection.
      A_log: [H]; multiplies the sum that includes dt_bias.
      dt_bias: [H * K] or [H, K].

    Returns:
      g: [..., H, K] float32.

    Raises:
      ValueError: shapes disagree, or lower_bound is not negative.

    Source: Kimi K3 `gate_lower_bound`; Kimi Linear (arXiv 2510.26692).
    """
    heads, width = f.shape[-2:]
    check_gate('kda_gate', f, A_log, dt_bias, lower_bound)
    wide = jnp.promote_types(f.dtype, jnp.float32)
    shifted = f.astype(wide) + dt_bias.astype(wide).reshape(heads, width)
    rate = jnp.exp(A_log.astype(wide))[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)
