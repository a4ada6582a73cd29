"""Several sources in one run: shares are exact, resuming is exact, long documents come back."""

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from k3jax import config as config_lib
from k3jax.config_dict import data_config_from_dict, to_dict
from k3jax.data import loader
from k3jax.data import tokenizer as tokenizer_lib
from k3jax.overrides import apply_overrides

TOKENIZER = tokenizer_lib.byte_tokenizer()
LETTERS = {'first': 'a', 'second': 'b', 'third': 'c'}


@pytest.fixture
def mixture(tmp_path):
    """Three folders whose documents are of one letter each, weighted 5 : 3 : 2."""
    rng = np.random.default_rng(0)
    for name, letter in LETTERS.items():
        (tmp_path / name).mkdir()
        texts = [letter * int(rng.integers(1, 90)) for _ in range(23)]
        lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
        (tmp_path / name / 'a.jsonl').write_text(lines)
    return config_lib.DataConfig(
        mixture=tuple(str(tmp_path / name) for name in LETTERS),
        mixture_weights=(5, 3, 2),
        sequence_length=32,
        batch_size=10,
        held_out_every=10,
        shuffle_rows=40,
    )


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def counted(batches):
    """Rows by the letters that they have."""
    letters = {ord(letter) for letter in LETTERS.values()}
    rows = np.concatenate([batch['tokens'] for batch in batches])
    return collections.Counter(
        ''.join(sorted(chr(token) for token in letters & set(row))) for row in rows.tolist()
    )


@pytest.mark.parametrize('num_streams', [1, 2])
def test_each_source_has_its_share_of_the_tokens_exactly(mixture, num_streams):
    config = dataclasses.replace(mixture, num_streams=num_streams)
    batches = take(loader.train_iterator(config, TOKENIZER), 8 * num_streams)
    rows = 80 * num_streams
    assert counted(batches) == {'a': rows // 2, 'b': rows * 3 // 10, 'c': rows // 5}


def test_a_mixture_resumes_exactly_at_every_batch(mixture):
    straight = loader.train_iterator(mixture, TOKENIZER)
    states, batches = [straight.get_state()], []
    for _ in range(20):
        batches.append(next(straight))
        states.append(json.loads(json.dumps(straight.get_state())))
    for at in range(0, 18, 5):
        resumed = loader.train_iterator(mixture, TOKENIZER)
        resumed.set_state(states[at])
        for left, right in zip(take(resumed, 2), batches[at : at + 2], strict=True):
            for name in left:
                np.testing.assert_array_equal(left[name], right[name])


def test_a_state_of_another_mixture_is_refused(mixture, tmp_path):
    state = loader.train_iterator(mixture, TOKENIZER).get_state()
    other = dataclasses.replace(mixture, mixture_weights=(5, 3, 1))
    with pytest.raises(ValueError, match=r'mixture_weights \[5, 3, 2\], but here it is \[5, 3, 1'):
        loader.train_iterator(other, TOKENIZER).set_state(state)
    with (tmp_path / 'second' / 'a.jsonl').open('a') as f:
        f.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r'num_documents of .*second 21, but here it is 22;'):
        loader.train_iterator(mixture, TOKENIZER).set_state(state)


def test_a_source_alone_in_a_mixture_gives_the_batches_of_the_source(mixture):
    path = mixture.mixture[0]
    alone = dataclasses.replace(mixture, mixture=(path,), mixture_weights=(2.0,))
    plain = dataclasses.replace(mixture, source=path, mixture=(), mixture_weights=())
    batches = (loader.train_iterator(config, TOKENIZER) for config in (alone, plain))
    for left, right in zip(*(take(iterator, 5) for iterator in batches), strict=True):
        np.testing.assert_array_equal(left['tokens'], right['tokens'])


def test_held_out_rows_are_all_of_all_sources_and_come_by_share(mixture):
    batches = list(loader.held_out_batches(mixture, TOKENIZER))
    ends = sum((batch['tokens'] == TOKENIZER.eos_id).sum() for batch in batches)
    assert ends == 2 * len(LETTERS)
    even = dataclasses.replace(mixture, held_out_every=2)
    first = counted([next(loader.held_out_batches(even, TOKENIZER))])
    assert first == {'a': 5, 'b': 3, 'c': 2}


def test_document_tokens_are_those_of_all_sources(mixture):
    documents = list(loader.document_tokens(mixture, TOKENIZER, 'train'))
    assert collections.Counter(chr(tokens[0]) for tokens in documents) == dict.fromkeys('abc', 21)


def test_long_documents_are_seen_as_often_as_asked(tmp_path):
    texts = [f'{i:02d}' + 'x' * (60 if i % 4 == 0 else 20) for i in range(40)]
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    (tmp_path / 'a.jsonl').write_text(lines)
    config = config_lib.DataConfig(
        source=str(tmp_path),
        sequence_length=32,
        batch_size=1,
        held_out_every=40,
        max_document_bytes=50,  # a long document is in two pieces
        long_document_bytes=62,
        long_document_repeats=3,
        shuffle_rows=1,
    )
    epoch = list(loader.document_tokens(config, TOKENIZER, 'train'))
    starts = collections.Counter(TOKENIZER.decode(t[:2]) for t in epoch if t[0] != ord('x'))
    long = {f'{i:02d}' for i in range(0, 40, 4)}
    (held_out,) = loader.document_tokens(config, TOKENIZER, 'held_out')
    del texts[int(TOKENIZER.decode(held_out[:2]))]
    assert starts == {text[:2]: 3 if text[:2] in long else 1 for text in texts}


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'mixture': ('a', 'a'), 'mixture_weights': (1, 2)}, 'data.mixture: .*different sources'),
        ({'mixture': ('a', 'b'), 'mixture_weights': (1,)}, r'data.mixture_weights: .*as many as'),
        ({'mixture': ('a',), 'mixture_weights': (0.0,)}, 'data.mixture_weights: .*above 0'),
        ({'mixture': ('a',), 'mixture_weights': (float('inf'),)}, 'mixture_weights: .*finite'),
        ({'long_document_repeats': 0}, 'data.long_document_repeats: got 0, wanted a number above'),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(fields, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        config_lib.DataConfig(**fields)


def test_a_mixture_is_set_by_flags_and_survives_json():
    config = apply_overrides(
        config_lib.DataConfig(),
        ['mixture=python_stdlib,needles', 'mixture_weights=9,1', 'needles.facts=12'],
    )
    assert config.shares == {'python_stdlib': 0.9, 'needles': 0.1}
    assert data_config_from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_dict_that_is_not_a_data_config_is_refused_by_field():
    with pytest.raises(config_lib.ConfigError, match='data.sources: got 3, wanted one of source'):
        data_config_from_dict({'sources': 3})
    with pytest.raises(config_lib.ConfigError, match='data.needles.facets: got 3, wanted one of'):
        data_config_from_dict({'needles': {'facets': 3}})
