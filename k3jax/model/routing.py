"""Which experts see a token, and how much each counts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """experts: [M, k] int32; weights: [M, k] float32."""

    experts: jax.Array
    weights: jax.Array


def router_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """[M, E] float32 logits: a bfloat16 router picks another set for one token in twenty."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(
        x.astype(wide),
        gate.astype(wide),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )


def route(
    logits: jax.Array,
    correction_bias: jax.Array,
    *,
    num_chosen: int,
    renormalize: bool,
    scaling_factor: float,
) -> Routing:
    """Top experts by sigmoid(logit) + bias; the weights leave the bias out.

    Args:
      logits: [M, E]. correction_bias: [E], for selection only.
      num_chosen: k. renormalize: weights sum to 1 before scaling_factor.

    Source: Kimi K3 `topk_method: noaux_tc`.
    """
    scores = jax.nn.sigmoid(logits)
    biased = lax.stop_gradient(scores + correction_bias.astype(scores.dtype))
    experts = lax.top_k(biased, num_chosen)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return Routing(experts, weights * scaling_factor)
