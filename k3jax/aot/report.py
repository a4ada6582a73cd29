"""What is said of a compiled job: the object for JSON, and the table for a terminal."""

from __future__ import annotations

import collections
import dataclasses
import resource
from collections.abc import Iterator
from typing import Any

from k3jax.aot.compile_job import Compiled
from k3jax.aot.estimate import Estimate, Rates, Seconds, estimate, mfu, seconds_of
from k3jax.aot.memory import GIB, gib
from k3jax.aot.program import KERNEL_OP, Program, analyse, collective_bytes, kernel_name
from k3jax.aot.work import COLLECTIVES
from k3jax.model.scopes import scope_of

Report = dict[str, Any]
_SCOPE_SHARES = ('compute', 'memory', 'communication')


def make_report(
    compiled: Compiled, rates: Rates, num_chips: int, model_flops: float, tokens: int
) -> Report:
    """The figures of a job, those of memory only where it does not fit.

    Args:
      model_flops: that the model needs for a step, all chips, without recomputation.
      tokens: of a step, all chips.
    """
    memory = compiled.memory
    report = {
        'estimate': True,
        'error': compiled.error,
        'tokens': tokens,
        'model_flops': model_flops,
        'compile_seconds': compiled.seconds,
        'host_peak_bytes': host_peak_bytes(),
        'hbm': dataclasses.asdict(memory) | {'headroom': memory.headroom},
        'buffers': [buffer._asdict() for buffer in compiled.buffers],
    }
    if compiled.text is None:
        return report
    program = analyse(compiled.text, num_chips)
    return report | _program_part(program, rates, num_chips, model_flops, tokens)


def share_of_step(
    model_flops: float, seconds: Seconds, num_chips: int, peak_flops: float
) -> dict[str, float]:
    """What a step's seconds go to, as shares that add up to 1.

    model: FLOPs that the model needs, at the peak: the MFU. other_compute: recomputation, padding,
    and what products and kernels stay below the peak. memory: less the model's FLOPs that are in
    it, where HBM limits more than they fill of compute. communication: as estimated.
    """
    model = mfu(model_flops, seconds.step, num_chips, peak_flops)
    communication = seconds.communication / seconds.step
    other = max(0.0, seconds.compute / seconds.step - model)
    return {
        'model': model,
        'other_compute': other,
        'memory': 1 - model - other - communication,
        'communication': communication,
    }


def _kernels(program: Program, rates: Rates) -> list[Report]:
    calls: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for op in program.ops:
        if op.kind == KERNEL_OP:
            one = seconds_of(op, rates).step
            name, cost = kernel_name(op.name), (op.flops, op.hbm_bytes)
            calls[(name, scope_of(op.op_name), *cost, op.vmem_bytes, op.has_cost, one)] += op.times
    fields = ('name', 'scope', 'flops', 'hbm_bytes', 'vmem_bytes', 'has_cost', 'seconds')
    rows = []
    for key, count in calls.items():
        row = dict(zip(fields, key, strict=True))
        given = 'given' if row['name'] in rates.kernel_seconds else 'share of the roofline'
        cycles = round(row['seconds'] * rates.chip.clock)
        rows.append(row | {'calls': count, 'cycles': cycles, 'cycles_from': given})
    return sorted(rows, key=lambda row: -row['calls'] * row['seconds'])


