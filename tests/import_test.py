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


def test_scripts_import_in_silence():
    scripts = [name for name in _modules('experiments') if '.' in name]
    # Each in its own process, since scripts define flags and names recur; libraries only once.
    done = _python(
        'import importlib, os\n'
        f'for name in {_modules("k3jax")}:\n'
        '    importlib.import_module(name)\n'
        f'for name in {scripts}:\n'
        '    if os.fork() == 0:\n'
        '        importlib.import_module(name)\n'
        '        os._exit(0)\n'
        "    assert os.wait()[1] == 0, f'{name} cannot be imported'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
