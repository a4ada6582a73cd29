"""Does BUILD tell the truth? Its targets against the tree's files, imports and pytest markers.

BUILD is read as Python: the subset of Starlark that it may use is also valid Python. What a file
needs is what it imports, the `__init__.py` of every package on the way there, the conftest.py files
that pytest loads for it, and the modules it runs as scripts or opens by path, which are recognised
by their name in a string.
"""

from __future__ import annotations

import ast
import os
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

RULES = ('py_binary', 'py_library', 'py_test')
FUNCTIONS = (*RULES, 'glob', 'load', 'package')
# Where the import name is not the distribution's.
DISTRIBUTIONS = {
    'PIL': 'pillow',
    'absl': 'absl-py',
    'mlx_lm': 'mlx-lm',
    'mlx_vlm': 'mlx-vlm',
    'orbax': 'orbax-checkpoint',
}

# What each part of the project may import; the longest name that fits a module counts.
DIRECTIONS = {
    'pallas_kernels': ('pallas_kernels',),
    'k3jax': (),
    'k3jax.config': ('k3jax.config',),
    'k3jax.files': (),
    'k3jax.config_dict': ('k3jax.config',),
    'k3jax.overrides': ('k3jax.config',),
    'k3jax.flags': ('k3jax.config', 'k3jax.overrides'),
    'k3jax.processes': (),
    'k3jax.parallel': ('k3jax.config', 'k3jax.parallel', 'pallas_kernels'),
    'k3jax.model': ('k3jax.config', 'k3jax.model', 'k3jax.parallel', 'pallas_kernels'),
    'k3jax.aot': ('k3jax.aot', 'k3jax.model.scopes', 'pallas_kernels'),
    'k3jax.aot.sweep': ('k3jax.aot', 'k3jax.parallel'),
    'k3jax.aot.jobs': (
        'k3jax.config',
        'k3jax.model',
        'k3jax.parallel',
        'k3jax.serve',
        'k3jax.train',
    ),
    'k3jax.data': ('k3jax.config', 'k3jax.data'),
    'k3jax.convert': (
        'k3jax.config',
        'k3jax.config_dict',
        'k3jax.convert',
        'k3jax.files',
        'k3jax.model',
    ),
    'k3jax.train': (
        'k3jax.config',
        'k3jax.config_dict',
        'k3jax.data',
        'k3jax.files',
        'k3jax.model',
        'k3jax.parallel',
        'k3jax.train',
        'pallas_kernels',
    ),
    'k3jax.serve': (
        'k3jax.config',
        'k3jax.config_dict',
        'k3jax.convert',
        'k3jax.data',
        'k3jax.files',
        'k3jax.model',
        'k3jax.parallel',
        'k3jax.serve',
        'k3jax.train',
        'pallas_kernels',
    ),
    'k3jax.post_train': (
        'k3jax.config',
        'k3jax.data',
        'k3jax.files',
        'k3jax.model',
        'k3jax.post_train',
        'k3jax.serve',
        'k3jax.train',
    ),
    'configs': ('configs', 'k3jax.config'),
    'experiments': ('configs', 'k3jax', 'pallas_kernels'),
    # Its other half runs under another environment's Python; both name the same workload.
    'experiments.bench': ('configs', 'experiments.bench_peers', 'k3jax', 'pallas_kernels'),
    'experiments.bench_engine': ('configs', 'experiments.bench_peers', 'k3jax'),
    'tests': ('configs', 'k3jax', 'pallas_kernels', 'tests'),
}


class BuildSyntaxError(ValueError):
    """BUILD uses more than the checked subset; the message names the line."""


class Target(NamedTuple):
    """One rule of BUILD, its globs expanded."""

    rule: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]
    data: tuple[str, ...]
    tags: tuple[str, ...]
    main: str | None


class Source(NamedTuple):
    """What a file says about itself.

    imports: (module, name) pairs, name None for `import module`. eager: modules imported outside of
    any function. strings: its string literals. markers: pytest markers it uses. is_script: runs
    something when it is the main module.
    """

    imports: frozenset[tuple[str, str | None]]
    eager: frozenset[str]
    strings: frozenset[str]
    markers: frozenset[str]
    is_script: bool


