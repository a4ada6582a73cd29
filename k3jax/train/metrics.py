"""What training writes down: a step line, JSON lines, TensorBoard events and a plot."""

from __future__ import annotations

import json
import time
from typing import Any

import jax
from absl import logging
from etils import epath
from matplotlib.figure import Figure
from tensorboardX import SummaryWriter

from k3jax.config import FailedSavePolicy
from k3jax.files import write_whole

# name -> how it reads in the step line
STEP_LINE = {
    'stage': 'stage {}',
    'loss': 'loss {:.4f}',
    'maxvio': 'maxvio {:.2f}',
    'learning_rate': 'lr {:.1e}',
    'step_ms': '{:.0f} ms',
    'tokens_per_second': '{:,.0f} tok/s',
}


def duration(seconds: float) -> str:
    """12 s, 3.4 min or 5.6 h."""
    if seconds < 60:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.1f} min' if seconds < 3600 else f'{seconds / 3600:.1f} h'


class MetricsWriter:
    """Appends to `metrics.jsonl` and TensorBoard events in a workdir; one writer a run.

    Records of steps after `start`, which the run is about to make again, are dropped. Of several
    processes, only the first writes. A record that cannot be written is an OSError, or is lost
    where `on_failure` is 'go_on'.
    """

    def __init__(
        self, workdir: epath.Path, num_steps: int, start: int, on_failure: FailedSavePolicy
    ):
        self._path = workdir / 'metrics.jsonl'
        self._num_steps, self._on_failure = num_steps, on_failure
        self._events = None
        if jax.process_index() == 0:
            _drop_after(self._path, start)
            self._events = SummaryWriter(str(workdir / 'tensorboard'), purge_step=start + 1)

    def write(self, step: int, values: dict[str, float | list[float]]) -> None:
        """One JSON object with `step` and `values`, and scalars for TensorBoard.

        Of a list, one value a layer, TensorBoard gets the largest and the smallest.
        """
        if self._events is None:
            return
        self._append({'step': step, **values})
        for name, value in values.items():
            if isinstance(value, list):
                self._events.add_scalar(f'{name}/max', max(value), step)
                self._events.add_scalar(f'{name}/min', min(value), step)
            else:
                self._events.add_scalar(name, value, step)

    def decide(self, step: int, decision: str, reason: str, **facts: float) -> None:
        """Logs that a run goes on where something was wrong, and why; `facts` for the record."""
        logging.warning('%s: %s', decision, reason)
        if self._events is not None:
            self._append({'step': step, 'decision': decision, 'reason': reason, **facts})

    def go_back(self, step: int) -> None:
        """Drops records of later steps, which are about to be made again; decisions stay."""
        if self._events is not None:
            _drop_after(self._path, step, keep_decisions=True)

    def _append(self, row: dict[str, Any]) -> None:
        try:
            with self._path.open('a') as f:
                f.write(json.dumps(row) + '\n')
        except OSError as error:
            message = f'{self._path} cannot be written ({error.strerror}); make room'
            if self._on_failure == 'stop':
                raise OSError(f'{message}, then run the same command again') from error
            logging.error('%s. Lost: the record of step %d', message, row['step'])

    def step_line(self, step: int, values: dict[str, float], eta_s: float | None) -> None:
        values = {name: max(x) if isinstance(x, list) else x for name, x in values.items()}
        shown = [form.format(values[name]) for name, form in STEP_LINE.items() if name in values]
        done = f'step {step:05d}/{self._num_steps} ({100 * step / self._num_steps:.1f}%)'
        eta = 'unknown' if eta_s is None else duration(eta_s)
        logging.info('%s | %s | eta %s', done, ' | '.join(shown), eta)

    def close(self) -> None:
        if self._events is not None:
            try:
                self._events.close()
            except OSError as error:  # must not take the place of what ended the run
                logging.error('TensorBoard events: the last are lost (%s)', error)


def _drop_after(path: epath.Path, step: int, keep_decisions: bool = False) -> None:
    if not path.exists():
        return
    kept = [
        row
        for row in read_metrics(path)
        if row['step'] <= step or (keep_decisions and 'decision' in row)
    ]
    write_whole(path, ''.join(json.dumps(row) + '\n' for row in kept).encode())


def read_metrics(path: epath.Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a line that is none, as after a kill, is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # not JSON, or not UTF-8
            row = None
        if isinstance(row, dict) and isinstance(row.get('step'), int):
            rows.append(row)
        else:
            logging.warning('%s: skipped a line that is no record: %.60r', path, line)
    return rows


def plot_loss(workdir: epath.Path) -> None:
    """Draws `loss.png` from `metrics.jsonl`: training loss and held-out loss over steps.

    Nothing where there are no metrics any more.
    """
    path = workdir / 'metrics.jsonl'
    if not path.exists():
        logging.warning('%s: is gone, so no plot is drawn', path)
        return
    rows = read_metrics(path)
    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    for name, style in (('loss', '-'), ('held_out_loss', 'o--')):
        points = [(row['step'], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace('_', ' '))
    axes.set(xlabel='step', ylabel='loss (nats a token)', title='Training loss')
    axes.grid(alpha=0.3)
    axes.legend()
    with (workdir / 'loss.png').open('wb') as f:
        figure.savefig(f, format='png', dpi=120)


class Stopwatch:
    """Time since the last look."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds
