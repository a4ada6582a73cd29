"""The draft: trained in parallel steps, it is what it will be when it guesses one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import kimi_k3
from k3jax.config import ConfigError
from k3jax.model.draft import (
    default_taps,
    draft_leaves,
    empty_cache,
    fused,
    init_draft,
    read,
    ready_for_head,
    unrolled,
    with_taps,
)
from k3jax.model.kimi import Kimi
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from tests import tiny
from tests.compare import relative_error

EXACT = 1e-12  # of float64 against float64, relative
CONFIG = tiny.k3(num_nextn_predict_layers=1)
T, STEPS = 9, 4
MODEL = with_taps(Kimi(CONFIG, Run(jnp.dtype('float64'), implementation='xla')))
IDS = np.array([[1] * T, [3, 3, 3, 3, 5, 5, 5, 5, 0]], np.int32)


@functools.cache
def arguments():
    """Draft, target, tokens, what follows them, and taps; the fusion is at no special value."""
    with jax.enable_x64(True):
        params = stack_params(tiny.random_params(CONFIG), MODEL.plan, np.stack)
        rng = np.random.default_rng(0)
        draft = init_draft(MODEL, params, jax.random.key(0))
        draft['fc'] = rng.standard_normal(draft['fc'].shape) / 5
        draft = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), draft)
        tokens = rng.integers(0, 40, (2, T)).astype(np.int32)
        following = np.where(IDS > 0, rng.integers(0, 40, (2, T)), -1).astype(np.int32)
        run = jax.jit(lambda: MODEL.apply({'params': params}, tokens, IDS).taps)
        return draft, params, tokens, following, run()


def steps_of(taps, following, ids, num_steps=STEPS):
    """[J, B, T, D]"""
    draft, params, *_ = arguments()
    keep = lambda x, step: x  # noqa: E731
    run = jax.jit(lambda *a: unrolled(MODEL, draft, params, *a, num_steps, keep))
    return np.asarray(run(taps, following, ids))


@functools.cache
def all_steps():
    with jax.enable_x64(True):
        _, _, _, following, taps = arguments()
        return steps_of(taps, following, IDS)


@functools.cache
def guessing():
    draft, params, *_ = arguments()
    return jax.jit(lambda *a: read(MODEL, draft, params, *a))


@pytest.mark.parametrize('start', [0, 3, T - STEPS])
def test_steps_are_those_of_guessing_one_by_one(start):
    """A guess begun at `start`: the features before it are the model's, then the draft's own."""
    with jax.enable_x64(True):
        draft, _, _, following, taps = arguments()
        features = fused(draft, taps)[:1, : start + 1]
        cache, length = empty_cache(MODEL, 1, 16), jnp.zeros(1, jnp.int32)
        valid = np.ones((1, start + 1), np.int32)
        x, cache = guessing()(features, following[:1, : start + 1], cache, length, valid)
        x, length = x[:, -1:], length + start + 1
        for step in range(STEPS):
            place = start + step
            assert relative_error(x[0, 0], all_steps()[step, 0, place]) < EXACT
            if step + 1 < STEPS:
                token = following[:1, place + 1 : place + 2]
                x, cache = guessing()(x, token, cache, length, None)
                length = length + 1


def test_packed_documents_equal_separate_ones():
    with jax.enable_x64(True):
        _, _, _, following, taps = arguments()
        for part in (slice(0, 4), slice(4, 8)):
            own = tuple(x[1:, part] for x in taps)
            alone = steps_of(own, following[1:, part], None)
            for step in range(STEPS):
                # A guess of several tokens begins inside the document.
                got = all_steps()[step, 1, part][step:]
                assert relative_error(got, alone[step, 0, step:]) < EXACT


def test_no_step_sees_features_after_where_its_guess_began():
    with jax.enable_x64(True):
        _, _, _, following, taps = arguments()
        changed = tuple(x.at[0, 4].add(1.0) for x in taps)
        differs = np.any(steps_of(changed, following, IDS) != all_steps(), axis=-1)[:, 0]
        for step in range(STEPS):
            # Before `step`, a guess would begin before the document.
            np.testing.assert_array_equal(differs[step][step:], np.arange(step, T) >= 4 + step)


def test_at_first_it_is_the_layer_of_multi_token_prediction():
    with jax.enable_x64(True):
        _, params, tokens, following, taps = arguments()
        fresh = jax.tree.map(jnp.asarray, init_draft(MODEL, params, jax.random.key(0)))
        fresh['mtp'] = params['mtp']  # not rounded to float32
        run = jax.jit(lambda: MODEL.apply({'params': params}, tokens, IDS, next_tokens=following))
        want = run().next_hidden
        keep = lambda x, step: ready_for_head(MODEL, fresh, x)  # noqa: E731
        got = unrolled(MODEL, fresh, params, taps, following, IDS, 1, keep)[0]
        assert relative_error(np.asarray(got)[IDS > 0], np.asarray(want)[IDS > 0]) < EXACT


def test_a_draft_without_such_a_layer_starts_fresh():
    config = tiny.k3()
    model = with_taps(Kimi(config, Run(jnp.dtype('float32'))))
    shapes = jax.eval_shape(lambda: init_draft(model, {}, jax.random.key(0)))
    leaves = draft_leaves(config, 3)
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, leaves)


def test_taps_are_those_of_the_report():
    assert default_taps(kimi_k3.get_config().model) == (11, 47, 92)
    assert default_taps(tiny.kimi_linear()) == (4,)


def test_what_a_draft_cannot_be_is_refused():
    run = Run(jnp.dtype('float32'))
    with pytest.raises(ConfigError, match=r'draft.taps: got \(4, 1\), wanted the last layer \(4\)'):
        with_taps(Kimi(CONFIG, run), (4, 1))
    with pytest.raises(ConfigError, match='taps: got 2, wanted one of'):
        with_taps(Kimi(CONFIG, run), (2, 4))
    with pytest.raises(ConfigError, match="model.mtp_mixer: got 'kda', wanted 'mla'"):
        with_taps(Kimi(tiny.k3(mtp_mixer='kda'), run))
