"""What happened at a step: the run is made again from the checkpoint before it, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from k3jax.config import ConfigError
from k3jax.data.pack import IGNORE
from k3jax.data.tokenizer import Tokenizer, load_tokenizer
from k3jax.train.checkpoint import Checkpoints, is_workdir, read_run
from k3jax.train.course import Course
from k3jax.train.metrics import read_metrics

COMPARED = ('loss', 'grad_norm')


class Replayed(NamedTuple):
    """A step made again.

    Attributes:
      step: its number. values: of COMPARED.
      recorded: those of `metrics.jsonl`; None where that step was not logged.
      rows: of its batch, those with the largest loss a token first: `row`, `loss` before the
        update, and `text`, a list of the row's documents; only of the last step.
    """

    step: int
    values: dict[str, float]
    recorded: dict[str, float] | None
    rows: list[dict[str, Any]]

    @property
    def equal(self) -> bool:
        """Whether the record has the same bits; also where there is none."""
        return self.recorded is None or self.values == self.recorded


def replay(
    workdir: str, step: int, devices: Sequence[jax.Device] | None = None
) -> Iterator[Replayed]:
    """Each step from the newest whole checkpoint before `step` on, to `step`.

    Nothing in the workdir is changed. The bits are those of the run on the same kind of chips, as
    many, with the same software.

    Raises:
      ValueError: there is no such run or step, or it cannot be made again here.
    """
    folder = epath.Path(workdir)
    if not is_workdir(folder):
        raise ValueError(f'--workdir: {workdir} holds no run of experiments.train')
    config = read_run(folder)
    if not 1 <= step <= config.train.num_steps:
        raise ConfigError(f'--step: got {step}, wanted 1..{config.train.num_steps}')
    tokenizer = load_tokenizer(config.data.tokenizer)
    course = Course(config, tokenizer, jax.devices() if devices is None else devices)
    checkpoints = Checkpoints(folder)
    try:
        state = course.restored(checkpoints, at_most=step - 1)
    finally:
        checkpoints.close()
    if state is None:
        state = course.fresh()
    begun = int(state.step)
    records = read_metrics(folder / 'metrics.jsonl')
    passed = [row for row in records if row.get('decision') == 'roll_back']
    passed = [row['passed_rows'] for row in passed if row['step'] == begun + 1]
    if passed:  # of several, the last counts them all
        course.pass_over(passed[-1], begun)
    logging.info('from the checkpoint of step %d', begun)
    recorded = {row['step']: row for row in records if 'loss' in row}
    for done in range(begun, step):
        state = course.at(done, state)
        batch = course.batch(done)
        if not course.program.is_compiled(batch):
            course.program.compile(batch)
        rows = []
        if done + 1 == step:
            losses = course.program.losses(state.params, batch)
            rows = _described(batch, np.asarray(losses, np.float64), tokenizer)
        state, metrics = course.program.step(state, batch)
        values = {name: float(metrics[name]) for name in COMPARED}
        record = recorded.get(done + 1)
        if record is not None:
            record = {name: record[name] for name in COMPARED}
        yield Replayed(done + 1, values, record, rows)


def _described(batch: Any, losses: np.ndarray, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`Replayed.rows` of a batch; losses: [B, T], nats."""
    if jax.process_count() > 1:
        batch = multihost_utils.process_allgather(batch, tiled=True)
    batch = jax.tree.map(np.asarray, batch)
    counts = np.maximum(np.sum(batch['targets'] != IGNORE, axis=1), 1)
    means = np.sum(losses, axis=1) / counts
    found = []
    for row in np.argsort(-np.nan_to_num(means, nan=np.inf), kind='stable'):
        segments = batch['segment_ids'][row]
        texts = [
            tokenizer.decode(batch['tokens'][row][segments == number].tolist())
            for number in np.unique(segments[segments > 0])
        ]
        found.append({'row': int(row), 'loss': float(means[row]), 'text': texts})
    return found
