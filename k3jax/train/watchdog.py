"""What ends a process that hangs, so that its launcher can start it again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

STALLED = 75  # exit code, EX_TEMPFAIL of sysexits.h: the same command may work when tried again


class Watchdog:
    """Within its context, the process ends if for too long no step is finished.

    Then stderr has where each thread hangs, and the exit code is STALLED. Time is taken from a
    clock that nobody can set. A thread that hangs while it holds Python's lock is not noticed.

    Args:
      step_s: seconds that a step may take; 0: the watchdog is off.
      pause_s: seconds for what `pause` names, each.
      clock: seconds of a clock that only goes forward.
      end: ends the process with an exit code.
    """

    def __init__(
        self,
        step_s: float,
        pause_s: float,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
    ):
        self._step_s, self._pause_s = step_s, pause_s
        self._clock, self._end = clock, end
        self._done = threading.Event()
        self._watched = ('a step', step_s, clock())  # replaced whole: a thread reads it

    def __enter__(self) -> Watchdog:
        if self._step_s:
            self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)
            self.beat()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._step_s:
            self._thread.join()

    def beat(self) -> None:
        """A step is finished."""
        self._watched = ('a step', self._step_s, self._clock())

    @contextlib.contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """A context for work that is no step, such as 'compiling'."""
        self._watched = (name, self._pause_s, self._clock())
        try:
            yield
        finally:
            self.beat()

    def _watch(self) -> None:
        # Often enough to end soon after the limit.
        while not self._done.wait(min(self._step_s, self._pause_s) / 10):
            name, limit, since = self._watched
            waited = self._clock() - since
            if waited > limit:
                print(
                    f'error: {name} has taken {waited:.3g} s, wanted at most {limit:g} s '
                    f'(train.watchdog_{"step" if name == "a step" else "pause"}_s); ending with '
                    f'exit code {STALLED}. The same command goes on from the newest checkpoint. '
                    'Where each thread is:',
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self._end(STALLED)
                return
