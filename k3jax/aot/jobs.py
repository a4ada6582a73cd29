"""What is compiled ahead of time: the real training step, prefill and decode step of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import Config, ConfigError
from k3jax.model.cache import init_cache
from k3jax.model.flops import flops_per_token
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.parallel.mesh import check_fits, make_mesh
from k3jax.parallel.rules import Strategy
from k3jax.parallel.shard import parallel_of
from k3jax.serve.expert_tiles import in_tiles
from k3jax.serve.steps import cuts_of, decode_step, prefill_step
from k3jax.train.media import abstract_media
from k3jax.train.optim import make_optimizer
from k3jax.train.spikes import limits_of
from k3jax.train.state import abstract_state, check_state_fits, check_trainable, chip_bytes
from k3jax.train.step import Extra, make_train_step

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


def build_job(config: Config, job: JobName, mesh: Mesh, limit: int | None = None) -> Job:
    """The job's program for a mesh.

    limit: bytes of a chip's memory; None to leave it to the compiler what fits.

    Raises:
      ConfigError: the model cannot be trained, or what it needs cannot lie on a chip.
    """
    make = {'train': _train, 'prefill': _prefill, 'decode': _decode}[job]
    return make(config, mesh, limit)


def _model(config: Config, mesh: Mesh, strategy: Strategy) -> Kimi:
    train = config.train
    run = Run(
        jnp.dtype(train.dtype),
        jnp.dtype('float32') if strategy == 'train' else None,
        train.remat if strategy == 'train' else 'none',
        keep=train.keep,
        offload=train.offload,
        quantisation=train.quantisation,
        parallel=parallel_of(mesh, config.mesh, strategy),
    )
    return Kimi(config.model, run, train.scan_layers)


def _placed(specs: Any, tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays on the mesh; specs: one for each, or for all of a part of the tree."""

    def place(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(place, specs, tree)


def _int32(spec: PartitionSpec, mesh: Mesh, *shape: int) -> jax.ShapeDtypeStruct:
    return _placed(spec, jax.ShapeDtypeStruct(shape, jnp.int32), mesh)


def _train(config: Config, mesh: Mesh, limit: int | None) -> Job:
    check_trainable(config.model)
    model, data = _model(config, mesh, 'train'), config.data
    optimizer = make_optimizer(config.optimizer, config.train.num_steps, model, mesh)
    limits = limits_of(config.train)
    state = abstract_state(model, optimizer, mesh, config.optimizer.state_memory, limits)
    check_state_fits(state, model, limit)
    cut = PartitionSpec() if model.run.parallel is None else model.run.parallel.batch_spec
    rows = _int32(cut, mesh, data.batch_size, data.sequence_length)
    batch = dict.fromkeys(('tokens', 'targets', 'segment_ids'), rows)
    if data.media.sources:
        batch['media'] = _placed(cut, abstract_media(data), mesh)
    tokens = data.batch_size * data.sequence_length
    flops = tokens * flops_per_token(config.model, data.sequence_length, backward=True)
    step = make_train_step(
        model,
        optimizer,
        grad_accum_steps=config.train.grad_accum_steps,
        extra=Extra(config.train.z_loss, config.train.mtp_loss_weight),
        mesh=mesh,
        placed=state,
        limits=limits,
    )
    note = 'documents are as long as a row'
    if data.media.sources:
        note += '; FLOPs do not count the vision tower'
    return Job(step, (state, batch), (0,), flops, tokens, note)


def _serving(config: Config, mesh: Mesh, strategy: Strategy, limit: int | None):
    """The model, how its steps are cut, and abstract parameters (stored dtypes) and cache.

    Raises:
      ConfigError: these cannot lie on a chip.
    """
    if strategy == 'decode':
        tiles = in_tiles(config.model, jnp.dtype(config.train.dtype))
        config = dataclasses.replace(config, model=tiles)
    model = _model(config, mesh, strategy)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    rows, length = config.data.batch_size, config.data.sequence_length
    cache = jax.eval_shape(
        lambda: init_cache(config.model, model.plan, rows, length, model.run.dtype)
    )
    cuts = cuts_of(model)
    params, cache = _placed(cuts.params, params, mesh), _placed(cuts.cache, cache, mesh)
    held = chip_bytes(params), chip_bytes(cache)
    if limit is not None and sum(held) > limit:
        params_gib, cache_gib, limit_gib = (x / 2**30 for x in (*held, limit))
        packed = config.model.experts_format != 'bf16'
        raise ConfigError(
            f'mesh: a chip would hold {params_gib:.1f} GiB of parameters and {cache_gib:.1f} GiB '
            f'of cache, wanted at most {limit_gib:.1f} GiB; take more chips that share what is '
            f'larger{"" if packed else ", or model.experts_format=mxfp4"}'
        )
    return model, cuts, params, cache


def _prefill(config: Config, mesh: Mesh, limit: int | None) -> Job:
    model, cuts, params, cache = _serving(config, mesh, 'prefill', limit)
    rows, length = config.data.batch_size, config.data.sequence_length
    tokens = _int32(cuts.tokens, mesh, rows, length)
    args = params, tokens, _int32(cuts.rows, mesh, rows), cache
    flops = rows * length * flops_per_token(config.model, length, backward=False)
    note = 'whole prompts, from an empty cache'
    return Job(prefill_step(model, mesh), args, (3,), flops, rows * length, note)


def _decode(config: Config, mesh: Mesh, limit: int | None) -> Job:
    model, cuts, params, cache = _serving(config, mesh, 'decode', limit)
    rows, length = config.data.batch_size, config.data.sequence_length
    args = params, _int32(cuts.rows, mesh, rows), cache
    # The mean context of a document of 2 n tokens is that of the last token of n.
    flops = rows * flops_per_token(config.model, 2 * length, backward=False)
    note = f'one token for each of {rows} sequences of {length:,} tokens'
    return Job(decode_step(model, mesh), args, (2,), flops, rows, note)
