"""How several processes become one run: flags, start-up, one log."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags, logging

_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of process 0, the same for every process of a run.'
)
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'Processes of the run.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.')
_FROM_ENVIRONMENT = flags.DEFINE_bool(
    'distributed', False, 'Find the other processes from the environment, as on a TPU pod.'
)
_TIMEOUT = flags.DEFINE_integer(
    'process_timeout',
    100,
    'Seconds after which a process that is not heard of ends the others.',
    lower_bound=1,
)


def start() -> None:
    """Joins the processes that the flags name; to be called before anything asks for a device.

    Only process 0 logs what is not a warning.

    Raises:
      ValueError: the flags name no complete set of processes.
    """
    given = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    limits = {
        'heartbeat_timeout_seconds': _TIMEOUT.value,
        'shutdown_timeout_seconds': _TIMEOUT.value,
    }
    if _FROM_ENVIRONMENT.value:
        if given != (None, None, None):
            raise ValueError('--distributed: got --coordinator and such too, wanted one or other')
        _join(**limits)
    elif given != (None, None, None):
        coordinator, count, number = given
        if None in given:
            raise ValueError(
                f'--coordinator={coordinator} --num_processes={count} --process_id={number}: '
                'wanted all three, or none for a single process'
            )
        host, _, port = coordinator.rpartition(':')
        if not host or not port.isdigit():
            raise ValueError(f'--coordinator: got {coordinator!r}, wanted HOST:PORT')
        if count < 1:
            raise ValueError(f'--num_processes: got {count}, wanted 1 or more')
        if not 0 <= number < count:
            raise ValueError(f'--process_id: got {number}, wanted 0..{count - 1}')
        _join(coordinator, count, number, **limits)
    if jax.process_index() > 0:
        logging.set_verbosity(logging.WARNING)


def _join(*args: Any, **limits: int) -> None:
    try:
        jax.distributed.initialize(*args, **limits)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f'--coordinator, --distributed: the processes did not find each other ({error}); say '
            'where process 0 is, and start all of them within five minutes'
        ) from error


@contextlib.contextmanager
def ends_together() -> Iterator[None]:
    """A context whose error ends this process at once where it is one of several.

    A process that left in the ordinary way would wait for the others, and they for it.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        print(f'error: process {jax.process_index()}: {error}', file=sys.stderr, flush=True)
        os._exit(1)
