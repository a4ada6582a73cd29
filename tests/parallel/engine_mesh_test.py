"""An engine on a mesh answers as on one device: prompts of any length, images, packed experts."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MeshConfig, VisionConfig
from k3jax.data.images import ImageConfig, Patches
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.serve.engine import Engine
from k3jax.serve.engine_config import EngineConfig
from k3jax.serve.placement import place_params
from k3jax.serve.pool import Pool
from k3jax.serve.request import Request, Sampling
from tests import tiny

TOKENIZER = byte_tokenizer()
PAD = TOKENIZER.special_tokens['<|media_pad|>']
_TINY = tiny.k3(
    (1,),
    (2,),
    vocab_size=512,
    max_position_embeddings=128,
    num_attention_heads=4,
    num_experts=8,
    routed_expert_hidden_size=32,
    moe_intermediate_size=32,
    experts_format='mxfp4',
    media_placeholder_token_id=PAD,
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
)
MODEL_CONFIG = dataclasses.replace(
    _TINY, linear_attn_config=dataclasses.replace(_TINY.linear_attn_config, num_heads=4)
)
RUN = Run(jnp.dtype('float32'), implementation='xla')
CONFIG = EngineConfig(num_slots=4, max_length=96, pieces=(16,), lane_sizes=(64,))
IMAGES = ImageConfig(patch_size=2)


@functools.cache
def params():
    values = tiny.random_params(MODEL_CONFIG)
    values = jax.tree.map(lambda x: x if x.dtype == np.uint8 else x.astype(np.float32), values)
    # Logits far apart, so that rounding cannot change which one is largest.
    return values | {'lm_head': 30 * values['lm_head']}


def requests():
    """More than there are slots, of several pieces and of one; two see images, which differ."""
    rng = np.random.default_rng(0)

    def text(length):
        return rng.integers(0, 256, length).tolist()

    def image(height, width):
        pixels = rng.integers(0, 256, (height * width, 3, 2, 2), np.uint8)
        return Patches(pixels, (1, height, width))

    prompts = [text(n) for n in (1, 37, 5, 60, 16, 33)]
    asked = [(prompt, ()) for prompt in prompts]
    asked[1] = [*text(3), PAD, *text(20), PAD, *text(4)], (image(2, 4), image(4, 4))
    asked[4] = [PAD, *text(9)], (image(6, 2),)
    options = [{'temperature': 0.0}] * 5 + [{'temperature': 3.0, 'seed': 4}]
    return [
        Request(prompt_ids=prompt, sampling=Sampling(max_new_tokens=5 + n, **own), media=media)
        for n, ((prompt, media), own) in enumerate(zip(asked, options, strict=True))
    ]


def answers(**axes):
    config = MeshConfig(data=axes.pop('data', 1), whole_below=0, **axes)
    count = config.data * config.expert * config.tensor
    mesh = make_mesh(config, jax.devices()[:count])
    run = RUN._replace(parallel=parallel_of(mesh, config, 'decode'))
    model = Kimi(MODEL_CONFIG, run, scan_layers=False)
    pool = Pool(
        model, place_params(params(), model, mesh), CONFIG.num_slots, CONFIG.max_length, mesh
    )
    engine = Engine(pool, TOKENIZER, CONFIG, images=IMAGES)
    engine.start()

    async def read(request):
        return [token async for token in engine.submit(request)]

    async def all_of_them():
        return await asyncio.gather(*map(read, requests()))

    try:
        found = asyncio.run(asyncio.wait_for(all_of_them(), 300))
        jax.block_until_ready(pool.cache)
    finally:
        engine.close()
    return [[token.id for token in tokens] for tokens in found], pool


@functools.cache
def on_one_device():
    return answers()[0]


@pytest.mark.parametrize(
    'axes',
    [
        {'expert': 2, 'tensor': 2},
        pytest.param({'data': 2, 'tensor': 2}, marks=pytest.mark.slow),
    ],
    ids=['expert', 'data'],
)
def test_answers_on_a_mesh_are_those_of_one_device(axes):
    found, pool = answers(**axes)
    assert found == on_one_device()
    assert [len(tokens) for tokens in found] == [5 + n for n in range(6)]
    assert len({tuple(tokens[:5]) for tokens in found}) == 6
    assert pool.num_lanes == 2
    for cached in (pool.cache, pool.rows):
        for x in jax.tree.leaves(cached):
            assert x.addressable_shards[0].data.size <= x.size // 2  # no chip has all slots
    packed = [x for x in jax.tree.leaves(pool.params) if x.dtype == jnp.uint8]
    assert packed and all(x.addressable_shards[0].data.size == x.size // 4 for x in packed)
