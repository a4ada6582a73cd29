"""What libtpu says of the kernels it compiled: cycles, spills, bundles, VMEM."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

_ESTIMATE = re.compile(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)')
_USED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"')
_CALL = re.compile(r'%([\w.\-]+) = .*custom_call_target="tpu_custom_call"')
_DUMP = re.compile(r'\d+-(.+)-\d+-final_(bundles|hlo-static-per-bundle-utilization)\.txt$')
_BUNDLE = re.compile(r'^ *(?:0x[0-9a-f]+|0) .*: .*\{', re.MULTILINE)
_SPILLS = 9  # column of the utilisation table

PROFILE, BUNDLES = 'profile', 'bundles'  # folders inside a dump


class Kernel(NamedTuple):
    """One custom call. cycles: None where the simulator gave none. spills: stores of registers that
    did not fit, in the whole body once."""

    name: str
    vmem_bytes: int
    cycles: int | None
    bundles: int | None
    spills: int | None


def dump_flags(folder: pathlib.Path, operation: str) -> str:
    """LIBTPU_INIT_ARGS that make libtpu simulate and dump one HLO operation into `folder`."""
    # Only one: many of XLA's own copies end the simulator.
    return (
        f'--xla_jf_dump_only_matching_hlo={operation} '
        f'--xla_jf_dump_static_llo_profile_to={folder / PROFILE} '
        f'--xla_jf_dump_to={folder / BUNDLES} --xla_jf_dump_llo_text=true '
        '--xla_jf_dump_llo_pass_label_regex=.*final_.*'
    )


def custom_calls(hlo: str) -> dict[str, int]:
    """Name of each kernel call in optimised HLO text -> the bytes of VMEM it uses."""
    calls = {}
    for line in hlo.splitlines():
        if call := _CALL.search(line):
            used = _USED_VMEM.search(line)
            calls[call.group(1)] = int(used.group(1)) if used else 0
    return calls


def simulated_cycles(folder: pathlib.Path) -> dict[str, int]:
    """Cycles by HLO operation, of one core."""
    cycles = {}
    for path in (folder / PROFILE).glob('*'):
        cycles |= {name: int(count) for name, count in _ESTIMATE.findall(path.read_text())}
    return cycles


def _columns(text: str) -> list[list[int]]:
    rows = [line.split() for line in text.splitlines() if re.fullmatch(r'[\d ]+', line)]
    return [[int(x) for x in row] for row in rows if len(row) == 11]


def bundles_and_spills(folder: pathlib.Path) -> tuple[dict[str, int], dict[str, int]]:
    """Instruction bundles and spills by HLO operation."""
    bundles, spills = {}, {}
    for path in (folder / BUNDLES).glob('*'):
        match = _DUMP.match(path.name)
        if not match:
            continue
        name, kind = match.groups()
        if kind == 'bundles':
            bundles[name] = len(_BUNDLE.findall(path.read_text()))
        else:
            # The first row holds the capacities.
            spills[name] = sum(row[_SPILLS] for row in _columns(path.read_text())[1:])
    return bundles, spills


def kernels(hlo: str, folder: pathlib.Path) -> list[Kernel]:
    """Every kernel of a compiled program with what `folder` says of it."""
    cycles = simulated_cycles(folder)
    bundles, spills = bundles_and_spills(folder)
    return [
        Kernel(name, vmem, cycles.get(name), bundles.get(name), spills.get(name))
        for name, vmem in custom_calls(hlo).items()
    ]
