"""What is there twice stays once, the rest byte for byte; nothing is left half-written."""

import errno
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from k3jax.data import deduplicate as deduplicate_lib
from k3jax.data.deduplicate import REPORT, deduplicate
from k3jax.data.near_duplicates import PERMUTATIONS, Signer, clusters, similar_pairs

WORDS = [f'word{i}' for i in range(500)]


def text_of(seed, size=120):
    return ' '.join(random.Random(seed).choices(WORDS, k=size))


def changed(text, words):
    """`text` with some words at its end replaced."""
    parts = text.split()
    parts[-words:] = [f'other{i}' for i in range(words)]
    return ' '.join(parts)


def write(folder, **files):
    folder.mkdir(parents=True)
    for name, texts in files.items():
        if isinstance(texts, str):
            (folder / f'{name}.txt').write_text(texts)
        else:
            lines = ''.join(
                json.dumps({'text': text, 'id': i}) + '\n' for i, text in enumerate(texts)
            )
            (folder / f'{name}.jsonl').write_text(lines)
    return str(folder)


def texts_in(folder):
    found = {}
    for path in sorted(folder.rglob('*')):
        if path.suffix == '.txt':
            found[path.name] = path.read_text()
        elif path.suffix == '.jsonl':
            found[path.name] = [json.loads(line)['text'] for line in path.read_text().splitlines()]
    return found


def test_the_first_of_each_stays_and_the_report_counts_the_others(tmp_path):
    a, b, c = map(text_of, range(3))
    near = changed(a, 4)
    source = write(tmp_path / 'in', p=[a, b, a], q=[near, '', c], r=b, s=a.upper() + '!')
    report = deduplicate(source, str(tmp_path / 'out'))
    assert texts_in(tmp_path / 'out') == {'p.jsonl': [a, b], 'q.jsonl': [c]}
    counts = {'documents': 7, 'empty': 1, 'corrupt': 0, 'exact_dropped': 2, 'near_dropped': 2}
    assert report.items() >= {**counts, 'kept': 3, 'clusters_by_size': {'3': 1}}.items()
    assert report['near_dropped_at']['1.0'] == 1  # the same words in capitals
    assert json.loads((tmp_path / 'out' / REPORT).read_text()) == report


def test_lines_are_copied_as_they_stand_in_folders_as_they_lie(tmp_path):
    source = write(tmp_path / 'in' / 'deep')
    line = b'{"more": 1,  "text": "\\u00e9t\\u00e9"}\r\n'
    (tmp_path / 'in' / 'deep' / 'a.jsonl').write_bytes(line + b'\n{"text": "no newline"}')
    deduplicate(str(tmp_path / 'in'), str(tmp_path / 'out'))
    found = (tmp_path / 'out' / 'deep' / 'a.jsonl').read_bytes()
    assert found == line + b'{"text": "no newline"}\n' and source


def test_it_is_done_the_same_way_each_time_and_nothing_more_is_found_in_the_result(tmp_path):
    rng = random.Random(0)
    originals = [text_of(i) for i in range(40)]
    texts = originals + [changed(rng.choice(originals), rng.randrange(1, 9)) for _ in range(60)]
    rng.shuffle(texts)
    source = write(tmp_path / 'in', a=texts[:50], b=texts[50:])
    first = deduplicate(source, str(tmp_path / 'one'))
    assert deduplicate(source, str(tmp_path / 'two')) == first
    assert texts_in(tmp_path / 'one') == texts_in(tmp_path / 'two')
    again = deduplicate(str(tmp_path / 'one'), str(tmp_path / 'three'))
    assert again['kept'] == again['documents'] == first['kept']


def test_only_exact_ones_where_asked_so(tmp_path):
    source = write(tmp_path / 'in', a=[text_of(0), changed(text_of(0), 1), text_of(0)])
    report = deduplicate(source, str(tmp_path / 'out'), threshold=2)
    assert report['kept'] == 2 and 'near_dropped' not in report


def test_of_duplicates_alone_one_is_kept_and_that_is_said(tmp_path, caplog):
    source = write(tmp_path / 'in', a=['the same'] * 5, b='the same')
    report = deduplicate(source, str(tmp_path / 'out'))
    assert report['kept'] == 1 and report['exact_dropped'] == 5
    assert 'all 6 documents are one and the same' in caplog.text
    assert texts_in(tmp_path / 'out') == {'a.jsonl': ['the same']}


def corrupt(tmp_path):
    source = write(tmp_path / 'in', a=['one', 'two'])
    with (tmp_path / 'in' / 'a.jsonl').open('a') as f:
        f.write('{"text": "cut o\n{"txt": 3}\n{"text": "three"}\n')
    return source


def test_a_corrupt_line_stops_with_file_and_line_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match=r'a.jsonl:3: got .*not JSON.*--corrupt=skip leaves such'):
        deduplicate(corrupt(tmp_path), str(tmp_path / 'out'))
    assert [p.name for p in tmp_path.iterdir()] == ['in']


