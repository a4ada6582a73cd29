"""Prefill and token-by-token decode of a converted folder in float64.

    JAX_ENABLE_X64=1 python -m tests.decode_float64 CONVERTED_DIR TOKENS.json OUT.npz

The output holds `forward` and `decode`, logits [T, Z] each. A process of its own, since JAX's x64
mode is for a whole process.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.convert.converted import load_params, read_conversion
from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, decode, forward
from k3jax.model.plan import stack_params
from k3jax.model.run import Run


def main(converted: str, tokens_file: str, output: str) -> None:
    config = read_conversion(converted).model_config
    model = Kimi(config, Run(jnp.dtype('float64'), implementation='xla'), scan_layers=False)
    params = stack_params(load_params(converted), model.plan, np.stack)
    params = jax.tree.map(lambda a: a if a.dtype == np.uint8 else np.asarray(a, np.float64), params)
    tokens = np.array(json.loads(pathlib.Path(tokens_file).read_text()), np.int32)
    whole = jax.jit(functools.partial(forward, model))(params, tokens[None])[0]
    cache = init_cache(config, model.plan, 1, len(tokens), model.run.dtype)
    step = jax.jit(functools.partial(decode, model))
    steps = []
    for token in tokens:
        logits, cache = step(params, token[None], cache)
        steps.append(logits)
    np.savez(output, forward=whole, decode=np.concatenate(steps))


if __name__ == '__main__':
    main(*sys.argv[1:])
