"""How fast, beside others, on the same checkpoint: `python -m experiments.bench`.

Prefill, train step and decode in float32, tokens a second, for k3jax, mlx-lm and (where installed)
transformers; then where our time goes. All run in turns, several times; the best of each counts.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

from experiments.bench_peers import DECODE_STEPS, DECODE_WARMUP, PREFILL, PROMPT, TRAIN
from k3jax.convert.to_orbax import convert
from k3jax.flags import config_from_file, run_main
from k3jax.model.cache import init_cache
from k3jax.model.kimi import decode, prefill
from k3jax.serve.export import export_random
from k3jax.serve.load import Loaded, open_model
from k3jax.train.optim import make_optimizer
from k3jax.train.profile import op_scopes, time_by_scope
from k3jax.train.state import TrainState
from k3jax.train.step import make_train_step

_CONFIG = flags.DEFINE_string('config', 'configs/kimi_linear_38m.py', 'Whose model to time.')
_RELEASE = flags.DEFINE_string('release', None, 'Released-format folder to time instead.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Turns each implementation gets.')
_PEER_PYTHON = flags.DEFINE_multi_string(
    'peer_python', [sys.executable], 'Pythons to look for mlx-lm and transformers in.'
)


def _best(run: Callable[[], None], tokens: int, repeats: int = 3) -> float:
    """Tokens a second of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return tokens / min(times)


class Ours:
    """The compiled functions of one checkpoint, ready to be timed."""

    def __init__(self, loaded: Loaded):
        self.model, self.params = loaded.model, loaded.params
        self.config = self.model.config
        rng = np.random.default_rng(0)
        self._ids = rng.integers(0, self.config.vocab_size, (1, max(PREFILL))).astype(np.int32)
        self._prefill = jax.jit(
            lambda params, ids, n, cache: prefill(self.model, params, ids, n, cache)
        )
        self._decode = jax.jit(self._next_token, donate_argnums=2)
        self._train, self._batch = self._make_train(rng)

    def _next_token(self, params, token, cache):
        logits, cache = decode(self.model, params, token, cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    def _make_train(self, rng: np.random.Generator):
        batch, length = TRAIN
        optimizer_config = config_from_file(_CONFIG.value).optimizer
        optimizer = make_optimizer(optimizer_config, 1000, self.model)
        self._state = TrainState(jnp.int32(0), self.params, optimizer.init(self.params))
        tokens = rng.integers(0, self.config.vocab_size, (batch, length + 1)).astype(np.int32)
        ones = np.ones((batch, length), np.int32)
        rows = {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'segment_ids': ones}
        return jax.jit(make_train_step(self.model, optimizer)), rows

    def _cache(self, size: int):
        return init_cache(self.config, self.model.plan, 1, size, jnp.dtype('float32'))

    def prefill(self, length: int) -> Callable[[], None]:
        cache, n = self._cache(length), np.array([length], np.int32)
        ids = self._ids[:, :length]
        return lambda: jax.block_until_ready(self._prefill(self.params, ids, n, cache))

    def train(self) -> None:
        jax.block_until_ready(self._train(self._state, self._batch))

    def decode(self) -> Callable[[], None]:
        cache = self._cache(PROMPT + DECODE_WARMUP + DECODE_STEPS)
        n = np.array([PROMPT], np.int32)
        _, self._running = self._prefill(self.params, self._ids[:, :PROMPT], n, cache)
        token = jnp.array([5], jnp.int32)

        def steps(count: int = DECODE_STEPS) -> None:
            nonlocal token
            for _ in range(count):
                token, self._running = self._decode(self.params, token, self._running)
            token.block_until_ready()

        steps(DECODE_WARMUP)
        return steps

    def scopes(self, job: str) -> dict[str, str]:
        """Which part of the model each op of a job's compiled function belongs to."""
        token, n = np.array([5], np.int32), np.array([max(PREFILL)], np.int32)
        match job:
            case 'train step':
                lowered = self._train.lower(self._state, self._batch)
            case 'decode':
                size = PROMPT + DECODE_WARMUP + DECODE_STEPS
                lowered = self._decode.lower(self.params, token, self._cache(size))
            case _:
                lowered = self._prefill.lower(self.params, self._ids, n, self._cache(n[0]))
        return op_scopes(lowered.compile().as_text())

    def measure(self) -> dict[str, float]:
        speeds = {}
        for length in PREFILL:
            run = self.prefill(length)
            run()
            speeds[f'prefill {length}'] = _best(run, length)
        self.train()
        speeds['train step'] = _best(self.train, TRAIN[0] * TRAIN[1])
        speeds['decode'] = _best(self.decode(), DECODE_STEPS, repeats=1)
        return speeds


def _peers(release: pathlib.Path) -> dict[str, list[str]]:
    """Commands that time the other implementations, of those installed."""
    found = {}
    for name, module in (('mlx-lm', 'mlx_lm'), ('transformers', 'transformers, torch')):
        for python in _PEER_PYTHON.value:
            probe = subprocess.run([python, '-c', f'import {module}'], capture_output=True)
            if probe.returncode == 0:
                script = str(pathlib.Path(__file__).with_name('bench_peers.py'))
                found[name] = [python, script, name, str(release)]
                break
        else:
            logging.warning('%s is not installed: left out', name)
    return found


def _table(results: dict[str, dict[str, float]]) -> list[str]:
    rows = [f'{"tokens/s":14s}' + ''.join(f'{name:>14s}' for name in results)]
    for job in results['k3jax']:
        row = [f'{job:14s}'] + [
            f'{speeds[job]:14,.0f}' if job in speeds else f'{"-":>14s}'
            for speeds in results.values()
        ]
        ratios = [
            f'{results["k3jax"][job] / speeds[job]:.1f}x {name}'
            for name, speeds in results.items()
            if name != 'k3jax' and job in speeds
        ]
        rows.append(''.join(row) + '   ' + ', '.join(ratios))
    return rows


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        release = pathlib.Path(_RELEASE.value or f'{folder}/release')
        if not _RELEASE.value:
            export_random(config_from_file(_CONFIG.value).model, release)
        convert(str(release), f'{folder}/converted', 'bf16')
        ours = Ours(open_model(f'{folder}/converted', 'float32'))
        peers = _peers(release)
        results: dict[str, dict[str, float]] = {}
        for turn in range(_ROUNDS.value):
            logging.info('round %d of %d', turn + 1, _ROUNDS.value)
            turns = {'k3jax': ours.measure()}
            for name, command in peers.items():
                out = subprocess.run(command, capture_output=True, text=True)
                if out.returncode:
                    raise ValueError(f'{name} failed: {out.stderr.strip().splitlines()[-1:]}')
                turns[name] = json.loads(out.stdout.splitlines()[-1])
            for name, speeds in turns.items():
                best = results.setdefault(name, {})
                for job, speed in speeds.items():
                    best[job] = max(speed, best.get(job, 0.0))
        print('\n'.join(_table(results)))
        for job, run in (
            (f'prefill {max(PREFILL)}', ours.prefill(max(PREFILL))),
            ('train step', ours.train),
            ('decode', ours.decode()),
        ):
            shares = time_by_scope(run, ours.scopes(job))
            print(f'{job}: ' + ', '.join(f'{name} {share:.0%}' for name, share in shares))


if __name__ == '__main__':
    run_main(main)
