"""KDA: every implementation against float64, outputs and gradients; gate, padding, errors."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.segments import runs_of
from pallas_kernels.kda import Gate, kda, kda_decode_step, kda_gate, l2_normalize
from pallas_kernels.kda.chunked import CHUNK, chunked_kda
from tests.compare import assert_close, relative_error
from tests.oracles import kda as oracle

TOLERANCE = 1e-5  # of float32 against float64, relative
IMPLEMENTATIONS = ('reference', 'xla', 'pallas')
PLAIN = ('reference', 'xla')
INPUTS = ('q', 'k', 'v', 'g', 'beta', 'initial_state')

# B, T, H, K, V: batch and heads above 1, K and V unequal. Few shapes, since each is a compilation.
MAIN = (2, 2 * CHUNK + 22, 2, 32, 24)  # with segment ids
WHOLE = (2, 2 * CHUNK, 2, 32, 24)  # without, and whole chunks
ODD = (1, 41, 1, 24, 40)  # neither, and V above K

REGIMES = {
    'uniform to -5': lambda rng, shape: -rng.uniform(0, 5, shape),
    'all -5': lambda rng, shape: np.full(shape, -5.0),
    'uniform to -20': lambda rng, shape: -rng.uniform(0, 20, shape),
    'all -100': lambda rng, shape: np.full(shape, -100.0),
    'a tenth -1000': lambda rng, shape: np.where(rng.uniform(size=shape) < 0.1, -1000.0, -0.01),
    'no decay, equal keys': lambda rng, shape: np.zeros(shape),
}


def normalized(x):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def random_inputs(shape=MAIN, regime='uniform to -5', seed=0, dtype=np.float32):
    """Arguments of `kda` by name, initial_state included, and cotangents (do, d_final)."""
    batch, length, heads, width, value = shape
    rng = np.random.default_rng(seed)
    rows = (batch, length, heads)
    keys = rng.standard_normal((*rows, width))
    beta = rng.uniform(0, 1, rows)
    if regime == 'no decay, equal keys':
        keys = rng.standard_normal((batch, 1, heads, width)) + 0.01 * keys
        beta = np.full(rows, 0.999)
    inputs = {
        'q': normalized(rng.standard_normal((*rows, width))) * width**-0.5,
        'k': normalized(keys),
        'v': rng.standard_normal((*rows, value)),
        'g': REGIMES[regime](rng, (*rows, width)),
        'beta': beta,
        'initial_state': rng.standard_normal((batch, heads, width, value)),
    }
    cotangents = (
        rng.standard_normal((*rows, value)),
        rng.standard_normal((batch, heads, width, value)),
    )
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    return inputs, tuple(x.astype(dtype) for x in cotangents)


@functools.cache
def compiled(implementation):
    """Jitted (inputs, segment_ids, cotangents) -> outputs and gradients by name."""

    @jax.jit
    def run(inputs, segment_ids, cotangents):
        def call(inputs):
            return kda(**inputs, segment_ids=segment_ids, implementation=implementation)

        (o, final), vjp = jax.vjp(call, inputs)
        return {'o': o, 'final_state': final} | vjp(cotangents)[0]

    return run


def truth(inputs, segment_ids, cotangents):
    o, final, grads = oracle.kda(*inputs.values(), segment_ids, *cotangents)
    return {'o': o, 'final_state': final} | grads


def check(implementation, inputs, segment_ids, cotangents, tolerance=TOLERANCE):
    got = compiled(implementation)(inputs, segment_ids, cotangents)
    assert_close(got, truth(inputs, segment_ids, cotangents), tolerance)
    return got


def packed_ids(length=MAIN[1]):
    """Two rows: one-token documents, chunk-crossing ones, padding at both ends and inside."""
    first = [1] * 37 + [2] + [0] * 5 + [3] * 60 + [4] + [5] * length
    second = [0] * 10 + [1] * 40 + [0] * 3 + [1] * 20 + [7] * 27 + [0] * length
    return np.array([first[:length], second[:length]], np.int32)


@pytest.mark.parametrize('implementation', [*PLAIN, pytest.param('pallas', marks=pytest.mark.slow)])
@pytest.mark.parametrize('regime', REGIMES)
def test_every_gate_regime(implementation, regime):
    inputs, cotangents = random_inputs(WHOLE, regime)
    check(implementation, inputs, None, cotangents)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
class TestAgainstFloat64:
    """Outputs, final state and all gradients."""

    @pytest.mark.parametrize('regime', REGIMES)
    def test_every_gate_regime_with_packed_documents_and_padding(self, implementation, regime):
        inputs, cotangents = random_inputs(regime=regime, seed=1)
        check(implementation, inputs, packed_ids(), cotangents)

    def test_beta_exactly_zero_and_one(self, implementation):
        inputs, cotangents = random_inputs(WHOLE)
        inputs['beta'] = (inputs['beta'] < 0.5).astype(np.float32)
        check(implementation, inputs, None, cotangents)

    def test_strongest_gate_of_the_bounded_form_in_one_chunk(self, implementation):
        inputs, cotangents = random_inputs(WHOLE)
        inputs['g'] = np.full_like(inputs['g'], -4.99)
        check(implementation, inputs, None, cotangents)

    def test_near_parallel_keys_with_slow_decay(self, implementation):
        inputs, cotangents = random_inputs(WHOLE, 'no decay, equal keys', seed=2)
        inputs['g'] = np.full_like(inputs['g'], -0.01)
        check(implementation, inputs, None, cotangents)

    def test_one_token_documents_forget_everything(self, implementation):
        inputs, cotangents = random_inputs()
        batch, length = MAIN[:2]
        ids = np.broadcast_to(np.arange(1, length + 1, dtype=np.int32), (batch, length))
        got = check(implementation, inputs, ids, cotangents)
        overlap = np.sum(inputs['q'] * inputs['k'], -1) * inputs['beta']
        # The first token still sees the initial state.
        want = (overlap[..., None] * inputs['v'])[:, 1:]
        assert relative_error(got['o'][:, 1:], want) < 1e-6

    def test_padding_rows_give_zero_and_leave_the_state_alone(self, implementation):
        inputs, cotangents = random_inputs()
        ids = packed_ids()
        ids[1] = 0
        got = check(implementation, inputs, ids, cotangents)
        padding = ids == 0
        for name in ('o', 'q', 'k', 'v', 'g', 'beta'):
            assert not np.any(np.asarray(got[name])[padding]), name
        np.testing.assert_array_equal(got['final_state'][1], inputs['initial_state'][1])
        np.testing.assert_array_equal(got['initial_state'][1], cotangents[1][1])

    def test_padding_may_hold_anything(self, implementation):
        inputs, cotangents = random_inputs()
        ids = packed_ids()
        clean = compiled(implementation)(inputs, ids, cotangents)
        for name in ('q', 'k', 'v', 'g', 'beta'):
            inputs[name][ids == 0] = np.nan
        dirty = compiled(implementation)(inputs, ids, cotangents)
        for name in clean:
            np.testing.assert_array_equal(clean[name], dirty[name])

    def test_packed_documents_equal_separate_ones(self, implementation):
        inputs, cotangents = random_inputs()
        inputs['initial_state'][:] = 0
        cotangents[1][:] = 0
        ids = np.array([[1] * 30 + [2] * 75 + [3] * 45, [1] * 64 + [2] * 86], np.int32)
        packed = compiled(implementation)(inputs, ids, cotangents)
        rows = [name for name in packed if packed[name].shape[:2] == ids.shape]
        for document in (1, 2, 3):
            # Alone at the start of a row, with padding behind.
            here = ids == document
            order = np.argsort(~here, axis=1, kind='stable')
            alone = {
                n: np.take_along_axis(x, order.reshape(*ids.shape, *[1] * (x.ndim - 2)), 1)
                for n, x in inputs.items()
                if n != 'initial_state'
            }
            alone['initial_state'] = inputs['initial_state']
            do = np.take_along_axis(cotangents[0], order[..., None, None], 1)
            alone_ids = np.take_along_axis(here, order, 1).astype(np.int32)
            got = compiled(implementation)(alone, alone_ids, (do, cotangents[1]))
            for row in range(2):
                want = {name: packed[name][row][here[row]] for name in rows}
                part = {name: got[name][row][: here[row].sum()] for name in rows}
                assert_close(part, want, 2e-6)

    def test_state_carried_over_two_calls_equals_one_call(self, implementation):
        inputs, cotangents = random_inputs()
        ids = np.array([[1] * 30 + [2] * 60 + [3] * 60, [1] * 150], np.int32)
        whole = compiled(implementation)(inputs, ids, cotangents)
        cut, length = 75, ids.shape[1]
        state, outputs = inputs['initial_state'], []
        for piece in (slice(0, cut), slice(cut, length)):

            def padded(x, piece=piece):
                x = x[:, piece]
                return np.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

            part = {n: padded(x) for n, x in inputs.items() if n != 'initial_state'}
            part['initial_state'] = state
            got = compiled(implementation)(part, padded(ids), cotangents)
            outputs.append(got['o'][:, : piece.stop - piece.start])
            state = got['final_state']
        got = {'o': np.concatenate(outputs, 1), 'final_state': state}
        assert_close(got, {name: whole[name] for name in got}, 2e-6)

    def test_golden_layer_vector(self, implementation):
        """Two tokens through normalisation, gate and sigmoid of beta."""
        o, state = kda(
            np.array([[1, 2], [0.5, -1]], np.float32).reshape(1, 2, 1, 2),
            np.array([[0.4, -0.3], [2, 1]], np.float32).reshape(1, 2, 1, 2),
            np.array([[1, -1], [0.5, 3]], np.float32).reshape(1, 2, 1, 2),
            np.array([[0.3, -0.7], [1.2, 0.1]], np.float32).reshape(1, 2, 1, 2),
            jax.nn.sigmoid(jnp.array([0.2, -0.4]).reshape(1, 2, 1)),
            gate=Gate(jnp.array([0.5]), jnp.array([-1, 0.25])),
            qk_l2norm=True,
            implementation=implementation,
        )
        np.testing.assert_allclose(
            o[0, :, 0], [[-0.069549, 0.069549], [0.016077, -0.016077]], atol=1e-6
        )
        np.testing.assert_allclose(
            state[0, 0], [[0.19792, 1.058386], [0.07354, 0.554613]], atol=1e-6
        )

    def test_golden_recurrence_vector(self, implementation):
        """Four tokens, K = 2, V = 1."""
        shape = (1, 4, 1, 2)
        alpha = np.array([(0.5, 0.5), (0.9, 0.5), (0.8, 0.25), (0.5, 1)], np.float32)
        o, state = kda(
            np.array([(1, 0), (0, 1), (0.6, 0.8), (1, 0)], np.float32).reshape(shape),
            np.array([(1, 0), (0.6, 0.8), (0, 1), (0.8, 0.6)], np.float32).reshape(shape),
            np.array([1, 2, -1, 0.5], np.float32).reshape(1, 4, 1, 1),
            np.log(alpha).reshape(shape),
            np.array([0.5, 1, 0.5, 0.25], np.float32).reshape(1, 4, 1),
            implementation=implementation,
        )
        np.testing.assert_allclose(o.ravel(), [0.5, 1.384, 0.45264, 0.639208], atol=1e-6)
        np.testing.assert_allclose(state.ravel(), [0.639208, -0.293994], atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize('length', [2, 3, 15, 16, 17, 63, 64, 65, 127, 129, 200])
    @pytest.mark.parametrize('regime', REGIMES)
    def test_every_regime_at_every_kind_of_length(self, implementation, regime, length):
        inputs, cotangents = random_inputs((2, length, 2, 32, 24), regime, seed=length)
        check(implementation, inputs, None, cotangents)
        check(implementation, inputs, packed_ids(length), cotangents)


@pytest.mark.parametrize('implementation', [*PLAIN, pytest.param('pallas', marks=pytest.mark.slow)])
class TestOddShapes:
    """Outputs, final state and all gradients."""

    def test_one_token(self, implementation):
        inputs, cotangents = random_inputs((2, 1, 1, 32, 24))
        check(implementation, inputs, None, cotangents)

    def test_values_wider_than_keys_and_length_not_a_multiple_of_anything(self, implementation):
        inputs, cotangents = random_inputs(ODD)
        check(implementation, inputs, None, cotangents)


def raw_arguments():
    """q, k and f (as g) as the projections give them, and the gate's parameters; float64."""
    rng = np.random.default_rng(7)
    rows = (1, 10, 2)
    return {
        'q': rng.standard_normal((*rows, 32)),
        'k': 3 * rng.standard_normal((*rows, 32)),
        'v': rng.standard_normal((*rows, 24)),
        'g': rng.standard_normal((*rows, 32)),
        'beta': rng.uniform(0, 1, rows),
        'A_log': rng.uniform(-1, 1, 2),
        'dt_bias': rng.standard_normal((2, 32)),
    }


