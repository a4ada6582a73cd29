"""The trigram model: true probabilities, the counts it should have, and a strong bar."""

import numpy as np
import pytest

from k3jax import config as config_lib
from k3jax.data import loader, ngram
from k3jax.data import tokenizer as tokenizer_lib


def random_documents(vocab_size, count, seed=0):
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, vocab_size + 1)
    return [
        rng.choice(vocab_size, size=rng.integers(1, 60), p=weights / weights.sum())
        for _ in range(count)
    ]


def test_probabilities_sum_to_one_in_every_context():
    size = 7
    model = ngram.TrigramModel.count(random_documents(size - 1, 20), size)
    token = np.arange(size)
    for before in range(-1, size + 1):
        for last in range(-1, size + 1):
            prob = model.prob(np.full(size, before), np.full(size, last), token)
            assert (prob > 0).all()
            np.testing.assert_allclose(prob.sum(), 1, rtol=1e-12)


def test_counting_in_parts_equals_counting_at_once(monkeypatch):
    documents = random_documents(11, 50)
    whole = ngram.TrigramModel.count(documents, 11)
    monkeypatch.setattr(ngram, '_TOKENS_AT_ONCE', 100)
    parts = ngram.TrigramModel.count(iter(documents), 11)
    for order in ('unigrams', 'bigrams', 'trigrams'):
        for field in ('keys', 'shares', 'contexts', 'gammas'):
            np.testing.assert_array_equal(
                getattr(getattr(whole, order), field), getattr(getattr(parts, order), field)
            )


def test_probabilities_equal_a_dictionary_count_of_the_definition():
    documents = random_documents(5, 30)
    model = ngram.TrigramModel.count(documents, 6)
    trigrams = {}
    for doc in documents:
        padded = [6, 6, *doc.tolist()]
        for i in range(2, len(padded)):
            key = tuple(padded[i - 2 : i + 1])
            trigrams[key] = trigrams.get(key, 0) + 1
    bigrams, unigrams = {}, {}
    for _, b, c in trigrams:
        bigrams[b, c] = bigrams.get((b, c), 0) + 1
    for _, c in bigrams:
        unigrams[(c,)] = unigrams.get((c,), 0) + 1

    def prob(context, token):
        table = (unigrams, bigrams, trigrams)[len(context)]
        lower = prob(context[1:], token) if context else 1 / 6
        discounts = ngram._discounts(np.array(list(table.values())))
        seen = {key[-1]: n for key, n in table.items() if key[:-1] == context}
        if not seen:
            return lower
        taken = sum(discounts[min(n, 3)] for n in seen.values())
        n = seen.get(token, 0)
        return (n - discounts[min(n, 3)] + taken * lower) / sum(seen.values())

    for before, last, token in np.ndindex(7, 7, 6):
        got = model.prob([before], [last], [token])[0]
        np.testing.assert_allclose(got, prob((before, last), token), rtol=1e-12)


def test_log2_prob_of_a_document_starts_at_its_first_token():
    documents = [np.array([1, 2, 3, 1, 2, 3])] * 5
    model = ngram.TrigramModel.count(documents, 5)
    got = model.log2_prob(np.array([1, 2, 3]))
    assert got.shape == (3,)
    np.testing.assert_allclose(got[0], np.log2(model.prob([5], [5], [1])[0]))
    assert (got > np.log2(0.5)).all()
    assert model.log2_prob(np.array([4]))[0] < -3


def test_a_batch_is_scored_within_its_segments():
    documents = random_documents(9, 40)
    model = ngram.TrigramModel.count(documents, 10)
    doc = np.array([3, 1, 2, 5, 7, 9])
    batch = {
        'tokens': np.array([[*doc, *doc]]),
        'targets': np.array([[*doc[1:], -1, *doc[1:], -1]]),
        'segment_ids': np.array([[1] * 6 + [2] * 6]),
    }
    got = model.batch_log2_prob(batch)[0]
    alone = model.log2_prob(doc)[1:]
    np.testing.assert_allclose(got[6:11], alone)
    np.testing.assert_allclose(got[1:5], alone[1:])
    assert got[5] == got[11] == 0


def test_bits_per_byte_divides_by_bytes_and_not_by_tokens():
    model = ngram.TrigramModel.count(random_documents(4, 10), 4)
    batch = {
        'tokens': np.array([[0, 1, 2]]),
        'targets': np.array([[1, 2, -1]]),
        'segment_ids': np.array([[1, 1, 1]]),
    }
    bits = -model.batch_log2_prob(batch).sum()
    lengths = np.array([1, 3, 2, 0])
    np.testing.assert_allclose(model.bits_per_byte([batch], lengths), bits / 5)
    with pytest.raises(ValueError, match='no targets that stand for text'):
        model.bits_per_byte([], lengths)


def test_bad_counts_are_errors():
    with pytest.raises(ValueError, match='at least one token'):
        ngram.TrigramModel.count([], 4)
    with pytest.raises(ValueError, match=r'got -1\.\.0 in document 0, wanted 0\.\.3'):
        ngram.TrigramModel.count([np.array([0, -1])], 4)
    with pytest.raises(ValueError, match=r'got 0\.\.9 in document 1, wanted 0\.\.3'):
        ngram.TrigramModel.count([np.array([3]), np.array([0, 9])], 4)
    with pytest.raises(ValueError, match=r'got 1\.\.4 in document 0, wanted 0\.\.3'):
        ngram.TrigramModel.count([np.array([1, 4])], 4)  # 4 stands before a document, not in it


def test_a_large_vocabulary_needs_no_dense_table():
    documents = [np.array([163_839, 0, 163_839, 5, 163_839, 0])] * 3
    model = ngram.TrigramModel.count(documents, 163_840)
    assert model.log2_prob(documents[0])[2] > -1


def test_the_bar_on_the_embedded_corpus_is_far_below_its_byte_entropy():
    config = config_lib.DataConfig(sequence_length=512, batch_size=8)
    tokenizer = tokenizer_lib.byte_tokenizer()
    bits = ngram.trigram_bits_per_byte(
        loader.document_tokens(config, tokenizer, 'train'),
        loader.held_out_batches(config, tokenizer),
        tokenizer.token_byte_lengths(),
    )
    assert 2.0 < bits < 3.0
