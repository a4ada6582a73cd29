"""The loader: no token is lost, targets stay in their document, and resuming is exact."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from k3jax import config as config_lib
from k3jax.data import loader
from k3jax.data import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.byte_tokenizer()


@pytest.fixture
def corpus(tmp_path):
    """Rows in the order of the documents, so that documents can be read back."""
    rng = np.random.default_rng(0)
    texts = [f'{i:03d}:' + 'x' * int(rng.integers(0, 90)) for i in range(41)]
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    (tmp_path / 'a.jsonl').write_text(lines)
    config = config_lib.DataConfig(
        source=str(tmp_path),
        sequence_length=32,
        batch_size=4,
        held_out_every=10,
        shuffle_seed=3,
        shuffle_rows=1,
    )
    return config, texts


def rows_of(batches):
    return sorted(tuple(row) for batch in batches for row in batch['tokens'].tolist())


def test_rows_are_shuffled_inside_their_window_and_none_is_lost(corpus):
    config, _ = corpus
    plain = take(loader.train_iterator(config, TOKENIZER), 6)
    shuffled = dataclasses.replace(config, shuffle_rows=12)
    mixed = take(loader.train_iterator(shuffled, TOKENIZER), 6)
    assert rows_of(mixed[:3]) == rows_of(plain[:3])
    assert rows_of(mixed[3:]) == rows_of(plain[3:])
    assert not np.array_equal(mixed[0]['tokens'], plain[0]['tokens'])


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def documents_of(batches):
    """The documents in a stream of batches, cut after each [EOS]."""
    stream = np.concatenate([batch['tokens'].ravel() for batch in batches])
    ends = np.flatnonzero(stream == TOKENIZER.eos_id)
    return [TOKENIZER.decode(part[:-1]) for part in np.split(stream, ends + 1)[:-1]]


def assert_equal(a, b):
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_batches_have_the_promised_shapes_and_dtypes(corpus):
    config, _ = corpus
    for batch in take(loader.train_iterator(config, TOKENIZER), 3):
        assert list(batch) == ['tokens', 'targets', 'segment_ids']
        for array in batch.values():
            assert array.shape == (4, 32) and array.dtype == np.int32
            assert array.flags.c_contiguous
        assert batch['segment_ids'].min() == 1


def test_an_epoch_holds_every_training_document_once_in_another_order_each_time(corpus):
    config, texts = corpus
    train = [text for i, text in enumerate(texts) if i % 10 != 9]
    seen = documents_of(take(loader.train_iterator(config, TOKENIZER), 100))
    first, second = seen[: len(train)], seen[len(train) : 2 * len(train)]
    assert sorted(first) == sorted(second) == sorted(train)
    assert first != second and first != train


def test_targets_are_the_next_tokens_of_the_same_document(corpus):
    config, _ = corpus
    batches = take(loader.train_iterator(config, TOKENIZER), 50)
    tokens, targets, ids = (
        np.concatenate([batch[name] for batch in batches])
        for name in ('tokens', 'targets', 'segment_ids')
    )
    following = np.append(tokens.ravel()[1:], -2).reshape(tokens.shape)
    ends = tokens == TOKENIZER.eos_id
    np.testing.assert_array_equal(targets[ends], -1)
    np.testing.assert_array_equal(targets[~ends][:-1], following[~ends][:-1])
    # A segment ends exactly where a document does; a row starts anew at 1.
    np.testing.assert_array_equal(np.diff(ids, axis=1), ends[:, :-1])
    np.testing.assert_array_equal(ids[:, 0], 1)


def test_the_seed_decides_the_order(corpus):
    config, _ = corpus
    other = config_lib.DataConfig(**{**vars(config), 'shuffle_seed': 4})
    same = [take(loader.train_iterator(config, TOKENIZER), 20) for _ in range(2)]
    assert_equal(*same)
    different = take(loader.train_iterator(other, TOKENIZER), 20)
    assert documents_of(same[0]) != documents_of(different)


@pytest.mark.parametrize('shuffle_rows', [1, 10])
@pytest.mark.parametrize('taken', [0, 1, 2, 5, 7, 13, 14, 15, 40, 300])
def test_resuming_from_json_equals_going_on(corpus, taken, shuffle_rows):
    config, _ = corpus  # about 14 batches an epoch
    config = dataclasses.replace(config, shuffle_rows=shuffle_rows)
    straight = loader.train_iterator(config, TOKENIZER)
    take(straight, taken)
    state = json.loads(json.dumps(straight.get_state()))
    resumed = loader.train_iterator(config, TOKENIZER)
    take(resumed, 5)
    resumed.set_state(state)
    assert resumed.get_state() == straight.get_state()
    assert_equal(take(straight, 40), take(resumed, 40))
    state = json.loads(json.dumps(resumed.get_state()))
    again = loader.train_iterator(config, TOKENIZER)
    again.set_state(state)
    assert_equal(take(straight, 3), take(again, 3))


def test_rows_do_not_depend_on_the_sizes_of_the_batches(corpus):
    config = dataclasses.replace(corpus[0], num_streams=2)
    plain, ramped = (loader.train_iterator(config, TOKENIZER) for _ in range(2))
    of_streams = lambda batches, n: np.concatenate(  # noqa: E731
        [np.split(batch['tokens'], 2)[n] for batch in batches]
    )
    batches = [ramped.take(size) for size in (2, 2, 6, 2)]
    state = json.loads(json.dumps(ramped.get_state()))
    batches.append(ramped.take(8))
    wanted = take(plain, 5)
    for n in range(2):
        np.testing.assert_array_equal(of_streams(batches, n), of_streams(wanted, n))
    resumed = loader.train_iterator(config, TOKENIZER)
    resumed.set_state(state)
    np.testing.assert_array_equal(resumed.take(8)['tokens'][:4], of_streams(wanted, 0)[6:])


def test_resuming_is_exact_at_every_batch_of_long_and_short_documents(tmp_path):
    rng = np.random.default_rng(1)
    sizes = np.concatenate([rng.integers(1, 5, 30), rng.integers(100, 500, 10), [16, 17, 15, 32]])
    lines = [json.dumps({'text': chr(97 + i % 26) * int(n)}) for i, n in enumerate(sizes)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    config = config_lib.DataConfig(
        source=str(tmp_path), sequence_length=16, batch_size=2, held_out_every=2, shuffle_rows=6
    )
    straight = loader.train_iterator(config, TOKENIZER)
    states, batches = [straight.get_state()], []
    for _ in range(150):
        batches.append(next(straight))
        states.append(json.loads(json.dumps(straight.get_state())))
    for at in range(0, 147):
        resumed = loader.train_iterator(config, TOKENIZER)
        resumed.set_state(states[at])
        assert_equal(take(resumed, 3), batches[at : at + 3])


def test_a_state_of_other_data_is_refused(corpus, tmp_path):
    config, _ = corpus
    state = loader.train_iterator(config, TOKENIZER).get_state()
    with (tmp_path / 'a.jsonl').open('a') as f:
        f.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r'num_documents 37, but here it is 38; resume with'):
        loader.train_iterator(config, TOKENIZER).set_state(state)


@pytest.mark.parametrize(
    ('field', 'value'),
    [('sequence_length', 64), ('held_out_every', 9), ('max_document_bytes', 1 << 19)],
)
def test_a_state_of_data_cut_in_another_way_is_refused(corpus, field, value):
    config, _ = corpus
    state = loader.train_iterator(config, TOKENIZER).get_state()
    before = state['data'][field]
    here = loader.train_iterator(dataclasses.replace(config, **{field: value}), TOKENIZER)
    # As if nothing else differed, such as the number of documents.
    state['data'] = here.get_state()['data'] | {field: before}
    with pytest.raises(ValueError, match=f'saved with {field} {before}, but here it is {value};'):
        here.set_state(state)


def test_streams_read_disjoint_documents_that_are_all_documents(corpus):
    config, texts = corpus
    config = dataclasses.replace(config, num_streams=2)
    train = {text for i, text in enumerate(texts) if i % 10 != 9}
    seen = []
    for number in range(2):
        batches = take(loader.train_iterator(config, TOKENIZER, streams=[number]), 60)
        assert batches[0]['tokens'].shape == (2, 32)
        seen.append(set(documents_of(batches)))
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == train


def test_batches_do_not_depend_on_who_reads_which_stream(corpus):
    """Two readers of one stream each, stopped; one reader of both goes on from there."""
    config = dataclasses.replace(corpus[0], num_streams=2)
    whole = take(loader.train_iterator(config, TOKENIZER), 6)
    readers = [loader.train_iterator(config, TOKENIZER, streams=[number]) for number in range(2)]
    for batch in whole[:3]:
        parts = [next(reader) for reader in readers]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        assert_equal([joined], [batch])
    states = [json.loads(json.dumps(reader.get_state())) for reader in readers]
    positions = {n: p for state in states for n, p in state['positions'].items()}
    resumed = loader.train_iterator(config, TOKENIZER)
    resumed.set_state({'data': states[0]['data'], 'positions': positions})
    assert_equal(take(resumed, 3), whole[3:])
    with pytest.raises(ValueError, match=r"stream 1 is missing, found \['0'\]"):
        resumed.set_state(states[0])


def test_what_cannot_be_shared_out_is_an_error(corpus):
    config, _ = corpus
    with pytest.raises(ValueError, match=r'got 4, wanted a multiple of data.num_streams \(3\)'):
        dataclasses.replace(config, num_streams=3)
    many = dataclasses.replace(config, batch_size=64, num_streams=64)
    with pytest.raises(ValueError, match='got 37 training documents, wanted at least one for each'):
        loader.train_iterator(many, TOKENIZER)


def test_held_out_batches_hold_every_held_out_document_once_and_then_padding(corpus):
    config, texts = corpus
    held_out = [text for i, text in enumerate(texts) if i % 10 == 9]
    batches = list(loader.held_out_batches(config, TOKENIZER))
    assert_equal(batches, list(loader.held_out_batches(config, TOKENIZER)))
    assert sorted(documents_of(batches)) == sorted(held_out)
    padding = np.concatenate([batch['segment_ids'] for batch in batches]) == 0
    real = sum(len(text) + 1 for text in held_out)
    assert (~padding).sum() == real
    targets = np.concatenate([batch['targets'] for batch in batches])
    assert (targets[padding] == -1).all()
    assert (targets != -1).sum() == real - len(held_out)
    assert all(batch['tokens'].shape == (4, 32) for batch in batches)


def test_held_out_batches_stop_at_the_maximum(corpus):
    assert len(list(loader.held_out_batches(corpus[0], TOKENIZER, 1))) == 1


def test_a_document_in_pieces_ends_once(tmp_path):
    (tmp_path / 'input.txt').write_text('é' * 2000)
    config = config_lib.DataConfig(source=str(tmp_path), sequence_length=64, batch_size=1)
    tokens = list(loader.document_tokens(config, TOKENIZER, 'train'))
    tokens += loader.document_tokens(config, TOKENIZER, 'held_out')
    joined = np.concatenate(tokens)
    assert (joined == TOKENIZER.eos_id).sum() == 1
    assert len(joined) == 4001


def test_the_embedded_corpus_streams_through_several_hundred_batches_and_resumes():
    config = config_lib.DataConfig(sequence_length=256, batch_size=8)
    straight = loader.train_iterator(config, TOKENIZER)
    take(straight, 400)
    state = json.loads(json.dumps(straight.get_state()))
    resumed = loader.train_iterator(config, TOKENIZER)
    resumed.set_state(state)
    assert_equal(take(straight, 50), take(resumed, 50))
