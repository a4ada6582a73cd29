"""A small model that sees, and requests to an engine of it."""

from __future__ import annotations

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from k3jax.config import VisionConfig
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.run import Run
from k3jax.serve.generate import generate
from k3jax.serve.request import Request, Sampling
from tests import tiny

TOKENIZER = byte_tokenizer()
PAD = TOKENIZER.special_tokens['<|media_pad|>']
MODEL_CONFIG = tiny.k3(
    (1, 2),
    (3,),
    vocab_size=512,
    max_position_embeddings=300,
    vision=VisionConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        qkv_hidden_size=8,
        intermediate_size=8,
        patch_size=2,
        pos_emb_height=2,
        pos_emb_width=2,
    ),
    media_placeholder_token_id=PAD,
)
MODEL = Kimi(MODEL_CONFIG, Run(jnp.dtype('float32'), implementation='xla'), scan_layers=False)


@functools.cache
def parameters():
    params = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    # Logits far apart, so that rounding cannot change which one is largest.
    return params | {'lm_head': 30 * params['lm_head']}


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, 256, length).tolist()


def request(prompt, media=(), constraint=None, **sampling):
    options = {'temperature': 0.0, 'max_new_tokens': 8} | sampling
    own = {'prompt_ids': prompt, 'media': media, 'constraint': constraint}
    return Request(sampling=Sampling(**options), **own)


def answers(engine, *requests, take=None):
    """The tokens of each; take: how many of the first are read before it is dropped."""

    async def read(number, request):
        stream, found = engine.submit(request), []
        async for token in stream:
            found.append(token)
            if take is not None and number == 0 and len(found) == take:
                stream.cancel()
                break
        return found

    async def all_of_them():
        return await asyncio.wait_for(
            asyncio.gather(*(read(n, r) for n, r in enumerate(requests))), 120
        )

    return asyncio.run(all_of_them())


def ids(tokens):
    return [token.id for token in tokens]


def alone(prompt, count=8, **options):
    return list(generate(MODEL, parameters(), prompt, max_new_tokens=count, **options))


def continued(engine, request):
    """Tokens of a prompt that did not have to be read, and the ids of its answer."""
    streams, submit = [], engine.submit
    engine.submit = lambda request: streams.append(submit(request)) or streams[-1]
    try:
        (found,) = answers(engine, request)
    finally:
        del engine.submit
    return streams[0].cached_tokens, ids(found)


def check_memory(engine, config):
    """No block is leaked, in two places or pinned, on the device or on the host."""
    prefixes = engine._prefixes
    for index in (prefixes.index, prefixes.host.index):
        used = [block for entry in index.entries() for block in entry.blocks]
        assert len(used) == len(set(used)) and len(used) + index.num_free == index.num_blocks
        assert all(not entry.pins for entry in index.entries())
    figures = engine.prefix_figures
    assert figures.device_bytes <= config.prefix_cache_bytes
    assert figures.host_bytes <= config.prefix_host_bytes


BEGINNINGS = [prompt_of(length, seed) for length, seed in ((40, 3), (65, 4), (129, 5))]


def drawn_turn(data, turns):
    """Requests to be answered together: of shared beginnings, and that go on from `turns`."""
    asked = []
    for _ in range(data.draw(st.integers(1, 4))):
        shared = data.draw(st.sampled_from([*BEGINNINGS, *turns]))
        ends = [64, 63, 65, 32, 31, 96, len(shared), data.draw(st.integers(1, len(shared)))]
        shared = shared[: data.draw(st.sampled_from(ends))]
        # An answer of random weights may have tokens that stand for images.
        prompt = [token for token in shared if token != PAD]
        prompt = [*prompt, *prompt_of(data.draw(st.integers(0, 20)), seed=5)]
        asked.append(request(prompt, max_new_tokens=data.draw(st.integers(1, 20)), logprobs=4))
    return asked
