"""Points of a growing job: read, compiled once, shown as a table and a plot."""

import json
import pathlib
import subprocess
import sys

import pytest

from k3jax.aot.compiler import has_libtpu
from k3jax.aot.scaling import Point, markdown, part_seconds, plot, read_points, rows_of, stored_rows

ROOT = pathlib.Path(__file__).parents[2]


def row(chips, error=None):
    found = {
        'config': 'c.py',
        'job': 'train',
        'topology': f'v5p:{chips}',
        'mesh': {'data': chips, 'expert': 1, 'sequence': 2},
        'chips': chips,
        'tokens': 100 * chips,
        'context': 8192,
        'hbm': {'required': 3 * 2**30, 'peak': None if error else 2**30, 'argument': 2**29},
        'error': error,
    }
    if error:
        return found
    return found | {
        'collectives': {'all-gather': 2e9},
        'host_bytes': 0.0,
        'step_seconds': 10.0,
        'mfu': 0.5,
        'scopes': [
            {'scope': 'kda_mixer', 'seconds': 3.0},
            {'scope': 'kda_mixer', 'seconds': 1.0},
            {'scope': 'loss', 'seconds': 6.0},
        ],
    }


def test_points_are_topologies_with_settings():
    assert read_points('v5p:2x2x1 a.b=1 c=2; v5p:2x2x2') == [
        Point('v5p:2x2x1', ('a.b=1', 'c=2')),
        Point('v5p:2x2x2', ()),
    ]


@pytest.mark.parametrize('text', ['', 'v5p:2x2x1;', 'a=1', 'v5p:2x2x1 a'])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(ValueError, match='--points: got .*, wanted a topology and values'):
        read_points(text)


def test_seconds_of_the_parts_add_up_to_the_step():
    parts = part_seconds(row(4))
    assert parts['KDA'] == 4 and parts['other'] == 6 and sum(parts.values()) == 10


def test_a_table_has_a_line_a_point_and_says_what_does_not_fit():
    lines = markdown([row(2, 'out of memory'), row(4)]).splitlines()
    assert len(lines) == 4 and len({line.count('|') for line in lines}) == 1
    assert lines[2].startswith('| v5p:2 | 2x2 | 8,192 | 100 | 3.0 | does not fit |')
    assert '| 1.0 | 2.0 | 0.0 | 10.00 | 4.00 |' in lines[3]
    assert plot([row(2, 'out of memory'), row(4)], 'chips').startswith(b'\x89PNG')


def test_what_is_stored_is_not_compiled_again(tmp_path):
    points, path = read_points('v5p:2x2x1; v5p:2x2x2 a=1'), str(tmp_path / 'rows.json')
    asked, kept = [], []

    def compiled(point):
        asked.append(point)
        return row(4)

    def keep(rows):
        kept.append(len(rows))
        (tmp_path / 'rows.json').write_text(json.dumps(rows))

    rows_of(points[:1], stored_rows(path, 'c.py', 'train'), compiled, keep)
    rows = rows_of(points, stored_rows(path, 'c.py', 'train'), compiled, keep)
    assert asked == points and kept == [1, 2]
    assert [found['point'] for found in rows] == ['v5p:2x2x1', 'v5p:2x2x2 a=1']
    with pytest.raises(ValueError, match='rows of another config or job than d.py, train'):
        stored_rows(path, 'd.py', 'train')
    for text in ('{', '[1]', '[{"config": "c.py", "job": "train", "point": "x"}]'):
        (tmp_path / 'rows.json').write_text(text)
        with pytest.raises(ValueError, match='wanted rows of this script'):
            stored_rows(path, 'c.py', 'train')
    (tmp_path / 'rows.json').write_text('{}')
    with pytest.raises(ValueError, match='wanted a list of rows'):
        stored_rows(path, 'c.py', 'train')


@pytest.mark.aot
@pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')
@pytest.mark.parametrize(
    ('points', 'message'),
    [
        ('v5p:3x3x3', "error: libtpu knows no topology 'v5p:3x3x3'"),
        ('v5p:2x2x1; v5p:2x2x1 mesh.expert=3', 'error: mesh: got data=-1 expert=3'),
        ('v5p:2x2x1 model.vocab_size=1000000000', 'error: mesh: a chip would hold'),
        ('v5p:2x2x1 no.such=3', 'error: --set no.such: the config'),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_compiled(points, message):
    command = [sys.executable, '-m', 'experiments.scaling', '--config=configs/tiny_k3.py']
    done = subprocess.run(
        [*command, f'--points={points}'], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (1, ''), done.stderr
    assert message in done.stderr and 'Traceback' not in done.stderr
