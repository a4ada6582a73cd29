"""KDA's TPU kernels in interpret mode: bfloat16, score forms, gates, precise mode, hardware."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kda import Gate, kda
from pallas_kernels.kda.tpu import call, words
from tests.compare import assert_close
from tests.pallas_kernels.kda_test import INPUTS, REGIMES, random_inputs, raw_arguments, truth

BFLOAT16 = 5e-3  # relative, outputs and gradients
SIMILAR_KEYS = 'no decay, equal keys'
# One row, one head, two chunks; K and V as in the models.
SHAPE = (1, 256, 1, 128, 128)


def narrowed(inputs, cotangents):
    """q, k, v and do in bfloat16, and the arguments of the oracle that they stand for.

    The final state's cotangent is cut to the size of the outputs' in the gradients; else the last
    few tokens are all that the norm of beta's gradient sees.
    """
    cotangents = cotangents[0], cotangents[1] * np.float32(cotangents[1].shape[-1] ** -0.5)
    narrow = {n: jnp.asarray(x, jnp.bfloat16 if n in 'qkv' else x.dtype) for n, x in inputs.items()}
    cotangents = jnp.asarray(cotangents[0], jnp.bfloat16), cotangents[1]
    true = {n: np.asarray(x, np.float64) for n, x in narrow.items()}
    return narrow, cotangents, true, tuple(np.asarray(x, np.float64) for x in cotangents)


@functools.cache
def compiled(bound, precision, packed):
    @jax.jit
    def run(inputs, ids, cotangents):
        def call(inputs):
            options = {'precision': precision, 'g_lower_bound': bound}
            segment_ids = ids if packed else None
            return kda(**inputs, segment_ids=segment_ids, implementation='pallas', **options)

        (o, final), vjp = jax.vjp(call, inputs)
        return {'o': o, 'final_state': final} | vjp(cotangents)[0]

    return run


def check(regime, bound, tolerance, precision='default', ids=None):
    inputs, cotangents = random_inputs(SHAPE, regime)
    if regime == SIMILAR_KEYS:
        inputs['initial_state'][:] = 0
    narrow, cotangents, true, true_cotangents = narrowed(inputs, cotangents)
    given = np.ones(SHAPE[:2], np.int32) if ids is None else ids
    got = compiled(bound, precision, ids is not None)(narrow, given, cotangents)
    assert_close(got, truth(true, ids, true_cotangents), tolerance)


class TestBfloat16:
    """Outputs, final state and all gradients against a float64 recurrence of the rounded inputs."""

    @pytest.mark.parametrize('regime', ['uniform to -5', 'all -5'])
    def test_dense_tiles_of_a_bounded_gate(self, regime):
        check(regime, -5.0, BFLOAT16)

    @pytest.mark.slow
    @pytest.mark.parametrize('regime', [r for r in REGIMES if r != SIMILAR_KEYS])
    def test_exact_tiles_of_any_gate(self, regime):
        check(regime, None, BFLOAT16)

    def test_keys_alike_without_decay(self):
        check(SIMILAR_KEYS, -5.0, 4e-2)

    @pytest.mark.slow
    def test_keys_alike_without_decay_in_the_precise_mode(self):
        check(SIMILAR_KEYS, -5.0, 2e-2, 'precise')

    def test_precise_forward_pass_alone(self):
        inputs, cotangents = random_inputs(SHAPE, SIMILAR_KEYS)
        inputs['initial_state'][:] = 0
        narrow, _, true, true_cotangents = narrowed(inputs, cotangents)
        run = functools.partial(kda, precision='precise', g_lower_bound=-5.0)
        o, final = jax.jit(functools.partial(run, implementation='pallas'))(**narrow)
        want = truth(true, None, true_cotangents)
        got = {'o': o, 'final_state': final}
        assert_close(got, {name: want[name] for name in got}, 2e-2)

    @pytest.mark.slow
    def test_packed_documents_and_padding(self):
        ids = [0] * 3 + [1] * 30 + [2] * 116 + [3] * 60 + [0] * 7 + [4] * 40
        check('uniform to -5', -5.0, BFLOAT16, ids=np.array([ids], np.int32))

    def test_gradients_of_any_size_stay_exact_in_the_dense_tiles(self):
        """A tile's decays reach 2^58; tiny and huge gradients must not leave the float range."""
        inputs, cotangents = random_inputs(SHAPE, 'all -5')
        narrow, (do, d_final), _, _ = narrowed(inputs, cotangents)
        run = compiled(-5.0, 'default', False)
        ids = np.ones(SHAPE[:2], np.int32)
        want = run(narrow, ids, (do, d_final))
        for scale in (2.0**-40, 2.0**40):
            got = run(narrow, ids, (do * scale, d_final * scale))
            got = {name: np.asarray(got[name], np.float64) / scale for name in INPUTS}
            assert_close(got, {name: want[name] for name in INPUTS}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('lower_bound', [-5.0, None])
def test_gate_and_normalisation_in_the_kernel(lower_bound):
    """Against the XLA form in float64, whose own test is against central differences."""
    arguments = raw_arguments()
    do = np.random.default_rng(3).standard_normal(arguments['v'].shape)

    def loss(a, implementation):
        gate = Gate(a['A_log'], a['dt_bias'], lower_bound)
        rest = {n: a[n] for n in ('q', 'k', 'v', 'g', 'beta')}
        o, _ = kda(**rest, gate=gate, qk_l2norm=True, implementation=implementation)
        return jnp.sum(do.astype(o.dtype) * o)

    def value_and_grads(a, implementation):
        f = jax.jit(functools.partial(jax.value_and_grad(loss), implementation=implementation))
        value, grads = f(a)
        return {'loss': value} | grads

    with jax.enable_x64(True):
        want = value_and_grads(arguments, 'xla')
    narrow = {name: x.astype(np.float32) for name, x in arguments.items()}
    got = value_and_grads(narrow, 'pallas')
    assert_close(got, want, 1e-5)


def kernel_jaxprs(jaxpr):
    """Bodies of all pallas_calls in a jaxpr."""
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(sub, 'jaxpr', sub)
                if not hasattr(inner, 'eqns'):
                    continue
                if eqn.primitive.name == 'pallas_call':
                    yield inner
                else:
                    yield from kernel_jaxprs(inner)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_no_float32_product_is_left_to_a_single_bfloat16_pass(dtype):
    """On TPU such a product rounds its float32 operands; interpret mode does not show it."""
    inputs, _ = random_inputs((1, 128, 1, 128, 128))
    inputs = {n: jnp.asarray(x, dtype if n in 'qkv' else x.dtype) for n, x in inputs.items()}

    def loss(inputs):
        return jnp.sum(kda(**inputs, implementation='pallas', g_lower_bound=-5.0)[0])

    products = 0
    for body in kernel_jaxprs(jax.make_jaxpr(jax.grad(loss))(inputs).jaxpr):
        for eqn in body.eqns:
            if eqn.primitive.name != 'dot_general':
                continue
            products += 1
            kinds = {x.aval.dtype for x in eqn.invars}
            highest = eqn.params['precision'] in (
                lax.Precision.HIGHEST,
                (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
            )
            assert kinds == {jnp.dtype(jnp.bfloat16)} or (dtype == jnp.float32 and highest)
    assert products > 20


def dot_by_passes(a, b, contract=(1, 0)):
    """`words.dot` as the matrix unit computes it: six products of the three bfloat16 parts."""
    numbers = (((contract[0],), (contract[1],)), ((), ()))

    def product(x, y):
        return lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)

    if a.dtype != jnp.float32:
        return product(a, b)

    def parts(x):
        out = []
        for _ in range(3):
            part = words.high_half(x)
            # Subnormal parts count as zero.
            part = jnp.where(jnp.abs(part) < 2.0**-126, 0.0, part)
            out.append(part)
            x = x - part
        return out

    (a0, a1, a2), (b0, b1, b2) = parts(a), parts(b)
    small = product(a0, b2) + product(a1, b1) + product(a2, b0)
    return (small + (product(a0, b1) + product(a1, b0))) + product(a0, b0)


@pytest.mark.slow
@pytest.mark.parametrize('regime', ['uniform to -5', 'all -5'])
def test_float32_survives_products_of_bfloat16_parts(regime, monkeypatch):
    for module in ('scores', 'inverse', 'forward', 'backward'):
        name = f'pallas_kernels.kda.tpu.{module}.dot'
        monkeypatch.setattr(name, dot_by_passes)
    jax.clear_caches()
    inputs, cotangents = random_inputs((1, 128, 1, 128, 128), regime)

    @jax.jit
    def run(inputs):
        def call(inputs):
            return kda(**inputs, implementation='pallas', g_lower_bound=-5.0)

        (o, final), vjp = jax.vjp(call, inputs)
        return {'o': o, 'final_state': final} | vjp(cotangents)[0]

    got = run(inputs)
    jax.clear_caches()
    want = truth(inputs, None, cotangents)
    outputs = ('o', 'final_state')
    assert_close({n: got[n] for n in outputs}, {n: want[n] for n in outputs}, 1e-5)
    assert_close({n: got[n] for n in INPUTS}, {n: want[n] for n in INPUTS}, 1e-4)


@pytest.mark.slow
def test_no_race_and_no_read_outside_or_before_a_write():
    """Two chunks, the second of them partly past T, on the interpreter that models memory."""
    inputs, cotangents = random_inputs((1, 150, 1, 128, 128))
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')

    def run(inputs):
        def call_(inputs):
            arrays = (inputs['q'], inputs['k'], inputs['v'], inputs['g'], inputs['beta'])
            return call.tpu_kda(
                *arrays,
                None,
                inputs['initial_state'],
                None,
                lower_bound=-5.0,
                qk_l2norm=False,
                precise=False,
                interpret=params,
            )

        (o, final), vjp = jax.vjp(call_, inputs)
        return {'o': o, 'final_state': final} | vjp(cotangents)[0]

    assert_close(jax.jit(run)(inputs), truth(inputs, None, cotangents), 1e-5)


@pytest.mark.parametrize(
    ('batch', 'heads', 'most', 'want'),
    [(1, 96, 12, 12), (1, 24, 12, 12), (1, 12, 12, 6), (1, 6, 12, 3), (2, 6, 12, 6), (1, 7, 4, 1)],
)
def test_programs_split_evenly_over_two_cores_where_heads_allow(batch, heads, most, want):
    assert call.heads_a_program(batch, heads, 128, 128, most) == want


@pytest.mark.slow
def test_wider_heads_share_the_same_memory():
    assert call.heads_a_program(1, 96, 256, 256, 12) == 3
