"""What hangs is ended: after how long, and with what on stderr."""

import subprocess
import sys
import textwrap
import threading

from k3jax.train.watchdog import STALLED, Watchdog


class Clock:
    """Goes only where the test says; `end` is told of the exit code."""

    def __init__(self):
        self.now = 0.0
        self.codes = []
        self.ended = threading.Event()

    def __call__(self):
        return self.now

    def end(self, code):
        self.codes.append(code)
        self.ended.set()


def watchdog(clock, step_s=0.05, pause_s=0.2):
    # Limits are also how often it looks, so they are short; the clock stands still meanwhile.
    return Watchdog(step_s, pause_s, clock, clock.end)


def test_a_step_that_takes_too_long_ends_the_process(capfd):
    clock = Clock()
    with watchdog(clock):
        clock.now = 0.06
        assert clock.ended.wait(20)
    assert clock.codes == [STALLED] == [75]
    err = capfd.readouterr().err
    assert 'a step has taken 0.06 s, wanted at most 0.05 s (train.watchdog_step_s)' in err
    assert 'watchdog_test.py' in err  # where this thread waited


def test_steps_that_finish_and_pauses_within_their_own_limit_do_not():
    clock = Clock()
    with watchdog(clock) as dog:
        for _ in range(4):
            clock.now += 0.04
            dog.beat()
            assert not clock.ended.wait(0.02)
        with dog.pause('compiling'):
            clock.now += 0.19
            assert not clock.ended.wait(0.05)
        clock.now += 0.04
        assert not clock.ended.wait(0.05)
    assert not clock.codes


def test_a_pause_that_takes_too_long_does(capfd):
    clock = Clock()
    with watchdog(clock) as dog, dog.pause('compiling'):
        clock.now = 0.21
        assert clock.ended.wait(20)
    assert 'compiling has taken 0.21 s, wanted at most 0.2 s (train.watchdog_pause_s)' in (
        capfd.readouterr().err
    )


def test_without_a_limit_there_is_no_watchdog():
    clock = Clock()
    with watchdog(clock, step_s=0.0):
        assert not any(thread.name == 'watchdog' for thread in threading.enumerate())


def test_a_process_that_hangs_ends_with_its_own_exit_code_and_says_where():
    script = """
    import threading
    from k3jax.train.watchdog import Watchdog
    def stuck():
        threading.Event().wait()
    with Watchdog(0.2, 60) as dog:
        stuck()
    """
    out = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert out.returncode == STALLED
    assert 'in stuck' in out.stderr and 'The same command goes on' in out.stderr
