"""How fast the engine decodes, beside mlx-lm on the same checkpoint:
`python -m experiments.bench_engine`.

Tokens a second of all requests together, in float32 on the CPU: through the engine's streams, as a
server reads them, with slots of the default length; and of mlx-lm's model called in a loop on a
batch of as many rows. All run in turns; the best of each counts.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import flags, logging

from experiments.bench_peers import BATCHES, DECODE_STEPS, DECODE_WARMUP, PROMPT
from k3jax.convert.to_orbax import convert
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.flags import config_from_file, run_main
from k3jax.serve.engine import Engine, EngineConfig
from k3jax.serve.export import export_random
from k3jax.serve.load import Loaded, open_model
from k3jax.serve.pool import Pool
from k3jax.serve.request import Request, Sampling

_CONFIG = flags.DEFINE_string('config', 'configs/kimi_linear_38m.py', 'Whose model to time.')
_RELEASE = flags.DEFINE_string('release', None, 'Released-format folder to time instead.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Turns each implementation gets.')
_PEER_PYTHON = flags.DEFINE_string('peer_python', sys.executable, 'Python with mlx-lm.')


def make_engine(loaded: Loaded, batch: int) -> Engine:
    """With slots as long as those of `experiments.serve`; the first requests compile."""
    length = min(EngineConfig.max_length, loaded.model.config.max_position_embeddings)
    config = EngineConfig(
        num_slots=batch, max_length=length, pieces=(PROMPT,), lane_sizes=(2 * PROMPT,)
    )
    pool = Pool(loaded.model, loaded.params, config.num_slots, config.max_length, None)
    engine = Engine(pool, loaded.tokenizer or byte_tokenizer(), config)
    engine.start()
    return engine


def tokens_per_second(engine: Engine, batch: int) -> float:
    """Of `batch` requests that run together, from when the last of them is on its way."""
    rng = np.random.default_rng(0)
    # The last is read when the others have run for a while.
    longest = DECODE_WARMUP + DECODE_STEPS + 4 * batch
    counts = [0] * batch

    async def read(number: int) -> None:
        prompt = rng.integers(0, 256, PROMPT).tolist()
        sampling = Sampling(temperature=0.0, max_new_tokens=longest)
        async for _ in engine.submit(Request(prompt_ids=prompt, sampling=sampling)):
            counts[number] += 1

    async def watch() -> float:
        tasks = [asyncio.create_task(read(number)) for number in range(batch)]
        while min(counts) < DECODE_WARMUP:
            await asyncio.sleep(0)
        start, before = time.perf_counter(), sum(counts)
        while max(counts) < longest:
            await asyncio.sleep(0.002)
        speed = (sum(counts) - before) / (time.perf_counter() - start)
        await asyncio.gather(*tasks)
        return speed

    return asyncio.run(watch())


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        release = pathlib.Path(_RELEASE.value or f'{folder}/release')
        if not _RELEASE.value:
            export_random(config_from_file(_CONFIG.value).model, release)
        convert(str(release), f'{folder}/converted', 'bf16')
        loaded = open_model(f'{folder}/converted', 'float32')
        engines = {batch: make_engine(loaded, batch) for batch in BATCHES}
        for batch, engine in engines.items():
            tokens_per_second(engine, batch)
        script = str(pathlib.Path(__file__).with_name('bench_peers.py'))
        command = [_PEER_PYTHON.value, script, 'mlx-lm-decode', str(release)]
        ours, theirs = {}, {}
        for turn in range(_ROUNDS.value):
            logging.info('round %d of %d', turn + 1, _ROUNDS.value)
            for batch, engine in engines.items():
                ours[batch] = max(ours.get(batch, 0.0), tokens_per_second(engine, batch))
            out = subprocess.run(command, capture_output=True, text=True)
            if out.returncode:
                raise ValueError(f'mlx-lm failed: {out.stderr.strip().splitlines()[-1:]}')
            for batch, speed in json.loads(out.stdout.splitlines()[-1]).items():
                theirs[int(batch)] = max(theirs.get(int(batch), 0.0), speed)
        for engine in engines.values():
            engine.close()
    print(f'{"tokens/s":12s}{"k3jax engine":>14s}{"mlx-lm":>10s}')
    for batch in BATCHES:
        ratio = ours[batch] / theirs[batch]
        print(f'batch {batch:<6d}{ours[batch]:14,.0f}{theirs[batch]:10,.0f}   {ratio:.1f}x')


if __name__ == '__main__':
    run_main(main)
