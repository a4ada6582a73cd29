"""Sources: which documents are found, how long ones are cut, and what a bad file says."""

import json
import os

import numpy as np
import pytest

from k3jax import config as config_lib
from k3jax.data import sources


def data_config(source, **fields):
    return config_lib.DataConfig(source=str(source), **fields)


def opened(config, split):
    return sources.open_documents(config.source, config, split)


def all_pieces(config):
    return [piece for split in ('train', 'held_out') for piece in opened(config, split)]


def write_lines(path, texts):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))


def test_python_stdlib_holds_library_sources_only():
    documents = opened(data_config('python_stdlib'), 'train')
    held_out = opened(data_config('python_stdlib'), 'held_out')
    assert documents.num_bytes > 5_000_000
    assert 0.02 < len(held_out) / len(documents) < 0.08
    paths = [str(path) for path in documents.files]
    assert paths == sorted(paths)
    assert any(path.endswith('dataclasses.py') for path in paths)
    for skipped in ('/test/', '/tests/', '/idlelib/', 'site-packages'):
        assert not [path for path in paths if skipped in path]
    assert 'import' in documents[0].text + documents[1].text + documents[2].text


def test_folder_of_txt_and_jsonl_is_read_recursively_in_order(tmp_path):
    (tmp_path / 'b').mkdir()
    (tmp_path / 'b/one.txt').write_text('first é')
    (tmp_path / 'a.jsonl').write_text('{"text": "x"}\n\n{"text": "", "n": 1}\n{"text": "yé"}')
    (tmp_path / 'c.txt').write_text('')
    (tmp_path / 'ignored.md').write_text('no')
    (tmp_path / 'folder.txt').mkdir()
    config = data_config(tmp_path, held_out_every=2)
    train = opened(config, 'train')
    held_out = opened(config, 'held_out')
    assert [piece.text for piece in train] == ['x', 'first é']
    assert [piece.text for piece in held_out] == ['yé']
    assert all(piece.ends_document for piece in [*train, *held_out])
    assert train.num_bytes + held_out.num_bytes == len('xyéfirst é'.encode())


def test_the_split_holds_out_the_last_of_every_n(tmp_path):
    write_lines(tmp_path / 'a.jsonl', [f'document {i}' for i in range(10)])
    config = data_config(tmp_path, held_out_every=4)
    held_out = [piece.text for piece in opened(config, 'held_out')]
    train = [piece.text for piece in opened(config, 'train')]
    assert held_out == ['document 3', 'document 7']
    assert sorted(train + held_out) == [f'document {i}' for i in range(10)]
    with pytest.raises(ValueError, match="split: got 'test'"):
        opened(config, 'test')


@pytest.mark.parametrize('kind', ['txt', 'jsonl'])
@pytest.mark.parametrize('size', [16, 17, 18, 19, 64, 10_000])
def test_pieces_of_a_long_document_join_to_it_and_cut_no_character(tmp_path, kind, size):
    text = 'aé中🚀' * 37 + 'end🚀'
    if kind == 'txt':
        (tmp_path / 'a.txt').write_text(text)
        (tmp_path / 'b.txt').write_text(text)
    else:
        write_lines(tmp_path / 'a.jsonl', [text, text])
    documents = opened(data_config(tmp_path, max_document_bytes=size, held_out_every=2), 'train')
    held_out = opened(data_config(tmp_path, max_document_bytes=size, held_out_every=2), 'held_out')
    pieces = [piece for pair in zip(documents, held_out, strict=False) for piece in pair]
    pieces += list(documents)[len(held_out) :]
    assert ''.join(piece.text for piece in pieces) == text * 2
    assert sum(piece.ends_document for piece in pieces) == 2
    assert max(len(piece.text.encode()) for piece in pieces) <= size + 3
    assert '\ufffd' not in ''.join(piece.text for piece in pieces)


