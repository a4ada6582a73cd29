"""How a program is compiled for a TPU topology on a machine without one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.aot.chips import chip_of

# libtpu reads these once, when it is loaded.
ENVIRONMENT = {
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # beside another process that compiles
    'TPU_SKIP_MDS_QUERY': '1',  # there is no metadata server to ask
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_ACCELERATOR_TYPE': 'v5p-8',
    'TPU_MIN_LOG_LEVEL': '3',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TF_CPP_MIN_LOG_LEVEL': '3',
}


def has_libtpu() -> bool:
    return importlib.util.find_spec('libtpu') is not None


def prepare_environment() -> None:
    """Sets what libtpu needs; to be called before libtpu is loaded.

    Raises:
      ModuleNotFoundError: libtpu is not installed.
    """
    if not has_libtpu():
        raise ModuleNotFoundError("libtpu is not installed; pip install '.[aot]'")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def devices_of(topology: str, num_slices: int = 1) -> list[jax.Device]:
    """The chips of slices that are not there, each of this topology.

    Raises:
      ValueError: libtpu knows no such topology.
    """
    prepare_environment()
    try:
        return topologies.get_topology_desc(
            platform='tpu', topology_name=topology, num_slices=num_slices
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f'libtpu knows no topology {topology!r}; v5p:2x2x1 is one') from error


def mesh_of(topology: str, **axes: int) -> Mesh:
    """A mesh over the first devices of a topology that is not there; one device without axes.

    Raises:
      ValueError: libtpu knows no such topology, or it has too few devices.
    """
    axes = axes or {'x': 1}
    devices = devices_of(topology)
    count = int(np.prod(list(axes.values())))
    if count > len(devices):
        raise ValueError(f'{topology} has {len(devices)} devices, the mesh {axes} wants {count}')
    return Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))


def check_topology(topology: str) -> None:
    """Raises ValueError for a topology that there are no figures for, or that libtpu lacks."""
    chip_of(topology)
    mesh_of(topology)


def lower_for(
    topology: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> jax.stages.Lowered:
    """`function` lowered for one chip of a topology; args: trees of ShapeDtypeStruct."""
    mesh = mesh_of(topology)
    sharding = NamedSharding(mesh, PartitionSpec())

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    args = jax.tree.map(placed, args)
    # Kernels ask the mesh for the chip's generation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*args)


def compile_for(
    topology: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> jax.stages.Compiled:
    """`lower_for`, compiled."""
    return lower_for(topology, function, args).compile()