def _collectives(program: Program) -> list[Report]:
    sums: dict[tuple[str, int, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for op in program.ops:
        if op.kind in COLLECTIVES:
            row = sums[(op.kind, op.group, scope_of(op.op_name))]
            row[0] += op.times
            row[1] += op.times * op.sent_bytes
    rows = [
        {'kind': kind, 'group': group, 'scope': scope, 'count': count, 'bytes': sent}
        for (kind, group, scope), (count, sent) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row['bytes'])


def _scopes(found: Estimate) -> list[Report]:
    rows = [
        {'scope': scope, 'direction': direction} | part._asdict() | {'seconds': part.step}
        for (scope, direction), part in found.by_scope.items()
    ]
    return sorted(rows, key=lambda row: -row['seconds'])


def _program_part(
    program: Program, rates: Rates, num_chips: int, model_flops: float, tokens: int
) -> Report:
    """What a chip does in a step, and how long that is estimated to take."""
    found = estimate(program, rates)
    step, peak = found.total.step, rates.chip.flops
    return {
        'flops': program.total('flops'),
        'hbm_bytes': program.total('hbm_bytes'),
        'host_bytes': program.total('host_bytes'),
        'step_seconds': step,
        'seconds': found.total._asdict(),
        'tokens_per_second': tokens / step,
        'mfu': mfu(model_flops, step, num_chips, peak),
        'shares': share_of_step(model_flops, found.total, num_chips, peak),
        'scopes': _scopes(found),
        'collectives': collective_bytes(program),
        'collective_groups': _collectives(program),
        'kernels': _kernels(program, rates),
        'loops': [loop._asdict() | {'scope': scope_of(loop.op_name)} for loop in program.loops],
        'unknown_loops': program.unknown_loops,
        'conditionals': program.conditionals,
        'rates': {
            'flops': peak,
            'hbm_bandwidth': rates.chip.hbm_bandwidth,
            'ici_bandwidth': rates.ici_bandwidth,
            'matmul_efficiency': rates.matmul_efficiency,
            'kernel_efficiency': dict(rates.kernel_efficiency),
            'kernel_seconds': dict(rates.kernel_seconds),
            'other_kernels': rates.other_kernels,
        },
    }


def host_peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def seconds(number: float) -> str:
    """With a unit that fits."""
    for unit, size in (('s', 1.0), ('ms', 1e-3)):
        if number >= size:
            return f'{number / size:.3g} {unit}'
    return f'{number / 1e-6:.3g} us'


def trips(loop: Report) -> str:
    """'5', '<= 5' where data decides, or '?'."""
    if loop['trips'] is None:
        return '?'
    return str(loop['trips']) if loop['exact'] else f'<= {loop["trips"]}'


def notes(report: Report) -> list[str]:
    """What a reader of the estimate must know."""
    found = [
        'An estimate, not a measurement: compute, memory and communication are summed, nothing '
        'overlaps, vector work outside kernels costs nothing beside its bytes, and starting an '
        "operation or an exchange and traffic to the host's memory cost nothing."
    ]
    if report.get('slices', 1) > 1:
        found.append(
            f'{report["slices"]} slices: what crosses the network between them is counted as if it '
            'were within one.'
        )
    if report.get('note'):
        found.append(report['note'])
    without = sorted({row['name'] for row in report.get('kernels', ()) if not row['has_cost']})
    if without:
        found.append(
            f'Kernels without a CostEstimate, their FLOPs counted as 0: {", ".join(without)}.'
        )
    if report.get('unknown_loops'):
        found.append(
            f'Loops with unknown trip counts, counted once: {", ".join(report["unknown_loops"])}.'
        )
    bounded = [row['name'] for row in report.get('loops', ()) if not row['exact']]
    if bounded:
        found.append(
            f'Loops whose trips depend on data, counted at the most: {", ".join(bounded)}.'
        )
    if report.get('conditionals'):
        found.append(
            f'Of {report["conditionals"]} conditionals the branch with the most work is counted.'
        )
    return found


def _head(report: Report) -> Iterator[str]:
    mesh = ' '.join(f'{axis}={size}' for axis, size in report['mesh'].items())
    yield f'{report["job"]} of {report["config"]} on {report["topology"]}: {mesh}'
    yield (
        f'compiled in {report["compile_seconds"]:.0f} s with '
        f'{gib(report["host_peak_bytes"])} of host memory'
    )
    hbm = report['hbm']
    parts = ('argument', 'output', 'alias', 'temp', 'code', 'peak', 'required', 'limit', 'headroom')
    shown = [f'{name} {gib(hbm[name])}' for name in parts if hbm[name] is not None]
    yield f'HBM a chip: {", ".join(shown)}'
    if hbm['host']:
        yield f'host memory a chip: {gib(hbm["host"])}'


def _buffer_table(report: Report) -> Iterator[str]:
    yield 'largest buffers in use at the peak:'
    yield f'  {"GiB":>9s} {"count":>5s} {"kind":10s} {"shape":34s} from'
    for row in report['buffers']:
        size = f'{row["bytes"] / GIB:9.3f} {row["count"]:5d}'
        yield f'  {size} {row["kind"]:10s} {row["shape"][:34]:34s} {row["op_name"][-90:]}'


def _figures(report: Report) -> Iterator[str]:
    yield (
        f'a chip, a step: {report["flops"]:.4g} FLOPs in products, '
        f'{report["hbm_bytes"]:.4g} bytes of HBM, {report["host_bytes"]:.4g} to and from the host'
    )
    yield 'collectives (bytes that a chip sends):'
    for row in report['collective_groups']:
        where = f'{row["kind"]} among {row["group"]}'
        yield f'  {where:32s} {row["bytes"]:11.4g} {row["count"]:7d} times  {row["scope"]}'
    yield 'Pallas kernels (seconds and cycles of a call: estimate):'
    for row in report['kernels']:
        cost = f'{row["flops"]:10.4g} FLOPs {row["hbm_bytes"]:10.4g} B'
        vmem = f'{row["vmem_bytes"] / 2**20:5.1f} MiB'
        time = f'{seconds(row["seconds"]):>9s} {row["cycles"]:>11,d} cycles'
        yield f'  {row["name"]:30s} {row["calls"]:6d} times {cost} {vmem} {time}'
    yield 'loops:'
    for row in report['loops']:
        yield f'  {row["name"]:30s} {trips(row)} trips, {row["times"]} times  {row["scope"]}'
    yield 'step time (estimate, seconds):'
    header = ' '.join(f'{name:>14s}' for name in ('all', *_SCOPE_SHARES))
    yield f'  {"":32s} {header} {"share":>7s}'
    for row in report['scopes']:
        shown = ' '.join(f'{row[name]:14.4g}' for name in ('seconds', *_SCOPE_SHARES))
        share = row['seconds'] / report['step_seconds']
        yield f'  {row["scope"] + " " + row["direction"]:32s} {shown} {share:7.1%}'
    total = ' '.join(f'{report["seconds"][name]:14.4g}' for name in _SCOPE_SHARES)
    yield f'  {"all":32s} {report["step_seconds"]:14.4g} {total} {1:7.1%}'
    shares = ', '.join(f'{name} {share:.1%}' for name, share in report['shares'].items())
    yield f'of the step (estimate): {shares}'
    yield (
        f'estimate: {seconds(report["step_seconds"])} a step, MFU {report["mfu"]:.1%}, '
        f'{report["tokens_per_second"]:,.0f} tokens a second'
    )


def table(report: Report) -> str:
    """A report as text."""
    lines = list(_head(report))
    if report['error']:
        lines += [report['error'], *_buffer_table(report)]
    else:
        lines += [*_figures(report), *notes(report)]
    return '\n'.join(lines)
