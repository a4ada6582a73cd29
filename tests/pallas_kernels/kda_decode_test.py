"""KDA decode on a pool of states: every implementation against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda.decode import (
    Conv,
    Projected,
    kda_decode,
    kda_decode_fused,
    kda_decode_window,
)
from pallas_kernels.kda.decode_cases import decode_cases
from pallas_kernels.kda.decode_kernel import decode_call, default_tiles, plan_decode
from pallas_kernels.kda.gate import Gate
from tests.compare import assert_close, relative_error

WIDTH, TAPS, SLOTS, HEADS = 128, 4, 6, 3
IMPLEMENTATIONS = ['xla', 'pallas', None]


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def oracle_step(q, k, v, g, beta, state):
    """One head's token: o [V] and the state [K, V], as the recurrence is written."""
    state = np.exp(g)[:, None] * state
    state = state + beta * np.outer(k, v - k @ state)
    return state.T @ q, state


def oracle_token(token, conv, gate, state, tail):
    """One row's token from its projections: o [H, V], state [H, K, V], tail [3, W - 1, H, K]."""
    heads = len(state)
    rows = np.concatenate([tail, np.stack(token[:3])[:, None]], axis=1)
    weight = np.stack(conv).reshape(3, heads, WIDTH, TAPS)
    total = np.einsum('pjhk,phkj->phk', rows, weight)
    q, k, v = total * sigmoid(total)
    q, k = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    shifted = token[3] + gate.dt_bias.reshape(heads, WIDTH)
    rate = np.exp(gate.A_log)[:, None]
    if gate.lower_bound is None:
        g = -rate * np.logaddexp(0, shifted)
    else:
        g = gate.lower_bound * sigmoid(rate * shifted)
    steps = [
        oracle_step(q[h] * WIDTH**-0.5, k[h], v[h], g[h], token[4][h], state[h])
        for h in range(heads)
    ]
    o, state = (np.stack(part) for part in zip(*steps, strict=True))
    return o, state, rows[:, 1:]


def random_layer(rng, heads, lower_bound=-5.0):
    conv = Conv(*(rng.standard_normal((heads * WIDTH, TAPS)) for _ in range(3)))
    gate = Gate(0.5 * rng.standard_normal(heads), rng.standard_normal(heads * WIDTH), lower_bound)
    as_float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    return Conv(*map(as_float32, conv)), Gate(*map(as_float32, gate[:2]), lower_bound)


def random_tokens(rng, *lead, heads=HEADS, dtype='float32'):
    shape = (*lead, heads, WIDTH)
    parts = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]
    return Projected(*parts, jnp.asarray(rng.uniform(0.1, 0.95, shape[:-1]), jnp.float32))


def random_pools(rng, heads=HEADS, dtype='float32'):
    pool = jnp.asarray(rng.standard_normal((SLOTS, heads, WIDTH, WIDTH)), jnp.float32)
    tails = rng.standard_normal((SLOTS, 3, TAPS - 1, heads, WIDTH))
    return pool, jnp.asarray(tails, dtype)


def part(tokens, index):
    return Projected(*(x[index] for x in tokens))


@functools.cache
def compiled(form, implementation, lower_bound=-5.0):
    def run(*args):
        if form == 'plain':
            return kda_decode(*args, implementation=implementation)
        *args, conv, gate = args
        call = {'fused': kda_decode_fused, 'window': kda_decode_window}[form]
        gate = Gate(*gate, lower_bound)
        return call(*args, conv=conv, gate=gate, implementation=implementation)

    return jax.jit(run)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
