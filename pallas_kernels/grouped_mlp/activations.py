"""How a gate branch and an up branch become one: SiTU-GLU and SwiGLU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True)
class SiTU:
    """beta tanh(a / beta) sigmoid(a) * linear_beta tanh(b / linear_beta), in float32.

    The sigmoid takes the uncapped a. beta None means 1; linear_beta None leaves b as it is.
    Source: Kimi K3 `activation_situ_beta`, `activation_situ_linear_beta`.
    """

    beta: float | None = 4.0
    linear_beta: float | None = 25.0

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = a.dtype
        a, b = _wide(a), _wide(b)
        beta = 1.0 if self.beta is None else self.beta
        gate = beta * jnp.tanh(a / beta) * jax.nn.sigmoid(a)
        if self.linear_beta is not None:
            b = self.linear_beta * jnp.tanh(b / self.linear_beta)
        return (gate * b).astype(dtype)


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """a sigmoid(a) * b, in float32."""

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return (jax.nn.silu(_wide(a)) * _wide(b)).astype(a.dtype)


GatedActivation = SiTU | SwiGLU
