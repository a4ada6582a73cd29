"""What does not count must not leak into what does; odd shapes and dtypes are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.cases import cases_of
from pallas_kernels.grouped_mlp import Experts, Mxfp4, SiTU, grouped_mlp, token_mlp
from pallas_kernels.kda import kda_decode_step
from pallas_kernels.kda.decode import Conv, Projected, kda_decode, kda_decode_window
from pallas_kernels.kda.gate import Gate
from pallas_kernels.mla import causal_attention, paged_decode
from tests.compare import relative_error

FORMS = ['reference', 'xla', 'pallas']


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('implementation', FORMS)
@pytest.mark.parametrize('odd', [np.nan, np.inf])
def test_attention_is_not_touched_by_what_padding_holds(implementation, odd):
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7])
    arrays = [normal(2, 7, 2, width, seed=n) for n, width in enumerate((16, 16, 8))]
    cotangent = normal(2, 7, 2, 8, seed=3)

    def run(q, k, v, cotangent):
        call = lambda *a: causal_attention(*a, ids, implementation=implementation)  # noqa: E731
        o, back = jax.vjp(call, q, k, v)
        return o, *back(cotangent)

    padding = np.asarray(ids == 0)[..., None, None]
    filled = [np.where(padding, np.float32(odd), x) for x in (*arrays, cotangent)]
    for got, want in zip(jax.jit(run)(*filled), jax.jit(run)(*arrays, cotangent), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize('part', ['v', 'beta', 'k', 'f'])
@pytest.mark.parametrize('implementation', ['xla', 'pallas'])
def test_a_guess_that_was_not_accepted_leaves_nothing(implementation, part):
    """Not even a number that is none."""
    rng = np.random.default_rng(0)

    def tokens(width, seed):
        rows = [normal(2, width, 1, 128, seed=seed + n) for n in range(4)]
        beta = rng.uniform(0.1, 0.9, (2, width, 1)).astype(np.float32)
        return Projected(*map(jnp.asarray, (*rows, beta)))

    previous, ahead = tokens(2, 1), tokens(1, 5)
    pool, tails = normal(3, 1, 128, 128), normal(3, 3, 3, 1, 128)
    conv = Conv(*(jnp.asarray(normal(128, 4, seed=n)) for n in range(3)))
    gate = Gate(jnp.zeros(1), jnp.zeros(128), -5.0)
    odd = previous._replace(**{part: getattr(previous, part).at[1, 1].set(jnp.nan)})

    def run(previous):
        return kda_decode_window(
            previous, jnp.array([2, 1]), ahead, jnp.asarray(pool), jnp.asarray(tails),
            jnp.array([0, 2]), conv=conv, gate=gate, implementation=implementation,
        )  # fmt: skip

    for got, want in zip(run(odd), run(previous), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('implementation', FORMS)
def test_an_attention_residual_of_nothing_is_nothing(implementation):
    bank, prefix = normal(2, 1, 4, 128), normal(1, 4, 128)
    rows = [normal(128, seed=n) for n in range(3)]

    def run(num_live, use_prefix):
        options = {'num_live': num_live, 'use_prefix': use_prefix, 'eps': 1e-6}
        return attn_res(bank, prefix, *rows, implementation=implementation, **options)

    for count in (0, -5):
        got = jax.jit(run)(jnp.int32(count), jnp.bool_(False))
        assert np.all(np.isfinite(got))


@pytest.mark.parametrize('implementation', FORMS)
@pytest.mark.parametrize(
    ('sizes', 'meant'),
    [((2**31 - 1, 5, 2**31 - 1), (6, 0, 0)), ((4, -3, 2), (4, 0, 2)), ((-1, 3, 9), (0, 3, 3))],
)
def test_group_sizes_that_make_no_sense_are_cut_alike(implementation, sizes, meant):
    x = normal(6, 8)
    experts = Experts(*(normal(3, *s, seed=n) for n, s in enumerate(((16, 8), (16, 8), (8, 16)))))

    @jax.jit
    def run(sizes):
        return grouped_mlp(x, experts, sizes, SiTU(), implementation=implementation)

    want = grouped_mlp(x, experts, jnp.array(meant), SiTU(), implementation='reference')
    assert relative_error(run(jnp.array(sizes)), want) < 1e-5


@pytest.mark.parametrize('implementation', FORMS)
def test_a_broken_expert_reaches_only_tokens_that_chose_it(implementation):
    experts = [normal(3, *s, seed=n) for n, s in enumerate(((16, 8), (16, 8), (8, 16)))]
    experts[0][2] = np.nan
    ids = jnp.array([[0, 1], [2, 0]])
    y = token_mlp(
        normal(2, 8), Experts(*experts), ids, normal(2, 2), SiTU(), implementation=implementation
    )
    np.testing.assert_array_equal(np.all(np.isfinite(y), axis=1), [True, False])


def test_scales_of_another_shape_or_dtype_are_refused():
    packed, scale = np.zeros((2, 128, 64), np.uint8), np.full((2, 128, 4), 127, np.uint8)
    sizes, x = jnp.array([1, 1]), normal(2, 128)
    whole = Mxfp4(packed, scale)
    for odd in (
        Mxfp4(packed, scale[..., :2]),
        Mxfp4(packed, scale[:, :1]),
        Mxfp4(packed.astype(np.int8), scale),
        Mxfp4(packed, scale.astype(np.float32)),
    ):
        with pytest.raises(ValueError, match='w3 has packed .* wanted uint8 and a scale of'):
            grouped_mlp(x, Experts(whole, odd, whole), sizes, SiTU())


def test_attention_refuses_other_dtypes():
    q = normal(1, 4, 2, 8)
    with pytest.raises(ValueError, match='causal_attention: v is int32, wanted a floating-point'):
        causal_attention(q, q, q.astype(np.int32))
    with pytest.raises(ValueError, match='causal_attention: segment_ids is float32'):
        causal_attention(q, q, q, np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match='k is bfloat16, wanted that of q, float32'):
        causal_attention(q, jnp.asarray(q, jnp.bfloat16), q)
    with pytest.raises(ValueError, match=r'v has shape \(1, 4, 2, 0\), wanted no empty axis'):
        causal_attention(q, q, q[..., :0])


def paged(**changes):
    given = {
        'q_latent': normal(2, 3, 16),
        'q_rope': normal(2, 3, 8),
        'pages': np.pad(normal(4, 8, 24), ((0, 0), (0, 0), (0, 104))),
        'page_table': np.array([[0, 1], [2, 3]], np.int32),
        'lengths': np.array([9, 16], np.int32),
    } | changes
    return paged_decode(*given.values(), scale=0.2, implementation='xla')


def test_paged_decode_takes_numpy_arrays_and_refuses_other_dtypes():
    assert np.all(np.isfinite(paged()))
    with pytest.raises(ValueError, match='paged_decode: lengths is float32, wanted integers'):
        paged(lengths=np.array([9.7, 8.0], np.float32))
    with pytest.raises(ValueError, match='paged_decode: pages is int32'):
        paged(pages=np.zeros((4, 8, 128), np.int32))


def test_decoding_takes_numpy_arrays_and_small_slots():
    q = normal(2, 1, 4)
    pool, beta = normal(200, 1, 4, 4), np.full((2, 1), 0.5, np.float32)
    want = kda_decode(q, q, q, -abs(q), beta, jnp.asarray(pool), jnp.array([1, 100]))
    got = kda_decode(q, q, q, -abs(q), beta, pool, np.array([1, 100], np.int8))
    np.testing.assert_array_equal(got[0], want[0])
    with pytest.raises(ValueError, match=r'got slots \(2, 1\) and pool .* wanted \[B\]'):
        kda_decode(q, q, q, -abs(q), beta, pool, np.array([[1], [2]]))


def test_one_step_of_decoding_checks_its_arguments():
    q, state = jnp.asarray(normal(2, 1, 4)), jnp.asarray(normal(2, 1, 4, 3))
    v, beta = q[..., :3], jnp.full((2, 1), 0.5)
    kda_decode_step(q, q, v, -q, beta, state)
    with pytest.raises(ValueError, match=r'beta has shape \(1, 1\), wanted \(2, 1\)'):
        kda_decode_step(q, q, v, -q, beta[:1], state)
    with pytest.raises(ValueError, match='state is int32, wanted float32'):
        kda_decode_step(q, q, v, -q, beta, state.astype(jnp.int32))


def test_no_start_of_a_case_is_refused():
    with pytest.raises(ValueError, match='--kernel: got nothing'):
        cases_of('')