class TestEveryImplementation:
    @pytest.mark.parametrize('slots', [[4, 0, 2], [4, -1, SLOTS]])
    def test_prepared_tokens(self, implementation, slots):
        rng = np.random.default_rng(0)
        q, k, v, f, beta = random_tokens(rng, len(slots))
        q, k, g = q / WIDTH, k / np.sqrt(WIDTH), -jnp.abs(f)
        pool, _ = random_pools(rng)
        run = compiled('plain', implementation)
        o, after = run(q, k, v, g, beta, pool, jnp.asarray(slots))
        want_o, want = np.zeros(v.shape), wide(pool)
        args = wide((q, k, v, g, beta))
        for row, slot in enumerate(slots):
            for head in range(HEADS if 0 <= slot < SLOTS else 0):
                one = (x[row, head] for x in args)
                want_o[row, head], want[slot, head] = oracle_step(*one, want[slot, head])
        assert_close({'o': o, 'pool': after}, {'o': want_o, 'pool': want}, 1e-5)
        idle = [s for s in range(SLOTS) if s not in slots]
        np.testing.assert_array_equal(after[np.array(idle)], pool[np.array(idle)])

    @pytest.mark.parametrize(
        ('dtype', 'lower_bound', 'tolerance'),
        [('float32', -5.0, 1e-5), ('float32', None, 1e-5), ('bfloat16', -5.0, 5e-3)],
    )
    def test_tokens_from_their_projections(self, implementation, dtype, lower_bound, tolerance):
        rng = np.random.default_rng(1)
        slots = [3, -1, 0]
        tokens, (pool, tails) = random_tokens(rng, 3, dtype=dtype), random_pools(rng, dtype=dtype)
        conv, gate = random_layer(rng, HEADS, lower_bound)
        run = compiled('fused', implementation, lower_bound)
        args = (tokens, pool, tails, jnp.asarray(slots), conv, gate[:2])
        o, after, tails_after = run(*args)
        assert o.dtype == dtype and after.dtype == 'float32' and tails_after.dtype == dtype
        want_o, want, want_tails = np.zeros(o.shape), wide(pool), wide(tails)
        wide_gate = Gate(*wide(gate[:2]), lower_bound)
        for row, slot in enumerate(slots):
            if slot >= 0:
                want_o[row], want[slot], want_tails[slot] = oracle_token(
                    wide(part(tokens, row)), wide(conv), wide_gate, want[slot], want_tails[slot]
                )
        got = {'o': o, 'pool': after, 'tails': tails_after}
        assert_close(got, {'o': want_o, 'pool': want, 'tails': want_tails}, tolerance)

    def test_any_number_of_accepted_tokens_equals_decoding_them_one_by_one(self, implementation):
        """Rejection at every place of a window: rows 0 to W accept as many tokens each."""
        width, ahead = 4, 3
        rng = np.random.default_rng(2)
        rows = width + 1
        previous, tokens = random_tokens(rng, rows, width), random_tokens(rng, rows, ahead)
        pool, tails = random_pools(rng)
        conv, gate = random_layer(rng, HEADS)
        slots, accepted = np.array([5, 0, 3, 1, 2]), np.arange(rows)
        run = compiled('window', implementation)
        o, after, tails_after = run(
            previous,
            jnp.asarray(accepted),
            tokens,
            pool,
            tails,
            jnp.asarray(slots),
            conv,
            gate[:2],
        )
        want_o, want, want_tails = np.zeros(o.shape), wide(pool), wide(tails)
        layer = wide(conv), Gate(*wide(gate[:2]))
        for row, slot in enumerate(slots):
            carry = want[slot], want_tails[slot]
            for i in range(accepted[row]):
                _, *carry = oracle_token(wide(part(previous, (row, i))), *layer, *carry)
            want[slot], want_tails[slot] = carry
            for i in range(ahead):
                want_o[row, i], *carry = oracle_token(wide(part(tokens, (row, i))), *layer, *carry)
        got = {'o': o, 'pool': after, 'tails': tails_after}
        assert_close(got, {'o': want_o, 'pool': want, 'tails': want_tails}, 1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize('heads', [6, 8, 12, 24])
    @pytest.mark.parametrize('rejected_at', range(8))
    def test_windows_of_eight_equal_decode(self, implementation, heads, rejected_at):
        """The pools after a window are those of as many single steps, and so are the outputs."""
        rng = np.random.default_rng(3)
        previous = random_tokens(rng, 2, 8, heads=heads)
        pool, tails = random_pools(rng, heads)
        conv, gate = random_layer(rng, heads)
        slots = jnp.array([4, 1])
        run, step = compiled('window', implementation), compiled('fused', 'xla')
        args = (previous, pool, tails, slots, conv, gate[:2])
        accepted = jnp.full((2,), rejected_at)
        o, after, tails_after = run(previous, accepted, *args)
        carry = pool, tails
        for i in range(rejected_at):
            _, *carry = step(part(previous, (slice(None), i)), *carry, slots, conv, gate[:2])
        assert relative_error(after, carry[0]) < 1e-5
        assert relative_error(tails_after, carry[1]) < 1e-6
        for i in range(8):
            want, *carry = step(part(previous, (slice(None), i)), *carry, slots, conv, gate[:2])
            assert relative_error(o[:, i], want) < 1e-5


@pytest.mark.parametrize('form', ['fused', 'window'])
def test_kernels_do_not_race_or_leave_their_blocks(form):
    """Two programs of two rows, idle ones among them, with fewer buffers than states."""
    rng = np.random.default_rng(4)
    heads, rows = 2, 3
    conv, gate = random_layer(rng, heads)
    pool, tails = random_pools(rng, heads)
    window = form == 'window'
    count = 4 if window else 1
    tokens = random_tokens(rng, rows + 1, count, heads=heads)
    plan = plan_decode(
        rows,
        heads,
        SLOTS,
        replayed=2 if window else 1,
        ahead=2 if window else 0,
        taps=TAPS,
        lower_bound=-5.0,
        tiles={'heads': 1, 'buffers': 3},
    )
    assert plan.rows == 4 and plan.program_rows == 2
    weight = jnp.moveaxis(jnp.stack(conv).reshape(3, heads, WIDTH, TAPS), -1, 1)
    rate = jnp.broadcast_to(jnp.exp(gate.A_log)[:, None], (heads, WIDTH))
    beta = jnp.broadcast_to(tokens.beta[..., None], tokens.q.shape)
    slots, accepted = jnp.array([5, 2, 100, -1]), jnp.array([1, 0, 2, 2])
    o, after, tails_after = decode_call(
        slots,
        accepted,
        (*tokens[:4], beta),
        (weight, rate, gate.dt_bias.reshape(heads, WIDTH)),
        pool,
        tails,
        plan=plan,
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    args = (pool, tails, slots[:rows], conv, gate[:2])
    if window:
        first = part(tokens, (slice(rows), slice(0, 2)))
        second = part(tokens, (slice(rows), slice(2, 4)))
        want = compiled('window', 'xla')(first, accepted[:rows], second, *args)
    else:
        want = compiled('fused', 'xla')(part(tokens, (slice(rows), 0)), *args)
        o = o[:, 0]
    got = dict(enumerate((o[:rows], after, tails_after)))
    assert_close(got, dict(enumerate(want)), 1e-5)


def test_default_tiles_divide_the_heads():
    for heads in (1, 3, 6, 12, 24, 32, 40, 96):
        tile = default_tiles(heads)['heads']
        assert heads % tile == 0 and (tile == heads or tile % 8 == 0)


class TestBadInput:
    RNG = np.random.default_rng(5)
    TOKENS, (POOL, TAILS) = random_tokens(RNG, 2), random_pools(RNG)
    LAYER = dict(zip(('conv', 'gate'), random_layer(RNG, HEADS), strict=True))

    def fused(self, slots, tokens=None, pool=None, tails=None, **kwargs):
        return kda_decode_fused(
            tokens or self.TOKENS,
            self.POOL if pool is None else pool,
            self.TAILS if tails is None else tails,
            jnp.asarray(slots),
            **self.LAYER | kwargs,
        )

    def test_slots(self):
        with pytest.raises(ValueError, match=r'slots are \[0, 6\], wanted 0 to 5, or -1'):
            self.fused([0, SLOTS])
        with pytest.raises(ValueError, match=r'slots are \[-2, 0\]'):
            self.fused([-2, 0])
        with pytest.raises(ValueError, match=r'slots \[3, 3\] name a slot twice'):
            self.fused([3, 3])
        self.fused([-1, -1])

    def test_shapes_and_dtypes(self):
        short = self.TOKENS._replace(v=self.TOKENS.v[:, :2])
        with pytest.raises(ValueError, match=r'v has shape \(2, 2, 128\), wanted \(2, 3, 128\)'):
            self.fused([0, 1], short)
        with pytest.raises(ValueError, match='pool is bfloat16, wanted float32'):
            self.fused([0, 1], pool=self.POOL.astype('bfloat16'))
        with pytest.raises(ValueError, match=r'tails are .* bfloat16, wanted .* float32'):
            self.fused([0, 1], tails=self.TAILS.astype('bfloat16'))
        with pytest.raises(ValueError, match=r'conv.k has shape \(384, 3\), wanted \(384, 4\)'):
            conv = self.LAYER['conv']
            self.fused([0, 1], conv=conv._replace(k=conv.k[:, 1:]))

    def test_accepted(self):
        window = Projected(*(x[:, None] for x in self.TOKENS))
        args = (self.POOL, self.TAILS, jnp.array([0, 1]))
        with pytest.raises(ValueError, match=r'accepted is \[0, 2\], wanted 0 to 1, the window'):
            kda_decode_window(window, jnp.array([0, 2]), window, *args, **self.LAYER)

    def test_widths_that_the_kernel_does_not_take(self):
        q, k, v, f = (x[..., :64] for x in self.TOKENS[:4])
        pool = self.POOL[..., :64, :64]
        args = (q, k, v, -jnp.abs(f), self.TOKENS.beta, pool, jnp.array([0, 1]))
        with pytest.raises(NotImplementedError, match=r'takes K = V = 128, got \(64, 64\)'):
            kda_decode(*args, implementation='pallas')
        assert kda_decode(*args)[0].shape == v.shape
        with pytest.raises(ValueError, match="implementation is 'reference'"):
            kda_decode(*args, implementation='reference')


def test_cases_have_distinct_keys_and_trace():
    every = decode_cases()
    assert len({case.key for case in every}) == len(every)
    for case in every[:1] + every[-1:]:
        jax.eval_shape(case.build(None), *case.args)
