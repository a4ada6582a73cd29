"""What the scripts share: the flags that make a config, and how a script reports a mistake."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, get_args

from absl import app, flags
from absl import logging as absl_logging

from k3jax import config as config_lib
from k3jax import overrides

_USER_ERRORS = (ValueError, NotImplementedError, OSError)
_NO_GCS = (
    "gs:// paths need the package gcsfs, which is not installed: pip install --editable '.[gcs]'"
)
_CONFIG, _SET, _WORKDIR = 'config', 'set', 'workdir'

_DEBUG = flags.DEFINE_bool('debug', False, 'Show the traceback of an error.')


def define_config_flags(
    *, config: str | None = None, workdir: str | None = None, has_workdir: bool = True
) -> None:
    """Registers --config, --set and --workdir, with defaults; for scripts that start from a config.

    Args:
      config, workdir: defaults; without one the flag must be given.
      has_workdir: false for a script that writes no folder of results.
    """
    flags.DEFINE_string(
        _CONFIG,
        config,
        'Python file with get_config(), such as configs/NAME.py.',
        required=not config,
    )
    flags.DEFINE_multi_string(
        _SET, [], 'path=value that changes the config, such as data.batch_size=16; may be repeated.'
    )
    if has_workdir:
        flags.DEFINE_string(
            _WORKDIR, workdir, 'Folder for all results, local or gs://.', required=not workdir
        )


def load_config() -> config_lib.Config:
    """The config that --config and --set ask for.

    Raises:
      ValueError: the file is not there, is not a config, or --set does not fit it.
    """
    return overrides.apply_overrides(config_from_file(flags.FLAGS.config), flags.FLAGS.set)


def define_activations_flags() -> None:
    """Registers --activations and --scale_rule; for scripts that run a checkpoint."""
    flags.DEFINE_enum(
        'activations',
        None,
        ['none', 'mxfp8'],
        "mxfp8: what enters each of the routed experts' products is rounded to MXFP8; none: it is "
        'not. By default as a workdir was trained, and none for a converted folder: a release does '
        'not say how it was trained.',
    )
    flags.DEFINE_enum(
        'scale_rule',
        None,
        list(get_args(config_lib.ScaleRule)),
        'Of --activations=mxfp8. By default that of a workdir; ocp_floor for a converted folder.',
    )


def activations() -> dict[str, Any]:
    """What --activations and --scale_rule say, for `open_model`; None where they say nothing."""
    return {name: flags.FLAGS[name].value for name in ('activations', 'scale_rule')}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Serving:
    """What --set changes in scripts that run a checkpoint on several chips."""

    mesh: config_lib.MeshConfig = config_lib.MeshConfig()


def define_mesh_flag() -> None:
    """Registers --set; for scripts that run a checkpoint, on one device or on a mesh."""
    flags.DEFINE_multi_string(
        _SET,
        [],
        'mesh.AXIS=chips, such as mesh.tensor=2: the mesh over all devices, of data (by default '
        'what the others leave), expert and tensor; without it, a single device. May be repeated.',
    )


def serving_mesh_config() -> config_lib.MeshConfig | None:
    """What --set says of the mesh, for `open_model`; None where it says nothing.

    Raises:
      ConfigError: --set does not fit a mesh.
    """
    given = flags.FLAGS.set
    return overrides.apply_overrides(_Serving(), given).mesh if given else None


def workdir() -> str:
    """What --workdir says."""
    return flags.FLAGS.workdir


def token_ids(text: str | None) -> list[int]:
    """The ids of --token_ids=5,17,...

    Raises:
      ValueError: nothing given, or something that is not a whole number.
    """
    if not text:
        raise ValueError('--token_ids: got none, wanted comma-separated ids such as 5,17')
    ids = []
    for part in text.split(','):
        try:
            ids.append(int(part))
        except ValueError:
            raise ValueError(
                f'--token_ids: got {part!r}, wanted whole numbers such as 5,17'
            ) from None
    return ids


def config_from_file(path: str) -> config_lib.Config:
    """What `get_config()` of a Python file returns.

    Raises:
      ValueError: there is no such file, or no such function in it, or it returns something else.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f'--config: got {path!r}, which is not a file; {_available(file)}')
    spec = importlib.util.spec_from_file_location(f'k3jax_config_{file.stem}', file)
    if spec is None or spec.loader is None:
        raise ValueError(f'--config: got {path!r}, wanted a Python file; {_available(file)}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, 'get_config', None)
    if get_config is None:
        raise ValueError(f'--config: {path} has no get_config(); {_available(file)}')
    config = get_config()
    if not isinstance(config, config_lib.Config):
        raise ValueError(
            f'--config: get_config() of {path} returned a {type(config).__name__}, wanted a '
            'k3jax.config.Config'
        )
    return config


class _OurLines(logging.Filter):
    """Lets through what this project logs, and warnings of anybody."""

    def filter(self, record: logging.LogRecord) -> bool:
        library = 'site-packages' in record.pathname or 'dist-packages' in record.pathname
        # Orbax warns of its own options on every use.
        lowest = logging.ERROR if 'orbax' in record.pathname else logging.WARNING
        return not library or record.levelno >= lowest


def _plain_logging() -> None:
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(logging.Formatter('%(message)s'))
    handler.addFilter(_OurLines())
    absl_logging.set_verbosity(absl_logging.INFO)


def run_main(main: Callable[[Sequence[str]], Any]) -> None:
    """Parses the flags, runs `main(argv)` and exits.

    A user's mistake (ValueError, NotImplementedError, OSError, or a gs:// path without gcsfs)
    becomes one line on stderr and exit code 1, as does a device without room; --debug keeps the
    traceback. Ctrl-C exits with 130.
    Anything else is a bug of ours and shows its traceback.
    """

    def guarded(argv: Sequence[str]) -> Any:
        _plain_logging()
        try:
            if len(argv) > 1:
                raise ValueError(f'arguments: got {" ".join(argv[1:])!r}, wanted only --flag=value')
            return main(argv)
        except _USER_ERRORS as e:
            if _DEBUG.value:
                traceback.print_exc()
            message = ' '.join(str(e).split()) or type(e).__name__
            print(f'error: {message}', file=sys.stderr)
            return 1
        except ImportError as e:
            if 'gcsfs' not in str(e):
                raise
            if _DEBUG.value:
                traceback.print_exc()
            print(f'error: {_NO_GCS}', file=sys.stderr)
            return 1
        except Exception as e:
            # JAX's own error; what was asked for is larger than the device.
            if type(e).__name__ != 'JaxRuntimeError' or 'RESOURCE_EXHAUSTED' not in str(e):
                raise
            if _DEBUG.value:
                traceback.print_exc()
            print(f'error: the device has no room: {str(e).splitlines()[0]}', file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print('interrupted', file=sys.stderr)
            return 130

    app.run(guarded)


def _available(file: pathlib.Path) -> str:
    """The configs that could have been meant: those beside `file`, or else those of the project."""
    for folder in (file.parent, pathlib.Path('configs')):
        found = [
            str(path)
            for path in sorted(folder.glob('*.py'))
            if not path.name.startswith('_') and 'def get_config' in path.read_text()
        ]
        if found:
            return f'there are: {", ".join(found)}'
    return 'wanted a Python file with get_config(), such as those in configs/'
