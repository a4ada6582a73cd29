"""How depth folds: K3's plan, every layer once, stacking and its inverse, snapshot counts."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kimi_k3, kimi_linear_48b
from k3jax.config import LinearAttnConfig
from k3jax.model import kimi, layer
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.layout import Leaf, layer_leaves, model_leaves
from k3jax.model.plan import depth_plan, layer_specs, stack_params, stacks, unstack_params
from k3jax.model.run import Run
from tests import tiny

K3 = kimi_k3.get_config().model


def layers_of(plan):
    return sorted(int(n) for stack in stacks(plan) for n in stack.layers.flat)


def summary(plan):
    """(first, repeats, [(offset, kinds, repeats)]) a block."""
    return [
        (
            block.first,
            block.repeats,
            [
                (s.offset, ' '.join(f'{x.mixer}-{x.ffn}' for x in s.specs), s.repeats)
                for s in block.segments
            ],
        )
        for block in plan
    ]


def test_k3_has_69_kda_layers_and_ends_with_two_mla_layers():
    specs = layer_specs(K3)
    assert sum(s.mixer == 'kda' for s in specs) == 69
    mla = [n for n, s in enumerate(specs) if s.mixer == 'mla']
    assert mla == [*range(3, 92, 4), 92]
    assert [n for n, s in enumerate(specs) if s.ffn == 'dense'] == [0]
    assert [s.attn_res_block for s in specs] == [n // 12 for n in range(93)]


def test_k3_expert_counts():
    assert (K3.num_experts, K3.num_experts_per_token) == (896, 16)


def test_k3_folds_into_its_first_block_six_equal_ones_and_its_tail():
    four = 'kda-moe kda-moe kda-moe mla-moe'
    first = [(0, 'kda-dense kda-moe kda-moe mla-moe', 1), (4, four, 2)]
    tail = [(0, four, 2), (8, 'mla-moe', 1)]
    plan = depth_plan(K3)
    assert summary(plan) == [(0, 1, first), (12, 6, [(0, four, 3)]), (84, 1, tail)]
    assert [run.count for run in plan[0].segments[0].runs] == [1, 2, 1]
    assert len(list(stacks(plan))) == 10


@pytest.mark.parametrize('scan', [True, False])
@pytest.mark.parametrize(
    'config', [K3, kimi_linear_48b.get_config().model, tiny.k3(), tiny.k3_deep()]
)
def test_every_layer_is_in_the_plan_exactly_once(config, scan):
    assert layers_of(depth_plan(config, scan=scan)) == list(range(config.num_hidden_layers))


def with_layers(mixers, block):
    kda = tuple(n + 1 for n, is_kda in enumerate(mixers) if is_kda)
    mla = tuple(n + 1 for n, is_kda in enumerate(mixers) if not is_kda)
    return dataclasses.replace(
        tiny.k3(),
        num_hidden_layers=len(mixers),
        attn_res_block_size=block,
        linear_attn_config=LinearAttnConfig(
            num_heads=3, head_dim=8, kda_layers=kda, full_attn_layers=mla
        ),
    )


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.booleans(), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(1, 9)),
    st.booleans(),
)
def test_stacking_any_pattern_and_back_is_the_identity(mixers, block, scan):
    config = with_layers(mixers, block)
    plan = depth_plan(config, scan=scan)
    assert layers_of(plan) == list(range(len(mixers)))
    params = {'embed_tokens': np.arange(3)}
    for n, spec in enumerate(layer_specs(config)):
        params[f'layers_{n}'] = {spec.mixer: {spec.ffn: np.full((2,), n)}}
    stacked = stack_params(params, plan, np.stack)  # unequal kinds would not stack
    back = unstack_params(stacked, plan)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize('config', [tiny.k3(), tiny.k3_deep(), tiny.kimi_linear()])
def test_stacked_parameters_have_the_structure_that_the_model_declares(config):
    model = Kimi(config, Run(jnp.float32))
    wanted = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    stacked = stack_params(tiny.random_params(config), model.plan, np.stack)
    assert jax.tree.structure(wanted) == jax.tree.structure(stacked)
    assert [w.shape for w in jax.tree.leaves(wanted)] == [s.shape for s in jax.tree.leaves(stacked)]


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(K3, marks=pytest.mark.slow),
        dataclasses.replace(K3, experts_format='mxfp4'),
    ],
)
def test_fresh_parameters_of_all_of_k3_have_the_release_s_shapes_and_dtypes(config):
    model = Kimi(config, Run(jnp.bfloat16))
    fresh = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    fresh = {jax.tree_util.keystr(p): a for p, a in jax.tree.leaves_with_path(fresh)}
    wanted = {}
    entries = [((), (), {n: x for n, x in model_leaves(config).items() if isinstance(x, Leaf)})]
    for path, layers in stacks(model.plan):
        entries.append((path, layers.shape, layer_leaves(config, int(layers.flat[0]))))
    for path, lead, leaves in entries:
        for below, leaf in jax.tree.leaves_with_path(leaves):
            name = ''.join(f"['{part}']" for part in path) + jax.tree_util.keystr(below)
            wanted[name] = ((*lead, *leaf.shape), leaf.dtype)
    assert {name: (a.shape, str(a.dtype)) for name, a in fresh.items()} == wanted


def test_k3_keeps_in_float32_what_the_release_stores_so():
    leaves = model_leaves(K3)
    attn, moe = leaves['layers_0']['self_attn'], leaves['layers_1']['block_sparse_moe']
    for leaf in (attn['A_log'], attn['dt_bias'], attn['q_conv1d'], attn['o_norm']):
        assert leaf.dtype == 'float32'
    assert moe['e_score_correction_bias'].dtype == 'float32'
    assert moe['routed_expert_down_proj'].dtype == moe['gate'].dtype == 'bfloat16'


def test_every_read_of_the_bank_has_the_candidates_that_its_layer_should_see(monkeypatch):
    """Snapshots and running sum, at each layer's two reads and at the readout."""
    reads = []
    real = layer.attn_res

    def recorded(*args, num_live, use_prefix, **rest):
        reads.append((int(num_live), use_prefix))
        return real(*args, num_live=num_live, use_prefix=use_prefix, **rest)

    monkeypatch.setattr(layer, 'attn_res', recorded)
    monkeypatch.setattr(kimi, 'attn_res', recorded)
    size, count = 3, 8
    config = with_layers([True] + [False] * (count - 1), size)
    model = Kimi(config, Run(jnp.float32), scan_layers=False)
    jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    candidates = [num_live + bool(use_prefix) for num_live, use_prefix in reads]
    want = []
    for n in range(count):
        # The first layer reads the embedding, which is its block's only snapshot.
        want += [-(-n // size) + 1, n // size + 2]
    assert candidates == [*want, -(-count // size) + 1]
