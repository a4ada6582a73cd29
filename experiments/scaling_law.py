"""What K3's recipe saves over K2's: `python -m experiments.scaling_law --workdir=DIR`.

Trains a grid of tiny models, each in its own folder under --workdir, smallest first; the same
command goes on. Prints the compute ratio at equal loss, of the whole recipe and of its parts one by
one, and writes scaling_law.json and scaling_law.png there.
"""

from __future__ import annotations

import json
import time
from typing import Any

from absl import flags, logging
from etils import epath

from configs.scaling_law import ABLATIONS, RATE, WIDTHS, recipe_config, tokens_of
from k3jax.config import Config
from k3jax.files import write_json, write_whole
from k3jax.flags import run_main
from k3jax.model.flops import flops_per_token, total_parameters
from k3jax.train.loop import NonFiniteLoss, Trainer
from k3jax.train.metrics import duration
from k3jax.train.scaling_law import Grid, Point, Result, markdown, plot, report, seconds_for

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for all runs and results.', required=True)
_BUDGET = flags.DEFINE_float(
    'budget_minutes',
    120.0,
    'No run is begun that would end later; 0: report what is there.',
    lower_bound=0.0,
)
GRID = Grid(WIDTHS, (RATE / 2, RATE, 2 * RATE), tuple(ABLATIONS))
_RESULT = 'result.json'


def _config(point: Point) -> Config:
    return recipe_config(point.recipe, point.width, tokens_of(point.width), point.rate)


def _size(config: Config) -> tuple[int, float]:
    """Tokens and training FLOPs of a run."""
    length = config.data.sequence_length
    tokens = config.train.num_steps * config.data.batch_size * length
    return tokens, tokens * flops_per_token(config.model, length, backward=True)


def _read(folder: epath.Path) -> Result:
    path = folder / _RESULT
    try:
        fields = json.loads(path.read_text())
        return Result(**(fields | {'point': Point(**fields['point'])}))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'{path}: not a result of a run ({error}); remove it, and the run is made again'
        ) from None


def _train(point: Point, folder: epath.Path) -> Result | None:
    """Trains, or goes on with it; None where it was asked to stop."""
    config = _config(point)
    began, steps, loss = time.perf_counter(), [], None  # steps: when each ended
    try:
        trainer = Trainer(config, str(folder))
        outcome = trainer.run(lambda _: steps.append(time.perf_counter()))
        if not outcome.finished:
            return None
        loss = trainer.evaluate(outcome.state.params).loss
    except NonFiniteLoss as error:
        logging.warning('%s: %s', point.name, error)
    tokens, flops = _size(config)
    here = steps[-1] - steps[0] if steps else 0.0
    fixed = time.perf_counter() - began - here
    # Of the whole run, also where only its end was here.
    seconds = here / max(1, len(steps) - 1) * config.train.num_steps
    result = Result(point, flops, tokens, total_parameters(config.model), loss, fixed, seconds)
    write_json(folder / _RESULT, result._asdict() | {'point': point._asdict()})
    return result


def _report(workdir: epath.Path, results: list[Result]) -> None:
    found: dict[str, Any] = report(GRID, results)
    write_json(workdir / 'scaling_law.json', found)
    write_whole(workdir / 'scaling_law.png', plot(found))
    print(markdown(found))


def main(_: list[str]) -> None:
    workdir = epath.Path(_WORKDIR.value)
    results = [_read(path.parent) for path in sorted(workdir.glob(f'runs/*/{_RESULT}'))]
    end = time.perf_counter() + 60 * _BUDGET.value
    while (point := GRID.next_point(results)) is not None:
        _, flops = _size(_config(point))
        needed, left = seconds_for(flops, results), end - time.perf_counter()
        if needed > left or left <= 0:
            logging.info(
                '%s would take %s of the %s left; the same command goes on from here',
                point.name,
                duration(needed),
                duration(max(0, left)),
            )
            break
        logging.info('%s: about %s; %d runs done', point.name, duration(needed), len(results))
        result = _train(point, workdir / 'runs' / point.name)
        if result is None:
            return
        logging.info('%s: held-out loss %s after %.2e FLOPs', point.name, result.loss, flops)
        results.append(result)
    _report(workdir, results)


if __name__ == '__main__':
    run_main(main)
