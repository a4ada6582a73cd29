"""What routed experts compute where the activations that enter each product are in MXFP8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_mlp import (
    Experts,
    Mxfp8,
    SiTU,
    decode_mxfp4,
    fake_quantise_mxfp4,
    fake_quantise_mxfp8,
    grouped_mlp,
    quantise_mxfp4,
    round_rows,
    token_mlp,
)
from pallas_kernels.grouped_mlp.mxfp8 import RoundedActivation
from tests.compare import assert_close, relative_error
from tests.oracles import mx
from tests.oracles.grouped_mlp import activate, oracle
from tests.pallas_kernels.grouped_mlp_arguments import ACTIVATIONS, packed_arguments

WIDTH, INNER, SIZES = 32, 128, [5, 0, 7]
FORMS = ['reference', 'xla', 'pallas']


def rounding(rule):
    return functools.partial(mx.rounded, magnitudes=mx.E4M3, rule=rule)


def is_far_from_ties(x, experts, name, rule):
    """Rounding is a step: float32's error must not take a hidden value over one."""
    x = rounding(rule)(np.asarray(x, np.float64))
    start = 0
    for e, size in enumerate(SIZES):
        rows = x[start : start + size]
        hidden = activate(name, rows @ experts.w1[e].T, rows @ experts.w3[e].T)
        low, high = (rounding(rule)(hidden * (1 + d)) for d in (-1e-5, 1e-5))
        if size and np.max(np.abs(high - low) / np.maximum(np.abs(hidden), 1e-30)) > 1e-3:
            return False
        start += size
    return True


@functools.cache
def arguments(name, rule):
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x, dy = rng.standard_normal((2, sum(SIZES), WIDTH)).astype(np.float32)
        shapes = ((3, INNER, WIDTH), (3, INNER, WIDTH), (3, WIDTH, INNER))
        experts = Experts(*(rng.standard_normal(s).astype(np.float32) / 4 for s in shapes))
        if is_far_from_ties(x, experts, name, rule):
            return x, experts, dy
    raise AssertionError('no seed')


@functools.cache
def compiled(name, form, quantise):
    """(x, experts, dy) -> outputs and gradients, by the named form."""

    @jax.jit
    def run(x, experts, dy):
        sizes = np.array(SIZES, np.int32)
        y, vjp = jax.vjp(
            lambda x, experts: grouped_mlp(
                *(x, experts, sizes, ACTIVATIONS[name]), quantise=quantise, implementation=form
            ),
            x,
            experts,
        )
        dx, grads = vjp(dy)
        return {'y': y, 'x': dx} | grads._asdict()

    return run


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
    ('name', 'rule'),
    [('situ', 'ocp_floor'), pytest.param('swiglu', 'ceil', marks=pytest.mark.slow)],
)
def test_outputs_and_gradients_equal_float64(name, rule, form):
    x, experts, dy = arguments(name, rule)
    want = oracle(x, experts, SIZES, name, dy, rounding(rule))
    got = compiled(name, form, Mxfp8(rule))(x, experts, dy)
    assert_close(got, want, 2e-6)
    plain = oracle(x, experts, SIZES, name, dy)
    assert relative_error(got['y'], plain['y']) > 1e-2  # it does round


def narrow(x, experts, dy):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x, experts, dy))


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_bfloat16_forms_agree_and_rows_may_come_rounded(form):
    x, experts, dy = narrow(*arguments('situ', 'ocp_floor'))
    want = compiled('situ', 'reference', Mxfp8())(x, experts, dy)
    rows, quantise = round_rows(x, Mxfp8())
    np.testing.assert_array_equal(rows, fake_quantise_mxfp8(x))
    got = compiled('situ', form, quantise)(rows, experts, dy)
    assert got['y'].dtype == got['w1'].dtype == jnp.bfloat16
    assert_close(got, want, 5e-3)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('dtype', [pytest.param('float32', marks=pytest.mark.slow), 'bfloat16'])
