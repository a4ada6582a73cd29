"""Windows are exactly as long as asked, are found again, and can be answered from their facts."""

import dataclasses
import re

import numpy as np
import pytest

from k3jax.config import ConfigError, DataConfig, NeedlesConfig
from k3jax.data import loader
from k3jax.data.needles import Needles
from k3jax.data.tokenizer import Tokenizer, byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture
def config(tmp_path):
    for i in range(30):
        (tmp_path / f'{i}.txt').write_text(f'text {i} ~zz=Z ' * (i + 1))
    return DataConfig(
        source='needles',
        needles=NeedlesConfig(facts=6, asked=3, text=str(tmp_path)),
        sequence_length=128,
        batch_size=2,
        shuffle_rows=1,
    )


def answered(window):
    """What reading the text finds: depths and values of the facts that the question asks for."""
    text = TOKENIZER.decode(window.tokens)
    body, _, question = text.rpartition('?')
    facts = {m[1]: (m.start() / len(body), m[2]) for m in re.finditer('~([a-z]{2})=([A-Z])', body)}
    asked = re.findall('~([a-z]{2})=[A-Z]', question)
    return len(facts), [facts[key] for key in asked]


@pytest.mark.parametrize('length', [70, 128, 1024, 1 << 20])
def test_a_window_is_as_long_as_asked_and_answered_by_its_facts(config, length):
    needles = Needles.of(dataclasses.replace(config, sequence_length=length), TOKENIZER, 'train')
    for index in (0, 1, len(needles) - 1):
        window = needles[index]
        assert window.tokens.shape == (length,) and window.tokens.dtype == np.int32
        assert window.tokens[-1] == TOKENIZER.eos_id
        num_facts, found = answered(window)
        assert num_facts == 6 and len(found) == 3
        depths, values = zip(*found, strict=True)
        np.testing.assert_allclose(window.depths, depths)
        assert TOKENIZER.decode(window.tokens[window.answers]) == ''.join(values)


def test_windows_depend_on_number_split_length_and_seed_alone(config):
    def tokens(split='train', index=0, **fields):
        changed = dataclasses.replace(config, **fields)
        return Needles.of(changed, TOKENIZER, split)[index].tokens.tobytes()

    seeded = dataclasses.replace(config.needles, seed=1)
    different = [
        tokens(),
        tokens(index=1),
        tokens('held_out'),
        tokens(sequence_length=129),
        tokens(needles=seeded),
    ]
    assert len(set(different)) == len(different)
    assert tokens() == tokens()


def test_facts_lie_at_every_depth_alike(config):
    needles = Needles.of(dataclasses.replace(config, sequence_length=512), TOKENIZER, 'train')
    depths = np.concatenate([needles[i].depths for i in range(400)])
    counts = np.histogram(depths, bins=10, range=(0, 1))[0]
    # 120 each in the mean; a standard deviation is about 10.
    assert counts.sum() == 1200 and counts.min() > 80 and counts.max() < 160


def test_a_row_is_a_window_and_only_answers_are_targets(config):
    batch = next(loader.train_iterator(config, TOKENIZER))
    assert (batch['segment_ids'] == 1).all()
    assert (batch['tokens'][:, -1] == TOKENIZER.eos_id).all()
    places = batch['targets'] != -1
    assert places.sum(axis=1).tolist() == [3, 3]
    assert set(TOKENIZER.decode(batch['tokens'][places])) == {'='}
    following = np.roll(batch['tokens'], -1, axis=1)
    np.testing.assert_array_equal(batch['targets'][places], following[places])


def test_all_tokens_are_targets_where_asked_so(config):
    every = dataclasses.replace(config.needles, answers_only=False)
    batch = next(loader.train_iterator(dataclasses.replace(config, needles=every), TOKENIZER))
    np.testing.assert_array_equal(batch['targets'][:, :-1], batch['tokens'][:, 1:])
    assert (batch['targets'][:, -1] == -1).all()


def test_needles_in_a_mixture_are_never_cut(config):
    mixed = dataclasses.replace(
        config, mixture=('needles', config.needles.text), mixture_weights=(1, 1), batch_size=8
    )
    batch = next(loader.train_iterator(mixed, TOKENIZER))
    whole = batch['tokens'][:, -1] == TOKENIZER.eos_id
    windows = whole & ((batch['targets'] != -1).sum(axis=1) == 3)
    assert windows.sum() == 4


def test_values_are_one_token_where_words_are_merged(config):
    ranks = {bytes([i]): i for i in range(256)} | {b'=A': 256, b'ab': 257, b'=B': 258, b'~a': 259}
    tokenizer = Tokenizer(ranks)
    window = Needles.of(config, tokenizer, 'train')[0]
    assert window.tokens.shape == (128,)
    assert all(chr(token).isupper() for token in window.tokens[window.answers])


def test_facts_that_do_not_fit_are_refused(config):
    short = dataclasses.replace(config, sequence_length=40)
    with pytest.raises(ValueError, match='data.sequence_length: got 40, wanted at least 47 for 6'):
        Needles.of(short, TOKENIZER, 'train')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'facts': 677}, 'data.needles.facts: got 677, wanted 1 to 676'),
        ({'facts': 3, 'asked': 4}, r'data.needles.asked: got 4, wanted 1 to 3'),
        ({'text': 'needles'}, 'data.needles.text'),
    ],
)
def test_needles_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        NeedlesConfig(**fields)
