"""KDA and attention over a shared row equal those of one chip, wherever documents begin."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3jax.parallel.attention_cp import from_balanced, sequence_attention, to_balanced
from k3jax.parallel.kda_cp import sequence_kda
from k3jax.parallel.sequence import AXIS, row_of, tokens_before
from pallas_kernels.kda import Gate, kda
from pallas_kernels.mla import causal_attention
from tests.compare import assert_close, relative_error

BATCH, LENGTH, HEADS, WIDTH, VALUE = 2, 48, 2, 8, 6
NUM = 4
KDA = ('q', 'k', 'v', 'f', 'beta', 'A_log', 'dt_bias')
CUT = P(None, AXIS)
DOCUMENTS = {
    'one document': None,
    'documents end at borders and between': [
        [1] * 12 + [2] * 20 + [3] * 16,
        [1] * 3 + [2] * 9 + [4] * 30 + [0] * 6,
    ],
    'a part of padding, a part of many documents': [
        [1] * 20 + [0] * 28,
        [1] * 23 + list(range(2, 14)) + [20] * 13,
    ],
}


def shared(function, num=NUM, in_specs=(CUT,), out_specs=CUT):
    mesh = Mesh(np.array(jax.devices()[:num]), (AXIS,))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def kda_arguments(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {'q': WIDTH, 'k': WIDTH, 'v': VALUE, 'f': WIDTH}
    arrays = {
        name: rng.standard_normal((BATCH, LENGTH, HEADS, size)).astype(dtype)
        for name, size in shapes.items()
    }
    arrays['beta'] = rng.uniform(0, 1, (BATCH, LENGTH, HEADS)).astype(dtype)
    arrays['A_log'] = rng.uniform(-1, 0.5, HEADS).astype(np.float32)
    arrays['dt_bias'] = rng.standard_normal(HEADS * WIDTH).astype(np.float32)
    do = rng.standard_normal((BATCH, LENGTH, HEADS, VALUE)).astype(np.float32)
    return arrays, do


def ids_of(name):
    rows = DOCUMENTS[name]
    return None if rows is None else np.array(rows, np.int32)


def kda_alone(arrays, ids, implementation):
    *inputs, A_log, dt_bias = (arrays[name] for name in KDA)
    gate = Gate(A_log, dt_bias, -5.0)
    return kda(*inputs, gate=gate, segment_ids=ids, qk_l2norm=True, implementation=implementation)


def kda_shared(arrays, ids, implementation):
    """Outputs and the row's final state."""

    def local(arrays, *ids):
        ids = ids[0] if ids else None
        *inputs, A_log, dt_bias = (arrays[name] for name in KDA)
        row = row_of(BATCH, ids, NUM)
        gate = Gate(A_log, dt_bias, -5.0)
        return sequence_kda(*inputs, gate, row, segment_ids=ids, implementation=implementation)

    specs = {name: P() if name in ('A_log', 'dt_bias') else CUT for name in arrays}
    given = () if ids is None else (ids,)
    run = shared(local, in_specs=(specs, *[CUT] * len(given)), out_specs=(CUT, P()))
    return run(arrays, *given)


def values_and_gradients(function, arrays, do):
    @jax.jit
    def run(arrays):
        def loss(arrays):
            o, final = function(arrays)
            return jnp.sum(o.astype(jnp.float32) * do), (o, final)

        grads, (o, final) = jax.grad(loss, has_aux=True)(arrays)
        return grads | {'o': o, 'final': final}

    return run(arrays)


@pytest.mark.parametrize('name', DOCUMENTS)
def test_kda_over_a_shared_row_equals_kda(name):
    arrays, do = kda_arguments()
    ids = ids_of(name)
    want, got = (
        values_and_gradients(lambda x, run=run: run(x, ids, 'xla'), arrays, do)
        for run in (kda_alone, kda_shared)
    )
    # Differentiating through shard_map sums what whole arrays receive from all chips.
    assert_close(got, want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', DOCUMENTS)
def test_interpreted_kernels_over_a_shared_row_equal_kda(name):
    arrays, do = kda_arguments()
    ids = ids_of(name)
    want = values_and_gradients(lambda x: kda_alone(x, ids, 'xla'), arrays, do)
    got = values_and_gradients(lambda x: kda_shared(x, ids, 'pallas'), arrays, do)
    assert_close(got, want, 1e-4)


def test_the_sum_of_the_parts_own_states_would_be_wrong():
    """The transition matters: what a part makes of the state before it is no small correction."""
    arrays, _ = kda_arguments()
    _, final = jax.jit(lambda x: kda_alone(x, None, 'xla'))(arrays)
    parts = {n: np.split(x, NUM, axis=1) for n, x in arrays.items() if x.ndim > 2}
    total = 0
    for i in range(NUM):
        part = {n: parts[n][i] if n in parts else x for n, x in arrays.items()}
        total = total + kda_alone(part, None, 'xla')[1]
    assert relative_error(total, final) > 0.05


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(st.integers(1, 17), min_size=1, max_size=20), st.integers(0, 20))
def test_kda_over_a_shared_row_for_any_documents(lengths, padding):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[: LENGTH - padding]
    ids = np.pad(ids, (0, LENGTH - len(ids))).astype(np.int32)
    ids = np.stack([ids, np.ones_like(ids)])
    arrays, do = kda_arguments()
    alone, together = _compiled()
    want, got = alone(arrays, ids, do), together(arrays, ids, do)
    # Tiny gradients of gates are sums that cancel.
    assert_close(got, want, 1e-4)