@pytest.mark.parametrize('implementation', PLAIN)
def test_algebra_holds_to_float64_rounding(implementation):
    inputs, cotangents = random_inputs((2, 41, 2, 32, 24), dtype=np.float64)
    with jax.enable_x64(True):
        check(implementation, inputs, packed_ids(41), cotangents, 1e-12)


@pytest.mark.parametrize('implementation', PLAIN)
def test_bfloat16_inputs_cost_their_own_rounding_only(implementation):
    inputs, cotangents = random_inputs((2, 23, 2, 32, 24))
    narrow = {n: jnp.asarray(inputs[n], jnp.bfloat16) for n in ('q', 'k', 'v', 'beta')}
    narrow |= {n: inputs[n] for n in ('g', 'initial_state')}
    cotangents = jnp.asarray(cotangents[0], jnp.bfloat16), cotangents[1]
    got = compiled(implementation)(narrow, None, cotangents)
    rounded = {n: np.asarray(narrow[n], np.float64) for n in INPUTS}
    want = truth(rounded, None, (np.asarray(cotangents[0], np.float64), cotangents[1]))
    assert got['o'].dtype == jnp.bfloat16 and got['final_state'].dtype == jnp.float32
    # Rounding to 8 significant bits costs at most 2^-8 of a number, in the mean 1.7e-3.
    exact = ('final_state', 'g', 'initial_state')
    assert_close({n: got[n] for n in exact}, {n: want[n] for n in exact}, TOLERANCE)
    rest = [n for n in want if n not in exact]
    assert_close({n: got[n] for n in rest}, {n: want[n] for n in rest}, 2e-3)


