"""Causal attention by blocks: float64 oracle, outputs and gradients, documents, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from pallas_kernels.common.segments import Runs, runs_of
from pallas_kernels.mla import (
    Part,
    attend_part,
    backward_kernel,
    causal_attention,
    merged,
    on_tpu,
    page_width,
    paged,
    paged_decode,
    part_gradients,
    xla,
)
from pallas_kernels.mla.blocks import ONE_ROW, How
from tests.compare import assert_close, relative_error

SHAPE = (2, 24, 2, 12, 6)  # B, T, H, qk, V
LENGTH = SHAPE[1]
DOCUMENTS = {
    'one document': None,
    'packed': [[1] * 5 + [2] * 11 + [3] * 8, [1] * 20 + [0] * 4],
    'one token each': [list(range(1, 25))] * 2,
    'padding at both ends and inside': [[0] * 6 + [1] * 7 + [0] * 3 + [2] * 8, [0] * 24],
}


def documents_of(row):
    """Document of each token, -1 for padding, which ends none: equal ids around it are one."""
    number, last, out = 0, None, []
    for value in row:
        if value > 0:
            number += last is not None and value != last
            last = value
        out.append(number if value > 0 else -1)
    return np.array(out)


def oracle(q, k, v, ids, do):
    """Outputs, gradients and largest logits in float64, every score at once."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    document = np.array([documents_of(row) for row in ids])
    seen = (document[:, :, None] == document[:, None, :]) & (document >= 0)[:, :, None]
    seen = (seen & np.tri(q.shape[1], dtype=bool))[:, None]
    q, k, v, do = (np.where((document >= 0)[:, :, None, None], x, 0) for x in (q, k, v, do))
    scores = np.where(seen, scale * np.einsum('bthd,bshd->bhts', q, k), -np.inf)
    top = scores.max(axis=(0, 2, 3))
    largest = scores.max(axis=-1, keepdims=True)
    p = np.where(seen, np.exp(scores - np.where(np.isfinite(largest), largest, 0)), 0)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
    dp = np.einsum('bthv,bshv->bhts', do, v)
    d_scores = scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return {
        'o': np.einsum('bhts,bshv->bthv', p, v),
        'q': np.einsum('bhts,bshd->bthd', d_scores, k),
        'k': np.einsum('bhts,bthd->bshd', d_scores, q),
        'v': np.einsum('bhts,bthv->bshv', p, do),
        'top': top,
    }


def random_arguments(seed=0, dtype=np.float32, sharpness=1.0, shape=SHAPE):
    """q, k, v and the cotangent of o."""
    batch, length, heads, width, value = shape
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, heads, d) for d in (width, width, value, value)]
    q, k, v, do = (rng.standard_normal(s) for s in shapes)
    return tuple(x.astype(dtype) for x in (sharpness * q, k, v, do))


def run(q, k, v, ids, do, implementation=None):
    attend = functools.partial(
        causal_attention, segment_ids=ids, implementation=implementation, with_max_logit=True
    )

    def both(q, k, v, do):
        o, vjp, top = jax.vjp(attend, q, k, v, has_aux=True)
        return dict(zip(('o', *'qkv', 'top'), (o, *vjp(do), top), strict=True))

    return jax.jit(both)(q, k, v, do)


def ids_of(documents):
    return None if documents is None else np.array(documents, np.int32)


@pytest.mark.parametrize('block', [1, 5, 8, 24, 128])
@pytest.mark.parametrize('documents', DOCUMENTS.values(), ids=DOCUMENTS)
def test_outputs_and_gradients_equal_float64_whatever_the_block(monkeypatch, documents, block):
    monkeypatch.setattr(xla, 'BLOCK', block)
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


def test_a_known_id_that_comes_back_is_an_error_and_a_traced_one_starts_a_document():
    q, k, v = (jnp.ones((1, 6, 1, 8)), jnp.ones((1, 6, 1, 8)), jnp.arange(6.0).reshape(1, 6, 1, 1))
    ids = np.array([[1, 1, 2, 2, 1, 1]], np.int32)
    with pytest.raises(ValueError, match='1 comes back after another document'):
        causal_attention(q, k, v, ids)
    o = jax.jit(causal_attention)(q, k, v, ids)
    np.testing.assert_allclose(o.ravel(), [0, 0.5, 2, 2.5, 4, 4.5], rtol=1e-6)