def python_files(root: pathlib.Path) -> list[str]:
    """Every .py file but those in hidden folders and virtual environments, relative to `root`."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith('.')
            and name != '__pycache__'
            and not (pathlib.Path(folder) / name / 'pyvenv.cfg').exists()
        ]
        where = pathlib.Path(folder).relative_to(root)
        found += [(where / name).as_posix() for name in files if name.endswith('.py')]
    return sorted(found)


_ALLOWED = (
    ast.Module,
    ast.Expr,
    ast.Call,
    ast.keyword,
    ast.Name,
    ast.Load,
    ast.Store,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.ListComp,
    ast.comprehension,
    ast.BinOp,
    ast.Add,
)


def _check_subset(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        method = isinstance(node, ast.Attribute) and node.attr == 'replace'
        if not isinstance(node, _ALLOWED) and not method:
            line = getattr(node, 'lineno', 0)
            raise BuildSyntaxError(f'BUILD:{line}: {type(node).__name__} is not allowed here')


def _matches(path: str, pattern: str) -> bool:
    """Bazel's glob: `*` stays within a folder, `**` crosses folders."""
    parts = re.split(r'(\*\*/|\*)', pattern)
    regex = ''.join({'**/': '(?:.*/)?', '*': '[^/]*'}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(regex, path) is not None


def read_build(root: pathlib.Path) -> tuple[list[Target], list[str]]:
    """Targets of `root`/BUILD, and what is wrong with the file itself.

    Raises:
      BuildSyntaxError: it uses something outside the checked subset.
    """
    text = (root / 'BUILD').read_text()
    try:
        tree = ast.parse(text, 'BUILD')
    except SyntaxError as error:
        raise BuildSyntaxError(f'BUILD:{error.lineno}: {error.msg}') from None
    _check_subset(tree)
    files = python_files(root)
    targets: list[Target] = []
    faults: list[str] = []
    loaded: set[str] = set()

    def load(_: str, *names: str) -> None:
        loaded.update(names)

    def package(**_: Any) -> None:
        pass

    def glob(patterns: list[str], exclude: list[str] = ()) -> list[str]:
        found = [
            f
            for f in files
            if any(_matches(f, p) for p in patterns) and not any(_matches(f, p) for p in exclude)
        ]
        if not found:
            faults.append(f'BUILD: glob({patterns}) matches nothing')
        return found

    def rule(kind: str) -> Any:
        def declare(*, name: str, srcs=(), deps=(), data=(), tags=(), main=None, **_: Any) -> None:
            lists = (tuple(x) for x in (srcs, deps, data, tags))
            targets.append(Target(kind, name, *lists, main))

        return declare

    names = {'load': load, 'package': package, 'glob': glob} | {kind: rule(kind) for kind in RULES}
    try:
        exec(compile(tree, 'BUILD', 'exec'), {'__builtins__': {}, **names})
    except (NameError, TypeError) as error:
        raise BuildSyntaxError(f'BUILD: {error}') from None
    used = {target.rule for target in targets}
    faults += [f'BUILD: {kind} is used and not loaded' for kind in sorted(used - loaded)]
    faults += [f'BUILD: {kind} is loaded and not used' for kind in sorted(loaded - used)]
    return targets, faults


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and '__name__' in {
        n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)
    }


def _imported(node: ast.Import | ast.ImportFrom) -> set[tuple[str, str | None]]:
    if isinstance(node, ast.Import):
        return {(alias.name, None) for alias in node.names}
    return {('.' * node.level + (node.module or ''), alias.name) for alias in node.names}


def read_source(path: pathlib.Path) -> Source:
    """Parses one file."""
    tree = ast.parse(path.read_text(), str(path))
    imports: set[tuple[str, str | None]] = set()
    eager, strings, markers = set(), set(), set()
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = _imported(node)
            imports |= found
            eager |= set() if id(node) in inside else {module for module, _ in found}
        match node:
            case ast.Constant(value=str(value)):
                strings.add(value)
            case ast.Attribute(value=ast.Attribute(value=ast.Name('pytest'), attr='mark')):
                markers.add(node.attr)
    is_script = any(_is_main_guard(node) for node in tree.body)
    return Source(
        *(frozenset(found) for found in (imports, eager, strings, markers)), is_script=is_script
    )


def _distribution(requirement: str) -> str:
    name = re.match(r'[A-Za-z0-9._-]+', requirement)
    return re.sub(r'[-_.]+', '-', name[0]).lower() if name else ''