def test_one_long_file_is_cut_so_that_a_part_can_be_held_out(tmp_path):
    path = tmp_path / 'input.txt'
    path.write_text('to be or not to be ' * 1000)
    for source in (tmp_path, path):
        train = opened(data_config(source), 'train')
        held_out = opened(data_config(source), 'held_out')
        assert len(held_out) == 1
        assert 0.04 < held_out.num_bytes / 19_000 < 0.06
        assert train.num_bytes + held_out.num_bytes == 19_000
        assert [piece.ends_document for piece in held_out] == [True]
        assert not any(piece.ends_document for piece in train)


def test_bytes_that_are_not_utf8_are_replaced_and_reported_once(tmp_path, caplog):
    (tmp_path / 'a.txt').write_bytes(b'caf\xe9 ' * 40)
    with caplog.at_level('WARNING', logger='absl'):
        pieces = all_pieces(data_config(tmp_path, held_out_every=2))
    assert pieces[0].text.startswith('caf\ufffd caf')
    assert len([r for r in caplog.records if 'a.txt: replaced bytes' in r.getMessage()]) <= 2


@pytest.mark.parametrize(
    'line, wanted',
    [
        ('{"text": "x"', 'not JSON'),
        ('{"body": "x"}', 'string in "text"'),
        ('{"text": 3}', 'string in "text"'),
        ('["x"]', 'string in "text"'),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, wanted):
    (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n' + line + '\n')
    with pytest.raises(ValueError, match=rf'a\.jsonl:2: .*{wanted}'):
        opened(data_config(tmp_path), 'train')


def test_a_source_without_text_says_so(tmp_path):
    with pytest.raises(ValueError, match=r'which does not exist'):
        opened(data_config(tmp_path / 'nowhere'), 'train')
    with pytest.raises(ValueError, match=r'where no \.txt or \.jsonl file is'):
        opened(data_config(tmp_path), 'train')
    (tmp_path / 'a.txt').write_text('')
    with pytest.raises(ValueError, match='1 files hold no text'):
        opened(data_config(tmp_path), 'train')
    (tmp_path / 'a.txt').write_text('tiny')
    with pytest.raises(ValueError, match='4 bytes of text, wanted at least 320'):
        opened(data_config(tmp_path), 'train')


def test_surrogates_in_json_count_as_replaced_characters(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"text": "a\\ud800b"}\n' * 2)
    pieces = all_pieces(data_config(tmp_path, held_out_every=2))
    assert [piece.text for piece in pieces] == ['a?b', 'a?b']
    assert np.issubdtype(
        opened(data_config(tmp_path, held_out_every=2), 'train').table.dtype,
        np.int64,
    )


def test_files_are_scanned_once_until_they_change(tmp_path, monkeypatch):
    scans, scan = [], sources._scan
    monkeypatch.setattr(sources, '_scan', lambda files: scans.append(files) or scan(files))
    path = tmp_path / 'a.jsonl'
    write_lines(path, ['one', 'two', 'three', 'four'])
    config = data_config(tmp_path, held_out_every=2)
    assert [p.text for p in all_pieces(config)] == ['one', 'three', 'two', 'four']
    assert [p.text for p in all_pieces(config)] == ['one', 'three', 'two', 'four']
    assert len(scans) == 1
    write_lines(path, ['one', 'two', 'three', 'seven', 'five', 'six'])
    assert [p.text for p in all_pieces(config)] == ['one', 'three', 'five', 'two', 'seven', 'six']
    os.utime(path, ns=(0, 0))  # the size alone does not tell
    all_pieces(config)
    (tmp_path / 'b.txt').write_text('eight')
    assert 'eight' in [p.text for p in all_pieces(config)]
    path.unlink()
    (tmp_path / 'b.txt').write_text('to be or not to be, ' * 10)
    assert ''.join(p.text for p in all_pieces(config)) == 'to be or not to be, ' * 10
    assert len(scans) == 5
