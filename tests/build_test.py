"""BUILD is true, and the checker that says so finds each kind of lie."""

import pathlib
import textwrap

import pytest

from tests.build_checker import BuildSyntaxError, check

ROOT = pathlib.Path(__file__).parents[1]

DIRECTIONS = {'lib': ('lib',), 'app': ('app', 'lib'), 'tests': ('app', 'lib', 'tests')}

FILES = {
    'lib/__init__.py': '',
    'lib/maths.py': 'import json\nimport numpy as np\n',
    'lib/inner/deep.py': '',
    'app/model.py': 'from lib import maths\n',
    'app/run.py': "from app.model import maths\nif __name__ == '__main__':\n    maths()\n",
    'tests/conftest.py': 'import pytest\n',
    'tests/main.py': 'import pytest\n',
    'tests/model_test.py': 'import pytest\nfrom app import model\n',
    'requirements.txt': '# Runtime.\nnumpy>=2  # arrays\n',
    'pyproject.toml': """
        [project.optional-dependencies]
        dev = ["pytest>=8"]
        [tool.pytest.ini_options]
        markers = ["slow: takes long"]
        """,
    'BUILD': """
        load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

        package(default_visibility = ["//visibility:private"])

        py_library(name = "lib", srcs = glob(["lib/**/*.py"]), deps = ["@pypi//numpy"])
        py_library(name = "model", srcs = ["app/model.py"], deps = [":lib"])
        py_binary(name = "run", srcs = ["app/run.py"], main = "app/run.py", deps = [":model"])
        py_library(name = "conftest", srcs = ["tests/conftest.py"], deps = ["@pypi//pytest"])
        [
            py_test(
                name = src.replace(".py", ""),
                srcs = [src, "tests/main.py"],
                data = ["pyproject.toml"],
                main = "tests/main.py",
                tags = tags,
                deps = deps + [":conftest", "@pypi//pytest"],
            )
            for src, tags, deps in [("tests/model_test.py", [], [":model"])]
        ]
        """,
}


def _write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def tree(tmp_path):
    """A small tree whose BUILD is true."""
    _write(tmp_path, FILES)
    return tmp_path


def _edit(root, file, old, new):
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_build_of_this_project_is_true():
    faults = check(ROOT)
    assert not faults, '\n'.join(faults)


def test_true_build_has_no_faults(tree):
    assert check(tree, DIRECTIONS) == []


def test_hidden_folders_and_virtual_environments_do_not_count(tree):
    _write(
        tree, {'.venv/a.py': '', 'env/pyvenv.cfg': '', 'env/b.py': '', 'lib/__pycache__/c.py': ''}
    )
    assert check(tree, DIRECTIONS) == []


@pytest.mark.parametrize(
    ('file', 'text', 'fault'),
    [
        ('app/other.py', '', 'app/other.py: in no target, wanted one'),
        ('lib/maths.py', 'import scipy, numpy', 'imports scipy; scipy is not in requirements.txt'),
        ('lib/maths.py', 'import pytest, numpy', 'pytest is not in requirements.txt'),
        ('lib/maths.py', '', 'lib: unused dep @pypi//numpy'),
        ('lib/maths.py', 'import numpy\nfrom . import x', 'relative import'),
        ('lib/maths.py', 'import numpy, app.model', 'lib may import lib'),
        ('lib/maths.py', 'import numpy, app.model', 'lib: missing dep :model'),
        ('lib/maths.py', 'import numpy, app.model', 'cycle: lib -> model -> lib'),
        ('lib/maths.py', 'def f():\n    import app.model\nimport numpy', 'missing dep :model'),
        ('lib/maths.py', 'import numpy, lib.gone', 'imports lib.gone, which does not exist'),
        ('lib/maths.py', "import numpy\nif __name__ == '__main__': f()", 'runs as a script'),
        ('lib/maths_test.py', '', 'lib/maths_test.py in a py_library; py_test is for'),
        ('app/model.py', '', 'model: unused dep :lib'),
        ('app/model.py', 'import numpy, lib', 'model: missing dep @pypi//numpy'),
        ('app/run.py', 'from app.model import maths', 'does not run as a script'),
        ('app/run.py', "if __name__ == '__main__': f()", 'run: unused dep :model'),
        ('tests/conftest.py', 'import pytest, torch', 'or an extra of pyproject.toml'),
        ('tests/model_test.py', 'import pytest, app.model, lib', 'missing dep :lib'),
        ('tests/model_test.py', "import app.model\nx = 'app.run'", 'missing dep :run'),
        ('tests/model_test.py', "import app.model\nx = 'app/run.py'", 'missing dep :run'),
        (
            'tests/model_test.py',
            'import app.model, pytest\n@pytest.mark.slow\ndef test_x(): pass',
            "tags are [], the markers of its tests ['slow']",
        ),
        ('stray/x.py', '', 'stray/x.py: what it may import is not written in DIRECTIONS'),
    ],
)
def test_fault_of_a_file_is_reported(tree, file, text, fault):
    _write(tree, {file: text})
    faults = check(tree, DIRECTIONS)
    assert any(fault in line for line in faults), faults


