"""What a model says when it is let go on: many continuations at once, in one program."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.serve.sampling import Choice, sample


@functools.partial(jax.jit, static_argnums=(0, 3))
def rollout(
    model: Kimi, params: Any, prompts: jax.Array, num_new: int, choice: Choice, key: jax.Array
) -> jax.Array:
    """Prompts [B, P] with `num_new` tokens more, [B, P + num_new] int32; nothing ends a text."""
    batch, length = prompts.shape
    cache = init_cache(model.config, model.plan, batch, length + num_new, model.run.dtype)
    num_real = jnp.full(batch, length, jnp.int32)
    logits, cache = prefill(model, params, prompts, num_real, cache)

    def step(carry: Any, key: jax.Array) -> Any:
        logits, cache = carry
        token = sample(logits, key, choice)
        return decode(model, params, token, cache), token

    _, new = lax.scan(step, (logits, cache), jax.random.split(key, num_new))
    return jnp.concatenate([prompts, new.T], axis=1)
