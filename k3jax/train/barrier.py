"""Where processes wait for each other without an exchange between devices."""

from __future__ import annotations

import itertools

import jax
from orbax.checkpoint import multihost

# Longer than any compilation; a process that dies ends the others long before.
_TIMEOUT = 3600

_meetings = itertools.count()


def wait_for_all() -> None:
    """Returns once every process of the run has called this as often as this one."""
    number = next(_meetings)
    if jax.process_count() > 1:
        everyone = set(range(jax.process_count()))
        name = f'k3jax {number}'
        multihost.sync_global_processes(name, timeout=_TIMEOUT, processes=everyone)
