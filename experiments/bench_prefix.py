"""How soon an answer begins when its prompt's beginning is held:
`python -m experiments.bench_prefix`.

Time to the first token of a long prompt through the engine's streams, in float32 with random
weights: nothing of it held; all but its end held on the device; and the same on the host, from
where it is fetched. In turns, the median of each counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from k3jax.data.tokenizer import byte_tokenizer
from k3jax.flags import config_from_file, run_main
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.serve.engine import Engine, EngineConfig
from k3jax.serve.pool import Pool
from k3jax.serve.prefix_cache import PrefixCache
from k3jax.serve.request import Request, Sampling
from pallas_kernels.common.platform import implementation_on

_CONFIG = flags.DEFINE_string('config', 'configs/draft_k3.py', 'Whose model to time.')
_TOKENS = flags.DEFINE_integer('tokens', 16384, 'Of a prompt.', lower_bound=1024)
_NEW_TOKENS = flags.DEFINE_integer('new_tokens', 256, 'Of them, those that differ.', lower_bound=1)
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Times that each is asked for.', lower_bound=1)


def make_engine(model: Kimi, num_tokens: int) -> Engine:
    """With one slot, and room on the device for the beginning of one prompt and a next turn."""
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    length = num_tokens + 8
    sizes = PrefixCache(model, 2**28)
    room = sizes.bytes_of(num_tokens) + sizes.bytes_of(sizes.hash_tokens)
    config = EngineConfig(
        num_slots=1, max_length=length, prefix_cache_bytes=room, prefix_host_bytes=4 * room
    )
    engine = Engine(Pool(model, params, 1, length, None), byte_tokenizer(), config)
    engine.warm_up()
    engine.start()
    return engine


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds until it comes, and tokens of the prompt that were held."""

    async def ask() -> tuple[float, int]:
        start = time.perf_counter()
        sampling = Sampling(temperature=0.0, max_new_tokens=1)
        stream = engine.submit(Request(prompt_ids=prompt, sampling=sampling))
        async for _ in stream:
            seconds = time.perf_counter() - start
        return seconds, stream.cached_tokens

    return asyncio.run(ask())


def main(argv: list[str]) -> None:
    del argv
    run = Run(jnp.dtype('float32'), implementation=implementation_on(jax.devices()[0].platform))
    config = config_from_file(_CONFIG.value).model
    # As long as is asked for: the model has no positions.
    config = dataclasses.replace(config, max_position_embeddings=_TOKENS.value + 8)
    model = Kimi(config, run, scan_layers=False)
    engine = make_engine(model, _TOKENS.value)
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, 256, count).tolist()  # noqa: E731
    seconds: dict[str, list[float]] = {'nothing': [], 'device': [], 'host': []}
    held = dict.fromkeys(seconds, 0)
    # The first round compiles what is left.
    for turn in range(_ROUNDS.value + 1):
        logging.info('round %d of %d', turn, _ROUNDS.value)
        first = draw(_TOKENS.value - _NEW_TOKENS.value)
        first_token(engine, first)
        # The prompt of which nothing is held needs all the room that there is on the device.
        for place in ('device', 'nothing', 'host'):
            prompt = draw(_TOKENS.value) if place == 'nothing' else first + draw(_NEW_TOKENS.value)
            fetches = engine.prefix_figures.fetches
            time_s, held[place] = first_token(engine, prompt)
            logging.info('%s: %.3f s', place, time_s)
            assert engine.prefix_figures.fetches - fetches == (place == 'host')
            if turn:
                seconds[place].append(time_s)
    engine.close()
    print(f'{"held":10s}{"tokens held":>12s}{"first token (s)":>17s}')
    whole = statistics.median(seconds['nothing'])
    for place, times in seconds.items():
        middle = statistics.median(times)
        print(f'{place:10s}{held[place]:12,d}{middle:17.3f}   {middle / whole:.1%}')


if __name__ == '__main__':
    run_main(main)