@functools.cache
def _compiled():
    def both(run):
        def values(arrays, ids, do):
            def loss(arrays):
                return jnp.sum(run(arrays, ids, 'xla')[0] * do)

            o, final = run(arrays, ids, 'xla')
            return jax.grad(loss)(arrays) | {'o': o, 'final': final}

        return jax.jit(values)

    return both(kda_alone), both(kda_shared)


def test_tokens_before_a_part_are_those_of_its_document():
    x = np.arange(BATCH * LENGTH, dtype=np.float32).reshape(BATCH, LENGTH, 1)
    ids = ids_of('documents end at borders and between')
    run = shared(lambda x, ids: tokens_before(x, 3, ids, None, NUM), in_specs=(CUT, CUT))
    got = np.asarray(run(x, ids)).reshape(BATCH, NUM, 3)
    size = LENGTH // NUM
    for row in range(BATCH):
        assert not got[row, 0].any()
        for part in range(1, NUM):
            at = part * size
            same = ids[row, at - 3 : at] == ids[row, at]
            np.testing.assert_array_equal(got[row, part], np.where(same, x[row, at - 3 : at, 0], 0))


@pytest.mark.parametrize('num', [2, 4, 8])
def test_balanced_pieces_are_one_early_and_one_late_and_come_back(num):
    tokens = np.arange(2 * num, dtype=np.int32).reshape(1, -1, 1)
    moved = shared(functools.partial(to_balanced, num_shards=num), num)(tokens)
    pairs = np.asarray(moved).reshape(num, 2)
    np.testing.assert_array_equal(pairs, [[r, 2 * num - 1 - r] for r in range(num)])
    back = shared(functools.partial(from_balanced, num_shards=num), num)(moved)
    np.testing.assert_array_equal(back, tokens)


def _expand(compressed, weight):
    kv = jnp.einsum('btr,rhd->bthd', compressed, weight)
    return kv[..., :WIDTH], kv[..., WIDTH:]


def attention_alone(arrays, ids):
    k, v = _expand(arrays['compressed'], arrays['weight'])
    return causal_attention(arrays['q'], k, v, ids, implementation='xla')


def attention_shared(arrays, ids):
    def local(arrays, *ids):
        row = row_of(BATCH, ids[0] if ids else None, NUM)
        q = to_balanced(arrays['q'], NUM)
        rest = arrays['compressed'], arrays['weight'], row, _expand
        o, _ = sequence_attention(q, *rest, num_shards=NUM, implementation='xla')
        return from_balanced(o, NUM)

    specs = {'q': CUT, 'compressed': CUT, 'weight': P()}
    given = () if ids is None else (ids,)
    return shared(local, in_specs=(specs, *[CUT] * len(given)))(arrays, *given)


@pytest.mark.parametrize('name', DOCUMENTS)
def test_attention_over_a_shared_row_equals_attention(name):
    rng = np.random.default_rng(1)
    arrays = {
        'q': rng.standard_normal((BATCH, LENGTH, HEADS, WIDTH)),
        'compressed': rng.standard_normal((BATCH, LENGTH, 5)),
        'weight': rng.standard_normal((5, HEADS, WIDTH + VALUE)),
    }
    arrays = {n: x.astype(np.float32) for n, x in arrays.items()}
    do = rng.standard_normal((BATCH, LENGTH, HEADS, VALUE)).astype(np.float32)
    want, got = (
        values_and_gradients(lambda x, run=run: (run(x, ids_of(name)), 0.0), arrays, do)
        for run in (attention_alone, attention_shared)
    )
    del want['final'], got['final']
    assert_close(got, want, 1e-5)
