"""What one optimizer step does: gradients over accumulation slices, update, metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.data.pack import IGNORE
from k3jax.model.kimi import Kimi, lm_head
from k3jax.model.param import param_specs
from k3jax.parallel.rules import AXES
from k3jax.train.losses import token_losses
from k3jax.train.optim import Optimizer
from k3jax.train.state import TrainState, working_copy

Batch = dict[str, jax.Array]  # tokens, targets, segment_ids: [B, T] int32
Metrics = dict[str, jax.Array]


def batch_losses(model: Kimi, params: Any, batch: Batch) -> jax.Array:
    """-log p of each target of a batch, [B, T] float32; on a mesh, this chip's."""
    hidden, _ = model.apply({'params': params}, batch['tokens'], batch['segment_ids'])
    return token_losses(lm_head(model, params), hidden, batch['targets'])


@functools.cache
def losses_of(
    model: Kimi, mesh: Mesh | None = None, num_slices: int = 1
) -> Callable[[Any, Batch], jax.Array]:
    """`batch_losses` compiled: (params, batch) -> [B, T], whole on every chip.

    The parameters may wait in the host's memory.
    num_slices: as in training, of which one is in memory at a time.
    """

    def losses(params: Any, batch: Batch) -> jax.Array:
        if num_slices == 1:
            return batch_losses(model, params, batch)
        found = lax.map(functools.partial(batch_losses, model, params), _slices(batch, num_slices))
        return found.reshape(-1, found.shape[-1])

    parallel = model.run.parallel
    if parallel is None:
        return jax.jit(lambda params, batch: losses(working_copy(model, params), batch))
    specs, cut = param_specs(model.config, model.plan, parallel), parallel.batch_spec
    losses = jax.shard_map(losses, mesh=mesh, in_specs=(specs, cut), out_specs=cut, check_vma=False)
    return jax.jit(
        lambda params, batch: losses(working_copy(model, params), batch),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


def _slices(batch: Batch, num_slices: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(num_slices, -1, *x.shape[1:]), batch)


def make_gradient(
    model: Kimi, grad_accum_steps: int, mesh: Mesh | None
) -> Callable[[Any, Batch], tuple[jax.Array, Any]]:
    """(params, batch) -> the sum of the batch's losses, and its gradient, cut as params are."""

    def loss_sum(params: Any, batch: Batch) -> jax.Array:
        return jnp.sum(batch_losses(model, params, batch))

    gradient = jax.value_and_grad(loss_sum)

    def accumulate(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        if grad_accum_steps == 1:
            return gradient(params, batch)

        def add(total: Any, one: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, one)), None

        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params
        )
        return lax.scan(add, (jnp.zeros(()), zero), _slices(batch, grad_accum_steps))[0]

    parallel = model.run.parallel
    if parallel is None:
        return accumulate
    specs = param_specs(model.config, model.plan, parallel)

    def on_each_chip(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        total, grads = accumulate(params, batch)

        def join(spec: PartitionSpec, grad: jax.Array) -> jax.Array:
            axes = parallel.uncut(spec)
            if not axes:
                return grad
            # What is whole on many chips is small; a sum of many terms is not rounded on the way.
            return lax.psum(grad.astype(jnp.promote_types(grad.dtype, jnp.float32)), axes)

        return lax.psum(total, AXES), jax.tree.map(join, specs, grads)

    return jax.shard_map(
        on_each_chip,
        mesh=mesh,
        in_specs=(specs, parallel.batch_spec),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )


def make_train_step(
    model: Kimi,
    optimizer: Optimizer,
    grad_accum_steps: int,
    mesh: Mesh | None = None,
    placed: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The pure step function, to be jitted with the state donated.

    The loss is the mean over all targets of the batch, whatever the number of accumulation slices.
    placed: the abstract state, where parts of it wait in the host's memory between steps.
    """
    gradient = make_gradient(model, grad_accum_steps, mesh)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        total, grads = gradient(working_copy(model, state.params), batch)
        count = jnp.maximum(jnp.sum(batch['targets'] != IGNORE), 1)
        loss = total / count
        # Fused into the sums: the update makes a float32 copy of its own, a leaf at a time.
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads))
        with jax.named_scope('optimizer'):
            params, opt_state = optimizer.update(
                grads,
                state.opt_state,
                state.params,
                state.step,
                norm=norm,
                count=count,
                placed=None if placed is None else (placed.params, placed.opt_state),
            )
        metrics = {'loss': loss, 'grad_norm': norm, 'targets': count}
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
