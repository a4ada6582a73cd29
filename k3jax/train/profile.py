"""Where the time of a compiled function goes: profiler events summed by the model's scopes."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping

import jax

from k3jax.model.scopes import OTHER, scope_of

_CONTAINERS = ('while', 'call', 'conditional')  # their time is that of what they contain


def op_scopes(hlo_text: str) -> dict[str, str]:
    """Scope of each op of an optimised HLO module, by the op's name."""
    scopes = {}
    for line in hlo_text.splitlines():
        op = re.match(r'\s*(?:ROOT )?%?([\w.\-]+) = ', line)
        name = re.search(r'op_name="([^"]*)"', line)
        if op:
            scopes[op.group(1)] = scope_of(name.group(1)) if name else OTHER
    return scopes


def time_by_scope(run: Callable[[], object], scopes: Mapping[str, str]) -> list[tuple[str, float]]:
    """Runs once under the profiler; shares of the op time by scope, largest first.

    Args:
      run: calls the compiled function and waits for it.
      scopes: `op_scopes` of that function.
    """
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).glob('plugins/profile/*/*.trace.json.gz')
        events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        name, is_op = event.get('name', ''), 'hlo_op' in event.get('args', {})
        if event.get('ph') == 'X' and is_op and not name.startswith(_CONTAINERS):
            total[scopes.get(name, OTHER)] += event['dur']
    whole = sum(total.values()) or 1
    return [(name, spent / whole) for name, spent in total.most_common()]
