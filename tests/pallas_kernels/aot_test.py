"""Every kernel compiles for the TPUs it is meant for, and fits, on a machine without one."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.aot.chips import chip_of
from k3jax.aot.compiler import compile_for, has_libtpu, mesh_of
from k3jax.aot.dumps import custom_calls
from k3jax.aot.measure import roofline_seconds
from pallas_kernels.cases import all_cases, find_case
from pallas_kernels.common.case import abstract
from pallas_kernels.kda import kda

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup'),
]

TOPOLOGIES = ('v5p:2x2x1', 'v6e:2x2')
KEYS = [case.key for case in all_cases()]
# One of each kernel and pass, at a size that compiles in seconds.
CHOSEN = [
    'attn_res/k3_8_snapshots_1024_tokens/backward',
    'attn_res/k3_8_snapshots_1024_tokens/forward',
    'grouped_mlp/k3_14_experts_16_tokens_each_rounded/backward',
    'grouped_mlp/k3_14_experts_16_tokens_each_rounded/forward',
    'grouped_mlp/k3_16_tokens_14_experts_rounded/decode',
    'kda/k3_24_heads_1024_bounded_gate/backward',
    'kda/k3_24_heads_1024_bounded_gate/forward',
    'kda/k3_6_heads_1_given_g/forward',
    'kda/kimi_linear_32_heads_8192_given_g_saving/forward',
    'mla/24_heads_8_sequences_8192_page_64/decode',
    'mla/k3_24_heads_1024/backward',
    'mla/k3_24_heads_1024/forward',
    'short_conv/k3_24_heads_8192_tokens_packed/backward',
]


def check(key: str, topology: str) -> None:
    case = find_case(key)
    calls = custom_calls(compile_for(topology, case.build(None), case.args).as_text())
    assert calls
    assert max(calls.values()) <= chip_of(topology).vmem_bytes


@pytest.mark.parametrize('key', CHOSEN)
def test_chosen_kernels_compile_for_v5p_within_vmem(key):
    check(key, TOPOLOGIES[0])


def fits(case, topology: str) -> bool:
    """All of K3's experts, or all its heads at 131,072 tokens, are too much for a v6e."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(case.args))
    with_outputs = size if case.pass_name == 'decode' else 2 * size  # gradients are as large
    return with_outputs < chip_of(topology).hbm_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ('key', 'topology'),
    [
        (case.key, topology)
        for case in all_cases()
        for topology in TOPOLOGIES
        if fits(case, topology)
    ],
)
def test_every_kernel_at_every_real_shape_compiles_within_vmem(key, topology):
    check(key, topology)


def test_every_case_has_its_own_key_and_needs_some_work():
    assert len(set(KEYS)) == len(KEYS)
    for case in all_cases():
        seconds, _ = roofline_seconds(case, chip_of('v5p:2x2x1'))
        assert 0 < seconds < 10, case.key


@pytest.mark.parametrize('topology', TOPOLOGIES)
def test_default_implementation_is_the_kernel_where_lowered_for_tpu(topology):
    """By the platform lowered for, though this process runs on the CPU."""
    tokens = abstract((1, 256, 4, 128))
    gate = abstract((1, 256, 4, 128), 'float32')

    def loss(q, k, v, g, beta):
        return jnp.sum(kda(q, k, v, g, beta)[0].astype(jnp.float32))

    args = (tokens, tokens, tokens, gate, abstract((1, 256, 4), 'float32'))
    calls = custom_calls(compile_for(topology, jax.grad(loss), args).as_text())
    assert sorted(name.split('.')[0] for name in calls) == ['kda_backward', 'kda_forward']


def test_an_old_generation_falls_back_to_xla_with_one_warning():
    rows = (1, 64, 1, 128)
    args = [np.ones(rows, np.float32)] * 4 + [np.ones(rows[:3], np.float32)]
    mesh = mesh_of('v5e:2x2')
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        with pytest.warns(UserWarning, match='kda: no kernel for TPU v5 lite; the XLA form'):
            jaxpr = jax.make_jaxpr(kda)(*args)
        assert 'pallas_call' not in str(jaxpr)
        assert 'pallas_call' not in str(jax.make_jaxpr(kda)(*args))
