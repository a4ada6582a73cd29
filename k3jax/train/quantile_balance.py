"""Quantile Balancing: the bias with which every expert would have got its equal share of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.model.routing import bias_range


def _centred(bias: jax.Array) -> jax.Array:
    """A shift of all biases changes no choice."""
    return bias - jnp.mean(bias, axis=-1, keepdims=True)


def exact_bias(scores: jax.Array, cutoff: jax.Array, num_chosen: int) -> jax.Array:
    """The rule itself: b_j = -(the (q + 1)-th largest of score - cutoff), q = floor(M k / E).

    Args: scores [M, E], without the bias; cutoff [M], with it. Returns: [E], of mean 0.

    Source: report section 2.3.3, equation 14.
    """
    num_tokens, num_experts = scores.shape
    margin = jnp.sort(scores - cutoff[:, None], axis=0, descending=True)
    return _centred(-margin[num_tokens * num_chosen // num_experts])


def estimated_bias(
    histogram: jax.Array, bias: jax.Array, num_chosen: int, momentum: float = 0.0
) -> jax.Array:
    """The rule from a histogram of required biases, linear inside a bin.

    Off by at most a bin and the gap to the next token. The old bias stays where nothing was
    counted, or where every expert is chosen.

    Args:
      histogram: [..., E, bins] int32, counted with `bias`; leading axes number layers.
      bias: [..., E] float32, that the tokens were routed with.
      num_chosen: experts a token.
      momentum: of the old bias in the new one.

    Source: report appendix D.
    """
    num_experts, bins = histogram.shape[-2:]
    if num_chosen >= num_experts:
        return bias
    low, high = (x[..., None] for x in bias_range(bias))
    below = jnp.cumsum(histogram, axis=-1)
    num_tokens = below[..., -1]
    # Whole numbers as far as they go: float32 would round a count of 2^24 tokens.
    whole, rest = jnp.divmod(num_tokens, num_experts)
    share = whole * num_chosen + rest * num_chosen // num_experts
    fraction = (rest * num_chosen % num_experts) / num_experts
    wanted = share + (fraction > 0)
    place = jnp.argmax(below >= jnp.maximum(wanted, 1)[..., None], axis=-1)
    inside, upto = (
        jnp.take_along_axis(x, place[..., None], axis=-1)[..., 0] for x in (histogram, below)
    )
    part = jnp.clip((share - (upto - inside) + fraction) / jnp.maximum(inside, 1), 0, 1)
    found = _centred(low + (place + part) * ((high - low) / bins))
    found = momentum * bias + (1 - momentum) * found
    return jnp.where(num_tokens > 0, found, bias).astype(bias.dtype)  # all experts count the same


def load_metrics(load: jax.Array) -> dict[str, jax.Array]:
    """How even the experts' loads [..., E] are, one value a layer [...].

    maxvio: the largest load over the mean, less 1. dead_experts: those without a token.
    load_entropy: of the shares, 1 where all are equal.
    """
    load = load.astype(jnp.float32)
    total = jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)
    share, num_experts = load / total, load.shape[-1]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1)
    even = entropy / jnp.log(num_experts) if num_experts > 1 else jnp.ones_like(entropy)
    return {
        'maxvio': jnp.max(share, axis=-1) * num_experts - 1,
        'dead_experts': jnp.sum(load == 0, axis=-1),
        'load_entropy': even,
    }
