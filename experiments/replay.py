"""Makes a step of a run again: `python -m experiments.replay --workdir=DIR --step=N`.

From the newest checkpoint before it, with the data of the run, on as many chips; says whether loss
and gradient norm have the bits of metrics.jsonl, and which rows of the batch had the largest loss.
Exits with 1 where they have not. Changes nothing in the workdir.
"""

from __future__ import annotations

import json

import jax
from absl import flags
from etils import epath

from k3jax import processes
from k3jax.flags import run_main
from k3jax.train.replay import Replayed, replay

_WORKDIR = flags.DEFINE_string('workdir', None, 'Of experiments.train.', required=True)
_STEP = flags.DEFINE_integer('step', None, 'Which step, from 1.', required=True)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'File for the rows of its batch, one JSON object a line, largest loss first.'
)
_SHOWN_ROWS, _SHOWN_CHARACTERS = 3, 120


def _line(made: Replayed) -> str:
    values = ', '.join(f'{name} {value!r}' for name, value in made.values.items())
    if made.recorded is None:
        return f'step {made.step}: {values} (not logged)'
    if made.equal:
        return f'step {made.step}: {values}, as recorded'
    recorded = ', '.join(f'{name} {value!r}' for name, value in made.recorded.items())
    return f'step {made.step}: {values}, but recorded were {recorded}'


def main(argv: list[str]) -> int:
    """Exit status 1 if a step is not as it was recorded."""
    del argv
    if _OUTPUT.value and not epath.Path(_OUTPUT.value).parent.is_dir():
        raise ValueError(f'--output={_OUTPUT.value}: there is no such folder; make it first')
    processes.start()
    with processes.ends_together():
        differ = 0
        for made in replay(_WORKDIR.value, _STEP.value):
            differ += not made.equal
            if jax.process_index() == 0:
                print(_line(made), flush=True)
    if jax.process_index() > 0:
        return int(differ > 0)
    if differ:
        print(
            'wanted the same bits. They need the same kind and number of chips, the same software, '
            'and the config that those steps ran with: run_config.json is that of the last command'
        )
    for row in made.rows[:_SHOWN_ROWS]:
        text = ' | '.join(row['text'])[:_SHOWN_CHARACTERS]
        print(f'row {row["row"]}: {row["loss"]:.4f} nats a token: {text!r}')
    if _OUTPUT.value:
        lines = (json.dumps(row) + '\n' for row in made.rows)
        epath.Path(_OUTPUT.value).write_text(''.join(lines))
    return int(differ > 0)


if __name__ == '__main__':
    run_main(main)