def test_long_inputs_take_larger_blocks(monkeypatch):
    monkeypatch.setattr(xla, 'BLOCK', 4)
    monkeypatch.setattr(xla, 'LONG', LENGTH)
    monkeypatch.setattr(xla, 'LONG_BLOCK', 10)
    *arguments, do = random_arguments(dtype=np.float64)
    with jax.enable_x64(True):
        got = run(*arguments, None, do)
    assert_close(got, oracle(*arguments, np.ones(SHAPE[:2], int), do), 1e-12)


def test_float32_is_accurate(monkeypatch):
    monkeypatch.setattr(xla, 'BLOCK', 8)
    *arguments, do = random_arguments(1)
    ids = ids_of(DOCUMENTS['packed'])
    assert_close(run(*arguments, ids, do), oracle(*arguments, ids, do), 2e-6)


def test_scores_in_the_thousands_stay_finite_and_accurate(monkeypatch):
    monkeypatch.setattr(xla, 'BLOCK', 8)
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
    top = clean.pop('top')
    for name, x in clean.items():
        assert not np.any(np.asarray(x)[ids == 0]), name
    for x in (*arguments, do):
        x[ids == 0] = 1e30
    dirty = run(*arguments, ids, do)
    np.testing.assert_array_equal(dirty['top'], top)
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


