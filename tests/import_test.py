"""Every module imports with nothing but the runtime requirements, and in silence."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIBRARIES = ('pallas_kernels', 'k3jax', 'configs')


def _modules(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob('*.py'))
    names = ('.'.join(f.relative_to(ROOT).with_suffix('').parts) for f in files)
    return [name.removesuffix('.__init__') for name in names]


def _python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, '-c', code],
        cwd=ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize('package', LIBRARIES)
def test_library_imports_in_silence_and_touches_no_device(package):
    done = _python(
        'import importlib, sys\n'
        f'for name in {_modules(package)}:\n'
        '    importlib.import_module(name)\n'
        "backends = sys.modules.get('jax._src.xla_bridge')\n"
        "assert not getattr(backends, '_backends', {}), 'import started a JAX backend'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('script', [m for m in _modules('experiments') if '.' in m])
def test_script_imports_in_silence(script):
    # Each in its own process: scripts define flags, and names recur.
    done = _python(f'import {script}')
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
