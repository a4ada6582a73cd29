"""What comes out of blocks is what went in, bit by bit; a page is as large as the report's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kimi_k3
from k3jax.model.cache import init_cache
from k3jax.model.plan import depth_plan
from k3jax.serve.block_pool import BlockPool, layer_counts, page_tokens, state_bytes, token_bytes
from tests import tiny

PAGE = 8


@pytest.mark.parametrize(('chips', 'tokens'), [(1, 6144), (2, 3072), (4, 1536), (8, 1024)])
def test_a_page_of_k3_holds_as_many_tokens_as_the_report_says(chips, tokens):
    """Chips that share the heads of a state share none of the latents."""
    config = kimi_k3.get_config().model
    dtype = jnp.dtype('bfloat16')
    if chips == 1:
        assert page_tokens(config, dtype, 512) == tokens
    needed = state_bytes(config, dtype) / chips / token_bytes(config, dtype)
    assert -(-needed // 512) * 512 == tokens
    assert layer_counts(config) == (24, 69)


def filled(config, plan, rows, size, dtype, seed):
    rng = np.random.default_rng(seed)
    cache = init_cache(config, plan, rows, size, dtype)
    fill = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    return cache._replace(layers=jax.tree.map(fill, cache.layers))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('make', [tiny.k3, tiny.k3_deep])
def test_pages_and_states_move_from_one_cache_to_another(make, dtype):
    config = make(qk_rope_head_dim=5, kv_lora_rank=10)  # an odd number of halves of words
    plan, dtype = depth_plan(config), jnp.dtype(dtype)
    num_mla, num_kda = layer_counts(config)
    pool = BlockPool(config, plan, dtype, 3 * num_mla + num_kda, PAGE)
    source = filled(config, plan, 2, 30, dtype, 0)
    ids = np.random.default_rng(1).permutation(3 * num_mla + num_kda)
    pages = np.split(ids[: 3 * num_mla], 3)
    for number, blocks in enumerate(pages):
        pool.save_page(source, 1, PAGE * number, blocks)
    pool.put(pool.state_of(source, 1), ids[3 * num_mla :])
    target = filled(config, plan, 3, 20, dtype, 2)  # shorter: the third page has no room for all
    before = jax.tree.map(np.asarray, target)
    for number, blocks in enumerate(pages):
        target = pool.load_page(target, 2, PAGE * number, blocks)
    target = pool.load_state(target, 2, 17, ids[3 * num_mla :])
    assert np.asarray(target.length).tolist() == [0, 0, 17]
    leaves = [jax.tree.leaves(x.layers) for x in (before, source, target)]
    for old, have, got in zip(*leaves, strict=True):
        axis = next(n for n, size in enumerate(got.shape) if size == 3 and have.shape[n] == 2)
        old, have, got = (np.moveaxis(np.asarray(x), axis, 0) for x in (old, have, got))
        np.testing.assert_array_equal(got[:2], old[:2])
        if have.shape[1:] == got.shape[1:]:
            np.testing.assert_array_equal(got[2], have[1])
        else:  # tokens, the second last axis
            np.testing.assert_array_equal(got[2], have[1][..., :20, :])
