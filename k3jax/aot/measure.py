"""How fast is a kernel by libtpu's static simulator?

The flags of a simulation are read once in a process, and the simulator ends the process where one
of its own checks fails, often after it has written its figure. So every case is compiled in a child
for its program, and in another for the figures of each kernel in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from k3jax.aot.chips import VECTOR_SLOTS, Chip, chip_of
from k3jax.aot.compiler import ENVIRONMENT
from k3jax.aot.dumps import custom_calls, dump_flags, kernels
from pallas_kernels.common.case import Case, Tiles

ROOT = pathlib.Path(__file__).parents[2]
_HLO = 'optimised.hlo'
_TIMEOUT_S = 200  # of a child; the simulator needs some 5 s for a million cycles


class CompileError(RuntimeError):
    """A case did not compile; the message ends with the compiler's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """One case on one chip, None where there is no figure.

    cycles: of all its kernels, one core, by the simulator. seconds: the larger of these at the
    clock and the needed bytes at HBM's bandwidth. roofline_fraction: the time that the needed work
    takes at the chip's peaks, over seconds; bound: which peak.
    """

    cycles: int | None
    seconds: float | None
    vmem_bytes: int
    spills: int | None
    bundles: int | None
    roofline_fraction: float | None
    bound: str


def roofline_seconds(case: Case, chip: Chip) -> tuple[float, str]:
    """The least time for a case's work, and what sets it."""
    times = {
        'MXU': case.flops / chip.flops,
        'HBM': case.hbm_bytes / chip.hbm_bandwidth,
        'VPU': case.vector_ops / (VECTOR_SLOTS * chip.cores * chip.clock),
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def _compile_in_child(
    case: Case, tiles: Tiles | None, topology: str, folder: pathlib.Path, operation: str | None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENVIRONMENT | {'JAX_PLATFORMS': 'cpu'}
    if operation is not None:
        environment['LIBTPU_INIT_ARGS'] = dump_flags(folder, operation)
    command = [
        sys.executable,
        '-m',
        'k3jax.aot.compile_case',
        case.key,
        topology,
        str(folder / _HLO),
    ]
    command.append(json.dumps(None if tiles is None else dict(tiles)))
    try:
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, '', f'more than {_TIMEOUT_S} s')


def measure(case: Case, topology: str, tiles: Tiles | None = None) -> Figures:
    """Compiles and simulates a case; tiles None: the stored or default ones.

    Raises:
      CompileError: it does not compile.
    """
    chip = chip_of(topology)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        child = _compile_in_child(case, tiles, topology, folder, None)
        if child.returncode != 0:
            lines = child.stderr.strip().splitlines() or [f'exit status {child.returncode}']
            raise CompileError(f'{case.key} for {topology}: {lines[-1]}')
        hlo = (folder / _HLO).read_text()
        for operation in custom_calls(hlo):
            _compile_in_child(case, tiles, topology, folder, operation)
        found = kernels(hlo, folder)
    if not found:
        raise CompileError(f'{case.key} for {topology}: the program has no kernel in it')
    least, bound = roofline_seconds(case, chip)
    cycles, seconds = _total([k.cycles for k in found]), None
    if cycles is not None:
        seconds = max(cycles / chip.clock, case.hbm_bytes / chip.hbm_bandwidth)
    return Figures(
        cycles=cycles,
        seconds=seconds,
        vmem_bytes=max(k.vmem_bytes for k in found),
        spills=_total([k.spills for k in found]),
        bundles=_total([k.bundles for k in found]),
        roofline_fraction=None if seconds is None else least / seconds,
        bound=bound,
    )


def _total(counts: list[int | None]) -> int | None:
    return None if None in counts else sum(counts)
