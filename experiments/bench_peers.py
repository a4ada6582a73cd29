"""Times mlx-lm or transformers on a released-format folder; prints one JSON line of tokens/s.

`python experiments/bench_peers.py mlx-lm|mlx-lm-decode|transformers DIR`. Stands alone, so that it
can run in an environment of its own. The workloads below are those of `experiments.bench` and
`experiments.bench_engine`.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

PREFILL = (512, 2048)  # tokens of one prompt
TRAIN = (4, 512)  # sequences x tokens
PROMPT = 64  # tokens before decoding
DECODE_WARMUP, DECODE_STEPS = 8, 64
BATCHES = (1, 16)  # rows that are decoded together, where an engine is measured
THREADS = 2


def _best(run: Callable[[], object], tokens: int, repeats: int = 2) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return tokens / min(times)


def _mlx_model(folder: str) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(pathlib.Path(folder))
    model.set_dtype(mx.float32, lambda dtype: dtype in (mx.bfloat16, mx.float16))
    return model


def mlx_lm_decode(folder: str, ids: np.ndarray) -> dict[str, float]:
    """Of rows that are decoded together, by their number; each step is asked for before the
    tokens of the one before are read, as in mlx-lm's own generation."""
    import mlx.core as mx

    model, speeds = _mlx_model(folder), {}
    for batch in BATCHES:
        cache = model.make_cache()
        prompts = np.resize(ids, (batch, PROMPT))
        token = mx.argmax(model(mx.array(prompts), cache=cache)[:, -1:], -1)
        mx.eval(token)

        def steps(count: int, cache: Any = cache) -> None:
            nonlocal token
            for _ in range(count):
                following = mx.argmax(model(token, cache=cache), -1)
                mx.async_eval(following)
                token.tolist()
                token = following
            mx.eval(token)

        steps(DECODE_WARMUP)
        speeds[str(batch)] = _best(lambda: steps(DECODE_STEPS), batch * DECODE_STEPS, repeats=1)
    return speeds


def mlx_lm(folder: str, ids: np.ndarray) -> dict[str, float]:
    import mlx.core as mx

    model, speeds = _mlx_model(folder), {}
    for length in PREFILL:
        tokens = mx.array(ids[:1, :length])
        mx.eval(model(tokens))
        speeds[f'prefill {length}'] = _best(lambda t=tokens: mx.eval(model(t)), length)
    cache = model.make_cache()
    mx.eval(model(mx.array(ids[:1, :PROMPT]), cache=cache))
    token = mx.array([[5]])

    def steps(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = mx.argmax(model(token, cache=cache)[:, -1:], -1)
            mx.eval(token)

    steps(DECODE_WARMUP)
    speeds['decode'] = _best(lambda: steps(DECODE_STEPS), DECODE_STEPS, repeats=1)
    return speeds


def transformers(folder: str, ids: np.ndarray) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(ids)
    speeds = {}
    with torch.no_grad():
        for length in PREFILL:
            model(tokens[:1, :length])
            speeds[f'prefill {length}'] = _best(lambda n=length: model(tokens[:1, :n]), length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    batch = tokens.reshape(-1)[: TRAIN[0] * TRAIN[1]].reshape(TRAIN)

    def train() -> None:
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()

    train()
    speeds['train step'] = _best(train, TRAIN[0] * TRAIN[1])
    with torch.no_grad():
        out = model(tokens[:1, :PROMPT], use_cache=True)
        cache, token = out.past_key_values, torch.tensor([[5]])

        def steps(count: int) -> None:
            nonlocal cache, token
            for _ in range(count):
                out = model(token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

        steps(DECODE_WARMUP)
        speeds['decode'] = _best(lambda: steps(DECODE_STEPS), DECODE_STEPS, repeats=1)
    return speeds


def main() -> None:
    name, folder = sys.argv[1:3]
    vocabulary = json.loads(pathlib.Path(folder, 'config.json').read_text())['vocab_size']
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, max(PREFILL)))
    peers = {'mlx-lm': mlx_lm, 'mlx-lm-decode': mlx_lm_decode, 'transformers': transformers}
    print(json.dumps(peers[name](folder, ids)))


if __name__ == '__main__':
    main()