@pytest.mark.parametrize('implementation', PLAIN)
@pytest.mark.parametrize('lower_bound', [-5.0, None])
def test_gate_and_normalisation_inside(implementation, lower_bound):
    """Outputs against the oracle; gradients against its central differences, by argument."""
    arguments = raw_arguments()
    rng = np.random.default_rng(3)
    do = rng.standard_normal(arguments['v'].shape)

    def true_outputs(a):
        q, k = normalized(a['q']) * a['q'].shape[-1] ** -0.5, normalized(a['k'])
        x, rate = a['g'] + a['dt_bias'], np.exp(a['A_log'])[:, None]
        g = -rate * np.log1p(np.exp(x))
        if lower_bound is not None:
            g = lower_bound / (1 + np.exp(-rate * x))
        return oracle.kda(q, k, a['v'], g, a['beta'])[0]

    def loss(a):
        gate = Gate(a['A_log'], a['dt_bias'], lower_bound)
        rest = {n: a[n] for n in ('q', 'k', 'v', 'g', 'beta')}
        o, _ = kda(**rest, gate=gate, qk_l2norm=True, implementation=implementation)
        return jnp.sum(do * o), o

    with jax.enable_x64(True):
        grads, o = jax.jit(jax.grad(loss, has_aux=True))(arguments)
    assert relative_error(o, true_outputs(arguments)) < 1e-12
    for name, value in arguments.items():
        direction, step = rng.standard_normal(value.shape), 1e-5
        above = np.sum(do * true_outputs(arguments | {name: value + step * direction}))
        below = np.sum(do * true_outputs(arguments | {name: value - step * direction}))
        slope = float(np.sum(np.asarray(grads[name]) * direction))
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8), name


@hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1))
def test_chunked_form_agrees_for_any_segment_ids(runs):
    """Documents, padding anywhere, ids that come back."""
    inputs, cotangents = random_inputs()
    ids = [value for value, length in runs for _ in range(length)] + [0] * MAIN[1]
    ids = np.array(ids[: MAIN[1]], np.int32)
    check('xla', inputs, np.stack([ids, ids[::-1]]), cotangents)


@pytest.mark.slow
@pytest.mark.parametrize('chunk', [1, 2, 8, 16, 32, 128, 256])
def test_chunk_size_does_not_matter(chunk):
    inputs, cotangents = random_inputs()
    ids = packed_ids()

    @jax.jit
    def run(inputs):
        def call(inputs):
            precision = jax.lax.Precision.HIGHEST
            ordered = [inputs[name] for name in INPUTS]
            return chunked_kda(*ordered, runs_of(ids), precision, chunk)

        (o, final), vjp = jax.vjp(call, inputs)
        return {'o': o, 'final_state': final} | vjp(cotangents)[0]

    assert_close(run(inputs), truth(inputs, ids, cotangents), TOLERANCE)


def test_decode_steps_equal_the_recurrence():
    inputs, _ = random_inputs((2, 6, 2, 32, 24))
    o, final = kda(**inputs, implementation='reference')
    state = inputs['initial_state']
    for t in range(6):
        row = [inputs[name][:, t] for name in ('q', 'k', 'v', 'g', 'beta')]
        o_t, state = kda_decode_step(*row, state)
        np.testing.assert_allclose(o_t, o[:, t], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(state, final, rtol=1e-6, atol=1e-7)


def test_default_implementation_is_the_chunked_form_off_tpu():
    inputs, _ = random_inputs((2, 6, 2, 32, 24))
    default, chunked = (
        jax.jit(functools.partial(kda, implementation=name)).lower(**inputs).compile()
        for name in (None, 'xla')
    )
    assert default.cost_analysis()['flops'] == chunked.cost_analysis()['flops']
    for got, want in zip(default(**inputs), chunked(**inputs), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ('A_log', 'shifted', 'want'),
    [(0, 0, -2.5), (0, -6, -0.0123631), (1, 1, -4.6904842), (-0.75, 2, -3.6002737)],
)
def test_bounded_gate_golden(A_log, shifted, want):
    g = kda_gate(jnp.full((1, 1), shifted / 2), jnp.array([A_log]), jnp.array([shifted / 2]))
    assert float(g[0, 0]) == pytest.approx(want, rel=2e-6)


def test_unbounded_gate_is_minus_rate_times_softplus():
    f = jnp.array([[0.0, 40.0], [-3.0, 1.0]])
    g = kda_gate(f, jnp.array([0.0, 1.0]), jnp.zeros(4), None)
    want = [[-np.log(2), -40.0], -np.e * np.log1p(np.exp([-3.0, 1.0]))]
    np.testing.assert_allclose(g, want, rtol=1e-6)


def test_gate_rate_is_per_head_not_per_channel():
    f = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    A_log, dt_bias = np.array([0.3, -1.2], np.float32), np.arange(6, dtype=np.float32) / 6
    g = kda_gate(f, A_log, dt_bias)
    for head in range(2):
        for channel in range(3):
            x = np.exp(A_log[head]) * (f[:, head, channel] + dt_bias[3 * head + channel])
            np.testing.assert_allclose(g[:, head, channel], -5 / (1 + np.exp(-x)), rtol=1e-6)


def test_gate_is_float32_for_bfloat16_input():
    assert kda_gate(jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros(1), jnp.zeros(4)).dtype == 'float32'


def test_l2_epsilon_belongs_to_the_sum_of_squares():
    x = np.full((1, 16), 1e-3 / 4, np.float32)  # sum of squares 1e-6, as large as epsilon
    np.testing.assert_allclose(l2_normalize(x), x / np.sqrt(2e-6), rtol=1e-6)


@pytest.mark.parametrize('implementation', PLAIN)
def test_padding_may_hold_anything_before_gate_and_norm(implementation):
    a = {name: x.astype(np.float32) for name, x in raw_arguments().items()}
    ids = np.array([[1] * 6 + [0] * 4], np.int32)

    @jax.jit
    def grads(a):
        def loss(a):
            gate = Gate(a['A_log'], a['dt_bias'])
            rest = {n: a[n] for n in ('q', 'k', 'v', 'g', 'beta')}
            options = {'gate': gate, 'qk_l2norm': True, 'implementation': implementation}
            return jnp.sum(jnp.sin(kda(**rest, segment_ids=ids, **options)[0]))

        return jax.grad(loss)(a)

    clean = grads(a)
    for name in ('q', 'k', 'v', 'g', 'beta'):
        a[name][ids == 0] = np.nan
    dirty = grads(a)
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name])


@pytest.mark.parametrize('implementation', PLAIN)
def test_an_infinite_decay_forgets_and_stays_finite(implementation):
    inputs, _ = random_inputs((1, 6, 1, 8, 6))
    inputs['g'][:, 2] = -np.inf
    o, state = kda(**inputs, implementation=implementation)
    fresh = {n: x[:, 2:] for n, x in inputs.items() if n != 'initial_state'}
    want_o, want_state = kda(**fresh, implementation='reference')
    np.testing.assert_allclose(o[:, 2:], want_o, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, want_state, rtol=1e-5, atol=1e-6)


def test_padding_inside_a_document_does_not_end_it():
    inputs, _ = random_inputs((1, 4, 1, 4, 4))
    kda(**inputs, segment_ids=np.array([[1, 0, 1, 2]], np.int32))
