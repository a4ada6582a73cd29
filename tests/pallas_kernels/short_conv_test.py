"""Short convolution: golden vector, float64 oracle, gradients, documents and tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import short_conv
from tests.compare import assert_close

SHAPE = (2, 12, 5)  # B, T, P
TAPS = 4


def oracle(x, weight, tail, ids):
    """y and the new tail, one output at a time, in float64; padding only at the end of a row."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    y, new_tail = np.zeros(x.shape), np.zeros(tail.shape)
    for b in range(batch):
        # Each row with the number of its document; the tail belongs to the first one.
        number, rows = 0, [(0, row) for row in tail[b]]
        for t in range(length):
            if ids[b, t] == 0:
                continue
            number += t > 0 and ids[b, t] != ids[b, t - 1]
            rows.append((number, x[b, t]))
            total = np.zeros(width)
            for j in range(taps):
                document, row = rows[len(rows) - taps + j]
                if document == number:
                    total += weight[:, j] * row
            y[b, t] = total / (1 + np.exp(-total))
        last = rows[-1][0]
        for j, (document, row) in enumerate(rows[len(rows) - taps + 1 :]):
            new_tail[b, j] = row if document == last else 0
    return y, new_tail


def random_arguments(seed=0, shape=SHAPE, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal(s).astype(dtype)
        for s in (shape, (shape[2], TAPS), (shape[0], TAPS - 1, shape[2]))
    )


def call(x, weight, tail, ids=None):
    return short_conv(x, weight, tail=tail, segment_ids=ids)


def test_golden_vector():
    z = jnp.array([1, 2, 3, 4, 5.0]).reshape(1, 5, 1)
    y, tail = short_conv(z, jnp.array([[0.1, 0.2, 0.3, 0.4]]))
    np.testing.assert_allclose(
        y.ravel(), [0.239475, 0.825286, 1.761594, 2.857722, 3.928055], atol=1e-6
    )
    np.testing.assert_array_equal(tail.ravel(), [3, 4, 5])


def test_outputs_and_tail_equal_the_oracle():
    x, weight, tail = random_arguments()
    got = call(x, weight, tail)
    want = oracle(x, weight, tail, np.ones(SHAPE[:2], int))
    assert_close(dict(enumerate(got)), dict(enumerate(want)), 1e-6)


@pytest.mark.parametrize(
    'ids',
    [
        [[1] * 12, [1] * 5 + [2] * 7],
        [[1] * 3 + [2] + [3] + [4] * 5 + [0] * 2, [1] * 10 + [2] * 2],  # shorter than the taps
        [[1] + [0] * 11, [5] * 11 + [6]],
        [[1] * 2 + [2] * 2 + [1] * 8, [3] * 12],  # an id comes back
    ],
)
def test_nothing_passes_between_documents(ids):
    x, weight, tail = random_arguments(1)
    ids = np.array(ids, np.int32)
    y, new_tail = call(x, weight, tail, ids)
    want_y, want_tail = oracle(x, weight, tail, ids)
    real = (ids > 0)[..., None]
    assert_close({'y': y * real, 'tail': new_tail}, {'y': want_y, 'tail': want_tail}, 1e-6)


def test_a_row_of_padding_keeps_its_tail():
    x, weight, tail = random_arguments(2)
    ids = np.array([[1] * 12, [0] * 12], np.int32)
    np.testing.assert_array_equal(call(x, weight, tail, ids)[1][1], tail[1])


@pytest.mark.parametrize('cut', [1, 2, 3, 7])
def test_pieces_of_any_size_equal_one_call(cut):
    x, weight, tail = random_arguments(3)
    ids = np.array([[1] * 5 + [2] * 7, [1] * 12], np.int32)
    whole, whole_tail = call(x, weight, tail, ids)
    first, between = call(x[:, :cut], weight, tail, ids[:, :cut])
    second, end = call(x[:, cut:], weight, between, ids[:, cut:])
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(end, whole_tail)


@pytest.mark.parametrize('packed', [False, True])
def test_gradients_equal_central_differences_of_the_oracle(packed):
    arguments = random_arguments(4, dtype=np.float64)
    ids = np.ones(SHAPE[:2], np.int32)
    if packed:
        ids = np.array([[1] * 4 + [2] * 6 + [0] * 2, [1] + [2] * 11], np.int32)
    rng = np.random.default_rng(5)
    dy = rng.standard_normal(SHAPE) * (ids > 0)[..., None]
    dtail = rng.standard_normal(arguments[2].shape)

    def loss(function, *arguments):
        y, tail = function(*arguments, ids)
        return (dy * y).sum() + (dtail * tail).sum()

    with jax.enable_x64(True):
        grads = jax.grad(lambda *a: loss(call, *a), argnums=(0, 1, 2))(*arguments)
    for index, (grad, value) in enumerate(zip(grads, arguments, strict=True)):
        direction, step = rng.standard_normal(value.shape), 1e-6
        sides = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[index] = value + sign * step * direction
            sides.append(loss(oracle, *moved))
        want = (sides[0] - sides[1]) / (2 * step)
        assert float(np.sum(np.asarray(grad) * direction)) == pytest.approx(want, rel=1e-7)


def test_bfloat16_input_is_accumulated_in_float32():
    x, weight, tail = random_arguments(6, (1, 64, 8))
    x, tail = (jnp.asarray(a, jnp.bfloat16) for a in (x, tail))
    y, new_tail = call(x, weight, tail)
    assert y.dtype == new_tail.dtype == jnp.bfloat16
    wide = [np.asarray(a, np.float64) for a in (x, weight, tail)]
    want, _ = oracle(*wide, np.ones((1, 64), int))
    # One rounding of the result, which costs at most 2^-8 of it.
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=1.01 * 2**-8)


def test_a_wrong_weight_is_an_error():
    x, weight, _ = random_arguments()
    with pytest.raises(ValueError, match=r'weight has shape \(4, 4\), wanted \(5, W\)'):
        short_conv(x, weight[:4])


def test_a_wrong_tail_is_an_error():
    x, weight, tail = random_arguments()
    with pytest.raises(ValueError, match=r'tail has shape \(2, 2, 5\), wanted \(2, 3, 5\)'):
        short_conv(x, weight, tail=tail[:, 1:])
