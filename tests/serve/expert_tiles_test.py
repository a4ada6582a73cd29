"""Experts in the kernels' order compute what those in the release's order do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError, MeshConfig
from k3jax.model.flops import count_parameters
from k3jax.model.kimi import Kimi, forward
from k3jax.model.layout import expert_leaves
from k3jax.model.run import Run
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.serve.expert_tiles import as_held, in_tiles
from k3jax.serve.placement import place_params
from tests import tiny

BF16 = jnp.dtype('bfloat16')
CONFIG = tiny.k3(
    (1,), (2,), routed_expert_hidden_size=128, moe_intermediate_size=128, experts_format='mxfp4'
)


def opened(config, mesh_config=None):
    """The model and the parameters of a release, as it holds them."""
    mesh = None if mesh_config is None else make_mesh(mesh_config, jax.devices()[:2])
    parallel = None if mesh is None else parallel_of(mesh, mesh_config, 'decode')
    model = Kimi(config, Run(BF16, implementation='xla', parallel=parallel), scan_layers=False)
    params = place_params(tiny.random_params(CONFIG), model, mesh, as_held)
    return model, params


def test_logits_are_the_same_bit_for_bit():
    tiled = in_tiles(CONFIG, BF16)
    tokens = np.arange(12).reshape(2, 6)
    found = [np.asarray(forward(*opened(config), tokens)[0]) for config in (CONFIG, tiled)]
    assert tiled.experts_format == 'mxfp4_tiles'
    assert np.ptp(found[0]) > 0.1
    np.testing.assert_array_equal(*found)


def test_leaves_are_those_of_the_table_and_count_as_many_weights():
    tiled = in_tiles(CONFIG, BF16)
    _, params = opened(tiled, MeshConfig(expert=2, whole_below=0))
    leaves, seen = expert_leaves(tiled), 0
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in leaves:
            leaf, seen = leaves[path[-1].key], seen + 1
            assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
            assert array.addressable_shards[0].data.shape == (leaf.shape[0] // 2, *leaf.shape[1:])
    assert seen == len(leaves) == 6
    assert count_parameters(tiled) == count_parameters(CONFIG)


@pytest.mark.parametrize(
    ('changes', 'dtype'),
    [
        ({}, 'float32'),
        ({'moe_intermediate_size': 64}, 'bfloat16'),
        ({'experts_format': 'bf16'}, 'bfloat16'),
    ],
)
def test_what_no_kernel_takes_stays_as_released(changes, dtype):
    config = tiny.k3(routed_expert_hidden_size=128, **{'moe_intermediate_size': 128} | changes)
    assert in_tiles(config, jnp.dtype(dtype)) == config


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="experts_format: got 'int4', wanted 'bf16' or 'mxfp4'"):
        tiny.k3(experts_format='int4')
