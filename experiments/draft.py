"""Trains a draft: `python -m experiments.draft --checkpoint=MODEL --workdir=DIR`.

The model writes texts that begin like its training data; the draft learns to guess them. At the
end: tokens a check, greedily and at temperature 1, on prompts of the held-out data. Goes on from
the newest whole checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import numpy as np
from absl import flags, logging
from etils import epath

from k3jax.config import DataConfig
from k3jax.data import loader
from k3jax.flags import run_main
from k3jax.overrides import apply_overrides
from k3jax.post_train.draft import DraftConfig, DraftTrainer, Target, tokens_a_check
from k3jax.serve.generate import cache_size
from k3jax.serve.load import Loaded, open_model, use_dtype

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'The model: converted folder or training workdir.', required=True
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder for the draft.', required=True)
_SET = flags.DEFINE_multi_string('set', [], 'name=value of DraftConfig; may be repeated.')
_SOURCE = flags.DEFINE_string(
    'source', None, "Where texts begin: folder or file of .txt or .jsonl. By default a workdir's."
)
_DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Compute dtype.')
_NUM_PROMPTS = flags.DEFINE_integer(
    'num_prompts', 8, 'Of the measurement at the end; 0: none.', lower_bound=0
)
_NUM_NEW = flags.DEFINE_integer(
    'max_new_tokens', 128, 'Tokens after each of these prompts.', lower_bound=2
)


def _data(loaded: Loaded, length: int) -> DataConfig:
    """Where prompts of `length` tokens come from."""
    if loaded.tokenizer is None:
        raise ValueError(f'--checkpoint: {_CHECKPOINT.value} carries no tokenizer to read text by')
    if loaded.data is None and _SOURCE.value is None:
        raise ValueError(f'--source: got none, and {_CHECKPOINT.value} was not trained here')
    data = loaded.data or DataConfig(source=_SOURCE.value)
    source = _SOURCE.value or data.source
    return dataclasses.replace(
        data, source=source, sequence_length=length, batch_size=1, num_streams=1,
        ramp_steps=(), ramp_batch_sizes=(),
    )  # fmt: skip


def _rows(batches: Iterator[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
    return (row for batch in batches for row in batch['tokens'])


def main(argv: list[str]) -> None:
    del argv
    config = apply_overrides(DraftConfig(), _SET.value)
    use_dtype(_DTYPE.value)
    loaded = open_model(_CHECKPOINT.value, _DTYPE.value)
    target = Target(loaded.model, loaded.params, loaded.tokenizer)
    cache_size(config.prompt_length, _NUM_NEW.value, loaded.model.config.max_position_embeddings)
    data = _data(loaded, config.prompt_length)
    trainer = DraftTrainer(target, config, _WORKDIR.value)
    draft = trainer.run(_rows(loader.train_iterator(data, loaded.tokenizer)))
    if not _NUM_PROMPTS.value:
        return
    held_out = _rows(loader.held_out_batches(data, loaded.tokenizer))
    prompts = list(itertools.islice(held_out, _NUM_PROMPTS.value))
    found = {'num_guesses': config.unroll_steps}
    for name, temperature in (('greedy', 0.0), ('temperature_1', 1.0)):
        found[name] = tokens_a_check(
            trainer.model,
            target,
            draft,
            prompts,
            num_guesses=config.unroll_steps,
            num_new=_NUM_NEW.value,
            temperature=temperature,
        )
    logging.info('tokens a check: %s', found)
    path = epath.Path(_WORKDIR.value) / 'tokens_a_check.json'
    path.write_text(json.dumps(found))
    print(json.dumps(found))


if __name__ == '__main__':
    run_main(main)
