"""Looking ahead: what a window says, and what is left of it after any number of its tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.model.window import committed, looking_ahead
from tests import tiny

WIDTH = 8
CONFIG = tiny.k3_deep()  # its layers are scanned
MODEL = Kimi(CONFIG, Run(jnp.dtype('float64'), implementation='xla'))
PROMPTS = np.array([[5, 17, 200, 3, 9], [8, 1, 0, 0, 0]])
LENGTHS = np.array([5, 2])
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, WIDTH + 1))


@functools.cache
def params():
    own = stack_params(tiny.random_params(CONFIG), MODEL.plan, np.stack)
    return jax.tree.map(jnp.asarray, own)


@functools.cache
def before():
    cache = init_cache(CONFIG, MODEL.plan, 2, 32, MODEL.run.dtype)
    return jax.jit(functools.partial(prefill, MODEL))(params(), PROMPTS, LENGTHS, cache)[1]


@functools.cache
def one_by_one():
    """Logits [B, Z] and the cache after each of TOKENS."""
    step, cache, found = jax.jit(functools.partial(decode, MODEL)), before(), []
    for number in range(WIDTH + 1):
        logits, cache = step(params(), TOKENS[:, number], cache)
        found.append((logits, cache))
    return found


@functools.cache
def window():
    @jax.jit
    def look(params, cache):
        given = {'params': params}, TOKENS[:, :WIDTH], None, looking_ahead(cache)
        output = MODEL.apply(*given)
        return output.hidden @ params['lm_head'].T, output.cache

    return look(params(), before())


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_a_window_says_what_its_tokens_say_one_by_one():
    with jax.enable_x64(True):
        want = np.stack([logits for logits, _ in one_by_one()[:WIDTH]], axis=1)
        close(window()[0], want)


@pytest.mark.parametrize('count', range(1, WIDTH + 1))
def test_what_is_committed_is_what_was_read_one_by_one(count):
    """Every place where the rest may be rejected; the other row keeps another number."""
    with jax.enable_x64(True):
        counts = np.array([count, WIDTH + 1 - count], np.int32)
        commit = jax.jit(functools.partial(committed, implementation='xla'))
        found = commit(before(), window()[1], counts)
        step = jax.jit(functools.partial(decode, MODEL))
        following = np.array([TOKENS[row, n] for row, n in enumerate(counts)])
        logits, after = step(params(), following, found)
        for row, own in enumerate(counts):
            assert found.length[row] == LENGTHS[row] + own
            want_logits, want = one_by_one()[own]
            close(logits[row], want_logits[row])
            for got, wanted in zip(*map(states_of, (after, want)), strict=True):
                close(got[..., row, :, :, :], wanted[..., row, :, :, :])


def states_of(cache):
    """KDA states [..., B, H, K, V] and tails, with an axis for H, of every layer."""
    flat = jax.tree_util.tree_leaves_with_path(cache.layers)
    for path, leaf in flat:
        name = path[-1].name
        if name == 'state':
            yield leaf
        elif name.endswith('tail'):
            yield leaf[..., None, :, :]
