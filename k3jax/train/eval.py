"""How good a model is: held-out loss, perplexity, bits a byte, multiple-choice accuracy."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from k3jax.data.pack import IGNORE
from k3jax.data.tokenizer import Tokenizer
from k3jax.model.kimi import Kimi, forward
from k3jax.train.media import with_media
from k3jax.train.step import losses_of

Losses = Callable[[Any, dict[str, np.ndarray]], jax.Array]


class HeldOut(NamedTuple):
    """loss: nats a token. bits_per_byte: of the text. tokens: targets counted."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def evaluate(
    model: Kimi,
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    byte_lengths: np.ndarray,
    losses: Losses | None = None,
) -> HeldOut:
    """Loss over all targets of `batches`.

    Args:
      batches: as `loader.held_out_batches` gives them.
      losses: (params, batch) -> [B, T], on every process; None for the model on a single chip.
      byte_lengths: [Z], bytes that each token stands for.

    Raises:
      ValueError: the batches hold no target.
    """
    total, tokens, num_bytes = 0.0, 0, 0
    if losses is None:
        alone = losses_of(model)
        losses = lambda params, batch: alone(params, with_media(batch))  # noqa: E731
    for batch in batches:
        total += float(np.sum(np.asarray(losses(params, batch), np.float64)))
        targets = batch['targets'][batch['targets'] != IGNORE]
        tokens += targets.size
        num_bytes += int(byte_lengths[targets].sum())
    if not tokens or not num_bytes:
        raise ValueError('evaluation: the held-out split has no text; give a larger data.source')
    return HeldOut(total / tokens, total / math.log(2) / num_bytes, tokens)


def bucket(length: int, smallest: int = 16) -> int:
    """The next power of two: shapes, and so compilations, stay few."""
    return max(smallest, 1 << (length - 1).bit_length())


@functools.partial(jax.jit, static_argnums=0)
def _forward(model: Kimi, params: Any, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    return forward(model, params, tokens, segment_ids)


def check_token_ids(ids: list[int], vocab_size: int, where: str) -> None:
    """Raises ValueError for an empty prompt or an id outside the vocabulary."""
    if not ids:
        raise ValueError(f'{where}: got no tokens, wanted at least one')
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f'{where}: got token id {token} at position {position}, '
                f'wanted 0..{vocab_size - 1} (model.vocab_size {vocab_size})'
            )


def _check_sequence(model: Kimi, ids: list[int], where: str) -> None:
    check_token_ids(ids, model.config.vocab_size, where)
    limit = model.config.max_position_embeddings
    if len(ids) > limit:
        raise ValueError(
            f'{where}: got {len(ids)} tokens, wanted at most {limit} '
            '(model.max_position_embeddings)'
        )


def logits_of(model: Kimi, params: Any, ids: list[int]) -> np.ndarray:
    """Float32 logits [1, T, Z] of one sequence.

    Raises:
      ValueError: no tokens, too many, or an id outside the vocabulary.
    """
    _check_sequence(model, ids, 'token_ids')
    size = bucket(len(ids))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    valid = (np.arange(size) < len(ids)).astype(np.int32)[None]
    out = np.asarray(_forward(model, params, tokens, valid), np.float32)
    return out[:, : len(ids)]


def _completion_log_prob(
    model: Kimi, params: Any, prompt: list[int], completion: list[int]
) -> float:
    """log p(completion | prompt), summed over its tokens."""
    ids = prompt + completion
    _check_sequence(model, ids, 'question and choice')
    batch = {name: np.zeros((1, bucket(len(ids))), np.int32) for name in ('tokens', 'segment_ids')}
    batch['targets'] = np.full_like(batch['tokens'], IGNORE)
    batch['tokens'][0, : len(ids)] = ids
    batch['segment_ids'][0, : len(ids)] = 1
    batch['targets'][0, len(prompt) - 1 : len(ids) - 1] = completion
    return -float(np.sum(np.asarray(losses_of(model)(params, batch), np.float64)))


def _read_questions(path: epath.Path) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: not UTF-8 text ({error}), wanted jsonl') from None
    questions = []
    for number, line in enumerate(text.split('\n'), start=1):
        if not line.strip():
            continue
        where = f'{path}:{number}'
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f'{where}: not JSON ({error})') from None
        wanted = 'wanted {"question": str, "choices": [str, ...], "answer": index}'
        if not isinstance(row, dict) or not {'question', 'choices', 'answer'} <= row.keys():
            raise ValueError(f'{where}: got {line[:80]!r}, {wanted}')
        choices, answer = row['choices'], row['answer']
        if not (
            isinstance(row['question'], str)
            and isinstance(choices, list)
            and len(choices) >= 2
            and all(isinstance(choice, str) and choice for choice in choices)
        ):
            raise ValueError(f'{where}: question or choices are not texts, {wanted}')
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ValueError(f'{where}: answer is {answer!r}, wanted 0..{len(choices) - 1}')
        questions.append(row)
    if not questions:
        raise ValueError(f'{path}: no questions')
    return questions


def choice_accuracy(
    model: Kimi, params: Any, tokenizer: Tokenizer, path: epath.Path
) -> dict[str, Any]:
    """Accuracy by log-likelihood on a jsonl file of questions.

    Each line: `{"question": text, "choices": [text, ...], "answer": index}`. Each choice is scored
    as the continuation of its question; `accuracy` takes the largest sum of log probabilities,
    `accuracy_per_byte` the largest sum divided by the choice's length in bytes.

    Raises:
      ValueError: a line that is not a question; names file and line.
    """
    questions = _read_questions(path)
    right = {'accuracy': 0, 'accuracy_per_byte': 0}
    for row in questions:
        prompt = tokenizer.encode(row['question']) or [tokenizer.eos_id]
        scores = np.array(
            [
                _completion_log_prob(model, params, prompt, tokenizer.encode(choice))
                for choice in row['choices']
            ]
        )
        lengths = np.array([len(choice.encode()) for choice in row['choices']])
        right['accuracy'] += int(np.argmax(scores) == row['answer'])
        right['accuracy_per_byte'] += int(np.argmax(scores / lengths) == row['answer'])
    count = len(questions)
    return {'questions': count} | {name: value / count for name, value in right.items()}
