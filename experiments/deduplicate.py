"""Leaves out what text has twice: `python -m experiments.deduplicate --source=DIR --target=DIR`.

Copies .txt and .jsonl documents but for exact and near duplicates of earlier ones; the report is
the last line on stdout, and in the target. --target appears when all of it is written.
"""

from __future__ import annotations

import json
import sys
import time

from absl import flags

from k3jax.data.deduplicate import deduplicate
from k3jax.flags import run_main
from k3jax.train.metrics import duration

_SOURCE = flags.DEFINE_string('source', None, 'Folder of .txt and .jsonl files.', required=True)
_TARGET = flags.DEFINE_string('target', None, 'Folder to make.', required=True)
_THRESHOLD = flags.DEFINE_float(
    'threshold',
    0.8,
    'Share of runs of five words in common from which documents are near duplicates; above 1: only '
    'exact ones are looked for.',
    lower_bound=0.3,
)
_CORRUPT = flags.DEFINE_enum(
    'corrupt', 'stop', ['stop', 'skip'], 'What to do with a .jsonl line that is no document.'
)
_EVERY_SECONDS = 2.0


class _Lines:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self._what, self._started, self._shown = '', 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if what != self._what:
            self._what, self._started, self._shown = what, now, 0.0
        if now - self._shown < _EVERY_SECONDS and done < total:
            return
        self._shown = now
        rate = done / max(now - self._started, 1e-9)
        left = duration((total - done) / max(rate, 1e-9))
        print(
            f'{what} {done / 1e6:.1f}/{total / 1e6:.1f} MB ({100 * done / max(total, 1):.1f}%) | '
            f'{rate / 1e6:.1f} MB/s | eta {left}',
            file=sys.stderr,
        )


def main(_: list[str]) -> None:
    report = deduplicate(
        _SOURCE.value,
        _TARGET.value,
        threshold=_THRESHOLD.value,
        corrupt=_CORRUPT.value,
        progress=_Lines(),
    )
    print(json.dumps(report))


if __name__ == '__main__':
    run_main(main)
