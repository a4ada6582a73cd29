"""What the routed experts mean: every expert over every row, and a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.experts import Experts
from pallas_kernels.grouped_mlp.visits import ends
from pallas_kernels.grouped_mlp.xla import dense


def grouped_mlp_reference(
    x: jax.Array, experts: Experts, group_sizes: jax.Array, activation: GatedActivation
) -> jax.Array:
    """[M, L]; differentiable by JAX."""
    w1, w3, w2 = (dense(w, x.dtype) for w in experts)
    last = ends(group_sizes, x.shape[0])
    row = jnp.arange(x.shape[0])
    own = (row >= jnp.append(0, last[:-1])[:, None]) & (row < last[:, None])  # [E, M]
    # Rows of no group may hold anything, and 0 * NaN would count.
    x = jnp.where((row < last[-1])[:, None], x, 0)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    options = {'preferred_element_type': wide, 'precision': 'highest'}
    a = jnp.einsum('ml,efl->emf', x, w1, **options)
    b = jnp.einsum('ml,efl->emf', x, w3, **options)
    hidden = jnp.where(own[..., None], activation(a, b), 0).astype(x.dtype)
    return jnp.einsum('emf,elf->ml', hidden, w2, **options).astype(x.dtype)


def token_mlp_reference(
    x: jax.Array,
    experts: Experts,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: GatedActivation,
) -> jax.Array:
    """[T, L]: each token's experts, one after another."""
    w1, w3, w2 = (dense(w, x.dtype) for w in experts)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    options = {'preferred_element_type': wide, 'precision': 'highest'}
    y = jnp.zeros(x.shape, wide)
    for e in range(w1.shape[0]):
        a, b = (jnp.einsum('tl,fl->tf', x, w[e], **options) for w in (w1, w3))
        one = jnp.einsum('tf,lf->tl', activation(a, b).astype(x.dtype), w2[e], **options)
        weight = jnp.sum(jnp.where(expert_ids == e, expert_weights, 0), axis=1)[:, None]
        chosen = jnp.any(expert_ids == e, axis=1)[:, None]
        y += jnp.where(chosen, weight * one, 0)  # one broken expert is not all of them
    return y.astype(x.dtype)
