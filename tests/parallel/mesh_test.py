"""Which meshes are made and refused, and how parameters are cut: nothing is whole on a chip."""

import dataclasses
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import kimi_k3, kimi_k3_pod, kimi_linear_48b, tiny_k3
from k3jax.config import Config, ConfigError, DataConfig, MeshConfig
from k3jax.model.kimi import Kimi
from k3jax.model.layout import model_leaves
from k3jax.model.param import param_specs
from k3jax.model.plan import depth_plan
from k3jax.model.run import Run
from k3jax.parallel.mesh import check_fits, filled, make_mesh
from k3jax.parallel.rules import RULES, axes_of, spec_of
from k3jax.parallel.shard import Parallel, parallel_of
from k3jax.train.optim import make_optimizer
from k3jax.train.state import abstract_state, check_state_fits, chip_bytes, fresh_state
from tests import tiny

Leaf = dataclasses.make_dataclass('Leaf', ['shape', 'axes'], frozen=True)


def leaves_of(tree):
    return [
        leaf
        for entry in tree.values()
        for leaf in (leaves_of(entry) if isinstance(entry, dict) else [entry])
    ]


def run_config(mesh, **data):
    data = {'batch_size': 8, 'sequence_length': 64} | data
    return Config(model=tiny.k3(num_experts=8), data=DataConfig(**data), mesh=mesh)


def test_data_takes_the_chips_that_the_other_axes_leave():
    assert filled(MeshConfig(expert=2, sequence=2), 8).data == 2
    mesh = make_mesh(MeshConfig(expert=2, sequence=2))
    assert dict(mesh.shape) == {'data': 2, 'expert': 2, 'sequence': 2, 'tensor': 1}
    assert parallel_of(make_mesh(MeshConfig(), jax.devices()[:1]), MeshConfig(), 'train') is None