def test_the_backward_pass_has_the_hidden_values_of_the_forward_pass(dtype, form):
    """With w2 the identity y is the hidden values; so is the gradient of a row of w2, for a dy of
    one 1."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((1, 128)), dtype)
    w1, w3 = (jnp.asarray(rng.standard_normal((1, 128, 128)) / 8, dtype) for _ in range(2))
    experts = Experts(w1, w3, jnp.eye(128, dtype=dtype)[None])

    @jax.jit
    def run(x, experts):
        sizes = np.array([1], np.int32)
        y, vjp = jax.vjp(
            lambda experts: grouped_mlp(
                *(x, experts, sizes, SiTU()), quantise=Mxfp8(), implementation=form
            ),
            experts,
        )
        return y, vjp(jnp.eye(1, 128, 5, dtype=dtype))[0].w2

    y, gradient = run(x, experts)
    np.testing.assert_array_equal(gradient[0, 5], y[0])
    np.testing.assert_array_equal(fake_quantise_mxfp8(y), y)
    assert np.count_nonzero(y) > 100


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_packed_weights_equal_the_arrays_that_training_has(form):
    """Weights rounded to MXFP4 while training, and packed after it."""
    rng = np.random.default_rng(4)
    shapes = ((3, 128, 128), (3, 128, 128), (3, 128, 128))
    masters = [jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in shapes]
    trained, packed = jax.jit(
        lambda masters: (
            Experts(*(fake_quantise_mxfp4(w).astype(jnp.bfloat16) for w in masters)),
            Experts(*(quantise_mxfp4(w) for w in masters)),
        )
    )(masters)
    for weight, array in zip(packed, trained, strict=True):
        np.testing.assert_array_equal(decode_mxfp4(weight), array)
    x, dy = (jnp.asarray(rng.standard_normal((sum(SIZES), 128)), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def run(x, experts, dy):
        sizes = np.array(SIZES, np.int32)
        y, vjp = jax.vjp(
            lambda x: grouped_mlp(
                *(x, experts, sizes, SiTU()), quantise=Mxfp8(), implementation=form
            ),
            x,
        )
        return {'y': y, 'x': vjp(dy)[0]}

    # The kernels add decoded weights in another order.
    tolerance = 5e-3 if form == 'pallas' else 0
    assert_close(run(x, packed, dy), run(x, trained, dy), tolerance)


@pytest.mark.parametrize(
    ('kind', 'form'),
    [
        pytest.param('mxfp4', 'reference', marks=pytest.mark.slow),
        ('mxfp4', 'xla'),
        ('mxfp4', 'pallas'),
        ('bfloat16', 'pallas'),
    ],
)
def test_few_tokens_equal_sorted_rows(kind, form):
    packed, decoded, rng = packed_arguments()
    experts = packed if kind == 'mxfp4' else decoded
    x = jnp.asarray(rng.standard_normal((6, 128)), jnp.bfloat16)
    ids = np.repeat([0, 2], [2, 4])[:, None].astype(np.int32)
    sizes = np.array([2, 0, 4], np.int32)

    @jax.jit
    def run(x, experts, decoded):
        args = (x, experts, ids, np.ones((6, 1), np.float32), SiTU())
        how = {'quantise': Mxfp8('ceil')}
        sorted_rows = grouped_mlp(x, decoded, sizes, SiTU(), implementation='xla', **how)
        return token_mlp(*args, implementation=form, **how), sorted_rows

    assert relative_error(*run(x, experts, decoded)) < 5e-3


def test_what_lanes_exchange_is_the_maximum_of_each_group():
    """The kernels' way to a group's largest number, in interpreted and plain rounding alike."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 16, 256)).astype(np.float32) * 3
    found = [
        jax.jit(RoundedActivation(SiTU(), 'ceil', jnp.dtype('float32'), place))(a, b)
        for place in ('xla', 'interpreted')
    ]
    np.testing.assert_array_equal(*found)


def test_widths_that_cut_a_group_are_refused_and_narrow_ones_have_no_kernel():
    rng = np.random.default_rng(6)

    def call(width, inner, implementation=None):
        shapes = ((1, inner, width), (1, inner, width), (1, width, inner))
        experts = Experts(*(rng.standard_normal(s).astype(np.float32) for s in shapes))
        x, sizes = np.ones((2, width), np.float32), np.array([2], np.int32)
        how = {'quantise': Mxfp8(), 'implementation': implementation}
        ids, weights = np.zeros((2, 1), np.int32), np.ones((2, 1), np.float32)
        return jax.eval_shape(
            lambda x: (
                token_mlp(x, experts, ids, weights, SiTU(), **how),
                grouped_mlp(x, experts, sizes, SiTU(), **how),
            ),
            x,
        )

    for sizes in ((48, 64), (64, 48)):
        with pytest.raises(ValueError, match='token_mlp: .* has 48 numbers, wanted a multiple of'):
            call(*sizes)
    with pytest.raises(NotImplementedError, match='rounds F = 64 hidden values to MXFP8'):
        call(64, 64, 'pallas')
    assert [rows.shape for rows in call(64, 64)] == [(2, 64), (2, 64)]
