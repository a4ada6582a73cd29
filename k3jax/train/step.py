"""What one optimizer step does: gradients over accumulation slices, update, metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.data.pack import IGNORE
from k3jax.model.kimi import Kimi, lm_head
from k3jax.model.layout import VISION
from k3jax.model.param import param_specs
from k3jax.model.statistics import Watch, added, added_over, nothing_seen
from k3jax.model.vision import media_rows
from k3jax.parallel.rules import AXES
from k3jax.train.corrections import corrections, layer_metrics
from k3jax.train.losses import TokenLosses, token_losses
from k3jax.train.optim import Optimizer
from k3jax.train.spikes import FINE, Limits, judged
from k3jax.train.state import TrainState, working_copy

# tokens, targets, segment_ids: [B, T] int32; in models that see, maybe media: vision.MediaInputs
Batch = dict[str, Any]
Metrics = dict[str, Any]  # arrays; `judgement` is a spikes.Judgement


class BatchLosses(NamedTuple):
    """Of a batch; on a mesh, of this chip's part.

    Attributes:
      main: of each target, [B, T].
      mtp: -log p of each target after those, [B, T] float32, or None.
      seen: what the model's run watches.
    """

    main: TokenLosses
    mtp: jax.Array | None
    seen: Any


def batch_losses(model: Kimi, params: Any, batch: Batch) -> BatchLosses:
    """What `model` makes of a batch; `mtp` if that has `next_targets`."""
    weight, after = lm_head(model, params), batch.get('next_targets')
    arguments = batch['tokens'], batch['segment_ids']
    next_tokens = None if after is None else batch['targets']
    rows = None
    if 'media' in batch:
        rows = media_rows(params, batch['media'], model.config, model.run)
    output = model.apply({'params': params}, *arguments, next_tokens=next_tokens, media_rows=rows)
    main = token_losses(weight, output.hidden, batch['targets'])
    mtp = None if after is None else token_losses(weight, output.next_hidden, after).nll
    return BatchLosses(main, mtp, output.seen)


@functools.cache
def losses_of(
    model: Kimi, mesh: Mesh | None = None, num_slices: int = 1
) -> Callable[[Any, Batch], jax.Array]:
    """`batch_losses` compiled: (params, batch) -> [B, T], whole on every chip.

    The parameters may wait in the host's memory.
    num_slices: as in training, of which one is in memory at a time.
    """

    def losses(params: Any, batch: Batch) -> jax.Array:
        def of_slice(one: Batch) -> jax.Array:
            return batch_losses(model, params, one).main.nll

        if num_slices == 1:
            return of_slice(batch)
        found = lax.map(of_slice, _slices(batch, num_slices))
        return found.reshape(-1, found.shape[-1])

    parallel, whole = model.run.parallel, None
    if parallel is not None:
        cut, whole = parallel.batch_spec, NamedSharding(mesh, PartitionSpec())
        specs = param_specs(model.config, model.plan, parallel), cut
        losses = jax.shard_map(losses, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)
    return jax.jit(
        lambda params, batch: losses(working_copy(model, params), batch), out_shardings=whole
    )


def _slices(batch: Batch, num_slices: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(num_slices, -1, *x.shape[1:]), batch)


class Extra(NamedTuple):
    """What is minimised beside the loss, by weight; 0: not at all.

    z: the squares of `log_z`. mtp: the loss of multi-token prediction, in models that have it.
    """

    z: float = 0.0
    mtp: float = 0.0


LOSS_ALONE = Extra()


class Sums(NamedTuple):
    """Over the targets of a batch.

    nll: -log p(target). z: squares of `log_z`. mtp: -log p of the targets after those.
    """

    nll: jax.Array
    z: jax.Array
    mtp: jax.Array

    def objective(self, extra: Extra) -> jax.Array:
        total = self.nll
        for weight, term in ((extra.z, self.z), (extra.mtp, self.mtp)):
            total = total + weight * term if weight else total
        return total


def next_targets(targets: jax.Array) -> jax.Array:
    """[B, T]: the target of the next token, of the same document and row; IGNORE without one."""
    after = jnp.pad(targets[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)
    return jnp.where(targets == IGNORE, IGNORE, after)


class Gradient(NamedTuple):
    """What a batch gives.

    Attributes:
      sums: its losses.
      grads: of `sums.objective`, as the parameters are cut.
      seen: what the model's run watches, of the whole batch.
    """

    sums: Sums
    grads: Any
    seen: Any


def make_gradient(
    model: Kimi, grad_accum_steps: int, mesh: Mesh | None, extra: Extra = LOSS_ALONE
) -> Callable[[Any, Batch], Gradient]:
    """(params, batch) -> Gradient; with `extra.mtp`, the batch has `next_targets` too."""

    def objective(params: Any, batch: Batch) -> tuple[jax.Array, tuple[Sums, Any]]:
        found = batch_losses(model, params, batch)
        mtp = jnp.float32(0.0) if found.mtp is None else jnp.sum(found.mtp)
        sums = Sums(jnp.sum(found.main.nll), jnp.sum(found.main.log_z**2), mtp)
        return sums.objective(extra), (sums, found.seen)

    gradient = jax.grad(objective, has_aux=True)

    def one_slice(params: Any, batch: Batch) -> Gradient:
        grads, (sums, seen) = gradient(params, batch)
        return Gradient(sums, grads, seen)

    def accumulate(params: Any, batch: Batch) -> Gradient:
        if grad_accum_steps == 1:
            return one_slice(params, batch)
        slices = _slices(batch, grad_accum_steps)

        def add(total: Gradient, batch: Batch) -> tuple[Gradient, None]:
            new = one_slice(params, batch)
            sums, grads = jax.tree.map(jnp.add, total[:2], new[:2])
            return Gradient(sums, grads, added(total.seen, new.seen)), None

        # The forward pass alone tells the shapes of what is seen.
        first = jax.tree.map(lambda x: x[0], slices)
        _, (sums, seen) = jax.eval_shape(objective, params, first)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), (sums, params)
        )
        return lax.scan(add, Gradient(*zeros, nothing_seen(seen)), slices)[0]

    parallel = model.run.parallel
    if parallel is None:
        return accumulate
    specs = param_specs(model.config, model.plan, parallel)

    def on_each_chip(params: Any, batch: Batch) -> Gradient:
        sums, grads, seen = accumulate(params, batch)

        def join(spec: PartitionSpec, grad: jax.Array) -> jax.Array:
            axes = parallel.uncut(spec)
            if not axes:
                return grad
            # What is whole on many chips is small; a sum of many terms is not rounded on the way.
            return lax.psum(grad.astype(jnp.promote_types(grad.dtype, jnp.float32)), axes)

        return Gradient(
            lax.psum(sums, AXES), jax.tree.map(join, specs, grads), added_over(seen, AXES)
        )

    return jax.shard_map(
        on_each_chip,
        mesh=mesh,
        in_specs=(specs, parallel.batch_spec),
        out_specs=Gradient(PartitionSpec(), specs, PartitionSpec()),
        check_vma=False,
    )


def modality_norms(grads: Any, count: jax.Array) -> Metrics:
    """Norms of the gradients, over `count`, of what sees and of all else."""
    seeing = {name: grads[name] for name in VISION}
    others = {name: tree for name, tree in grads.items() if name not in VISION}
    return {
        f'grad_norm_{name}': optax.tree.norm(
            jax.tree.map(lambda g: g.astype(jnp.float32) / count, part)
        )
        for name, part in (('vision', seeing), ('text', others))
    }


def make_train_step(
    model: Kimi,
    optimizer: Optimizer,
    *,
    grad_accum_steps: int = 1,
    extra: Extra = LOSS_ALONE,
    mesh: Mesh | None = None,
    placed: TrainState | None = None,
    limits: Limits | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The pure step function, to be jitted with the state donated.

    The loss is the mean over all targets of the batch, whatever the number of accumulation slices;
    `extra` is added, by weight, to what is minimised.
    placed: the abstract state, where parts of it wait in the host's memory between steps.
    limits: of a step that counts; the update of another is undone; the metrics have the
    `judgement`. None: every step counts.
    """
    balance = optimizer.config.quantile_balance
    watch = Watch(balance.bins if balance.enabled else 0)
    watched = model.clone(run=model.run._replace(watch=watch))
    mtp = model.config.num_nextn_predict_layers > 0
    extra = extra if mtp else extra._replace(mtp=0.0)
    gradient = make_gradient(watched, grad_accum_steps, mesh, extra)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        working = working_copy(model, state.params)
        if mtp:
            batch = batch | {'next_targets': next_targets(batch['targets'])}
        sums, grads, seen = gradient(working, batch)
        rules = corrections(seen, working, model.config, model.plan, optimizer.config)
        count = jnp.maximum(jnp.sum(batch['targets'] != IGNORE), 1)
        loss = sums.nll / count
        # Fused into the sums: the update makes a float32 copy of its own, a leaf at a time.
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32) / count, grads))
        guard, judgement = state.guard, None
        if limits is not None:
            judgement, guard = judged(guard, loss, norm, limits)
        with jax.named_scope('optimizer'):
            params, opt_state = optimizer.update(
                grads,
                state.opt_state,
                state.params,
                state.step,
                norm=norm,
                count=count,
                corrections=rules,
                undone=None if judgement is None else judgement.verdict != FINE,
                placed=None if placed is None else (placed.params, placed.opt_state),
            )
        metrics = {'loss': loss, 'grad_norm': norm, 'targets': count}
        if model.config.vision is not None:
            metrics |= modality_norms(grads, count)
        metrics |= {'z_loss': extra.z * sums.z / count} if extra.z else {}
        if mtp:
            after = jnp.maximum(jnp.sum(batch['next_targets'] != IGNORE), 1)
            metrics['mtp_loss'] = sums.mtp / after
        metrics |= layer_metrics(seen, model.config, model.plan)
        if judgement is not None:
            metrics['judgement'] = judgement
        return TrainState(state.step + 1, params, opt_state, guard), metrics

    return train_step
