"""Short convolution: golden vector, float64 oracle, gradients, documents and tails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv.backward_kernel import backward
from pallas_kernels.short_conv.blocks import plan_for
from pallas_kernels.short_conv.cases import cases
from pallas_kernels.short_conv.forward_kernel import forward
from tests.compare import assert_close, relative_error

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
    # Traced: a known id that comes back is refused.
    y, new_tail = jax.jit(call)(x, weight, tail, ids)
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


def oracle_gradients(x, weight, tail, ids, dy):
    """dx, dweight and dtail of (dy * y).sum(), one product at a time, in float64."""
    taps = weight.shape[1]
    dx, d_weight, d_tail = np.zeros(x.shape), np.zeros(weight.shape), np.zeros(tail.shape)
    for b in range(len(x)):
        number, sources = 0, [(0, d_tail[b, j], tail[b, j]) for j in range(taps - 1)]
        for t in range(x.shape[1]):
            number += t > 0 and ids[b, t] != ids[b, t - 1] and ids[b, t] > 0
            sources.append((number, dx[b, t], x[b, t]))
            seen = [(j, *sources[t + j][1:]) for j in range(taps) if sources[t + j][0] == number]
            total = sum(weight[:, j] * row for j, _, row in seen)
            s = 1 / (1 + np.exp(-total))
            d_total = dy[b, t] * s * (1 + total * (1 - s))
            for j, d_row, row in seen:
                d_row += weight[:, j] * d_total
                d_weight[:, j] += row * d_total
    return dx, d_weight, d_tail


@functools.cache
def compiled(implementation):
    def run(x, weight, tail, ids, dy):
        def call(*args):
            return short_conv(
                args[0],
                args[1],
                tail=args[2],
                segment_ids=ids,
                implementation=implementation,
            )

        y, pull, new_tail = jax.vjp(call, x, weight, tail, has_aux=True)
        return y, new_tail, *pull(dy)

    return jax.jit(run)


def documents(length, *ends):
    """Ids of documents that end there; padding after the last."""
    ids = np.zeros(length, np.int32)
    for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False), 1):
        ids[start:end] = number
    return ids


def check(implementation, shape, ids, dtype, tolerance):
    args = random_arguments(7, shape)
    dy = np.random.default_rng(8).standard_normal(shape).astype(np.float32)
    if ids is not None:
        dy *= (ids > 0)[..., None]
    x, weight, tail, dy = (
        jnp.asarray(a, t)
        for a, t in zip((*args, dy), (dtype, 'float32', dtype, dtype), strict=True)
    )
    y, new_tail, *grads = compiled(implementation)(x, weight, tail, ids, dy)
    assert y.dtype == new_tail.dtype == dtype
    assert [g.dtype for g in grads] == [dtype, 'float32', dtype]
    every = np.ones(shape[:2], int) if ids is None else ids
    exact = [np.asarray(a, np.float64) for a in (x, weight, tail)]
    want_y, want_tail = oracle(*exact, every)
    want = dict(
        zip(
            ('dx', 'dweight', 'dtail'),
            oracle_gradients(*exact, every, np.asarray(dy, np.float64)),
            strict=True,
        )
    )
    got = dict(zip(want, grads, strict=True))
    got |= {'y': y * (every > 0)[..., None].astype(y.dtype), 'tail': new_tail}
    assert_close(got, want | {'y': want_y, 'tail': want_tail}, tolerance)


@pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas', None])
class TestEveryImplementation:
    @pytest.mark.parametrize('packed', [False, True])
    @pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 5e-3)])
    def test_outputs_and_gradients(self, implementation, packed, dtype, tolerance):
        ids = None
        if packed:
            ids = np.stack([documents(37, 1, 3, 16, 17, 35), documents(37, 9, 24, 37)])
        check(implementation, (2, 37, 128), ids, dtype, tolerance)

    def test_a_single_token(self, implementation):
        check(implementation, (2, 1, 128), None, 'float32', 1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize('length', [512, 1030])
    @pytest.mark.parametrize('packed', [False, True])
    @pytest.mark.parametrize(('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 5e-3)])
    def test_several_tiles(self, implementation, length, packed, dtype, tolerance):
        """A document ends at each place about the edge of a tile of 512 rows."""
        ids = documents(length, 100, 509, 510, 511, length - 2)[None] if packed else None
        check(implementation, (1, length, 384), ids, dtype, tolerance)


@pytest.mark.parametrize('packed', [False, True])
def test_kernels_do_not_race_or_leave_their_blocks(packed):
    """Two tiles of tokens, the second partly past the end, and two of channels."""
    # Numbers of documents lie along lanes, so a packed tile has at least 128 rows.
    (length, rows), width = (150, 128) if packed else (24, 16), 256
    x, weight, tail = (jnp.asarray(a) for a in random_arguments(9, (1, length, width)))
    tiles = {'rows': rows, 'lanes': 128, 'step': 1}
    plan = plan_for('forward', x.shape, x.dtype, packed=packed, tiles=tiles)
    assert plan.grid == (1, 2, 2)
    ids = np.ones((1, length), np.int32)
    reach = None
    if packed:
        ids[:, 127:] = 2
        since = np.concatenate([np.arange(127) + TAPS - 1, np.arange(length - 127)])
        reach = jnp.pad(jnp.asarray(since, jnp.float32), (0, plan.padded - length))[None, None]
    halved = jnp.repeat(0.5 * weight.T[:, None], 8, axis=1)
    before = jnp.pad(tail, ((0, 0), (5, 0), (0, 0)))
    interpret = pltpu.InterpretParams(detect_races=True)
    y = forward(x, halved, before, reach, plan=plan, interpret=interpret)
    dx, d_weight, d_tail = backward(x, y, halved, before, reach, plan=plan, interpret=interpret)
    exact = [np.asarray(a, np.float64) for a in (x, weight, tail)]
    assert relative_error(y, oracle(*exact, ids)[0]) < 1e-5
    want = oracle_gradients(*exact, ids, np.asarray(y, np.float64))
    got = dx, 0.5 * d_weight.sum((0, 2)).T, d_tail[:, 5:]
    assert_close(dict(enumerate(got)), dict(enumerate(want)), 1e-5)


@pytest.mark.parametrize(
    ('ids', 'message'),
    [
        (np.ones((1, 12), np.int32), 'segment_ids has shape'),
        (np.array([[0] + [1] * 11] * 2, np.int32), 'padding before a token'),
        (np.ones((2, 12), np.float32), 'segment_ids is float32, wanted integers'),
    ],
)
def test_segment_ids_that_do_not_fit(ids, message):
    x, weight, tail = random_arguments()
    with pytest.raises(ValueError, match=message):
        call(x, weight, tail, ids)


def test_padding_may_hold_anything():
    x, weight, tail = random_arguments()
    ids = np.array([[1] * 9 + [0] * 3, [1] * 12], np.int32)
    clean = call(x, weight, tail, ids)
    dirty = call(np.where(ids[..., None] > 0, x, np.nan).astype(x.dtype), weight, tail, ids)
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(np.isfinite(got), True)
        np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(dirty[0][0, :9], clean[0][0, :9])


def test_what_the_kernel_does_not_take():
    x, weight = jnp.ones((1, 4, 128)), jnp.ones((128, 3))
    with pytest.raises(NotImplementedError, match='takes 4 taps, got 3'):
        short_conv(x, weight, implementation='pallas')
    assert short_conv(x, weight)[0].shape == x.shape
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        short_conv(x, weight, implementation='cuda')


def test_cases_have_distinct_keys_and_trace():
    every = cases()
    assert len({case.key for case in every}) == len(every)
    for case in (every[0], every[-1]):
        jax.eval_shape(case.build(None), *case.args)