def test_corrupt_lines_are_skipped_and_counted_where_asked_so(tmp_path, caplog):
    report = deduplicate(corrupt(tmp_path), str(tmp_path / 'out'), corrupt='skip')
    assert report['corrupt'] == 2 and report['kept'] == 3
    assert texts_in(tmp_path / 'out') == {'a.jsonl': ['one', 'two', 'three']}
    assert 'a.jsonl:4' in caplog.text


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    source = write(tmp_path / 'in', a=[text_of(i) for i in range(9)])

    def full(*_):
        (tmp_path / 'out.partial' / 'a.jsonl').write_text('half')
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(deduplicate_lib, '_copy', full)
    with pytest.raises(OSError, match=r'--target: .*out cannot be written \(No space left'):
        deduplicate(source, str(tmp_path / 'out'))
    assert [p.name for p in tmp_path.iterdir()] == ['in']


def test_what_a_killed_run_left_is_written_anew(tmp_path):
    source = write(tmp_path / 'in', a=['one', 'two'])
    (tmp_path / 'out.partial').mkdir()
    (tmp_path / 'out.partial' / 'stale.txt').write_text('half')
    deduplicate(source, str(tmp_path / 'out'))
    assert sorted(p.name for p in tmp_path.iterdir()) == ['in', 'out']
    assert list(texts_in(tmp_path / 'out')) == ['a.jsonl']


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path):
    source = write(tmp_path / 'in', a=['one', 'two'])

    def progress(what, done, total):
        if what == 'signing' and done == total:
            (tmp_path / 'in' / 'a.jsonl').write_text('{"text": "one"}\n')

    with pytest.raises(ValueError, match='had 2 documents at first and now 1; nothing may write'):
        deduplicate(source, str(tmp_path / 'out'), progress=progress)
    assert [p.name for p in tmp_path.iterdir()] == ['in']


def test_what_cannot_be_is_refused(tmp_path):
    source = write(tmp_path / 'in', a=[''])
    with pytest.raises(ValueError, match='holds no text, wanted documents'):
        deduplicate(source, str(tmp_path / 'out'))
    with pytest.raises(OSError, match='in is there already; name another folder'):
        deduplicate(source, source)
    with pytest.raises(ValueError, match='is inside --source'):
        deduplicate(source, f'{source}/out')
    with pytest.raises(ValueError, match="--source: got '.*none', which does not exist"):
        deduplicate(f'{source}/none', str(tmp_path / 'out'))


def test_signatures_estimate_the_share_of_common_shingles():
    signer, text = Signer(), text_of(0, 400)
    for words in (20, 60, 150):
        other = changed(text, words)
        runs = [{' '.join(t.split()[i : i + 5]) for i in range(396)} for t in (text, other)]
        jaccard = len(runs[0] & runs[1]) / len(runs[0] | runs[1])
        estimate = np.mean(signer.signature(text) == signer.signature(other))
        assert abs(estimate - jaccard) < 4 * np.sqrt(jaccard * (1 - jaccard) / PERMUTATIONS)


def test_signs_without_spaces_are_words():
    signer = Signer()
    text = ''.join(chr(0x4E00 + i) for i in range(300))
    similarity = np.mean(signer.signature(text) == signer.signature(text[:290] + 'x'))
    assert 0.85 < similarity < 1


def test_short_texts_are_compared_whole():
    signer = Signer()
    assert np.array_equal(signer.signature('Hello, you'), signer.signature('hello you'))
    assert np.mean(signer.signature('hello you') == signer.signature('hello me')) < 0.1
    assert np.array_equal(signer.signature('?'), signer.signature('!'))


def test_pairs_are_found_as_by_comparing_all():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 32, (30, PERMUTATIONS), dtype=np.uint32)
    rows = np.concatenate([base, base, base])
    for i, row in enumerate(rows[30:]):
        row[rng.permutation(PERMUTATIONS)[: i % 40]] = i  # up to a third of the numbers differ
    pairs, similarity = similar_pairs(rows, np.arange(90), 0.8)
    assert (similarity >= 0.8).all() and (pairs[:, 0] < pairs[:, 1]).all()
    joined = clusters(pairs, 90)
    equal = (rows[:, None] == rows[None]).mean(-1) >= 0.9  # banding may miss one at the threshold
    for i, j in np.argwhere(equal):
        assert joined[i] == joined[j]
    assert (joined % 30 == np.arange(90) % 30).all()


def test_clusters_are_joined_through_others():
    found = clusters(np.array([[3, 4], [1, 4], [0, 2], [6, 7], [5, 7]]), 8)
    assert found.tolist() == [0, 1, 0, 1, 1, 5, 5, 5]
    assert clusters(np.zeros((0, 2), int), 3).tolist() == [0, 1, 2]


def test_the_script_shows_its_progress_and_reports(tmp_path):
    def run(*args):
        return subprocess.run(
            [sys.executable, '-m', 'experiments.deduplicate', *args],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        )

    source = write(tmp_path / 'in', a=['one', 'two', 'one'])
    done = run(f'--source={source}', f'--target={tmp_path}/out', '--threshold=0.7')
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report['kept'] == 2 and report['threshold'] == 0.7
    assert 'signing 0.0/0.0 MB (100.0%)' in done.stderr and 'writing' in done.stderr
    done = run(f'--source={source}', f'--target={tmp_path}/out')
    assert done.returncode == 1 and 'is there already' in done.stderr


def test_a_threshold_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match='--threshold: got nan, wanted a number above 0'):
        deduplicate(str(tmp_path), str(tmp_path / 'out'), threshold=float('nan'))
