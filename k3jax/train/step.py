"""What one optimizer step does: gradients over accumulation slices, update, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from k3jax.data.pack import IGNORE
from k3jax.model.kimi import Kimi
from k3jax.train.losses import token_losses

Batch = dict[str, jax.Array]  # tokens, targets, segment_ids: [B, T] int32
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """step: int32, updates done. params: float32 masters. opt_state: optax's."""

    step: jax.Array
    params: Any
    opt_state: Any


def make_train_step(
    model: Kimi, optimizer: optax.GradientTransformation, grad_accum_steps: int
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The pure step function, to be jitted with the state donated.

    The loss is the mean over all targets of the batch, whatever the number of accumulation slices.
    """

    def loss_sum(params: Any, batch: Batch) -> jax.Array:
        hidden, _ = model.apply({'params': params}, batch['tokens'], batch['segment_ids'])
        return jnp.sum(token_losses(params, hidden, batch['targets']))

    gradient = jax.value_and_grad(loss_sum)

    def accumulate(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        if grad_accum_steps == 1:
            return gradient(params, batch)
        slices = jax.tree.map(lambda x: x.reshape(grad_accum_steps, -1, *x.shape[1:]), batch)

        def add(total: Any, one: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, one)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(add, zero, slices)[0]

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        total, grads = accumulate(state.params, batch)
        count = jnp.maximum(jnp.sum(batch['targets'] != IGNORE), 1)
        loss, grads = total / count, jax.tree.map(lambda g: g / count, grads)
        with jax.named_scope('optimizer'):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {'loss': loss, 'grad_norm': optax.tree.norm(grads), 'targets': count}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
