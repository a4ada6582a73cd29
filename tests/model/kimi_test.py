"""The whole model: float64 oracle, causality, documents, pieces, decoding, scans, program size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kimi_k3
from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, decode, forward, init_params, prefill
from k3jax.model.plan import depth_plan, stack_params, unstack_params
from k3jax.model.run import Run
from tests import tiny
from tests.compare import assert_close, relative_error
from tests.oracles import kimi as oracle

EXACT = 1e-11  # of float64 against float64, relative: the algebra, with rounding amplified by depth
T = 20  # two tiles of KDA's chunk and a remainder

CONFIGS = {
    'k3': tiny.k3(),
    'kimi_linear': tiny.kimi_linear(),
    'kimi_linear_short': tiny.kimi_linear((1,), (2,)),
    'k3_mxfp4': tiny.k3(
        routed_expert_hidden_size=32, moe_intermediate_size=32, experts_format='mxfp4'
    ),
    'k3_deep': tiny.k3_deep(),
}


def build(config, dtype, scan=True, remat='none'):
    """A model and its parameters in `dtype`, as it takes them."""
    model = Kimi(config, Run(dtype, None, remat, 'xla'), scan)
    params = stack_params(tiny.random_params(config), model.plan, np.stack)
    return model, jax.tree.map(lambda a: a if a.dtype == np.uint8 else a.astype(dtype), params)


def tokens_of(batch=2, length=T, seed=0):
    return np.random.default_rng(seed).integers(0, 40, (batch, length)).astype(np.int32)


@functools.cache
def compiled(name, dtype, scan=True, remat='none'):
    """(model, params, {'forward', 'prefill', 'decode', 'grads'}), each compiled once a shape."""
    model, params = build(CONFIGS[name], dtype, scan, remat)

    def loss(params, tokens, segment_ids, weights):
        logits = forward(model, params, tokens, segment_ids)
        return jnp.sum(logits * weights), logits

    functions = {
        'forward': lambda p, tokens, ids: forward(model, p, tokens, ids),
        'prefill': lambda p, tokens, count, cache: prefill(model, p, tokens, count, cache),
        'decode': lambda p, token, cache: decode(model, p, token, cache),
        'grads': jax.grad(loss, has_aux=True),
    }
    return model, params, {n: jax.jit(f) for n, f in functions.items()}


def forward64(name, tokens, ids):
    with jax.enable_x64(True):
        _, params, functions = compiled(name, 'float64')
        return np.asarray(functions['forward'](params, tokens, ids))


@pytest.mark.parametrize(
    'name', ['k3', 'kimi_linear', 'k3_deep', pytest.param('k3_mxfp4', marks=pytest.mark.slow)]
)
def test_logits_equal_the_float64_oracle(name):
    config, tokens = CONFIGS[name], tokens_of()
    got = forward64(name, tokens, np.ones((2, T), np.int32))
    for row, logits in zip(tokens, got, strict=True):
        want = oracle.logits(config, tiny.random_params(config), row)
        assert relative_error(logits, want) < EXACT


@pytest.mark.parametrize('name', ['k3', pytest.param('kimi_linear', marks=pytest.mark.slow)])
def test_float32_logits_are_near_the_oracle(name):
    config, tokens = CONFIGS[name], tokens_of()
    _, params, functions = compiled(name, 'float32')
    got = functions['forward'](params, tokens, None)
    assert got.dtype == jnp.float32
    rounded = jax.tree.map(lambda a: a.astype(np.float32), tiny.random_params(config))
    want = [oracle.logits(config, rounded, row) for row in tokens]
    # Measured 2.8e-6 to 5.5e-6. A few early tokens, whose q and k are nearly orthogonal, dominate:
    # the norm of the KDA output magnifies what rounding leaves of so short a vector.
    assert relative_error(got, want) < 1e-5


def test_first_snapshots_are_the_embedding_and_the_sum_of_a_block_without_it():
    """The oracle's own bookkeeping, which the comparison above relies on."""
    config, params = tiny.k3(), tiny.random_params(tiny.k3())
    tokens = tokens_of(1)[0]
    _, bank, _ = oracle.hidden_states(config, params, tokens)
    assert len(bank) == 3
    np.testing.assert_array_equal(bank[0], params['embed_tokens'][tokens])
    # Without any sublayer output in the first block, its sum is zero and not the embedding.
    for layer, part, name in ((0, 'self_attn', 'o_proj'), (0, 'mlp', 'down_proj'),
                              (1, 'self_attn', 'o_proj')):  # fmt: skip
        params[f'layers_{layer}'][part][name] *= 0
    moe = params['layers_1']['block_sparse_moe']
    moe['routed_expert_up_proj'] *= 0
    moe['shared_experts']['down_proj'] *= 0
    _, bank, _ = oracle.hidden_states(config, params, tokens)
    assert not np.any(bank[1])


