"""The script: what it prints, and one line with exit code 1 for a user's mistake."""

import os
import subprocess
import sys

import pytest

from tests import release


def _run(*args):
    return subprocess.run(
        [sys.executable, '-m', 'experiments.convert', *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )


def test_both_ways_with_progress(tmp_path):
    source = release.write_release(tmp_path / 'source', release.kimi_linear())
    done = _run(f'--source={source}', f'--target={tmp_path}/orbax')
    assert done.returncode == 0, done.stderr
    assert 'kimi_linear in' in done.stdout and 'experts in bf16' in done.stdout
    assert 'convert 0.00/0.00 GB (100.0%)' in done.stderr
    assert 'MB/s | eta 0 s | done' in done.stderr
    done = _run(f'--source={tmp_path}/orbax', f'--target={tmp_path}/back', '--to=safetensors')
    assert done.returncode == 0, done.stderr
    names = sorted(p.name for p in source.iterdir())
    assert sorted(p.name for p in (tmp_path / 'back').iterdir()) == names
    for name in names:
        assert (tmp_path / 'back' / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        ((), 'no such folder'),
        (('--to=safetensors',), 'not a converted checkpoint'),
        (('--to=safetensors', '--experts=bf16'), '--experts=bf16: only for --to=orbax'),
    ],
)
def test_mistake_gets_one_line_and_exit_code_1(tmp_path, args, message):
    done = _run(f'--source={tmp_path}/none', f'--target={tmp_path}/out', *args)
    assert done.returncode == 1
    assert done.stdout == ''
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
    assert message in done.stderr
    assert not (tmp_path / 'out').exists()


INTERRUPTED = """
import experiments.convert as script


def stop(*args):
    raise KeyboardInterrupt


script.convert = stop
script.run_main(script.main)
"""


def test_ctrl_c_gets_one_line_and_exit_code_130(tmp_path):
    done = subprocess.run(
        [sys.executable, '-c', INTERRUPTED, '--source=none', f'--target={tmp_path}/out'],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    )
    assert (done.returncode, done.stderr) == (130, 'interrupted\n')


def test_debug_shows_the_traceback(tmp_path):
    done = _run(f'--source={tmp_path}/none', f'--target={tmp_path}/out', '--debug')
    assert done.returncode == 1
    assert 'Traceback' in done.stderr and 'error: ' in done.stderr.splitlines()[-1]
