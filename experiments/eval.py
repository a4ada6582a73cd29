"""Evaluates a checkpoint: `python -m experiments.eval --checkpoint=DIR --task=perplexity`.

Tasks: perplexity (held-out split of --data, JSON on stdout), logits (of --token_ids, to --output),
choice (accuracy by log-likelihood on a jsonl file of questions), captions (answers generated for
the images of a folder of records, right or wrong).
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from absl import flags, logging
from etils import epath

from k3jax.config import DataConfig, MediaDataConfig
from k3jax.data.loader import held_out_batches
from k3jax.data.records import all_records, record_files
from k3jax.data.tokenizer import Tokenizer
from k3jax.flags import activations, define_activations_flags, run_main, token_ids
from k3jax.serve.captions import caption_accuracy
from k3jax.serve.load import Loaded, open_model, use_dtype
from k3jax.train.eval import choice_accuracy, evaluate, logits_of

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Converted folder or training workdir.', required=True
)
_TASK = flags.DEFINE_enum(
    'task', 'perplexity', ['perplexity', 'logits', 'choice', 'captions'], 'What to compute.'
)
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Compute dtype.')
define_activations_flags()
_DATA = flags.DEFINE_string(
    'data',
    None,
    'perplexity: a source as in data.source, by default the one of the run or the standard '
    "library's; choice: a jsonl file of questions; captions: a folder of records, or one file.",
)
_TOKEN_IDS = flags.DEFINE_string('token_ids', None, 'logits: comma-separated ids.')
_OUTPUT = flags.DEFINE_string('output', None, 'logits: .npy file to write.')
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    'sequence_length', None, 'perplexity: tokens a row, by default those of the run.'
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', None, 'perplexity: rows a batch, by default those of the run.'
)
_MAX_BATCHES = flags.DEFINE_integer('max_batches', 64, 'perplexity: at most this many.')
TOLD_EVERY = 50  # records of captions
_MAX_RECORDS = flags.DEFINE_integer(
    'max_records', None, 'captions: at most this many.', lower_bound=1
)


def _tokenizer(loaded: Loaded) -> Tokenizer:
    if loaded.tokenizer is None:
        raise ValueError(
            f'--checkpoint: {_CHECKPOINT.value} carries no tokenizer (no tiktoken.model), which '
            f'--task={_TASK.value} needs; convert a release that has one'
        )
    return loaded.tokenizer


def _perplexity(loaded: Loaded) -> dict[str, float]:
    tokenizer = _tokenizer(loaded)
    wanted = {
        'source': _DATA.value,
        'sequence_length': _SEQUENCE_LENGTH.value,
        'batch_size': _BATCH_SIZE.value,
    }
    changed = {name: value for name, value in wanted.items() if value is not None}
    if _DATA.value is not None:
        changed |= {'mixture': (), 'mixture_weights': (), 'media': _media(loaded)}
    data = dataclasses.replace(loaded.data or DataConfig(), **changed)
    batches = held_out_batches(data, tokenizer, _MAX_BATCHES.value)
    result = evaluate(loaded.model, loaded.params, batches, tokenizer.token_byte_lengths())
    return {
        'perplexity': result.perplexity,
        'loss': result.loss,
        'bits_per_byte': result.bits_per_byte,
        'tokens': result.tokens,
    }


def _media(loaded: Loaded) -> MediaDataConfig:
    """As in the run, if --data is one of its sources of records."""
    media = MediaDataConfig() if loaded.data is None else loaded.data.media
    kept = tuple(source for source in media.sources if source == _DATA.value)
    return dataclasses.replace(media, sources=kept)


def _logits(loaded: Loaded) -> dict[str, object]:
    logits = logits_of(loaded.model, loaded.params, token_ids(_TOKEN_IDS.value))
    with epath.Path(_OUTPUT.value).open('wb') as f:
        np.save(f, logits)
    return {'output': _OUTPUT.value, 'shape': list(logits.shape)}


def _captions(loaded: Loaded) -> dict[str, float]:
    records = all_records(_DATA.value, '--data')

    count = min(len(records), _MAX_RECORDS.value or len(records))

    def tell(done: int) -> None:
        if done % TOLD_EVERY == 0:
            logging.info('%d of %d records', done, count)

    found = caption_accuracy(loaded, records, _MAX_RECORDS.value, tell)
    return found._asdict() | {'accuracy': found.accuracy}


def _check_flags() -> None:
    """A mistake shows before a large model is read."""
    if _TASK.value == 'logits':
        token_ids(_TOKEN_IDS.value)
        if not _OUTPUT.value:
            raise ValueError('--output: wanted the .npy file to write the logits to')
    if _TASK.value == 'choice' and not (_DATA.value and epath.Path(_DATA.value).is_file()):
        raise ValueError(f'--data: got {_DATA.value!r}, wanted a jsonl file of questions')
    if _TASK.value == 'captions':
        if not _DATA.value:
            raise ValueError('--data: wanted a folder of records, or one file of them')
        record_files(_DATA.value, '--data')


def main(argv: list[str]) -> None:
    del argv
    _check_flags()
    use_dtype(_DTYPE.value)
    loaded = open_model(_CHECKPOINT.value, _DTYPE.value, **activations())
    match _TASK.value:
        case 'perplexity':
            result = _perplexity(loaded)
        case 'logits':
            result = _logits(loaded)
        case 'captions':
            result = _captions(loaded)
        case 'choice':
            path = epath.Path(_DATA.value)
            result = choice_accuracy(loaded.model, loaded.params, _tokenizer(loaded), path)
    print(json.dumps(result))


if __name__ == '__main__':
    run_main(main)
