"""What is compiled ahead of time: the real training step, prefill and decode step of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import Config, ConfigError
from k3jax.model.cache import cache_specs, init_cache
from k3jax.model.flops import flops_per_token
from k3jax.model.kimi import Kimi, decode, init_params, prefill
from k3jax.model.param import param_specs
from k3jax.model.run import Run
from k3jax.parallel.mesh import check_fits, make_mesh
from k3jax.parallel.rules import Strategy
from k3jax.parallel.shard import parallel_of
from k3jax.train.optim import leaf_labels, make_optimizer
from k3jax.train.step import (
    abstract_state,
    check_state_fits,
    check_trainable,
    make_train_step,
)

JobName = Literal['train', 'prefill', 'decode']


class Job(NamedTuple):
    """A program and what it is for.

    Attributes:
      function, args: to be jitted; args are abstract, placed on the mesh. donate: of these.
      model_flops: of a step on all chips: training FLOPs, or forward ones when serving; nothing
        that is computed twice counts twice.
      tokens: that a step reads or makes.
      note: what a reader of the figures must know.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    model_flops: float
    tokens: int
    note: str


def mesh_for(config: Config, job: JobName, devices: list[jax.Device]) -> Mesh:
    """The config's mesh over these devices.

    Raises:
      ConfigError: the job's work cannot be cut that way, or there is no such job.
    """
    if job not in get_args(JobName):
        raise ConfigError(f'--job: got {job!r}, wanted one of {", ".join(get_args(JobName))}')
    return make_mesh(check_fits(config, job, len(devices)), devices)


def build_job(config: Config, job: JobName, mesh: Mesh, chip_bytes: int | None = None) -> Job:
    """The job's program for a mesh.

    chip_bytes: of a chip's memory; None to leave it to the compiler what fits.

    Raises:
      ConfigError: the model cannot be trained, or its state cannot lie on a chip.
    """
    if job == 'train':
        return _train(config, mesh, chip_bytes)
    return (_prefill if job == 'prefill' else _decode)(config, mesh)


def _model(config: Config, mesh: Mesh, strategy: Strategy) -> Kimi:
    train = config.train
    run = Run(
        jnp.dtype(train.dtype),
        jnp.dtype('float32') if strategy == 'train' else None,
        train.remat if strategy == 'train' else 'none',
        keep=train.keep,
        offload=train.offload,
        parallel=parallel_of(mesh, config.mesh, strategy),
    )
    return Kimi(config.model, run, train.scan_layers)


def _placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def _train(config: Config, mesh: Mesh, chip_bytes: int | None) -> Job:
    check_trainable(config.model)
    model, data = _model(config, mesh, 'train'), config.data
    labels = leaf_labels(config.model, model.plan)
    optimizer = make_optimizer(config.optimizer, config.train.num_steps, labels)
    state = abstract_state(model, optimizer, mesh, config.optimizer.state_memory)
    check_state_fits(state, chip_bytes)
    cut = PartitionSpec() if model.run.parallel is None else model.run.parallel.batch_spec
    shape = data.batch_size, data.sequence_length
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, cut))
    batch = dict.fromkeys(('tokens', 'targets', 'segment_ids'), rows)
    tokens = data.batch_size * data.sequence_length
    flops = tokens * flops_per_token(config.model, data.sequence_length, backward=True)
    step = make_train_step(model, optimizer, config.train.grad_accum_steps, mesh, state)
    return Job(step, (state, batch), (0,), flops, tokens, 'documents are as long as a row')


def _serving(config: Config, mesh: Mesh, strategy: Strategy):
    """The model, and abstract parameters and cache, in bfloat16 or as the release stores them."""
    model = _model(config, mesh, strategy)
    parallel = model.run.parallel
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    rows, length = config.data.batch_size, config.data.sequence_length
    cache = jax.eval_shape(
        lambda: init_cache(config.model, model.plan, rows, length, model.run.dtype)
    )
    if parallel is None:
        specs, cut = jax.tree.map(lambda _: PartitionSpec(), (params, cache))
    else:
        specs = param_specs(config.model, model.plan, parallel)
        cut = cache_specs(config.model, model.plan, parallel)
    return model, specs, cut, _placed(params, specs, mesh), _placed(cache, cut, mesh)


def _prefill(config: Config, mesh: Mesh) -> Job:
    model, specs, cut, params, cache = _serving(config, mesh, 'prefill')
    rows, length = config.data.batch_size, config.data.sequence_length
    parallel = model.run.parallel
    by_row = PartitionSpec() if parallel is None else PartitionSpec(parallel.rules.rows)
    tokens = PartitionSpec() if parallel is None else parallel.batch_spec

    def step(params: Any, tokens: jax.Array, num_real: jax.Array, cache: Any):
        return prefill(model, params, tokens, num_real, cache)

    if parallel is not None:
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, tokens, by_row, cut),
            out_specs=(by_row, cut),
            check_vma=False,
        )
    args = (
        params,
        _placed(jax.ShapeDtypeStruct((rows, length), jnp.int32), tokens, mesh),
        _placed(jax.ShapeDtypeStruct((rows,), jnp.int32), by_row, mesh),
        cache,
    )
    flops = rows * length * flops_per_token(config.model, length, backward=False)
    return Job(step, args, (3,), flops, rows * length, 'whole prompts, from an empty cache')


def _decode(config: Config, mesh: Mesh) -> Job:
    model, specs, cut, params, cache = _serving(config, mesh, 'decode')
    rows, length = config.data.batch_size, config.data.sequence_length
    parallel = model.run.parallel
    by_row = PartitionSpec() if parallel is None else PartitionSpec(parallel.rules.rows)

    def step(params: Any, tokens: jax.Array, cache: Any):
        return decode(model, params, tokens, cache)

    if parallel is not None:
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, by_row, cut),
            out_specs=(by_row, cut),
            check_vma=False,
        )
    tokens = _placed(jax.ShapeDtypeStruct((rows,), jnp.int32), by_row, mesh)
    # The mean context of a document of 2 n tokens is that of the last token of n.
    flops = rows * flops_per_token(config.model, 2 * length, backward=False)
    note = f'one token for each of {rows} sequences of {length:,} tokens'
    return Job(step, (params, tokens, cache), (2,), flops, rows, note)
