"""KDA, MLA and MoE layers alone, in every variant, against float64; caches and blocks of MLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model import mla
from k3jax.model.cache import KDACache, MLACache
from k3jax.model.kda import kda_mixer
from k3jax.model.moe import moe
from k3jax.model.run import Run
from tests import tiny
from tests.compare import relative_error
from tests.oracles import kimi as oracle

EXACT = 1e-12  # of float64 against float64, relative
B, T = 2, 11
RUN = Run(jnp.dtype('float64'), implementation='xla')


def arguments(config, layer, part, length=T, dtype=np.float64):
    params = tiny.random_params(config)[f'layers_{layer}'][part]
    x = np.random.default_rng(1).standard_normal((B, length, config.hidden_size)).astype(dtype)
    return jax.tree.map(lambda a: a if a.dtype == np.uint8 else a.astype(dtype), params), x


def run(function, *args, **kwargs):
    """In float64, compiled."""
    with jax.enable_x64(True):
        return jax.jit(functools.partial(function, **kwargs))(*args)


def replace_linear(config, **fields):
    linear = dataclasses.replace(config.linear_attn_config, **fields)
    return dataclasses.replace(config, linear_attn_config=linear)


KDA_VARIANTS = {
    'k3': tiny.k3(),
    'kimi_linear': tiny.kimi_linear(),
    'softplus gate, full-rank output gate': replace_linear(tiny.k3(), gate_lower_bound=None),
    'bounded gate, low-rank output gate': replace_linear(tiny.k3(), use_full_rank_gate=False),
    'two taps': replace_linear(tiny.k3(), short_conv_kernel_size=2),
}


@pytest.mark.parametrize('config', KDA_VARIANTS.values(), ids=KDA_VARIANTS)
def test_kda_layer_equals_the_oracle(config):
    params, x = arguments(config, 1, 'self_attn')
    shared = {'segment_ids': None, 'cache': None, 'run': RUN}
    got, cache = run(kda_mixer, params, x, config=config, **shared)
    assert cache is None
    for b in range(B):
        assert relative_error(got[b], oracle.kda_mixer(params, x[b], config)[0]) < EXACT


def test_kda_state_is_keys_by_values_and_beta_is_a_sigmoid_once():
    """One token with raw beta 0 from an empty state: S = k (v / 2)^T."""
    config = tiny.k3()
    params, x = arguments(config, 1, 'self_attn', length=1)
    params['b_proj'] = np.zeros_like(params['b_proj'])
    c = config.linear_attn_config
    tail = np.zeros((B, c.short_conv_kernel_size - 1, c.num_heads * c.head_dim))
    empty = KDACache(np.zeros((B, c.num_heads, c.head_dim, c.head_dim)), tail, tail, tail)
    _, cache = run(
        lambda params, x, cache: kda_mixer(
            params, x, config, segment_ids=None, cache=cache, run=RUN
        ),
        params, x, empty,
    )  # fmt: skip
    for b in range(B):
        k, v = (
            oracle.short_conv(oracle.times(x[b], params[f'{n}_proj']), params[f'{n}_conv1d'])
            for n in ('k', 'v')
        )
        for h, (k_h, v_h) in enumerate(zip(k.reshape(3, 8), v.reshape(3, 8), strict=True)):
            k_h = k_h / np.sqrt(np.sum(k_h**2) + 1e-6)
            assert relative_error(cache.state[b, h], np.outer(k_h, v_h / 2)) < EXACT


MLA_VARIANTS = {
    'k3': tiny.k3(),
    'kimi_linear': tiny.kimi_linear(),
    'direct q, gate': tiny.k3(q_lora_rank=None),
    'q latent, no gate': tiny.k3(mla_use_output_gate=False),
    'another latent epsilon': tiny.k3(mla_latent_norm_eps=1e-2),
}


@pytest.mark.parametrize('config', MLA_VARIANTS.values(), ids=MLA_VARIANTS)
def test_mla_layer_equals_the_oracle(config):
    params, x = arguments(config, 3, 'self_attn')
    rest = {'segment_ids': None, 'cache': None, 'length': None, 'run': RUN}
    got, *_ = run(mla.mla_mixer, params, x, config=config, **rest)
    for b in range(B):
        assert relative_error(got[b], oracle.mla_mixer(params, x[b], config)) < EXACT


def test_latent_epsilon_is_its_own_and_matters_for_small_latents():
    config = tiny.k3()
    assert config.mla_latent_norm_eps == 1e-6 != config.rms_norm_eps
    params, x = arguments(config, 3, 'self_attn')
    params['kv_a_proj_with_mqa'] *= 1e-2
    rest = {'segment_ids': None, 'cache': None, 'length': None, 'run': RUN}
    got, *_ = run(mla.mla_mixer, params, x, config=config, **rest)
    assert relative_error(got[0], oracle.mla_mixer(params, x[0], config)) < EXACT
    other = dataclasses.replace(config, mla_latent_norm_eps=config.rms_norm_eps)
    changed, *_ = run(mla.mla_mixer, params, x, config=other, **rest)
    assert relative_error(changed, got) > 1e-3


@pytest.mark.parametrize('key_block', [1, 4, 5, 16, 512])
def test_cached_attention_equals_the_layer_whatever_the_block_of_keys(monkeypatch, key_block):
    """The cache is longer than the text, and its size is no multiple of the block."""
    monkeypatch.setattr(mla, 'KEY_BLOCK', key_block)
    monkeypatch.setattr(mla, 'QUERY_BLOCK', 3)
    config, size = tiny.k3(), 16
    params, x = arguments(config, 3, 'self_attn', length=12)
    cache = MLACache(np.full((B, size, config.kv_lora_rank), 7.0), np.full((B, size, 4), 7.0))

    def call(params, x, cache, length, ids):
        return mla.mla_mixer(
            params, x, config, segment_ids=ids, cache=cache, length=length, run=RUN
        )[:2]

    zero = np.zeros(B, np.int32)
    got, cache = run(call, params, x[:, :9], cache, zero, np.ones((B, 9), np.int32))
    # Two real tokens and one of padding, then one by the absorbed form.
    ids = np.array([[1, 1, 0]] * B, np.int32)
    more, cache = run(call, params, x[:, 9:12], cache, zero + 9, ids)
    last, cache = run(call, params, x[:, 11:], cache, zero + 11, None)
    got = np.concatenate([got, more[:, :2], last], axis=1)
    for b in range(B):
        assert relative_error(got[b], oracle.mla_mixer(params, x[b], config)) < EXACT
    assert np.all(np.asarray(cache.latent)[:, 12:] == 7.0)  # padding is not written


@pytest.mark.parametrize('prefix', [1, 3, 16])
def test_one_token_at_a_time_equals_the_layer_whatever_part_of_the_cache_is_read(
    monkeypatch, prefix
):
    """Rows of unequal length: the shorter is two tokens behind."""
    monkeypatch.setattr(mla, 'PREFIX', prefix)
    config, size = tiny.k3(), 13
    params, x = arguments(config, 3, 'self_attn', length=12)
    cache = MLACache(np.full((B, size, config.kv_lora_rank), 7.0), np.full((B, size, 4), 7.0))
    behind = 2 * np.arange(B)

    @jax.jit
    def call(params, x, cache, length):
        return mla.mla_mixer(
            params, x, config, segment_ids=None, cache=cache, length=length, run=RUN
        )[:2]

    found = np.zeros_like(x)
    for step in range(12 + behind.max()):
        place = np.clip(step - behind, 0, 11)
        rows = np.arange(B)
        with jax.enable_x64(True):
            out, cache = call(params, x[rows, place][:, None], cache, place.astype(np.int32))
        found[rows, place] = out[:, 0]
    for b in range(B):
        assert relative_error(found[b], oracle.mla_mixer(params, x[b], config)) < EXACT


MOE_VARIANTS = {
    'k3': tiny.k3(),
    'kimi_linear': tiny.kimi_linear(),
    'latent without norm': tiny.k3(latent_moe_use_norm=False),
    'no shared experts': tiny.k3(num_shared_experts=0),
    'every expert': tiny.k3(num_experts_per_token=6),
    'one expert': tiny.k3(num_experts_per_token=1),
    'raw weights, scaled': tiny.k3(moe_renormalize=False, routed_scaling_factor=3.0),
    'mxfp4': tiny.k3(
        routed_expert_hidden_size=32, moe_intermediate_size=64, experts_format='mxfp4'
    ),
    'uncapped up branch': tiny.k3(activation_situ_linear_beta=None),
}


@pytest.mark.parametrize('config', MOE_VARIANTS.values(), ids=MOE_VARIANTS)
def test_moe_equals_the_oracle(config):
    params, x = arguments(config, 2, 'block_sparse_moe')
    got, _ = run(moe, params, x, config=config, run=RUN)
    for b in range(B):
        assert relative_error(got[b], oracle.moe(params, x[b], config)) < EXACT


def test_moe_gradients_equal_central_differences():
    config = tiny.k3()
    params, x = arguments(config, 2, 'block_sparse_moe')
    dy = np.random.default_rng(3).standard_normal(x[0].shape)
    loss = lambda params, x: jnp.sum(dy * moe(params, x, config, RUN)[0][0])  # noqa: E731
    d_params, dx = jax.tree.map(np.asarray, run(jax.grad(loss, argnums=(0, 1)), params, x[:1]))
    assert not np.any(d_params['e_score_correction_bias'])
    rng = np.random.default_rng(4)

    def true_loss(params, x):
        return np.sum(dy * oracle.moe(params, x, config))

    def check(slope, moved):
        above, below = moved(1e-6), moved(-1e-6)
        assert slope == pytest.approx((above - below) / 2e-6, rel=1e-6, abs=1e-7)

    direction = rng.standard_normal(x[0].shape)
    check(np.sum(direction * dx[0]), lambda s: true_loss(params, x[0] + s * direction))
    for name in ('gate', 'routed_expert_down_proj', 'routed_expert_norm', 'routed_expert_up_proj'):
        direction = rng.standard_normal(params[name].shape)
        slope = np.sum(direction * d_params[name])
        check(
            slope, lambda s, n=name, d=direction: true_loss(params | {n: params[n] + s * d}, x[0])
        )
    experts = params['experts']
    for name in ('w1', 'w2', 'w3'):
        direction = rng.standard_normal(experts[name].shape)
        slope = np.sum(direction * d_params['experts'][name])

        def moved(s, n=name, d=direction):
            return true_loss(params | {'experts': experts | {n: experts[n] + s * d}}, x[0])

        check(slope, moved)
