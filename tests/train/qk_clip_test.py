"""QK-Clip: logits of clipped heads come to the threshold, everything else stays as it is."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model import mla
from k3jax.model.layout import mla_leaves
from k3jax.model.run import Run
from k3jax.model.statistics import Watch
from k3jax.train.qk_clip import clip_factor, row_factors
from tests import tiny

RUN = Run(jnp.dtype('float32'), implementation='xla', watch=Watch())


def layer(config, scale):
    """Random MLA parameters; each head's queries are `scale` [H] times as large."""
    rng = np.random.default_rng(2)
    params = {
        name: rng.standard_normal(leaf.shape).astype(np.float32)
        for name, leaf in mla_leaves(config).items()
    }
    queries = 'q_proj' if config.q_lora_rank is None else 'q_b_proj'
    params[queries] *= np.repeat(scale, config.qk_head_dim)[:, None].astype(np.float32)
    return params, rng.standard_normal((2, 9, config.hidden_size)).astype(np.float32)


def top_logits(params, x, config):
    *_, seen = mla.mla_mixer(params, x, config, segment_ids=None, cache=None, length=None, run=RUN)
    return np.asarray(seen.max_logit)


def clipped(params, factor, config):
    out = {}
    for name, x in params.items():
        rows = row_factors(name, jnp.asarray(factor), config)
        out[name] = x if rows is None else np.asarray(x * rows[:, None])
    return out


@pytest.mark.parametrize('config', [tiny.k3(), tiny.kimi_linear()], ids=lambda c: c.name)
def test_the_next_forward_pass_has_the_smaller_of_logit_and_threshold(config):
    heads = config.num_attention_heads
    params, x = layer(config, np.geomspace(0.05, 20, heads))
    before = top_logits(params, x, config)
    threshold = float(np.sort(before)[heads // 2]) * 0.9
    assert before.min() < threshold < before.max()
    factor = clip_factor(jnp.asarray(before), threshold)
    changed = clipped(params, factor, config)
    after = top_logits(changed, x, config)
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)
    # Bit by bit the same where nothing was to be done: other parameters, other heads, the values.
    touched = {'q_proj', 'q_b_proj', 'kv_b_proj'}
    for name, x in params.items():
        if name not in touched:
            assert changed[name] is x
            continue
        rows = [y.reshape(heads, -1, y.shape[-1]) for y in (x, changed[name])]
        low = before <= threshold
        assert np.array_equal(rows[0][low], rows[1][low])
        assert not np.array_equal(rows[0], rows[1])
        if name == 'kv_b_proj':
            values = [y[:, config.qk_nope_head_dim :] for y in rows]
            assert np.array_equal(*values)


def test_factors_of_the_specification():
    factor = clip_factor(jnp.float32([4.34, 20.87, 104.39]), 10.0)
    np.testing.assert_allclose(factor, [1, 0.47915, 0.09579], atol=1e-5)
    assert factor[0] == 1.0


def test_at_the_threshold_and_without_a_token_nothing_happens():
    logits = jnp.float32([100.0, -np.inf, np.nan, np.inf, -3.0])
    assert np.array_equal(clip_factor(logits, 100.0), np.ones(5))


def test_the_query_takes_the_whole_factor_where_the_key_is_shared():
    config = tiny.k3()
    nope, shared, heads = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.num_attention_heads,
    )
    factor = np.full(heads, 0.25, np.float32)
    rows = np.asarray(row_factors('q_b_proj', jnp.asarray(factor), config)).reshape(heads, -1)
    assert np.all(rows[:, :nope] == 0.5) and np.all(rows[:, nope:] == 0.25)
    assert rows.shape == (heads, nope + shared)
    rows = np.asarray(row_factors('kv_b_proj', jnp.asarray(factor), config)).reshape(heads, -1)
    assert np.all(rows[:, :nope] == 0.5) and np.all(rows[:, nope:] == 1.0)
    for name in ('o_proj', 'g_proj', 'kv_a_proj_with_mqa', 'q_a_proj'):
        assert row_factors(name, jnp.asarray(factor), config) is None
