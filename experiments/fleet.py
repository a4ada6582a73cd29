"""What routing does to a fleet: `python -m experiments.fleet --json=rows.json --png=fleet.png`.

Simulates servers with prefix caches under a trace, made from a mix of conversations or read from a
file, and compares consistent hashing with other ways to route, by load or around the loss of a
server. Every rate is an assumption: see --set. Prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from absl import flags
from etils import epath

from k3jax.flags import run_main
from k3jax.overrides import apply_overrides
from k3jax.serve.fleet.simulation import POLICIES, Setup, simulate
from k3jax.serve.fleet.simulation_report import markdown, plot, report
from k3jax.serve.fleet.trace import make_trace, read_trace, summary

_SET = flags.DEFINE_multi_string(
    'set', [], 'Such as fleet.servers=16, fleet.fail_at_s=900 or mix.pause_s=5; may be repeated.'
)
_TRACE = flags.DEFINE_string('trace', None, 'JSON lines, in place of a mix and --loads.')
_LOADS = flags.DEFINE_list('loads', ['0.1', '0.2', '0.3', '0.4', '0.5', '0.6'], 'Conversations/s.')
_POLICIES = flags.DEFINE_list('policies', list(POLICIES), 'To be compared.')
_SECONDS = flags.DEFINE_float('seconds', 3600.0, 'In which conversations begin.')
_WARM_UP_S = flags.DEFINE_float('warm_up_s', 900.0, 'Of these, not counted.', lower_bound=0)
_SLO_S = flags.DEFINE_float('slo_s', 10.0, 'In which a first token is good.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the mix.', lower_bound=0)
_JSON = flags.DEFINE_string('json', None, 'File for all figures.')
_PNG = flags.DEFINE_string('png', None, 'File to draw the plot to.')


def _loads() -> list[float]:
    try:
        loads = [float(text) for text in _LOADS.value]
    except ValueError:
        loads = []
    if not loads or not all(0 < load < 1e4 for load in loads):
        raise ValueError(f'--loads: got {",".join(_LOADS.value)!r}, wanted numbers above 0')
    return loads


def main(argv: list[str]) -> None:
    del argv
    setup = apply_overrides(Setup(), _SET.value)
    unknown = [name for name in _POLICIES.value if name not in POLICIES]
    if unknown or not _POLICIES.value:
        got = ','.join(_POLICIES.value)
        raise ValueError(f'--policies: got {got!r}, wanted some of {", ".join(POLICIES)}')
    seconds, warm_up_s = _SECONDS.value, _WARM_UP_S.value
    if not warm_up_s < seconds < 1e6:
        raise ValueError(f'--warm_up_s: got {warm_up_s:g}, wanted less than --seconds={seconds:g}')
    if not _SLO_S.value > 0:
        raise ValueError(f'--slo_s: got {_SLO_S.value:g}, wanted more than 0')
    rows: list[dict[str, Any]] = []
    for load in [None] if _TRACE.value else _loads():
        if load is None:
            trace = read_trace(_TRACE.value)
        else:
            trace = make_trace(setup.mix, load, seconds, _SEED.value)
        print(f'{load or _TRACE.value}: {json.dumps(summary(trace))}', file=sys.stderr)
        for policy in _POLICIES.value:
            requests = simulate(trace, setup.fleet, policy)
            found = report(requests, warm_up_s, seconds, _SLO_S.value)
            rows.append({'load': load, 'policy': policy, **found})
    print(markdown(rows))
    fail_at_s = setup.fleet.fail_at_s
    if fail_at_s is not None:
        for row in rows:
            print(f'{row["load"]} {row["policy"]}: {json.dumps(row["lost"])}')
    if _JSON.value:
        assumed = dataclasses.asdict(setup)
        whole = {'assumed': assumed, 'slo_s': _SLO_S.value, 'seed': _SEED.value, 'rows': rows}
        epath.Path(_JSON.value).write_text(json.dumps(whole, indent=1) + '\n')
    if _PNG.value:
        epath.Path(_PNG.value).write_bytes(plot(rows, fail_at_s))


if __name__ == '__main__':
    run_main(main)
