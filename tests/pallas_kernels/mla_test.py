"""Causal attention by blocks: float64 oracle, outputs and gradients, documents, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import api, causal_attention
from tests.compare import assert_close, relative_error

SHAPE = (2, 24, 2, 12, 6)  # B, T, H, qk, V
LENGTH = SHAPE[1]
DOCUMENTS = {
    'one document': None,
    'packed': [[1] * 5 + [2] * 11 + [3] * 8, [1] * 20 + [0] * 4],
    'one token each': [list(range(1, 25))] * 2,
    'padding at both ends and inside': [[0] * 6 + [1] * 7 + [0] * 3 + [2] * 8, [0] * 24],
    'an id comes back': [[1] * 9 + [2] * 6 + [1] * 9, [3] * 24],
}


def oracle(q, k, v, ids, do):
    """Outputs and gradients in float64, one row of scores at a time."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    batch, length, heads, width = q.shape
    o, dq, dk, dv = (np.zeros(x.shape) for x in (v, q, k, v))
    scale = width**-0.5
    for b in range(batch):
        # Padding ends no document, so equal ids around it are one; a change of ids starts another.
        number, last, document = 0, None, []
        for value in ids[b]:
            if value > 0:
                number += last is not None and value != last
                last = value
            document.append(number if value > 0 else -1)
        for t in range(length):
            seen = [s for s in range(t + 1) if document[s] == document[t] >= 0]
            if not seen:
                continue
            for h in range(heads):
                scores = scale * (k[b, seen, h] @ q[b, t, h])
                p = np.exp(scores - scores.max())
                p /= p.sum()
                o[b, t, h] = p @ v[b, seen, h]
                dp = v[b, seen, h] @ do[b, t, h]
                d_scores = scale * p * (dp - p @ dp)
                dv[b, seen, h] += np.outer(p, do[b, t, h])
                dk[b, seen, h] += np.outer(d_scores, q[b, t, h])
                dq[b, t, h] = d_scores @ k[b, seen, h]
    return {'o': o, 'q': dq, 'k': dk, 'v': dv}


def random_arguments(seed=0, dtype=np.float32, sharpness=1.0):
    """q, k, v and the cotangent of o."""
    batch, length, heads, width, value = SHAPE
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, heads, d) for d in (width, width, value, value)]
    q, k, v, do = (rng.standard_normal(s) for s in shapes)
    return tuple(x.astype(dtype) for x in (sharpness * q, k, v, do))


def run(q, k, v, ids, do):
    def both(q, k, v, do):
        o, vjp = jax.vjp(functools.partial(causal_attention, segment_ids=ids), q, k, v)
        return dict(zip('oqkv', (o, *vjp(do)), strict=True))

    return jax.jit(both)(q, k, v, do)


def ids_of(documents):
    return None if documents is None else np.array(documents, np.int32)


@pytest.mark.parametrize('block', [1, 5, 8, 24, 128])
@pytest.mark.parametrize('documents', DOCUMENTS.values(), ids=DOCUMENTS)
def test_outputs_and_gradients_equal_float64_whatever_the_block(monkeypatch, documents, block):
    monkeypatch.setattr(api, 'BLOCK', block)
    *arguments, do = random_arguments(dtype=np.float64)
    ids = ids_of(documents)
    with jax.enable_x64(True):
        got = run(*arguments, ids, do)
    want = oracle(*arguments, np.ones(SHAPE[:2], int) if ids is None else ids, do)
    if documents == DOCUMENTS['one token each']:
        # Softmax over one score has no gradient, up to rounding.
        assert max(np.abs(got.pop(n)).max() for n in 'qk') < 1e-14
        assert not any(np.any(want.pop(n)) for n in 'qk')
    assert_close(got, want, 1e-12)


def test_long_inputs_take_larger_blocks(monkeypatch):
    monkeypatch.setattr(api, 'BLOCK', 4)
    monkeypatch.setattr(api, 'LONG', LENGTH)
    monkeypatch.setattr(api, 'LONG_BLOCK', 10)
    *arguments, do = random_arguments(dtype=np.float64)
    with jax.enable_x64(True):
        got = run(*arguments, None, do)
    assert_close(got, oracle(*arguments, np.ones(SHAPE[:2], int), do), 1e-12)


def test_float32_is_accurate(monkeypatch):
    monkeypatch.setattr(api, 'BLOCK', 8)
    *arguments, do = random_arguments(1)
    ids = ids_of(DOCUMENTS['packed'])
    assert_close(run(*arguments, ids, do), oracle(*arguments, ids, do), 2e-6)


def test_scores_in_the_thousands_stay_finite_and_accurate(monkeypatch):
    monkeypatch.setattr(api, 'BLOCK', 8)
    q, k, v, do = random_arguments(1, sharpness=300.0)
    ids = ids_of(DOCUMENTS['packed'])
    got, want = run(q, k, v, ids, do), oracle(q, k, v, ids, do)
    assert_close({n: got[n] for n in 'ov'}, {n: want[n] for n in 'ov'}, 2e-6)
    # Where one weight is 1, terms of size do v cancel in the gradients of q and k.
    term = np.abs(np.einsum('bthv,bshv->bhts', do, v)).max()
    for name, factor in (('q', k), ('k', q)):
        bound = 1e-6 * term * np.abs(factor).max()
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=bound)


def test_padding_gives_zero_and_may_hold_anything():
    *arguments, do = random_arguments(2)
    ids = ids_of(DOCUMENTS['padding at both ends and inside'])
    clean = run(*arguments, ids, do)
    for name, x in clean.items():
        assert not np.any(np.asarray(x)[ids == 0]), name
    for x in (*arguments, do):
        x[ids == 0] = 1e30
    dirty = run(*arguments, ids, do)
    for name in clean:
        np.testing.assert_array_equal(dirty[name], clean[name])


def test_bfloat16_inputs_cost_a_few_roundings():
    arguments = [jnp.asarray(x, jnp.bfloat16) for x in random_arguments(3)]
    got = run(*arguments[:3], None, arguments[3])
    want = oracle(*arguments[:3], np.ones(SHAPE[:2], int), arguments[3])
    assert got['o'].dtype == jnp.bfloat16
    for name in want:
        # Probabilities and the result are rounded, by 1.7e-3 each in the mean.
        assert relative_error(got[name], want[name]) < 5e-3, name


@pytest.mark.parametrize('index', [1, 2])
def test_a_wrong_shape_is_an_error(index):
    arguments = [np.zeros((1, 4, 2, 8), np.float32) for _ in range(3)]
    arguments[index] = np.zeros((1, 5, 2, 8), np.float32)
    with pytest.raises(ValueError, match='wanted q and k alike'):
        causal_attention(*arguments)
