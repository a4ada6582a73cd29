"""How far long work is: one line with bytes, rate and time left."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from absl import logging


def _duration(seconds: float) -> str:
    for unit, size in (('h', 3600), ('min', 60)):
        if seconds >= size:
            return f'{seconds / size:.1f} {unit}'
    return f'{seconds:.0f} s'


class Progress:
    """Counts bytes and prints a line every few seconds; safe to call from several threads.

    Args:
      label: what is under way.
      stream: where to print; None prints nothing.
      interval_s: seconds between lines.
    """

    def __init__(self, label: str, *, stream: TextIO | None = None, interval_s: float = 5.0):
        self._label = label
        self._stream = stream
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self.start(0)

    def start(self, total_bytes: int, done_bytes: int = 0) -> None:
        """Begins the count; `done_bytes` were done by an earlier run."""
        self._total, self._done, self._earlier = total_bytes, done_bytes, done_bytes
        self._began = self._shown = time.monotonic()

    def add(self, nbytes: int, where: str = '') -> None:
        """Counts `nbytes` more, which belonged to `where`."""
        with self._lock:
            self._done += nbytes
            if time.monotonic() - self._shown >= self._interval_s:
                self._show(where)

    def note(self, text: str) -> None:
        """Says something that is worth knowing."""
        if self._stream is None:
            logging.info('%s: %s', self._label, text)
        else:
            print(f'{self._label}: {text}', file=self._stream, flush=True)

    def finish(self) -> None:
        with self._lock:
            self._show('done')

    def _show(self, where: str) -> None:
        if self._stream is None:
            return
        self._shown = time.monotonic()
        rate = (self._done - self._earlier) / max(self._shown - self._began, 1e-9)
        left_s = (self._total - self._done) / rate if rate else 0.0
        print(
            f'{self._label} {self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB '
            f'({self._done / max(self._total, 1):.1%}) | {rate / 1e6:.0f} MB/s | '
            f'eta {_duration(left_s)} | {where}',
            file=self._stream,
            flush=True,
        )
