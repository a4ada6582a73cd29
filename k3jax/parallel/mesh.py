"""Which mesh a config asks for, and whether the work can be cut that way."""

from __future__ import annotations

import dataclasses
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
      ConfigError: the axes do not multiply to the number of devices; the message proposes some.
    """
    rest = config.expert * config.sequence * config.tensor
    data = max(num_devices // rest, 1) if config.data == -1 else config.data
    if data * rest != num_devices:
        fits = _factorised(dataclasses.replace(config, data=data), num_devices)
        raise ConfigError(
            f'mesh: got {_shape(config)}, which is {data * rest} chips, wanted the {num_devices} '
            f'there are; {_listed(fits)}'
        )
    if data % config.slices:
        raise ConfigError(
            f'mesh.slices: got {config.slices}, wanted a divisor of mesh.data ({data}): only rows '
            'of a batch are cut across the data centre network'
        )
    return dataclasses.replace(config, data=data)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, neighbours along an axis close together.

    Raises:
      ConfigError: it does not fit the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    config = filled(config, len(devices))
    shape = [getattr(config, axis) for axis in AXES]
    if config.slices > 1:
        outer = [config.slices, 1, 1, 1]
        inner = [config.data // config.slices, *shape[1:]]
        array = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
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
    mesh = filled(config.mesh, num_devices)
    problem = next(_problems(config, strategy, mesh), None)
    if problem is None:
        return mesh
    fits = [
        other
        for other in _factorised(mesh, num_devices)
        if not any(_problems(config, strategy, other))
    ]
    raise ConfigError(f'{problem}; {_listed(fits)}')


def _problems(config: Config, strategy: Strategy, mesh: MeshConfig) -> Iterator[str]:
    model, data, accumulated = config.model, config.data, config.train.grad_accum_steps
    rows = mesh.data * mesh.expert
    if strategy == 'train' and data.batch_size % (rows * accumulated):
        slices = f' x {accumulated} accumulation steps' if accumulated > 1 else ''
        yield (
            f'data.batch_size: got {data.batch_size}, wanted a multiple of the {rows} parts of a '
            f'batch (mesh.data {mesh.data} x mesh.expert {mesh.expert}{slices})'
        )
    # Attention gives each chip two pieces, one early and one late, so that all work alike.
    pieces = 2 * mesh.sequence
    least = model.linear_attn_config.short_conv_kernel_size - 1
    length = data.sequence_length
    if mesh.sequence > 1 and (length % pieces or length // mesh.sequence < least):
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
    for name, heads in (
        ('num_attention_heads', model.num_attention_heads),
        ('linear_attn_config.num_heads', model.linear_attn_config.num_heads),
    ):
        if heads % mesh.tensor:
            yield f'mesh.tensor: got {mesh.tensor}, wanted a divisor of model.{name} ({heads})'


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


def _listed(meshes: list[MeshConfig]) -> str:
    if not meshes:
        return 'no mesh over these devices works'
    shown = (_shape(mesh) or 'data=1' for mesh in meshes[:MOST_PROPOSALS])
    return f'what fits: {"; ".join(shown)}'