@pytest.mark.parametrize(
    ('old', 'new', 'fault'),
    [
        ('"app/model.py"', '"app/modle.py"', 'model: source app/modle.py does not exist'),
        ('"app/model.py"', '"app/modle.py"', 'app/model.py: in no target'),
        ('["app/model.py"]', '["app/model.py", "lib/maths.py"]', 'in lib and model, wanted one'),
        ('"lib/**/*.py"', '"lib/*.py"', 'lib/inner/deep.py: in no target'),
        ('"lib/**/*.py"', '"bil/**/*.py"', 'matches nothing'),
        ('deps = [":lib"]', 'deps = [":bil"]', 'model: there is no target :bil'),
        ('deps = [":lib"]', 'deps = []', 'model: missing dep :lib'),
        ('deps = [":lib"]', 'deps = [":lib", ":run"]', 'model: unused dep :run'),
        ('deps = [":lib"]', 'deps = [":lib", "@pypi//jax"]', 'model: unused dep @pypi//jax'),
        ('[":conftest", "@', '["@', 'missing dep :conftest (pytest loads it'),
        ('name = "conftest"', 'name = "lib"', 'lib: several targets have this name'),
        ('py_binary(', 'py_library(', 'app/run.py runs as a script, and is in a py_library'),
        ('py_binary(', 'py_library(', 'py_binary is loaded and not used'),
        ('"py_binary", ', '', 'py_binary is used and not loaded'),
        ('_test.py", []', '_test.py", ["slow"]', "tags are ['slow'], the markers of its tests []"),
        ('"pyproject.toml"', '"absent.toml"', 'data absent.toml does not exist'),
    ],
)
def test_fault_of_build_is_reported(tree, old, new, fault):
    _edit(tree, 'BUILD', old, new)
    faults = check(tree, DIRECTIONS)
    assert any(fault in line for line in faults), faults


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('import os', r'BUILD:1: Import is not allowed'),
        ('load("x")\nprint(1)', r"'print' is not defined"),
        ('py_library(name = "x".upper())', 'BUILD:1: Attribute is not allowed'),
        ('py_library(name = "x"', 'BUILD:1: '),
        ('py_library(srcs = [])', 'name'),
    ],
)
def test_more_than_the_checked_subset_is_refused(tree, text, message):
    (tree / 'BUILD').write_text(text)
    with pytest.raises(BuildSyntaxError, match=message):
        check(tree, DIRECTIONS)


def test_script_may_import_what_is_there_or_not_inside_a_function(tree):
    code = "import app.model\ndef f():\n    import torch\nif __name__ == '__main__': f()"
    _write(tree, {'app/run.py': code})
    assert check(tree, DIRECTIONS) == []
    _write(tree, {'app/run.py': f'import torch\n{code}'})
    assert 'app/run.py: imports torch; torch is not in requirements.txt' in check(tree, DIRECTIONS)
