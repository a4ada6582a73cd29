"""How a row draws: penalties, truncations and masks as NumPy has them; seeds by row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.serve.request import Sampling
from k3jax.serve.rows import draw, mask_words, no_rows, put_row, row_of
from k3jax.serve.sampling import Choice, probabilities

Z = 40
draw = jax.jit(draw)


def rows_of(*samplings, prompt=(), drawn=()):
    rows = no_rows(len(samplings), Z)
    for slot, sampling in enumerate(samplings):
        rows = put_row(rows, row_of(sampling, 7 + slot, prompt, Z, Z), slot)
    counts = np.zeros((len(samplings), Z), np.int32)
    for token in drawn:
        counts[:, token] += 1
    return rows._replace(active=jnp.ones(len(samplings), bool), drawn=jnp.asarray(counts))


def open_mask(rows):
    return np.full((len(rows.token), mask_words(Z)), 2**32 - 1, np.uint32)


def logits_of(seed, rows=1):
    return (4 * np.random.default_rng(seed).standard_normal((rows, Z))).astype(np.float32)


@pytest.mark.parametrize(
    'fields',
    [
        {'presence_penalty': 6.0},
        {'frequency_penalty': 3.0},
        {'repetition_penalty': 4.0},
        {'presence_penalty': -6.0, 'frequency_penalty': 1.0, 'repetition_penalty': 0.4},
    ],
)
def test_penalties_change_the_likeliest_token_as_they_say(fields):
    sampling = Sampling(temperature=0.0, **fields)
    prompt, drawn = (3, 4, 5), (5, 6, 6, 6)
    changed = 0
    for seed in range(40):
        logits = logits_of(seed)
        logits[0, 3:7] += 6
        rows = rows_of(sampling, prompt=prompt, drawn=drawn)
        found, _ = draw(logits, rows, open_mask(rows), np.bool_(False))
        want = logits[0].astype(np.float64)
        for token in {*prompt, *drawn}:
            by = sampling.repetition_penalty
            want[token] = want[token] / by if want[token] > 0 else want[token] * by
        for token in set(drawn):
            want[token] -= sampling.presence_penalty
            want[token] -= sampling.frequency_penalty * drawn.count(token)
        assert int(found.token[0, 0]) == np.argmax(want)
        changed += np.argmax(want) != np.argmax(logits[0])
    assert changed > 3


@pytest.mark.parametrize(
    ('fields', 'oracle'),
    [
        ({'top_k': 3}, lambda p: np.sort(p)[-3:].min() <= p),
        ({'min_p': 0.2}, lambda p: p >= 0.2 * p.max()),
        ({'top_p': 0.6}, lambda p: np.array([np.sum(p[p > x]) < 0.6 for x in p])),
        (
            {'top_k': 4, 'top_p': 0.8, 'min_p': 0.05},
            lambda p: (
                (np.sort(p)[-4:].min() <= p)
                & (p >= 0.05 * p.max())
                & np.array([np.sum(p[p > x]) < 0.8 for x in p])
            ),
        ),
    ],
)
def test_what_is_cut_off_is_what_numpy_says(fields, oracle):
    for seed in range(20):
        logits = logits_of(seed, rows=2)
        choice = Choice(
            *[jnp.array(x) for x in ([1.5, 1.0], [fields.get('top_p', 1.0), 1.0], [Z, Z])],
            top_k=jnp.array([fields.get('top_k', 0), 0]),
            min_p=jnp.array([fields.get('min_p', 0.0), 0.0]),
        )
        found = np.asarray(probabilities(jnp.asarray(logits), choice), np.float64)
        for row, temperature in enumerate((1.5, 1.0)):
            wide = logits[row].astype(np.float64) / temperature
            p = np.exp(wide - wide.max())
            p /= p.sum()
            want = p * oracle(p) if row == 0 else p
            np.testing.assert_allclose(found[row], want / want.sum(), atol=1e-6)


@pytest.mark.parametrize('fields', [{'top_p': 1e-50}, {'top_p': 1e-9}, {'temperature': 1e-50}])
def test_numbers_that_round_to_0_leave_the_likeliest_token(fields):
    logits = logits_of(3)
    rows = rows_of(Sampling(**fields))
    found, _ = draw(logits, rows, open_mask(rows), np.bool_(False))
    assert int(found.token[0, 0]) == np.argmax(logits)


def test_only_allowed_tokens_are_drawn():
    allowed = np.zeros((2, Z), bool)
    allowed[0, [1, 33, 39]] = True
    allowed[1] = True
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, 64 - Z))), axis=1, bitorder='little')
    rows = rows_of(Sampling(temperature=3.0), Sampling(temperature=3.0))
    seen = [set(), set()]
    for seed in range(60):
        found, rows = draw(logits_of(seed, 2), rows, bits.view(np.uint32), np.bool_(True))
        for row in range(2):
            seen[row].add(int(found.token[row, 0]))
    assert seen[0] == {1, 33, 39} and len(seen[1]) > 15


def test_draws_follow_the_distribution_and_each_row_has_its_own_seed():
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (Z - 3), np.float32)), (200, 1))
    rows = rows_of(*[Sampling(temperature=1.0)] * 200)
    counts = np.zeros(Z)
    first = None
    for _ in range(20):
        found, rows = draw(logits, rows, open_mask(rows), np.bool_(False))
        first = np.asarray(found.token)[:, 0] if first is None else first
        counts += np.bincount(np.asarray(found.token)[:, 0], minlength=Z)
    assert len(set(first.tolist())) == 3
    shares = counts[:3] / counts.sum()
    # Four standard deviations of 4,000 draws.
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=4 * np.sqrt(0.25 / 4000))


def test_rows_without_a_request_change_nothing():
    rows = rows_of(Sampling(presence_penalty=1.0), Sampling(presence_penalty=1.0))
    rows = rows._replace(active=jnp.array([True, False]))
    _, after = draw(logits_of(0, 2), rows, open_mask(rows), np.bool_(False))
    assert np.asarray(after.drawn).sum(axis=1).tolist() == [1, 0]