def test_layer_zero_s_attention_residual_has_no_effect():
    model, params, functions = compiled('k3', 'float32')
    changed = unstack_params(params, model.plan)
    changed['layers_0']['self_attention_res_proj'] = np.full(24, 5, np.float32)
    changed = stack_params(changed, model.plan, np.stack)
    tokens = tokens_of()
    want = functions['forward'](params, tokens, None)
    np.testing.assert_array_equal(functions['forward'](changed, tokens, None), want)


@pytest.mark.parametrize('name', ['k3', 'kimi_linear_short'])
def test_no_logit_depends_on_a_later_token_and_each_on_all_earlier_ones(name):
    """By gradient: each token has an embedding row of its own."""
    length = T if name == 'k3' else 4
    tokens = np.random.default_rng(1).permutation(40)[:length].astype(np.int32)
    tokens, ids = np.stack([tokens, tokens]), np.ones((2, length), np.int32)
    direction = np.random.default_rng(2).standard_normal(40)
    with jax.enable_x64(True):
        _, params, functions = compiled(name, 'float64')
        for t in range(length):
            weights = np.zeros((2, length, 40))
            weights[0, t] = direction
            grads, _ = functions['grads'](params, tokens, ids, weights)
            reached = np.any(np.asarray(grads['embed_tokens'])[tokens[0]] != 0, axis=1)
            np.testing.assert_array_equal(reached, np.arange(length) <= t)


def test_packed_documents_equal_separate_ones_in_logits_and_gradients():
    ids = np.array([[1] * 7 + [2] + [3] * 12, [4] * 15 + [0] * 5], np.int32)
    tokens = tokens_of()
    weights = np.random.default_rng(3).standard_normal((2, T, 40)) * (ids > 0)[..., None]
    with jax.enable_x64(True):
        _, params, functions = compiled('k3', 'float64')
        total, logits = functions['grads'](params, tokens, ids, weights)
        parts = []
        for row, document in ((0, 1), (0, 2), (0, 3), (1, 4)):
            # Alone at the start of a row, with padding behind; the other row is padding.
            here = ids[row] == document
            count = here.sum()
            alone, alone_weights = np.zeros_like(tokens), np.zeros_like(weights)
            alone[0, :count], alone_weights[0, :count] = tokens[row, here], weights[row, here]
            alone_ids = np.zeros_like(ids)
            alone_ids[0, :count] = 1
            grads, own = functions['grads'](params, alone, alone_ids, alone_weights)
            assert relative_error(own[0, :count], logits[row, here]) < EXACT
            parts.append(grads)
        summed = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(total), jax.tree.leaves(summed), strict=True
    ):
        assert relative_error(got, want) < 1e-10, jax.tree_util.keystr(path)


def feed(functions, params, cache, tokens, pieces):
    """Prefills pieces, each padded to 16; `pieces` holds each row's number of tokens."""
    position = np.zeros(len(tokens), int)
    # Not 8: there, in float64, LLVM of jaxlib 0.10.2 stops at "Cannot select SUBV_BROADCAST_LOAD".
    for counts in pieces:
        padded = np.full((len(tokens), 16), 39, np.int32)
        for b, count in enumerate(counts):
            padded[b, :count] = tokens[b, position[b] : position[b] + count]
        logits, cache = functions['prefill'](params, padded, np.array(counts, np.int32), cache)
        position += counts
    return logits, cache


@pytest.mark.parametrize(
    ('name', 'dtype', 'tolerance'),
    [
        ('k3_deep', 'float64', EXACT),
        pytest.param('k3', 'float64', EXACT, marks=pytest.mark.slow),
        pytest.param('kimi_linear', 'float64', EXACT, marks=pytest.mark.slow),
        # By token; measured 5.4e-6, where each side alone is up to 1e-5 off its float64 value.
        ('k3', 'float32', 2e-5),
    ],
)
def test_prefill_in_pieces_and_decoding_equal_the_forward_pass(name, dtype, tolerance):
    """Rows of unequal length, padded; one prefill, pieces of many sizes, then token by token."""
    tokens = tokens_of()
    lengths = (13, 9)
    with jax.enable_x64(dtype == 'float64'):
        model, params, functions = compiled(name, dtype)
        ids = np.ones((2, T), np.int32) if dtype == 'float64' else None
        want = np.asarray(functions['forward'](params, tokens, ids))
        empty = init_cache(CONFIGS[name], model.plan, 2, 32, dtype)
        once, cache_once = feed(functions, params, empty, tokens, [lengths])
        for b, length in enumerate(lengths):
            assert relative_error(once[b], want[b, length - 1]) < tolerance
        for pieces in ([(1, 1), (5, 7), (7, 1)], [(10, 3), (1, 1), (1, 1), (1, 4)]):
            cut, cache = feed(functions, params, empty, tokens, pieces)
            assert relative_error(cut, once) < tolerance
            for got, one in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_once), strict=True):
                assert np.isfinite(got).all()
                assert relative_error(got, one) < tolerance
        for step in range(7):
            token = np.array([tokens[b, n + step] for b, n in enumerate(lengths)])
            before = cache
            logits, cache = functions['decode'](params, token, cache)
            for b, length in enumerate(lengths):
                assert relative_error(logits[b], want[b, length + step]) < tolerance
        # A cache is a value: going on from an earlier one again gives the same.
        again, _ = functions['decode'](params, token, before)
        np.testing.assert_array_equal(again, logits)
        np.testing.assert_array_equal(cache.length, [20, 16])


