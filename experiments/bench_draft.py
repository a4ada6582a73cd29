"""How much faster an engine answers with a draft:
`python -m experiments.bench_draft --checkpoint=MODEL --draft=DRAFT`.

Tokens a second through the engine's streams, of one request at a time and of several together, with
and without guesses, by turns; the best of each counts. Prompts begin held-out rows of the model's
own training data.
"""

from __future__ import annotations

import asyncio
import itertools
import time

from absl import flags, logging

from k3jax.data.loader import held_out_batches
from k3jax.flags import run_main
from k3jax.serve.draft_pool import open_pool
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.load import Loaded, open_model, use_dtype
from k3jax.serve.request import Request, Sampling

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Training workdir.', required=True)
_DRAFT = flags.DEFINE_string('draft', None, 'Workdir of experiments.draft.', required=True)
_NUM_GUESSES = flags.DEFINE_integer('num_guesses', 7, 'Tokens guessed at a time.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Turns that each gets.', lower_bound=1)
_BATCHES = flags.DEFINE_list('batches', ['1', '4'], 'Requests at a time.')
NUM_PROMPTS, PROMPT, NUM_NEW = 8, 32, 128


def make_engine(loaded: Loaded, batch: int, draft: str | None) -> Engine:
    length = 2 * (PROMPT + NUM_NEW)
    config = EngineConfig(
        num_slots=batch, max_length=length, pieces=(PROMPT,), lane_sizes=(2 * PROMPT,)
    )
    pool = open_pool(loaded, batch, length, draft, _NUM_GUESSES.value)
    engine = Engine(pool, loaded.tokenizer, config)
    engine.start()
    return engine


def tokens_per_second(
    engine: Engine, prompts: list[list[int]], batch: int, temperature: float
) -> float:
    """Of all answers to the prompts, `batch` at a time, from the first to the last."""

    async def read(number: int, prompt: list[int]) -> int:
        sampling = Sampling(temperature=temperature, seed=number, max_new_tokens=NUM_NEW)
        request = Request(prompt_ids=prompt, sampling=sampling)
        return len([token async for token in engine.submit(request)])

    async def all_of_them() -> int:
        total = 0
        for first in range(0, len(prompts), batch):
            group = enumerate(prompts[first : first + batch], first)
            total += sum(await asyncio.gather(*(read(*one) for one in group)))
        return total

    start = time.perf_counter()
    total = asyncio.run(all_of_them())
    return total / (time.perf_counter() - start)


def main(argv: list[str]) -> None:
    del argv
    use_dtype('float32')
    loaded = open_model(_CHECKPOINT.value, 'float32')
    if loaded.data is None:
        raise ValueError(f'--checkpoint: {_CHECKPOINT.value} is no training workdir, wanted one')
    batches = held_out_batches(loaded.data, loaded.tokenizer)
    rows = (row for batch in batches for row in batch['tokens'])
    prompts = [row[:PROMPT].tolist() for row in itertools.islice(rows, NUM_PROMPTS)]
    print(f'{"tokens/s":24s}{"plain":>8s}{"guesses":>9s}{"faster":>8s}{"tokens a check":>16s}')
    for batch, temperature in itertools.product(map(int, _BATCHES.value), (0.0, 1.0)):
        engines = [make_engine(loaded, batch, draft) for draft in (None, _DRAFT.value)]
        best = [0.0, 0.0]
        for turn in range(1 + _ROUNDS.value):
            found = [tokens_per_second(engine, prompts, batch, temperature) for engine in engines]
            logging.info('batch %d, turn %d: %s', batch, turn, found)
            if turn:  # the first compiles
                best = [max(pair) for pair in zip(best, found, strict=True)]
        checked = engines[1].num_checked_tokens / engines[1].num_checks
        for engine in engines:
            engine.close()
        plain, guessing = best
        print(
            f'{f"batch {batch}, temperature {temperature:g}":24s}{plain:8,.0f}{guessing:9,.0f}'
            f'{guessing / plain:7.2f}x{checked:16.2f}'
        )


if __name__ == '__main__':
    run_main(main)
