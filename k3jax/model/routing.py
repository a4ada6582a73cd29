"""Which experts see a token, how much each counts, and what bias others would have needed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LOW = 32  # bins that share the high part of their number


class Routing(NamedTuple):
    """experts: [M, k] int32; weights: [M, k] float32.

    cutoff: [M] float32, the (k + 1)-th largest biased score, which an expert that is not chosen
    would have to exceed; or None.
    """

    experts: jax.Array
    weights: jax.Array
    cutoff: jax.Array | None = None


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
    with_cutoff: bool = False,
) -> Routing:
    """Top experts by sigmoid(logit) + bias; the weights leave the bias out.

    Args:
      logits: [M, E]. correction_bias: [E], for selection only.
      num_chosen: k. renormalize: weights sum to 1 before scaling_factor.
      with_cutoff: also return what the chosen ones had to exceed; there are more than k experts.

    Source: Kimi K3 `topk_method: noaux_tc`.
    """
    scores = jax.nn.sigmoid(logits)
    biased = lax.stop_gradient(scores + correction_bias.astype(scores.dtype))
    best, experts = lax.top_k(biased, num_chosen + with_cutoff)
    cutoff = best[:, num_chosen] if with_cutoff else None
    experts = experts[:, :num_chosen]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return Routing(experts, weights * scaling_factor, cutoff)


def bias_range(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds of any required bias: scores lie in (0, 1), cutoffs in (min bias, 1 + max bias).

    Args: bias [..., E]. Returns: two arrays [...].
    """
    return jnp.min(bias, axis=-1) - 1, jnp.max(bias, axis=-1) + 1


def _counts_by_scatter(bin_of: jax.Array, counted: jax.Array, bins: int) -> jax.Array:
    def of_expert(bin_of: jax.Array) -> jax.Array:
        return jnp.zeros(bins, jnp.int32).at[bin_of].add(counted.astype(jnp.int32))

    return jax.vmap(of_expert)(bin_of.T)


def _counts_by_products(
    bin_of: jax.Array, counted: jax.Array, bins: int, at_once: int = 1024
) -> jax.Array:
    """Rows one-hot in the high and in the low part of their bin; their product counts the pairs."""
    num_rows, num_experts = bin_of.shape
    padding = -num_rows % at_once
    # [steps, E, rows]: rows last, where lanes are cheap.
    steps = jnp.pad(bin_of, ((0, padding), (0, 0))).reshape(-1, at_once, num_experts)
    counted = jnp.pad(counted, (0, padding)).reshape(-1, 1, 1, at_once)
    parts = jnp.arange(-(-bins // _LOW))[:, None], jnp.arange(_LOW)[:, None]

    def add(total: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        bin_of, counted = jnp.swapaxes(step[0], 0, 1)[:, None], step[1]
        high = ((bin_of // _LOW == parts[0]) & counted).astype(jnp.bfloat16)
        low = (bin_of % _LOW == parts[1]).astype(jnp.bfloat16)
        found = jnp.einsum('ehm,elm->ehl', high, low, preferred_element_type=jnp.float32)
        return total + found.astype(jnp.int32), None

    zero = jnp.zeros((num_experts, parts[0].size, _LOW), jnp.int32)
    return lax.scan(add, zero, (steps, counted))[0].reshape(num_experts, -1)[:, :bins]


def required_bias_histogram(
    scores: jax.Array,
    cutoff: jax.Array,
    bias: jax.Array,
    counted: jax.Array,
    bins: int,
) -> jax.Array:
    """How many tokens need which bias to be routed to an expert: cutoff - score, in equal bins.

    Args:
      scores: [M, E], without the bias. cutoff: [M], with it. bias: [E].
      counted: [M] bool; False for padding.
      bins: between the bounds of `bias_range`.

    Returns:
      [E, bins] int32. Counts of parts of a batch add up.

    Source: report appendix D.
    """
    low, high = bias_range(bias.astype(scores.dtype))
    required = lax.stop_gradient(cutoff[:, None] - scores)
    bin_of = jnp.floor((required - low) * (bins / (high - low))).astype(jnp.int32)
    bin_of = jnp.clip(bin_of, 0, bins - 1)
    forms = {'cpu': _counts_by_scatter, 'default': _counts_by_products}  # TPUs scatter one by one
    return lax.platform_dependent(
        bin_of, counted, **{name: functools.partial(f, bins=bins) for name, f in forms.items()}
    )