def packed_ids(batch, length, seed=0):
    """Documents of many lengths, padding at the end and between them."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((batch, length), np.int32)
    for row in ids:
        at, document = 0, 0
        while at < length:
            size = int(rng.integers(1, max(2, length // 2)))
            document += 1
            row[at : at + size] = document if rng.random() < 0.8 else 0
            at += size
        row[-(length // 20) :] = 0
    return ids


# Name -> B, T, H, qk, V and whether rows hold several documents.
CASES = {
    'K3 widths': ((1, 300, 2, 192, 128), False),
    'K3 widths, packed': ((1, 300, 2, 192, 128), True),
    'two blocks': ((1, 256, 2, 64, 32), False),
    'odd heads and widths, packed': ((2, 130, 3, 24, 6), True),
    'one token': ((1, 1, 2, 192, 128), False),
}


class TestImplementations:
    """Every form, outputs and gradients, against float64."""

    @pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 5e-3)])
    @pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas'])
    @pytest.mark.parametrize('case', CASES)
    def test_equals_float64(self, case, implementation, dtype, tolerance):
        shape, packed = CASES[case]
        arguments = [jnp.asarray(x, dtype) for x in random_arguments(shape=shape)]
        ids = packed_ids(*shape[:2]) if packed else np.ones(shape[:2], np.int32)
        got = run(*arguments[:3], ids if packed else None, arguments[3], implementation)
        want = oracle(*arguments[:3], ids, arguments[3])
        assert got['o'].dtype == dtype and got['top'].dtype == jnp.float32
        if shape[1] == 1:
            assert max(np.abs(np.asarray(got.pop(n), np.float64)).max() for n in 'qk') < 1e-2
            want.pop('q'), want.pop('k')
        assert_close(got, want, tolerance)

    @pytest.mark.parametrize('packed', [False, True])
    def test_a_long_row_is_cut_into_calls(self, monkeypatch, packed):
        """dq of 128 queries waits at a time, so three calls add up dk and dv."""
        monkeypatch.setattr(backward_kernel, 'RESIDENT', 128)
        shape = (2, 300, 2, 64, 32)
        *arguments, do = random_arguments(4, shape=shape)
        ids = packed_ids(*shape[:2], seed=1) if packed else np.ones(shape[:2], np.int32)
        got = run(*arguments, ids if packed else None, do, 'pallas')
        assert_close(got, oracle(*arguments, ids, do), 1e-5)

    @pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas'])
    def test_padding_gives_zero_and_a_batch_of_padding_no_logit(self, implementation):
        shape = (1, 24, 2, 64, 32)
        *arguments, do = random_arguments(5, shape=shape)
        ids = np.zeros(shape[:2], np.int32)
        got = run(*arguments, ids, do, implementation)
        assert np.all(np.asarray(got.pop('top')) == -np.inf)
        assert not any(np.any(np.asarray(x)) for x in got.values())

    def test_pallas_lets_padding_hold_nan(self):
        shape = (1, 150, 2, 64, 32)
        *arguments, do = random_arguments(6, shape=shape)
        ids = packed_ids(*shape[:2], seed=2)
        for x in (*arguments, do):
            x[ids == 0] = np.nan
        got = run(*arguments, ids, do, 'pallas')
        for x in (*arguments, do):
            x[ids == 0] = 0
        assert_close(got, oracle(*arguments, ids, do), 1e-5)

    @pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas'])
    def test_no_gradient_flows_through_the_largest_logit(self, implementation):
        q, k, v, _ = random_arguments(7, shape=(1, 4, 2, 64, 32))
        attend = functools.partial(
            causal_attention, implementation=implementation, with_max_logit=True
        )
        gradients = jax.grad(lambda *args: attend(*args)[1].sum(), argnums=(0, 1, 2))(q, k, v)
        assert not any(np.any(np.asarray(x)) for x in gradients)

    def test_equals_splash_attention(self):
        """An independent kernel; q and k padded to widths it takes."""
        *arguments, do = (x[..., :128] for x in random_arguments(8, shape=(1, 256, 2, 128, 128)))
        mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((256, 256))] * 2)
        splash = splash_kernel.make_splash_mha_single_device(mask, interpret=True)

        def with_splash(q, k, v):
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * 128**-0.5, k, v))
            return jnp.swapaxes(jax.vmap(splash)(q, k, v), 1, 2)

        o, vjp = jax.vjp(jax.jit(with_splash), *arguments)
        want = dict(zip('oqkv', (o, *vjp(do)), strict=True))
        got = run(*arguments, None, do, 'pallas')
        del got['top']
        assert_close(got, want, 1e-4)

    def test_kernels_do_not_race_or_leave_their_blocks(self):
        """Three blocks of queries, the last partly padding, several documents."""
        interpret = pltpu.InterpretParams(detect_races=True)
        shape = (1, 300, 2, 64, 32)
        *arguments, do = random_arguments(9, shape=shape)
        ids = packed_ids(*shape[:2], seed=3)
        runs = runs_of(jnp.asarray(ids))
        o, lse, top = on_tpu.attention_on_tpu(ONE_ROW, interpret, *arguments, (runs, runs))
        gradients = on_tpu.gradients_on_tpu(
            ONE_ROW, interpret, *arguments, (runs, runs), o, lse, do
        )
        got = dict(zip(('o', *'qkv', 'top'), (o, *gradients, top.max(axis=(0, 2))), strict=True))
        assert_close(got, oracle(*arguments, ids, do), 1e-5)

    @pytest.mark.parametrize(
        ('implementation', 'packed'),
        [('xla', True), ('xla', False), ('pallas', True), ('pallas', False), ('races', True)],
    )
    def test_parts_of_the_keys_join(self, implementation, packed):
        """Two halves of a row: what the second half reads of both is what the whole row says."""
        batch, length, half = 1, 544, 272
        *arguments, do = random_arguments(5, shape=(batch, length, 2, 64, 32))
        ids = packed_ids(batch, length, seed=5) if packed else np.ones((batch, length), np.int32)
        runs = runs_of(jnp.asarray(ids))
        early, late = slice(0, half), slice(half, None)

        def of(at):
            return Runs(runs.number[:, at], runs.real[:, at])

        q, do_late = arguments[0][:, late], do[:, late]
        pieces = [
            (q, *(x[:, at] for x in arguments[1:]), (of(late), of(at)) if packed else None)
            for at in (early, late)
        ]
        if implementation == 'races':
            interpret = pltpu.InterpretParams(detect_races=True)
            how = [How(causal, jnp.dtype('float32')) for causal in (False, True)]

            def attend(i):
                return Part(*on_tpu.attention_on_tpu(how[i], interpret, *pieces[i]))

            def back(i, joined):
                return on_tpu.gradients_on_tpu(
                    how[i], interpret, *pieces[i], joined.o, joined.lse, do_late
                )
        else:

            def attend(i):
                return attend_part(*pieces[i], causal=i == 1, implementation=implementation)

            def back(i, joined):
                options = {'causal': i == 1, 'implementation': implementation}
                return part_gradients(*pieces[i], joined.o, joined.lse, do_late, **options)

        joined = merged(attend(0), attend(1))
        (dq_early, *d_early), (dq_late, *d_late) = back(0, joined), back(1, joined)
        want = oracle(*arguments, ids, np.concatenate([0 * do[:, early], do_late], axis=1))
        got = {'o': joined.o, 'q': dq_early + dq_late}
        assert_close(got, {name: want[name][:, late] for name in got}, 1e-5)
        got = dict(
            zip('kv', map(lambda a, b: np.concatenate([a, b], 1), d_early, d_late), strict=True)
        )
        assert_close(got, {name: want[name] for name in got}, 1e-5)

    def test_a_part_has_no_reference_and_says_what_the_kernel_cannot_take(self):
        q, k, v = (jnp.zeros((1, 2, 1, 8)) for _ in range(3))
        with pytest.raises(ValueError, match="attend_part: implementation is 'reference', wanted"):
            attend_part(q, k, v, None, causal=True, implementation='reference')
        q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
        with pytest.raises(
            NotImplementedError, match="attend_part: 'pallas' .* use implementation"
        ):
            attend_part(q, k, v, None, causal=True, implementation='pallas')

    def test_bad_input_is_refused(self):
        q, k, v, _ = random_arguments(shape=(1, 4, 2, 64, 32))
        with pytest.raises(ValueError, match="implementation is 'cuda'"):
            causal_attention(q, k, v, implementation='cuda')
        with pytest.raises(ValueError, match=r'segment_ids has shape \(4,\), wanted \(1, 4\)'):
            causal_attention(q, k, v, np.ones(4, np.int32))
        with pytest.raises(ValueError, match='wanted no empty axis'):
            causal_attention(q[:, :0], k[:, :0], v[:, :0])
        half = (x.astype(np.float16) for x in (q, k, v))
        with pytest.raises(NotImplementedError, match='takes bfloat16 or float32 throughout'):
            causal_attention(*half, implementation='pallas')
        wide = np.zeros((1, 4, 1, 640), np.float32)
        with pytest.raises(NotImplementedError, match='q and k up to 512 wide, got 640'):
            causal_attention(wide, wide, wide, implementation='pallas')
        assert causal_attention(wide, wide, wide).shape == wide.shape


class TestPagedDecode:
    """Every form against float64; pages lie anywhere and hold NaN where no token is."""

    SCALE = 0.11

    def arguments(self, dtype, heads=3, latent=128, rope=16, size=16, lengths=(45, 0, 1, 64, 200)):
        rng = np.random.default_rng(0)
        batch, most = len(lengths), 13
        order = rng.permutation(batch * most + 2)[: batch * most].reshape(batch, most)
        pages = np.full((batch * most + 2, size, page_width(latent, rope)), np.nan)
        for row, length in zip(order, lengths, strict=True):
            for s in range(length):
                token = np.zeros(pages.shape[-1])
                token[: latent + rope] = rng.standard_normal(latent + rope)
                pages[row[s // size], s % size] = token
            row[-(-length // size) :] = 10**6  # never looked up
        q = rng.standard_normal((batch, heads, latent + rope))
        arrays = [jnp.asarray(x, dtype) for x in (q[..., :latent], q[..., latent:], pages)]
        return *arrays, order.astype(np.int32), np.array(lengths, np.int32)

    def oracle(self, q_latent, q_rope, pages, page_table, lengths):
        q = np.concatenate([np.asarray(x, np.float64) for x in (q_latent, q_rope)], axis=-1)
        pages, latent = np.asarray(pages, np.float64), q_latent.shape[-1]
        o = np.zeros(q_latent.shape)
        for b, length in enumerate(lengths):
            if length:
                live = page_table[b, : -(-length // pages.shape[1])]
                kv = pages[live].reshape(-1, pages.shape[-1])[:length]
                scores = self.SCALE * q[b] @ kv[:, : q.shape[-1]].T
                p = np.exp(scores - scores.max(axis=-1, keepdims=True))
                o[b] = p / p.sum(axis=-1, keepdims=True) @ kv[:, :latent]
        return o

    @pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 5e-3)])
    @pytest.mark.parametrize('implementation', ['reference', 'xla', 'pallas', None])
    def test_equals_float64(self, monkeypatch, implementation, dtype, tolerance):
        monkeypatch.setattr(paged, 'TOKENS', 64)
        monkeypatch.setattr(paged, '_XLA_TOKENS', 64)
        arguments = self.arguments(dtype)
        decode = functools.partial(paged_decode, scale=self.SCALE, implementation=implementation)
        got = jax.jit(decode)(*arguments)
        assert got.dtype == dtype
        assert_close({'o': got}, {'o': self.oracle(*arguments)}, tolerance)
        assert not np.any(np.asarray(got[1]))

    def test_the_kernel_does_not_race_or_leave_its_buffers(self, monkeypatch):
        monkeypatch.setattr(paged, 'TOKENS', 32)
        q_latent, q_rope, pages, page_table, lengths = self.arguments('float32')
        q = jnp.pad(jnp.concatenate([q_latent, q_rope], axis=-1), ((0, 0), (0, 0), (0, 112)))
        interpret = pltpu.InterpretParams(detect_races=True)
        table = jnp.clip(page_table, 0, len(pages) - 1)
        got = paged._on_tpu(128, self.SCALE, interpret, q, pages, table, jnp.asarray(lengths))
        want = self.oracle(q_latent, q_rope, pages, page_table, lengths)
        assert_close({'o': got}, {'o': want}, 1e-5)

    def test_unknown_values_out_of_range_are_clipped(self):
        q_latent, q_rope, pages, page_table, lengths = self.arguments('float32', lengths=(45, 208))
        decode = jax.jit(functools.partial(paged_decode, scale=1.0, implementation='pallas'))
        got = decode(q_latent, q_rope, pages, page_table, np.array([-3, 10**9], np.int32))
        assert not np.any(np.asarray(got[0]))
        want = decode(q_latent, q_rope, pages, page_table, np.array([0, 208], np.int32))
        np.testing.assert_array_equal(got, want)
        wild = np.where(np.arange(13) == 1, -7, page_table).astype(np.int32)
        pages = jnp.nan_to_num(pages)
        clipped = np.clip(wild, 0, len(pages) - 1)
        got = decode(q_latent, q_rope, pages, wild, lengths)
        np.testing.assert_array_equal(got, decode(q_latent, q_rope, pages, clipped, lengths))

    @pytest.mark.parametrize(
        'index, value, message',
        [
            (4, [45, 0, 1, 64, 209], 'lengths are 0 to 209, wanted 0 to 208'),
            (4, [-1, 0, 1, 64, 20], 'lengths are -1 to 64'),
            (3, [[10**6] * 13] * 5, 'names pages 1000000 to 1000000, wanted 0 to 66'),
            (3, [[0] * 13] * 4, r'wanted \[5, M\]'),
            (2, np.zeros((67, 16, 144), np.float32), r'wanted \[num_pages, P, 256\]'),
            (2, np.zeros((67, 16, 256), np.float16), 'cast two'),
            (1, np.zeros((5, 2, 16), np.float32), r'wanted \[B, H, R\]'),
        ],
    )
    def test_bad_input_is_refused(self, index, value, message):
        arguments = list(self.arguments('float32'))
        arguments[index] = np.asarray(value) if index < 3 else np.asarray(value, np.int32)
        with pytest.raises(ValueError, match=message):
            paged_decode(*arguments, scale=1.0)

    def test_what_the_kernel_cannot_take_is_said_or_left_to_xla(self):
        arguments = self.arguments('float32', size=12, lengths=(20, 7))
        with pytest.raises(NotImplementedError, match='multiple of 8 tokens, got 12'):
            paged_decode(*arguments, scale=self.SCALE, implementation='pallas')
        got = paged_decode(*arguments, scale=self.SCALE)
        assert_close({'o': got}, {'o': self.oracle(*arguments)}, 1e-5)
