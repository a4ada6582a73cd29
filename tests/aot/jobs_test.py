"""The real programs of a pod, compiled: our kernels are in them, and they fit a chip."""

import dataclasses

import jax
import pytest

from configs import digits_k3, kimi_k3_shallow, kimi_linear_48b, tiny_k3
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
    mesh = mesh_for(config, job, devices_of(topology, config.mesh.slices))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        built = build_job(config, job, mesh)
        lowered = jax.jit(built.function, donate_argnums=built.donate).lower(*built.args)
    done = compile_lowered(lowered, chip_of(topology))
    assert done.error is None, done.error
    return done, analyse(done.text, mesh.size)


def kernels_of(program):
    return {kernel_name(op.name) for op in program.ops if op.kind == KERNEL_OP}


def with_work(module, mesh, experts_format='bf16', **data):
    config = module.get_config()
    model = dataclasses.replace(config.model, experts_format=experts_format)
    return dataclasses.replace(config, model=model, data=DataConfig(**data), mesh=mesh)


def tiny(mesh, batch_size=32):
    """Three layers, in bfloat16."""
    config = with_work(tiny_k3, mesh, sequence_length=256, batch_size=batch_size)
    linear = dataclasses.replace(
        config.model.linear_attn_config, kda_layers=(1, 2), full_attn_layers=(3,)
    )
    model = dataclasses.replace(config.model, num_hidden_layers=3, linear_attn_config=linear)
    train = dataclasses.replace(config.train, dtype='bfloat16', remat='layer')
    return dataclasses.replace(config, model=model, train=train)


@pytest.mark.slow
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


@pytest.mark.parametrize('job', ['prefill', 'decode'])
def test_serving_that_cannot_fit_is_refused_before_it_is_compiled(job):
    config = tiny(MeshConfig())
    mesh = mesh_for(config, job, devices_of('v5p:2x2x1'))
    *_, cache = build_job(config, job, mesh).args
    least = min(x.size for x in jax.tree.leaves(cache))
    with pytest.raises(ConfigError, match='a chip would hold .* of parameters and .* of cache, wa'):
        build_job(config, job, mesh, least)


@pytest.mark.slow
def test_a_step_on_two_slices_sends_no_tokens_between_them():
    config = tiny(MeshConfig(expert=2, sequence=2, slices=2, whole_below=0))
    done, program = compiled(config, 'train', 'v5p:2x2x1')
    assert done.memory.required < done.memory.limit
    mesh = mesh_for(config, 'train', devices_of('v5p:2x2x1', 2))
    assert [{d.slice_index for d in part.flat} for part in mesh.devices] == [{0}, {1}]
    exchanged = [op for op in program.ops if op.kind == 'ragged-all-to-all']
    assert exchanged and {op.group for op in exchanged} == {2}


def test_kimi_linear_decodes_on_four_chips():
    config = with_work(
        kimi_linear_48b, MeshConfig(tensor=4), batch_size=16, num_streams=1, sequence_length=32768
    )
    done, program = compiled(config, 'decode', 'v5p:2x2x1')
    assert 'token_mlp' in kernels_of(program)
    assert done.memory.required < 40 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ('job', 'mesh', 'rows', 'length', 'kernels'),
    [
        ('decode', MeshConfig(tensor=8), 64, 2**17, {'attn_res_forward', 'token_mlp_mxfp4'}),
        (
            'prefill',
            MeshConfig(sequence=128),
            1,
            2**20,
            {'kda_forward', 'mla_forward', 'grouped_gate_up_mxfp4'},
        ),
    ],
)
def test_a_shallow_k3_with_packed_experts_serves_on_128_chips(job, mesh, rows, length, kernels):
    config = with_work(kimi_k3_shallow, mesh, 'mxfp4', batch_size=rows, sequence_length=length)
    done, program = compiled(config, job, 'v5p:4x4x8')
    assert kernels <= kernels_of(program)
    assert done.memory.required < 20 * 2**30


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


@pytest.mark.slow
def test_a_shallow_k3_trains_on_rows_of_a_million_tokens():
    config = with_work(
        kimi_k3_shallow,
        MeshConfig(expert=64, sequence=64),
        batch_size=64,
        num_streams=64,
        sequence_length=2**20,
    )
    done, program = compiled(config, 'train', 'v5p:16x16x16')
    assert {'kda_backward', 'mla_backward', 'grouped_weight_gradient'} <= kernels_of(program)
    assert done.memory.peak < 83 * 2**30


@pytest.mark.slow
def test_a_step_on_images_fits_rows_whose_tokens_and_patches_chips_share():
    config = digits_k3.get_config()
    train = dataclasses.replace(config.train, dtype='bfloat16', remat='layer')
    config = dataclasses.replace(config, mesh=MeshConfig(sequence=2), train=train)
    done, program = compiled(config, 'train', 'v5p:2x2x1')
    assert {'kda_forward', 'mla_backward'} <= kernels_of(program)
