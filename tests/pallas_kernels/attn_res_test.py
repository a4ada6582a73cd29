"""The attention residual and its norm: every implementation against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attn_res import attn_res, attn_res_mix, blocks
from pallas_kernels.attn_res.backward_kernel import backward
from pallas_kernels.attn_res.cases import cases
from pallas_kernels.attn_res.forward_kernel import forward
from tests.compare import assert_close, relative_error

EPS = 1e-5
NAMES = ('bank', 'prefix', 'norm', 'proj', 'out_norm')


def oracle(bank, prefix, norm, proj, out_norm, num_live, use_prefix):
    """y, and for dy its gradients as a function, one token after another in float64."""
    bank, prefix, norm, proj, out_norm = (
        np.asarray(a, np.float64) for a in (bank, prefix, norm, proj, out_norm)
    )
    size = prefix.shape[-1]
    chosen = [*range(num_live), *([len(bank)] if use_prefix else [])]
    every = np.concatenate([bank, prefix[None]])
    y, steps = np.zeros(prefix.shape), {}
    for at in np.ndindex(prefix.shape[:-1]):
        rows = every[(chosen, *at)]
        inverse = 1 / np.sqrt(np.mean(rows**2, axis=1) + EPS)
        scores = rows @ (norm * proj) * inverse
        p = np.exp(scores - scores.max())
        p /= p.sum()
        mixture = p @ rows
        scale = 1 / np.sqrt(np.mean(mixture**2) + EPS)
        y[at] = mixture * scale * out_norm
        steps[at] = rows, inverse, scores, p, mixture, scale

    def gradients(dy):
        d_every, d_query, d_out = np.zeros(every.shape), np.zeros(size), np.zeros(size)
        for at, (rows, inverse, scores, p, mixture, scale) in steps.items():
            d_out += dy[at] * mixture * scale
            h = dy[at] * out_norm
            d_mix = scale * h - scale**3 * mixture * np.mean(h * mixture)
            d_p = rows @ d_mix
            d_s = p * (d_p - p @ d_p)
            d_query += (d_s * inverse) @ rows
            d_rows = p[:, None] * d_mix + (d_s * inverse)[:, None] * (norm * proj)
            d_rows -= (d_s * scores * inverse**2 / size)[:, None] * rows
            d_every[(chosen, *at)] = d_rows
        return d_every[:-1], d_every[-1], d_query * proj, d_query * norm, d_out

    return y, gradients


def random_arguments(seed, num, batch, length, size, dtype='float32'):
    rng = np.random.default_rng(seed)
    shapes = [(num, batch, length, size), (batch, length, size), (size,), (size,), (size,)]
    bank, prefix, norm, proj, out_norm = (rng.standard_normal(s) for s in shapes)
    # Scores of about 1: at 85, float32 rounding of a score alone moves small weights by 1e-5.
    arrays = bank, prefix, norm, proj * size**-0.5, out_norm
    return tuple(jnp.asarray(x, dtype) for x in arrays)


@functools.cache
def compiled(implementation, num_live=None, use_prefix=None):
    """(arguments, dy, num_live, use_prefix) -> y and gradients; given flags are static."""

    def run(args, dy, live, use):
        live = live if num_live is None else num_live
        use = use if use_prefix is None else use_prefix
        call = functools.partial(
            attn_res, num_live=live, use_prefix=use, eps=EPS, implementation=implementation
        )
        y, pull = jax.vjp(call, *args)
        return y, pull(dy)

    return jax.jit(run)


def hide(args, num_live, use_prefix):
    """What does not count holds NaN."""
    bank, prefix, *rest = args
    bank = bank.at[num_live:].set(jnp.nan)
    return bank, prefix if use_prefix else jnp.full_like(prefix, jnp.nan), *rest


def check(implementation, seed, shape, live, use_prefix, dtype, tolerance, static=False):
    args = random_arguments(seed, *shape, dtype)
    dy = np.random.default_rng(seed + 1).standard_normal(shape[1:])
    dy = jnp.asarray(dy, dtype)
    want, gradients = oracle(*args, live, use_prefix)
    flags = (live, use_prefix) if static else ()
    run = compiled(implementation, *flags)
    y, grads = run(hide(args, live, use_prefix), dy, jnp.asarray(live), jnp.asarray(use_prefix))
    assert y.dtype == dtype and [g.dtype for g in grads] == [a.dtype for a in args]
    got = {'y': y} | dict(zip(NAMES, grads, strict=True))
    want = {'y': want} | dict(zip(NAMES, gradients(np.asarray(dy, np.float64)), strict=True))
    if live + use_prefix == 1:
        # One candidate has weight 1 whatever its score: only rounding is left of these gradients.
        scale = np.linalg.norm(want['out_norm'])
        for name in ('norm', 'proj'):
            assert not np.any(want.pop(name))
            assert np.linalg.norm(np.asarray(got.pop(name), np.float64)) <= tolerance * scale
    assert_close(got, want, tolerance)


@pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas', None])
class TestEveryImplementation:
    @pytest.mark.parametrize(('live', 'use_prefix'), [(3, True), (2, False), (1, True), (0, True)])
    def test_float32_outputs_and_gradients(self, implementation, live, use_prefix):
        check(implementation, 0, (3, 2, 21, 160), live, use_prefix, 'float32', 1e-5)

    def test_bfloat16_outputs_and_gradients(self, implementation):
        check(implementation, 2, (3, 2, 21, 160), 2, True, 'bfloat16', 5e-3)

    def test_flags_known_while_tracing(self, implementation):
        check(implementation, 4, (3, 2, 21, 160), 2, False, 'float32', 1e-5, static=True)

    def test_one_candidate_is_normalised_as_it_is(self, implementation):
        check(implementation, 5, (1, 1, 1, 24), 1, False, 'float32', 1e-5, static=True)

    @pytest.mark.slow
    @pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
    @pytest.mark.parametrize('shape', [(8, 1, 70, 384), (5, 3, 17, 256), (2, 1, 33, 7168)])
    @pytest.mark.parametrize('use_prefix', [False, True])
    def test_every_count(self, implementation, shape, use_prefix, dtype):
        tolerance = 1e-5 if dtype == 'float32' else 5e-3
        for live in range(0 if use_prefix else 1, shape[0] + 1):
            check(implementation, live, shape, live, use_prefix, dtype, tolerance)


@pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas'])
def test_the_order_of_snapshots_does_not_matter(implementation):
    args = random_arguments(7, 3, 2, 21, 160)
    run, order = compiled(implementation), np.array([2, 0, 1])
    flags = args[1], jnp.asarray(3), jnp.asarray(True)
    y, grads = run(args, *flags)
    y2, grads2 = run((args[0][order], *args[1:]), *flags)
    assert relative_error(y2, y) < 1e-6
    assert relative_error(grads2[0], grads[0][order]) < 1e-5


def test_the_norm_is_the_mixture_normalised():
    args = random_arguments(8, 3, 2, 5, 24)
    flags = {'num_live': 2, 'use_prefix': True, 'eps': EPS}
    mixture = np.asarray(attn_res_mix(*args[:4], **flags), np.float64)
    want = mixture / np.sqrt(np.mean(mixture**2, -1, keepdims=True) + EPS) * np.asarray(args[4])
    assert relative_error(attn_res(*args, **flags), want) < 1e-6


def test_kernels_do_not_race_or_leave_their_blocks():
    """Four tiles on two cores, the last one partly past the end; one snapshot does not count."""
    bank, prefix, *_, gain = random_arguments(9, 2, 1, 60, 128)
    bank, prefix = bank[:, 0].at[1].set(jnp.nan), prefix[0]
    plan = blocks.plan_for(
        'forward', 60, 128, 2, prefix.dtype, num_live=None, use_prefix=None, eps=EPS, tile=16
    )
    assert plan.grid == (2, 2) and plan.is_ragged
    args = (jnp.array([1, 1]), bank, prefix, gain, gain)
    interpret = pltpu.InterpretParams(detect_races=True)
    y, stats = forward(*args, plan=plan, with_stats=True, interpret=interpret)
    want, gradients = oracle(bank[:, None], prefix[None], gain, jnp.ones(128), gain, 1, True)
    assert relative_error(y, want[0]) < 1e-5
    d_bank, d_prefix, d_query, d_gain = backward(
        *args, prefix, stats, plan=plan, interpret=interpret
    )
    want = gradients(np.asarray(prefix, np.float64)[None])
    got = {'bank': d_bank[:, None], 'prefix': d_prefix[None], 'norm': d_query, 'out_norm': d_gain}
    for name, value in got.items():
        assert relative_error(value, want[NAMES.index(name)]) < 1e-5, name


class TestBadInput:
    ARGS = random_arguments(10, 2, 1, 4, 8)

    def call(self, *args, num_live=2, use_prefix=True, implementation=None):
        flags = {'num_live': num_live, 'use_prefix': use_prefix}
        return attn_res(*args, **flags, eps=EPS, implementation=implementation)

    def test_shapes(self):
        bank, prefix, norm, proj, out = self.ARGS
        with pytest.raises(
            ValueError, match=r'bank has shape \(2, 1, 3, 8\), .* shape \(1, 4, 8\)'
        ):
            self.call(bank[:, :, :3], prefix, norm, proj, out)
        with pytest.raises(ValueError, match=r'out_norm has shape \(7,\), wanted \(8,\)'):
            self.call(bank, prefix, norm, proj, out[:7])

    def test_dtypes(self):
        bank, *rest = self.ARGS
        with pytest.raises(ValueError, match='bank is bfloat16 and prefix float32'):
            self.call(bank.astype('bfloat16'), *rest)
        half = [a.astype('float16') for a in self.ARGS]
        with pytest.raises(NotImplementedError, match="'pallas' takes bfloat16 or float32, got fl"):
            self.call(*half, implementation='pallas')
        assert self.call(*half).dtype == 'float16'

    def test_counts(self):
        with pytest.raises(ValueError, match='num_live is 3, wanted 0 to 2'):
            self.call(*self.ARGS, num_live=3)
        with pytest.raises(ValueError, match='nothing counts'):
            self.call(*self.ARGS, num_live=0, use_prefix=False)
        with pytest.raises(ValueError, match="implementation is 'cuda'"):
            self.call(*self.ARGS, implementation='cuda')

    def test_traced_counts_are_clipped(self):
        dy = self.ARGS[1]
        for implementation in ('reference', 'xla', 'pallas'):
            run = compiled(implementation)
            far, _ = run(self.ARGS, dy, jnp.asarray(100), jnp.asarray(True))
            near, _ = run(self.ARGS, dy, jnp.asarray(2), jnp.asarray(True))
            np.testing.assert_array_equal(far, near)


def test_too_many_snapshots_for_the_kernel():
    args = random_arguments(11, 32, 1, 1, 8)
    with pytest.raises(NotImplementedError, match='fewer than 32 snapshots, got 32'):
        attn_res(*args, num_live=32, use_prefix=True, eps=EPS, implementation='pallas')


def test_cases_have_distinct_keys_and_trace():
    every = cases()
    assert len({case.key for case in every}) == len(every)
    small = next(case for case in every if case.shape['T'] == 1)
    jax.eval_shape(small.build(None), *small.args)
