"""Evaluation: loss and bits a byte from probabilities, choices by likelihood, bad input by name."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.data.tokenizer import byte_tokenizer
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.train import eval as eval_lib
from tests import tiny

CONFIG = tiny.k3(vocab_size=512)
MODEL = Kimi(CONFIG, Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla'))
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope='module')
def params():
    return jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))


def log_probs(params, ids):
    logits = eval_lib.logits_of(MODEL, params, ids)[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_loss_and_bits_a_byte_are_those_of_the_probabilities(params):
    ids = TOKENIZER.encode('hello')
    tokens = np.zeros((1, 8), np.int32)
    targets = np.full((1, 8), -1, np.int32)
    segment_ids = np.zeros((1, 8), np.int32)
    tokens[0, :5], targets[0, :4], segment_ids[0, :5] = ids, ids[1:], 1
    targets[0, 4] = TOKENIZER.eos_id
    batch = {'tokens': tokens, 'targets': targets, 'segment_ids': segment_ids}
    result = eval_lib.evaluate(MODEL, params, [batch], TOKENIZER.token_byte_lengths())
    table = log_probs(params, ids)
    nats = -sum(table[i, target] for i, target in enumerate([*ids[1:], TOKENIZER.eos_id]))
    assert result.tokens == 5
    np.testing.assert_allclose(result.loss, nats / 5, rtol=1e-5)
    np.testing.assert_allclose(result.bits_per_byte, nats / math.log(2) / 4, rtol=1e-5)
    np.testing.assert_allclose(result.perplexity, math.exp(nats / 5), rtol=1e-4)


def test_nothing_to_evaluate_is_an_error(params):
    with pytest.raises(ValueError, match='no text'):
        eval_lib.evaluate(MODEL, params, [], TOKENIZER.token_byte_lengths())


def test_logits_do_not_depend_on_the_bucket(params):
    ids = TOKENIZER.encode('a sentence of more than sixteen')
    whole = eval_lib.logits_of(MODEL, params, ids)
    assert whole.shape == (1, len(ids), 512) and whole.dtype == np.float32
    np.testing.assert_allclose(
        eval_lib.logits_of(MODEL, params, ids[:5])[0], whole[0, :5], atol=2e-5
    )


@pytest.mark.parametrize(
    ('ids', 'message'),
    [
        ([], 'got no tokens'),
        ([5, 512], r'got token id 512 at position 1, wanted 0\.\.511'),
        ([-1], 'got token id -1'),
        ([1] * 65, 'got 65 tokens, wanted at most 64'),
    ],
)
def test_ids_outside_the_vocabulary_are_errors(params, ids, message):
    with pytest.raises(ValueError, match=message):
        eval_lib.logits_of(MODEL, params, ids)


def test_choices_are_scored_by_the_likelihood_of_their_tokens(params, tmp_path):
    question, choices = 'ab', ['c', 'de']
    scores = []
    for choice in choices:
        ids = TOKENIZER.encode(question + choice)
        table = log_probs(params, ids)
        scores.append(sum(table[i - 1, ids[i]] for i in range(len(question), len(ids))))
    best = int(np.argmax(scores))
    path = tmp_path / 'q.jsonl'
    rows = [{'question': question, 'choices': choices, 'answer': answer} for answer in (0, 1)]
    rows.append({'question': question, 'choices': choices, 'answer': best})
    path.write_text('\n'.join(map(json.dumps, rows)))
    result = eval_lib.choice_accuracy(MODEL, params, TOKENIZER, path)
    assert result['questions'] == 3
    assert result['accuracy'] == pytest.approx(2 / 3)
    assert 'accuracy_per_byte' in result


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{', r'q\.jsonl:1: not JSON'),
        ('{"question": "a"}', r'q\.jsonl:1: got'),
        ('{"question": "a", "choices": ["b"], "answer": 0}', 'not texts'),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', r'answer is 2, wanted 0\.\.1'),
        ('', 'no questions'),
    ],
)
def test_a_line_that_is_no_question_is_an_error_that_names_it(params, tmp_path, text, message):
    path = tmp_path / 'q.jsonl'
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        eval_lib.choice_accuracy(MODEL, params, TOKENIZER, path)
