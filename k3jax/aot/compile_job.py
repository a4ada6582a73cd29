"""How a lowered program becomes numbers: its text, its memory, or why it does not fit."""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import NamedTuple

import jax

from k3jax.aot.chips import Chip
from k3jax.aot.hlo import op_names
from k3jax.aot.memory import (
    Buffer,
    Memory,
    gib,
    is_out_of_memory,
    largest_buffers,
    memory_of,
    memory_of_failure,
)

MOST_BUFFERS = 20
# What XLA's dump calls the text that compiled.as_text() would give; without one, earlier stages.
_TEXTS = ('*after_codegen.txt', '*oom_intermediate_module.txt', '*after_optimizations.txt')


class Compiled(NamedTuple):
    """text: of the optimised program, None where it does not fit; error: then the reason."""

    text: str | None
    memory: Memory
    buffers: list[Buffer]
    seconds: float
    error: str | None


def compile_lowered(lowered: jax.stages.Lowered, chip: Chip) -> Compiled:
    """Compiles, and reads the program from XLA's dump.

    `compiled.as_text()` fails for programs in which libtpu 0.0.52 runs a scatter beside other work
    (async-update); the dump is written without reading the program back.

    Raises:
      jax.errors.JaxRuntimeError: it does not compile, for another reason than HBM.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, started, error = pathlib.Path(name), time.perf_counter(), None
        options = {'xla_dump_to': name, 'xla_dump_hlo_as_text': True}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as e:
            if not is_out_of_memory(e):
                raise
            error = e
        seconds = time.perf_counter() - started
        text = _text(folder)
        buffers = largest_buffers(folder, op_names(text or ''), MOST_BUFFERS)
        if error is not None:
            memory = memory_of_failure(error, folder, chip)
            needs, has = gib(memory.required), gib(memory.limit)
            reason = f'out of memory: needs {needs} of HBM, a chip has {has}'
            return Compiled(None, memory, buffers, seconds, reason)
        memory = memory_of(compiled, chip)
        return Compiled(text or compiled.as_text(), memory, buffers, seconds, None)


def _text(folder: pathlib.Path) -> str | None:
    for pattern in _TEXTS:
        # Of several modules the largest is the program.
        files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_size)
        if files:
            return files[-1].read_text()
    return None
