"""Flags and errors as a shell sees them: scripts are run as their own processes."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

from k3jax import config as config_lib
from k3jax import flags as flags_lib

ROOT = pathlib.Path(__file__).parents[1]

CONFIG = """
from k3jax import config


def get_config():
    model = config.ModelConfig(
        name='test', family='kimi_linear', vocab_size=512, hidden_size=8, num_hidden_layers=2,
        intermediate_size=8, num_attention_heads=1, q_lora_rank=None, kv_lora_rank=4,
        qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, num_experts=2,
        num_experts_per_token=1, num_shared_experts=1, moe_intermediate_size=8,
        linear_attn_config=config.LinearAttnConfig(
            num_heads=1, head_dim=4, kda_layers=(1,), full_attn_layers=(2,)
        ),
    )
    return config.Config(model=model)
"""

SCRIPT = """
import errno
import jax
from k3jax import flags


def main(argv):
    config = flags.load_config()
    print('batch', config.data.batch_size)
    if config.data.source == 'error':
        raise ValueError('first line\\n   second line')
    if config.data.source == 'unsupported':
        raise NotImplementedError('not on this device')
    if config.data.source == 'disk':
        raise OSError(errno.ENOSPC, 'No space left on device', '/x')
    if config.data.source == 'no gcsfs':
        raise ImportError('Please install gcsfs to access Google Storage')
    if config.data.source == 'no module':
        raise ImportError('No module named no_such_module')
    if config.data.source == 'interrupt':
        raise KeyboardInterrupt
    if config.data.source == 'no room':
        jax.numpy.zeros(2**52)
    if config.data.source == 'bug':
        raise RuntimeError('a bug')


if __name__ == '__main__':
    flags.define_config_flags(workdir='out')
    flags.run_main(main)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'tiny.py').write_text(CONFIG)
    (tmp_path / 'script.py').write_text(SCRIPT)
    return tmp_path


def run(folder, *args):
    done = subprocess.run(
        [sys.executable, folder / 'script.py', *args],
        capture_output=True,
        text=True,
        cwd=folder,
        env={'PYTHONPATH': str(ROOT), 'PATH': ''},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_config_and_set_reach_the_script(folder):
    code, out, err = run(folder, '--config=tiny.py', '--set=data.batch_size=16')
    assert (code, out, err) == (0, 'batch 16\n', '')


@pytest.mark.parametrize(
    'source, code, error',
    [
        ('error', 1, 'error: first line second line\n'),
        ('unsupported', 1, 'error: not on this device\n'),
        ('disk', 1, "error: [Errno 28] No space left on device: '/x'\n"),
        (
            'no gcsfs',
            1,
            'error: gs:// paths need the package gcsfs, which is not installed: '
            "pip install --editable '.[gcs]'\n",
        ),
        ('interrupt', 130, 'interrupted\n'),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(folder, source, code, error):
    got = run(folder, '--config=tiny.py', '--set', f'data.source={source}')
    assert got == (code, 'batch 8\n', error)


def test_a_device_without_room_is_a_line_too(folder):
    code, _, error = run(folder, '--config=tiny.py', '--set=data.source=no room')
    last = error.splitlines()[-1]  # after what JAX itself may have to say
    assert code == 1 and last.startswith('error: the device has no room: RESOURCE_EXHAUSTED')
    assert 'Traceback' not in error


def test_debug_and_bugs_show_the_traceback(folder):
    code, _, err = run(folder, '--config=tiny.py', '--set=data.source=error', '--debug')
    assert code == 1 and 'Traceback' in err and err.endswith('error: first line second line\n')
    code, _, err = run(folder, '--config=tiny.py', '--set=data.source=bug')
    assert code == 1 and 'Traceback' in err and 'RuntimeError: a bug' in err
    code, _, err = run(folder, '--config=tiny.py', '--set=data.source=no module')
    assert code == 1 and 'Traceback' in err and 'ImportError: No module named' in err


def test_mistakes_in_the_flags_are_named(folder):
    code, _, err = run(folder, '--config=tiny.py', '--set=data.batch_sise=16')
    assert code == 1 and err.count('\n') == 1 and "did you mean 'data.batch_size'" in err
    code, _, err = run(folder, '--config=tiny.py', 'data.batch_size=16')
    assert code == 1
    assert err == "error: arguments: got 'data.batch_size=16', wanted only --flag=value\n"
    code, _, err = run(folder)
    assert code == 1 and '--config' in err and 'Traceback' not in err


def test_a_missing_config_lists_those_there_are(folder):
    with pytest.raises(ValueError, match=r"got '.*nano\.py', which is not a file.*tiny\.py"):
        flags_lib.config_from_file(str(folder / 'nano.py'))
    with pytest.raises(ValueError, match='which is not a file'):
        flags_lib.config_from_file(str(folder))


def test_a_file_that_is_no_config_is_named(folder):
    assert isinstance(flags_lib.config_from_file(str(folder / 'tiny.py')), config_lib.Config)
    (folder / 'empty.py').write_text('')
    with pytest.raises(ValueError, match=r'empty\.py has no get_config\(\); there are: .*tiny\.py'):
        flags_lib.config_from_file(str(folder / 'empty.py'))
    (folder / 'other.py').write_text(textwrap.dedent('def get_config():\n    return {}\n'))
    with pytest.raises(ValueError, match=r'returned a dict, wanted a k3jax\.config\.Config'):
        flags_lib.config_from_file(str(folder / 'other.py'))
    (folder / 'notes.txt').write_text('')
    with pytest.raises(ValueError, match='wanted a Python file'):
        flags_lib.config_from_file(str(folder / 'notes.txt'))