def test_padding_at_the_end_of_a_row_changes_nothing():
    tokens = tokens_of()
    ids = np.ones((2, T), np.int32)
    ids[1, 12:] = 0
    got = forward64('k3', tokens, ids)
    other = tokens.copy()
    other[1, 12:] = 39
    np.testing.assert_array_equal(forward64('k3', other, ids)[1, :12], got[1, :12])
    whole = forward64('k3', tokens, np.ones((2, T), np.int32))
    assert relative_error(got[1, :12], whole[1, :12]) < EXACT


@pytest.mark.parametrize(
    'kind', [{'scan': False}, pytest.param({'remat': 'layer'}, marks=pytest.mark.slow)]
)
def test_scanned_depth_equals_unrolled_and_remat_changes_nothing(kind):
    """Outputs and gradients, layer by layer."""
    tokens = tokens_of(length=3)
    weights = np.random.default_rng(4).standard_normal((2, 3, 40))
    results = []
    with jax.enable_x64(True):
        for options in ({}, kind):
            model, params, functions = compiled('k3_deep', 'float64', **options)
            grads, logits = functions['grads'](params, tokens, None, weights)
            grads = unstack_params(jax.tree.map(np.asarray, grads), model.plan)
            results.append({'logits': logits} | {
                jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)
            })  # fmt: skip
    unused = "['layers_0']['self_attention_res_norm']", "['layers_0']['self_attention_res_proj']"
    for result in results:
        for name in unused:
            assert not np.any(result.pop(name))
    assert_close(results[1], results[0], EXACT)


def test_bfloat16_logits_are_within_a_few_roundings_of_float32():
    tokens = tokens_of(8, 4)
    config = tiny.k3(
        (1,), (2,), num_experts_per_token=6
    )  # every expert, so that no choice can flip
    model, params = build(config, np.float32)
    narrow = Kimi(config, Run(jnp.bfloat16, implementation='xla'))
    got = jax.jit(lambda p: forward(narrow, p, tokens))(params)
    assert got.dtype == jnp.float32
    want = jax.jit(lambda p: forward(model, p, tokens))(params)
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    # Measured 0.013 to 0.020: some ten roundings of 2^-9, through norms that magnify a few.
    assert np.median(error) < 0.04


def small_k3(num_layers):
    """K3's own layer pattern at `num_layers`, at widths that trace quickly."""
    full = (*range(4, num_layers, 4), num_layers)
    kda = tuple(n for n in range(1, num_layers + 1) if n not in full)
    return tiny.k3(kda, full, attn_res_block_size=12)


def training_program(num_layers):
    model = Kimi(small_k3(num_layers), Run(jnp.bfloat16, jnp.float32, 'layer', 'xla'))
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(params, tokens, targets, segment_ids):
        logits = jax.nn.log_softmax(forward(model, params, tokens, segment_ids))
        return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], -1))

    return jax.jit(jax.value_and_grad(loss)).lower(params, rows, rows, rows).as_text()


@pytest.mark.slow
def test_training_program_hardly_grows_from_45_to_93_layers():
    assert small_k3(93).linear_attn_config.full_attn_layers == (
        kimi_k3.get_config().model.linear_attn_config.full_attn_layers
    )
    short, long = (len(training_program(n)) for n in (45, 93))
    assert short < long < 1.05 * short


def test_a_cache_larger_than_the_model_s_positions_is_an_error():
    config = dataclasses.replace(tiny.k3(), max_position_embeddings=16)
    with pytest.raises(ValueError, match=r'cache size: got 17, wanted 1\.\.16'):
        init_cache(config, depth_plan(config), 1, 17, jnp.float32)
