"""Which mesh a config asks for, and whether the work can be cut that way."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from k3jax.config import Config, ConfigError, MeshConfig
from k3jax.parallel.rules import AXES, RULES, Strategy

MOST_PROPOSALS = 3


def filled(config: MeshConfig, num_devices: int) -> MeshConfig:
    """`config` with data=-1 replaced by what the other axes leave.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    mesh = _filled(config, num_devices)
    problem = next(_count_problems(config, mesh, num_devices), None)
    if problem:
        raise ConfigError(problem)
    return mesh


def _filled(config: MeshConfig, num_devices: int) -> MeshConfig:
    rest = config.expert * config.sequence * config.tensor
    data = max(num_devices // rest, 1) if config.data == -1 else config.data
    return dataclasses.replace(config, data=data)


def _count_problems(config: MeshConfig, mesh: MeshConfig, num_devices: int) -> Iterator[str]:
    """config: as it was written; mesh: filled."""
    count = math.prod(getattr(mesh, axis) for axis in AXES)
    if count != num_devices:
        yield (
            f'mesh: got {_shape(config)}, which is {count} chips, wanted the {num_devices} there '
            'are'
        )
    if mesh.data % mesh.slices:
        yield (
            f'mesh.slices: got {mesh.slices}, wanted a divisor of mesh.data ({mesh.data}): only '
            'rows of a batch are cut across the data centre network'
        )


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, neighbours along an axis close together.

    Raises:
      ConfigError: it does not fit the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    config = filled(config, len(devices))
    shape = [getattr(config, axis) for axis in AXES]
    if config.slices > 1:
        found = len({getattr(device, 'slice_index', 0) for device in devices})
        if found != config.slices:
            raise ConfigError(f'mesh.slices: got {config.slices}, but the chips are in {found}')
        outer = [config.slices, 1, 1, 1]
        inner = [config.data // config.slices, *shape[1:]]
        array = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    elif devices[0].platform == 'tpu':
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        array = np.array(devices).reshape(shape)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_fits(config: Config, strategy: Strategy, num_devices: int) -> MeshConfig:
    """The filled mesh, if the work of `config` can be cut along it.

    Raises:
      ConfigError: names the numbers that do not divide and the nearest meshes that work.
    """
    mesh = _filled(config.mesh, num_devices)
    counts = _count_problems(config.mesh, mesh, num_devices)
    problem = next(itertools.chain(counts, _problems(config, strategy, mesh)), None)
    if problem is None:
        return mesh
    whole = mesh if strategy == 'decode' else dataclasses.replace(mesh, tensor=1)
    candidates = _factorised(whole, num_devices)
    fits = (other for other in candidates if not any(_problems(config, strategy, other)))
    shown = [_shape(other) or 'data=1' for other in itertools.islice(fits, MOST_PROPOSALS)]
    works = f'what fits: {"; ".join(shown)}' if shown else 'no mesh over these devices works'
    raise ConfigError(f'{problem}; {works}')


def _problems(config: Config, strategy: Strategy, mesh: MeshConfig) -> Iterator[str]:
    model, data = config.model, config.data
    accumulated = config.train.grad_accum_steps if strategy == 'train' else 1
    rows = mesh.data * mesh.expert
    for size in data.batch_sizes if strategy == 'train' else (data.batch_size,):
        if size % (rows * accumulated) == 0:
            continue
        name = 'data.batch_size' if size == data.batch_size else 'data.ramp_batch_sizes'
        slices = f' x {accumulated} accumulation steps' if accumulated > 1 else ''
        yield (
            f'{name}: got {size}, wanted a multiple of the {rows} parts of a '
            f'batch (mesh.data {mesh.data} x mesh.expert {mesh.expert}{slices})'
        )
    # Attention gives each chip two pieces, one early and one late, so that all work alike.
    pieces = 2 * mesh.sequence
    least = model.linear_attn_config.short_conv_kernel_size - 1
    length = data.sequence_length
    if mesh.sequence > 1 and strategy == 'decode':
        yield f'mesh.sequence: got {mesh.sequence}, wanted 1: a decode step has one token a row'
    elif mesh.sequence > 1 and (length % pieces or length // mesh.sequence < least):
        yield (
            f'data.sequence_length: got {length}, wanted a multiple of {pieces} (twice '
            f'mesh.sequence) that leaves each chip at least {least} tokens'
        )
    axes = RULES[strategy].experts
    homes = math.prod(getattr(mesh, axis) for axis in axes)
    if model.num_experts % homes:
        axes = ' x '.join(f'mesh.{axis}' for axis in axes)
        yield f'{axes}: got {homes}, wanted a divisor of the {model.num_experts} experts'
    if mesh.tensor > 1 and strategy != 'decode':
        yield f'mesh.tensor: got {mesh.tensor}, wanted 1: only decoding splits heads'
    for name, size in (
        ('num_attention_heads', model.num_attention_heads),
        ('linear_attn_config.num_heads', model.linear_attn_config.num_heads),
        ('vocab_size', model.vocab_size),
        ('intermediate_size', model.intermediate_size),
        ('moe_intermediate_size x num_shared_experts', model.shared_intermediate_size),
    ):
        if size % mesh.tensor:
            yield f'mesh.tensor: got {mesh.tensor}, wanted a divisor of model.{name} ({size})'


def _factorised(like: MeshConfig, num_devices: int) -> list[MeshConfig]:
    """Meshes of the same tensor axis over all devices, the nearest to `like` first."""
    if num_devices % like.tensor:
        return []
    num = num_devices // like.tensor
    divisors = [n for n in range(1, num + 1) if num % n == 0]
    found = []
    for expert in divisors:
        for sequence in divisors:
            if num % (expert * sequence) == 0:
                data = num // (expert * sequence)
                if data % like.slices == 0:
                    mesh = dataclasses.replace(like, data=data, expert=expert, sequence=sequence)
                    found.append(mesh)

    def distance(mesh: MeshConfig) -> float:
        pairs = ((getattr(mesh, axis), getattr(like, axis)) for axis in AXES)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    return sorted(found, key=distance)


def _shape(mesh: MeshConfig) -> str:
    return ' '.join(f'{axis}={getattr(mesh, axis)}' for axis in AXES if getattr(mesh, axis) != 1)