@pytest.mark.parametrize(
    ('mesh', 'data', 'message'),
    [
        (
            MeshConfig(data=3, expert=2),
            {},
            r'mesh: got data=3 expert=2, which is 6 chips, wanted the 8 there are; what fits: '
            r'data=4 expert=2',
        ),
        (
            MeshConfig(expert=16),
            {},
            r'got data=-1 expert=16, which is 16 chips, wanted the 8 there are; what fits: '
            r'expert=8',
        ),
        (
            MeshConfig(),
            {'batch_size': 4},
            r'data.batch_size: got 4, wanted a multiple of the 8 parts of a batch \(mesh.data 8 x '
            r'mesh.expert 1\); what fits: data=4 sequence=2',
        ),
        (
            MeshConfig(sequence=8),
            {'sequence_length': 40},
            r'data.sequence_length: got 40, wanted a multiple of 16 \(twice mesh.sequence\) that '
            r'leaves each chip at least 3 tokens; what fits: data=2 sequence=4',
        ),
        (
            MeshConfig(tensor=2),
            {},
            r'mesh.tensor: got 2, wanted 1: only decoding splits heads; what fits: data=8',
        ),
        (
            MeshConfig(slices=3),
            {},
            r'mesh.slices: got 3, wanted a divisor of mesh.data \(8\)',
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_one_that_does(mesh, data, message):
    with pytest.raises(ConfigError, match=message):
        check_fits(run_config(mesh, **data), 'train', 8)


def test_experts_and_heads_that_cannot_be_shared_out_are_refused():
    config = dataclasses.replace(run_config(MeshConfig(expert=8)), model=tiny.k3(num_experts=6))
    with pytest.raises(ConfigError, match='mesh.expert: got 8, wanted a divisor of the 6 experts'):
        check_fits(config, 'train', 8)
    with pytest.raises(ConfigError, match=r'wanted a divisor of model.num_attention_heads \(2\)'):
        check_fits(run_config(MeshConfig(tensor=8)), 'decode', 8)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.sampled_from([1, 2, 4, 6, 8, 12, 16]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([4, 6, 8, 16]),
)
def test_every_mesh_that_is_proposed_fits(num_devices, expert, sequence, batch):
    config = run_config(MeshConfig(expert=expert, sequence=sequence), batch_size=batch)
    try:
        check_fits(config, 'train', num_devices)
    except ConfigError as error:
        _, _, proposed = str(error).partition('what fits: ')
        for text in filter(None, proposed.split('; ')):
            axes = {name: int(n) for name, n in (pair.split('=') for pair in text.split())}
            mesh = MeshConfig(**({'data': 1} | axes))
            check_fits(dataclasses.replace(config, mesh=mesh), 'train', num_devices)


def test_two_dimensions_that_want_the_same_axis_are_refused():
    leaf = Leaf((8, 8), ('heads', 'mlp'))
    with pytest.raises(ValueError, match='mesh axis expert cuts two dimensions'):
        spec_of(leaf, RULES['train'], {'expert': 2}, 0)


def test_a_dimension_that_is_only_stored_is_cut_as_far_as_it_divides():
    sizes = {'data': 4, 'sequence': 2, 'expert': 4}
    assert spec_of(Leaf((12, 8), ('heads', 'embed')), RULES['train'], sizes, 0) == P(
        'expert', ('data', 'sequence')
    )
    assert spec_of(Leaf((6, 12), ('heads', 'embed')), RULES['train'], sizes, 0) == P(None, 'data')
    assert spec_of(Leaf((12, 8), ('heads', 'embed')), RULES['train'], sizes, 97) == P(None, None)
    with pytest.raises(ValueError, match='expert of a parameter .* has 6 elements'):
        spec_of(Leaf((6, 8, 8), ('expert', None, None)), RULES['train'], sizes, 1 << 20)


@pytest.mark.parametrize('strategy', ['train', 'prefill', 'decode'])
@pytest.mark.parametrize('config', [kimi_k3, kimi_linear_48b, tiny_k3])
def test_every_parameter_of_every_model_is_cut_by_every_strategy(config, strategy):
    model = config.get_config().model
    sizes = (2, 4, 1, 1) if strategy != 'decode' else (2, 2, 1, 1)
    parallel = Parallel(sizes, strategy, 0, 'moon')
    for leaf in leaves_of(model_leaves(model)):
        local = parallel.local(leaf)
        chips = [parallel.size(*axes_of(cut)) for cut in parallel.spec(leaf)]
        assert tuple(np.array(local.shape) * np.array(chips)) == leaf.shape


def test_a_chip_of_4096_holds_its_share_of_k3_and_no_whole_expert_table():
    config = kimi_k3_pod.get_config()
    parallel = Parallel((64, 64, 1, 1), 'train', config.mesh.whole_below, 'moon')
    leaves = leaves_of(model_leaves(config.model))
    held = sum(parallel.local(leaf).size for leaf in leaves)
    assert held <= 1.05 * sum(leaf.size for leaf in leaves) / 4096
    experts = [leaf for leaf in leaves if 'expert' in leaf.axes]
    assert len(experts) == 92 * 3
    # What a step gathers of an expert matrix is 14 experts, never 896.
    assert all('expert' in parallel.rules.kept and leaf.shape[0] == 896 for leaf in experts)


def test_the_state_is_made_in_parts_that_equal_the_whole():
    """No array of the program is larger than twice a chip's largest share (a random number is made
    of two); the values are those of one chip."""
    config = run_config(MeshConfig(data=2, expert=2, sequence=2, whole_below=0))
    config = dataclasses.replace(config, model=tiny.k3((1,), (2,), num_experts=8))
    mesh = make_mesh(config.mesh)
    run = Run(jnp.float32, jnp.float32, implementation='xla')
    model = Kimi(config.model, run._replace(parallel=parallel_of(mesh, config.mesh, 'train')))
    optimizer = make_optimizer(config.optimizer, 1000, model, mesh)
    abstract = abstract_state(model, optimizer, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    make = jax.jit(
        lambda: fresh_state(model, optimizer, jax.random.key(3)), out_shardings=shardings
    )
    state = make()
    share = max(x.addressable_shards[0].data.size for x in jax.tree.leaves(state))
    shapes = re.findall(r'\b[a-z]+\d+\[([\d,]+)\]', make.lower().compile().as_text())
    assert max(math.prod(map(int, shape.split(','))) for shape in shapes) <= 2 * share
    one = Kimi(config.model, run)
    whole = jax.jit(lambda: fresh_state(one, optimizer, jax.random.key(3)))()
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    cut = [x for x in jax.tree.leaves(state.params) if x.addressable_shards[0].data.size < x.size]
    assert len(cut) > 20
    specs = param_specs(config.model, depth_plan(config.model), model.run.parallel)
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.opt_state)
        if jax.tree_util.keystr(path).endswith('.mu')
    ]
    assert moments and {m.sharding.spec for m in moments} <= set(
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    )


def test_a_state_that_cannot_lie_on_a_chip_is_refused_with_the_numbers():
    config = run_config(MeshConfig(whole_below=0))
    mesh = make_mesh(config.mesh)
    model = Kimi(
        config.model,
        Run(jnp.float32, jnp.float32, parallel=parallel_of(mesh, config.mesh, 'train')),
    )
    optimizer = make_optimizer(config.optimizer, 1000, model, mesh)
    abstract = abstract_state(model, optimizer, mesh)
    need = chip_bytes(abstract) + chip_bytes(abstract.params)
    with pytest.raises(ConfigError, match='wanted at most .* take at least 3 times the chips'):
        check_state_fits(abstract, model, -(-need // 3))
    check_state_fits(abstract, model, need)
    check_state_fits(abstract, model, None)
    waiting = abstract_state(model, optimizer, mesh, 'pinned_host')
    assert chip_bytes(waiting) < 0.4 * chip_bytes(abstract)
