"""The real programs of a pod, compiled: our kernels are in them, and they fit a chip."""

import dataclasses

import jax
import pytest

from configs import kimi_k3_shallow, tiny_k3
from k3jax.aot.chips import chip_of
from k3jax.aot.compile_job import compile_lowered
from k3jax.aot.compiler import devices_of, has_libtpu
from k3jax.aot.jobs import build_job, mesh_for
from k3jax.aot.program import KERNEL_OP, analyse, collective_bytes, kernel_name
from k3jax.config import ConfigError, DataConfig, MeshConfig

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup'),
]


def compiled(config, job, topology):
    mesh = mesh_for(config, job, devices_of(topology))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        built = build_job(config, job, mesh)
        lowered = jax.jit(built.function, donate_argnums=built.donate).lower(*built.args)
    done = compile_lowered(lowered, chip_of(topology))
    assert done.error is None, done.error
    return done, analyse(done.text, mesh.size)


def kernels_of(program):
    return {kernel_name(op.name) for op in program.ops if op.kind == KERNEL_OP}


def tiny(mesh, **data):
    config = tiny_k3.get_config()
    train = dataclasses.replace(config.train, dtype='bfloat16', remat='layer')
    data = DataConfig(**({'sequence_length': 256, 'batch_size': 32} | data))
    return dataclasses.replace(config, train=train, data=data, mesh=mesh)


def test_a_step_on_64_chips_has_our_kernels_and_moves_tokens_not_expert_tables():
    done, program = compiled(
        tiny(MeshConfig(expert=8, sequence=2, whole_below=0)), 'train', 'v5p:4x4x4'
    )
    names = kernels_of(program)
    for kernel in ('attn_res', 'kda', 'mla'):
        assert {f'{kernel}_forward', f'{kernel}_backward'} <= names, names
    assert {'grouped_gate_up', 'grouped_down', 'grouped_weight_gradient'} <= names, names
    kinds = collective_bytes(program)
    assert kinds.keys() >= {'ragged-all-to-all', 'all-gather', 'collective-permute'}, kinds
    assert done.memory.required < done.memory.limit


def test_a_job_that_cannot_be_cut_is_refused_before_it_is_built():
    devices = devices_of('v5p:2x2x1')
    with pytest.raises(ConfigError, match=r'data.batch_size: got 6, wanted a multiple of the 4'):
        mesh_for(tiny(MeshConfig(), batch_size=6), 'train', devices)
    with pytest.raises(ConfigError, match=r"--job: got 'sleep', wanted one of train, prefill"):
        mesh_for(tiny(MeshConfig()), 'sleep', devices)


@pytest.mark.slow
def test_a_shallow_k3_at_full_width_trains_on_4096_chips():
    done, program = compiled(kimi_k3_shallow.get_config(), 'train', 'v5p:16x16x16')
    assert {'kda_backward', 'mla_backward', 'grouped_weight_gradient'} <= kernels_of(program)
    assert done.memory.peak < 83 * 2**30
