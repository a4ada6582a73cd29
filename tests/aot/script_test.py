"""experiments/aot as a shell sees it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from k3jax.aot.compiler import has_libtpu

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup'),
]


def run(*args):
    command = [sys.executable, '-m', 'experiments.aot', '--config=configs/tiny_k3.py', *args]
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    'args, message',
    [
        (['--topology=v5p:3x3x3'], "error: libtpu knows no topology 'v5p:3x3x3'"),
        (['--set=mesh.expert=3'], 'error: mesh: got data=-1 expert=3, which is 3 chips, wanted'),
        (['--job=sleep'], 'value should be one of <train|prefill|decode>'),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_compiled(args, message):
    code, out, err = run(*args)
    assert (code, out) == (1, '') and message in err
    assert 'Traceback' not in err


@pytest.mark.slow
def test_decoding_is_compiled_and_written_down(tmp_path):
    files = tmp_path / 'report.json', tmp_path / 'page.html'
    code, out, err = run('--job=decode', f'--json={files[0]}', f'--html={files[1]}')
    assert code == 0, err
    report = json.loads(files[0].read_text())
    assert report['estimate'] is True and report['mesh']['data'] == 4
    assert report['hbm']['required'] < report['hbm']['limit'] and 0 < report['mfu'] < 1
    assert 'estimate:' in out and 'An estimate, not a measurement' in out
    assert '(estimate, not measured)' in files[1].read_text()


@pytest.mark.slow
def test_a_sweep_ranks_what_fits_and_says_why_the_rest_does_not(tmp_path):
    path = tmp_path / 'rows.json'
    code, out, err = run('--job=decode', '--sweep=mesh=4x1,3x1,2x2', f'--json={path}')
    assert code == 0, err
    rows = json.loads(path.read_text())
    assert [bool(row['error']) for row in rows] == [False, False, True]
    assert rows[0]['tokens_per_second'] >= rows[1]['tokens_per_second']
    assert 'which is 3 chips, wanted the 4' in rows[2]['error'] and '3/3 mesh.data=2' in out
