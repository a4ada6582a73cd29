"""What experts with packed weights compute: the same as with the arrays they stand for."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_mlp import (
    Experts,
    SiTU,
    decode_mxfp4,
    fake_quantise_mxfp4,
    grouped_mlp,
    mxfp4_kernels,
    quantise_mxfp4,
    tile_mxfp4,
    token_mlp,
    xla,
)
from tests.compare import assert_close, relative_error
from tests.oracles.grouped_mlp import oracle
from tests.pallas_kernels.grouped_mlp_arguments import packed_arguments, random_mxfp4


def test_mxfp4_experts_equal_their_decoded_bfloat16_experts():
    rng = np.random.default_rng(3)
    packed = Experts(*(random_mxfp4(rng, 3, *s) for s in ((64, 32), (64, 32), (32, 64))))
    decoded = Experts(*(decode_mxfp4(w) for w in packed))
    assert decoded.w1.dtype == ml_dtypes.bfloat16
    sizes = np.array([5, 0, 11], np.int32)
    x = rng.standard_normal((16, 32)).astype(np.float32)
    for form in (grouped_mlp, xla.forward_by_tiles, xla.forward_ragged):
        got = form(x, packed, sizes, SiTU())
        np.testing.assert_array_equal(got, form(x, decoded, sizes, SiTU()))
        assert relative_error(got, oracle(x, decoded, sizes, 'situ', x)['y']) < 2e-6


@functools.cache
def packed_run(form):
    @jax.jit
    def run(x, experts, sizes, dy):
        y, vjp = jax.vjp(lambda x: grouped_mlp(x, experts, sizes, SiTU(), implementation=form), x)
        return {'y': y, 'x': vjp(dy)[0]}

    return run


@pytest.mark.parametrize('form', ['reference', 'xla', 'pallas'])
@pytest.mark.parametrize('sizes', [[16, 0, 24], [3, 20, 17], [0, 40, 0], [5, 5, 5]])
def test_mxfp4_outputs_and_input_gradients_equal_float64(form, sizes):
    packed, decoded, rng = packed_arguments()
    x, dy = (jnp.asarray(rng.standard_normal((40, 128)), jnp.bfloat16) for _ in range(2))
    experts = Experts(*(tile_mxfp4(w) for w in packed)) if sizes[0] == 3 else packed
    got = packed_run(form)(x, experts, np.array(sizes, np.int32), dy)
    want = oracle(x, decoded, sizes, 'situ', dy)
    assert_close(got, {name: want[name] for name in got}, 5e-3)


def test_the_default_form_takes_packed_weights():
    packed, decoded, rng = packed_arguments()
    x = jnp.asarray(rng.standard_normal((6, 128)), jnp.bfloat16)
    sizes = np.array([2, 0, 4], np.int32)
    ids = np.repeat([0, 2], [2, 4])[:, None].astype(np.int32)
    want = oracle(x, decoded, sizes, 'situ', x)['y']
    assert relative_error(grouped_mlp(x, packed, sizes, SiTU()), want) < 5e-3
    assert relative_error(token_mlp(x, packed, ids, np.ones((6, 1)), SiTU()), want) < 5e-3


def test_packed_weights_have_no_gradient():
    packed, _, _ = packed_arguments()
    x, sizes = jnp.ones((2, 128), jnp.bfloat16), np.array([2, 0, 0], np.int32)
    _, vjp = jax.vjp(lambda experts: grouped_mlp(x, experts, sizes, SiTU()), packed)
    for gradient in jax.tree.leaves(vjp(x)):
        assert gradient.dtype == jax.dtypes.float0


@pytest.mark.parametrize('form', ['xla', 'pallas'])
def test_gradients_pass_straight_through_the_quantisation_to_the_masters(form):
    _, _, rng = packed_arguments()
    shapes = ((3, 64, 32), (3, 64, 32), (3, 32, 64))
    masters = Experts(*(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes))
    x, dy = (jnp.asarray(rng.standard_normal((20, 32)), jnp.float32) for _ in range(2))
    sizes = [4, 0, 16]

    @jax.jit
    def run(x, masters):
        def loss(x, masters):
            quantised = Experts(*(fake_quantise_mxfp4(w) for w in masters))
            return grouped_mlp(
                x, quantised, jnp.array(sizes, jnp.int32), SiTU(), implementation=form
            )

        y, vjp = jax.vjp(loss, x, masters)
        dx, grads = vjp(dy)
        return {'y': y, 'x': dx} | grads._asdict()

    seen = Experts(*(decode_mxfp4(quantise_mxfp4(w), jnp.float32) for w in masters))
    assert_close(run(x, masters), oracle(x, seen, sizes, 'situ', dy), 1e-5)


def test_the_kernels_for_packed_weights_have_no_races_and_stay_inside_their_arrays():
    packed, decoded, rng = packed_arguments(num_experts=2, inner=128)
    experts = Experts(*(tile_mxfp4(w) for w in packed))
    x, dy = (jnp.asarray(rng.standard_normal((20, 128)), jnp.bfloat16) for _ in range(2))
    sizes = jnp.array([7, 13], jnp.int32)
    settings = {
        'interpret': pltpu.InterpretParams(detect_races=True),
        'tiles': {'rows': 16, 'inner': 128, 'width': 128},
    }
    y, kept = mxfp4_kernels.forward(x, experts, sizes, SiTU(), keep=True, **settings)
    dx = mxfp4_kernels.backward(experts, sizes, kept, dy, SiTU(), **settings)
    want = oracle(x, decoded, sizes, 'situ', dy)
    assert_close({'y': y, 'x': dx}, {'y': want['y'], 'x': want['x']}, 5e-3)
