"""Does a model use its whole context: `python -m experiments.needles --checkpoint=DIR`.

Asks for facts scattered over windows of --lengths tokens; prints accuracy by the facts' depth.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from absl import flags
from etils import epath

from k3jax.config import DataConfig
from k3jax.data.needles import Needles
from k3jax.flags import run_main
from k3jax.serve.load import open_model, use_dtype
from k3jax.train.metrics import duration
from k3jax.train.recall import markdown, measure, plot

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Converted folder or training workdir.', required=True
)
_LENGTHS = flags.DEFINE_list('lengths', ['128', '1024'], 'Tokens of a window, several of them.')
_WINDOWS = flags.DEFINE_integer('windows', 64, 'Of each length.', lower_bound=1)
_FACTS = flags.DEFINE_integer('facts', None, 'In a window; by default as in the run.')
_ASKED = flags.DEFINE_integer(
    'asked', None, 'Facts that an answer needs; by default as in the run.'
)
_TEXT = flags.DEFINE_string('text', None, "Source of the text in between; by default the run's.")
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Compute dtype.')
_TOKENS = flags.DEFINE_integer('tokens_at_once', 1 << 16, 'Of a batch.', lower_bound=1)
_JSON = flags.DEFINE_string('json', None, 'File to write the accuracies to.')
_PLOT = flags.DEFINE_string('plot', None, 'PNG to draw.')


def _lengths() -> list[int]:
    try:
        lengths = [int(length) for length in _LENGTHS.value]
    except ValueError:
        lengths = []
    if not lengths:
        raise ValueError(
            f'--lengths: got {",".join(_LENGTHS.value)!r}, wanted whole numbers such as 128,1024'
        )
    return lengths


def _check_folders() -> None:
    for name, path in (('json', _JSON.value), ('plot', _PLOT.value)):
        if path and not epath.Path(path).parent.is_dir():
            raise ValueError(f'--{name}={path}: there is no such folder; make it first')


def main(_: list[str]) -> None:
    lengths = _lengths()
    _check_folders()
    use_dtype(_DTYPE.value)
    loaded = open_model(_CHECKPOINT.value, _DTYPE.value)
    if loaded.tokenizer is None:
        raise ValueError(
            f'--checkpoint: {_CHECKPOINT.value} carries no tokenizer (no tiktoken.model); convert '
            'a release that has one'
        )
    data = loaded.data or DataConfig()
    given = {'facts': _FACTS.value, 'asked': _ASKED.value, 'text': _TEXT.value}
    given = {name: value for name, value in given.items() if value is not None}
    of_run = dataclasses.replace(data.needles, **given)
    sets = [
        Needles.of(
            dataclasses.replace(data, needles=of_run, sequence_length=length),
            loaded.tokenizer,
            'held_out',
        )
        for length in lengths
    ]
    reports = []
    for needles in sets:
        length, started = needles.config.sequence_length, time.perf_counter()

        def show(done: int, length: int = length, started: float = started) -> None:
            seconds = time.perf_counter() - started
            left = duration(seconds / done * (_WINDOWS.value - done))
            print(f'{length} tokens: {done}/{_WINDOWS.value} windows, eta {left}', file=sys.stderr)

        found = measure(
            loaded.model,
            loaded.params,
            needles,
            _WINDOWS.value,
            tokens_at_once=_TOKENS.value,
            on_batch=show,
        )
        reports.append(found.report())
    print(markdown(reports))
    if _JSON.value:
        epath.Path(_JSON.value).write_text(json.dumps(reports, indent=1) + '\n')
    if _PLOT.value:
        epath.Path(_PLOT.value).write_bytes(plot(reports))


if __name__ == '__main__':
    run_main(main)