def _declared(root: pathlib.Path) -> tuple[set[str], set[str], set[str]]:
    """Distributions of the runtime, those of the runtime and all extras, and pytest's markers."""
    lines = (root / 'requirements.txt').read_text().splitlines()
    runtime = {_distribution(line) for line in lines if line and not line.startswith('#')}
    project = tomllib.loads((root / 'pyproject.toml').read_text())
    extras = project.get('project', {}).get('optional-dependencies', {}).values()
    everything = runtime | {_distribution(line) for extra in extras for line in extra}
    options = project.get('tool', {}).get('pytest', {}).get('ini_options', {})
    markers = {line.split(':')[0].strip() for line in options.get('markers', [])}
    return runtime, everything, markers


def _label(distribution: str) -> str:
    return f'@pypi//{distribution.replace("-", "_")}'


def _module(file: str) -> str:
    return file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


class Checker:
    """One tree, read once."""

    def __init__(self, root: pathlib.Path, directions: Mapping[str, tuple[str, ...]]):
        self.root, self.directions = root, directions
        self.targets, self.faults = read_build(root)
        self.files = python_files(root)
        self.sources = {file: read_source(root / file) for file in self.files}
        self.modules = {_module(file): file for file in self.files}
        self.parts = {file.split('/')[0] for file in self.files}
        self.runtime, self.everything, self.known_markers = _declared(root)
        self.runners = {t.main for t in self.targets if t.rule == 'py_test' and t.main}
        self.runners -= {file for file in self.files if file.endswith('_test.py')}
        self.edges: dict[str, list[str]] = {}  # by what is declared and by what is needed
        self.owners: dict[str, list[str]] = {file: [] for file in self.files}
        for target in self.targets:
            for src in target.srcs:
                if src not in self.runners:
                    self.owners.setdefault(src, []).append(target.name)

    def check(self) -> list[str]:
        """Every fault, each a line that says where and what."""
        self.faults += [
            *self._check_names(),
            *self._check_files(),
            *self._check_kinds(),
            *self._check_directions(),
            *self._check_deps(),
            *self._check_cycles(),
        ]
        return self.faults

    def _check_names(self) -> Iterator[str]:
        names = [target.name for target in self.targets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f'{name}: several targets have this name'
        for target in self.targets:
            for dep in target.deps:
                if dep.startswith(':') and dep[1:] not in names:
                    yield f'{target.name}: there is no target {dep}'

    def _check_files(self) -> Iterator[str]:
        for file, owners in sorted(self.owners.items()):
            if file not in self.sources:
                yield f'{owners[0]}: source {file} does not exist'
            elif len(owners) != 1 and file not in self.runners:
                yield f'{file}: in {" and ".join(owners) if owners else "no target"}, wanted one'
        for target in self.targets:
            for file in target.data:
                if not (self.root / file).exists():
                    yield f'{target.name}: data {file} does not exist'

    def _check_kinds(self) -> Iterator[str]:
        """Tests are py_test with the right tags, scripts py_binary, and nothing else is."""
        for target in self.targets:
            own = [src for src in target.srcs if src in self.sources and src not in self.runners]
            for src in own:
                if src.endswith('_test.py') != (target.rule == 'py_test'):
                    yield f'{target.name}: {src} in a {target.rule}; py_test is for *_test.py'
                if self.sources[src].is_script != (target.rule == 'py_binary'):
                    what = 'runs' if self.sources[src].is_script else 'does not run'
                    yield f'{target.name}: {src} {what} as a script, and is in a {target.rule}'
            if target.rule == 'py_test':
                markers = {m for src in own for m in self.sources[src].markers}
                markers &= self.known_markers
                if markers != set(target.tags):
                    yield (
                        f'{target.name}: tags are {sorted(target.tags)}, '
                        f'the markers of its tests {sorted(markers)}'
                    )

    def _part(self, module: str) -> str | None:
        fitting = [p for p in self.directions if f'{module}.'.startswith(f'{p}.')]
        return max(fitting, key=len, default=None)

    def _check_directions(self) -> Iterator[str]:
        for file in self.files:
            module = _module(file)
            part = self._part(module)
            if part is None:
                yield f'{file}: what it may import is not written in DIRECTIONS'
                continue
            allowed = self.directions[part]
            for imported in sorted(self._imported_modules(file)):
                if not any(f'{imported}.'.startswith(f'{a}.') for a in allowed):
                    yield (
                        f'{file}: imports {imported}; {part} may import '
                        f'{", ".join(allowed) or "no other part"}'
                    )

    def _imported_modules(self, file: str) -> set[str]:
        """First-party modules that `file` imports by name."""
        found = set()
        for module, name in self.sources[file].imports:
            if module.split('.')[0] in self.parts:
                inner = f'{module}.{name}'
                found.add(inner if inner in self.modules else module)
        return found

    def _packages(self, module: str) -> Iterator[str]:
        """The `__init__.py` files that importing `module` runs before it."""
        parts = module.split('.')
        for end in range(1, len(parts)):
            file = self.modules.get('.'.join(parts[:end]))
            if file:
                yield file

    def _needed_files(self, file: str) -> dict[str, str]:
        """First-party files that `file` needs, each with the reason."""
        needed = {package: f'{file} is inside it' for package in self._packages(_module(file))}
        for module in self._imported_modules(file):
            reason = f'{file} imports {module}'
            needed |= {package: reason for package in self._packages(module)}
            if module in self.modules:
                needed[self.modules[module]] = reason
            elif not any(m.startswith(f'{module}.') for m in self.modules):
                self.faults.append(f'{reason}, which does not exist')
        for text in self.sources[file].strings:
            script = self.modules.get(text, text)
            if script in self.sources and (self.sources[script].is_script or text == script):
                needed |= {p: f'{file} runs {text}' for p in self._packages(_module(script))}
                needed[script] = f'{file} names {text}'
        if file.endswith('_test.py'):
            for parent in pathlib.PurePosixPath(file).parents:
                conftest = (parent / 'conftest.py').as_posix()
                if conftest in self.sources:
                    needed[conftest] = f'pytest loads it for {file}'
        return needed

    def _third_party(self, file: str, allowed: set[str], where: str) -> Iterator[tuple[str, str]]:
        """(label, reason) of each other distribution that `file` imports."""
        for module, _ in self.sources[file].imports:
            if module.startswith('.'):
                self.faults.append(f'{file}: relative import {module}; write the full name')
                continue
            top = module.split('.')[0]
            if top in sys.stdlib_module_names or top in self.parts:
                continue
            name = _distribution(DISTRIBUTIONS.get(top, top))
            source = self.sources[file]
            if name not in allowed and source.is_script and module not in source.eager:
                continue  # a script may use, inside a function, what is there or not
            if name not in allowed:
                self.faults.append(f'{file}: imports {module}; {name} is not in {where}')
            yield _label(name), f'{file} imports {module}'

    def _check_deps(self) -> Iterator[str]:
        for target in self.targets:
            wanted: dict[str, str] = {}
            is_test = any(src.startswith('tests/') for src in target.srcs)
            allowed = self.everything if is_test else self.runtime
            where = 'requirements.txt' + (' or an extra of pyproject.toml' if is_test else '')
            for src in target.srcs:
                if src not in self.sources:
                    continue
                for file, reason in self._needed_files(src).items():
                    for owner in self.owners[file]:
                        wanted[f':{owner}'] = reason
                wanted |= dict(self._third_party(src, allowed, where))
            wanted.pop(f':{target.name}', None)
            self.edges[target.name] = [d[1:] for d in {*wanted, *target.deps} if d[0] == ':']
            for dep in sorted(wanted.keys() - set(target.deps)):
                yield f'{target.name}: missing dep {dep} ({wanted[dep]})'
            for dep in sorted(set(target.deps) - wanted.keys()):
                yield f'{target.name}: unused dep {dep}'

    def _check_cycles(self) -> Iterator[str]:
        done: set[str] = set()

        def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
            if name in path:
                yield f'cycle: {" -> ".join((*path[path.index(name) :], name))}'
            elif name not in done:
                for dep in sorted(self.edges.get(name, ())):
                    yield from visit(dep, (*path, name))
                done.add(name)

        for name in self.edges:
            yield from visit(name, ())


def check(root: pathlib.Path, directions: Mapping[str, tuple[str, ...]] = DIRECTIONS) -> list[str]:
    """Every fault of `root`/BUILD, as lines."""
    return Checker(root, directions).check()
