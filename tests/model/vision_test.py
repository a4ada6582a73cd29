"""The vision tower and projector against float64, in every form; packed media; padding."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError, VisionConfig
from k3jax.model import vision
from k3jax.model.layout import Leaf
from k3jax.model.vision import media_of, mm_projector, vision_leaves, vision_tower
from tests.compare import relative_error
from tests.oracles import vision as oracle

EXACT = 1e-12  # of float64 against float64, relative
TEXT = 24
SHARED = {
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'qkv_hidden_size': 24,
    'intermediate_size': 20,
    'patch_size': 2,
    'pos_emb_height': 4,
    'pos_emb_width': 6,
}
CONFIGS = {
    'k3': VisionConfig(**SHARED),
    'k2.5': VisionConfig(
        **SHARED, norm='layer', norm_eps=1e-5, bias=True, pos_emb_interpolation_mode='bicubic'
    ),
}
# Odd and even numbers of rows for the text; as large as the table; a video chunk; a short one.
GRIDS = [(1, 2, 6), (1, 4, 6), (1, 8, 2), (4, 4, 2), (2, 2, 2)]


def random_params(config):
    def walk(path, entry):
        if isinstance(entry, Leaf):
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            x = rng.standard_normal(entry.shape)
            return x / entry.shape[-1] ** 0.5 if len(entry.shape) > 1 else 0.3 * x + 1
        return {name: walk(f'{path}/{name}', child) for name, child in entry.items()}

    return walk('', vision_leaves(config, TEXT))


def pixels_of(grids, size=2):
    count = sum(t * h * w for t, h, w in grids)
    return np.random.default_rng(0).uniform(-1, 1, (count, 3, size, size))


@functools.cache
def compiled(name):
    config = CONFIGS[name]
    params = random_params(config)

    @jax.jit
    def run(pixels, media):
        corners = vision_tower(params['vision_tower'], pixels, media, config, jnp.float64)
        return corners, mm_projector(params['mm_projector'], corners, config)

    return params, run


@pytest.mark.parametrize('name', CONFIGS)
def test_packed_media_equal_the_oracle_one_by_one(name):
    config, pixels = CONFIGS[name], pixels_of(GRIDS)
    with jax.enable_x64(True):
        params, run = compiled(name)
        padded = np.pad(pixels, ((0, 5), (0, 0), (0, 0), (0, 0)))
        got = run(padded, media_of(GRIDS, len(padded), 40))
    first = row = 0
    for t, h, w in GRIDS:
        own = pixels[first : first + t * h * w]
        corners = oracle.tower(params['vision_tower'], own, (t, h, w), config)
        rows = slice(row, row + h * w // 4)
        assert relative_error(got[0][rows], corners) < EXACT
        want = oracle.projector(params['mm_projector'], corners, config)
        assert relative_error(got[1][rows], want) < EXACT
        first, row = first + t * h * w, row + h * w // 4
    assert np.all(np.isfinite(got[1]))


def test_attention_in_blocks_equals_attention_at_once(monkeypatch):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((29, 2, 8)).astype(np.float32) for _ in range(3))
    medium = np.repeat([1, 2, 3, 0], [3, 14, 10, 2])

    def total(q, k, v):
        out = vision.media_attention(q, k, v, medium)
        return jnp.sum(jnp.sin(out)), out

    find = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    (_, want), want_grads = find(q, k, v)
    monkeypatch.setattr(vision, 'BLOCK', 8)
    (_, got), got_grads = find(q, k, v)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_scores_of_a_large_image_never_lie_whole():
    """65,536 patches: the largest array of the program is far under 65,536 squared."""
    q = jax.ShapeDtypeStruct((65536, 2, 16), jnp.float32)
    medium = jax.ShapeDtypeStruct((65536,), jnp.int32)

    def largest(jaxpr):
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, 'size')]
        for eqn in jaxpr.eqns:
            for inner in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, 'jaxpr') or hasattr(x, 'eqns'),
            ):
                if hasattr(inner, 'jaxpr') or hasattr(inner, 'eqns'):
                    sizes.append(largest(getattr(inner, 'jaxpr', inner)))
        return max(sizes, default=0)

    def loss(q, medium):
        return jnp.sum(vision.media_attention(q, q, q, medium))

    # One block of queries against all keys, for the backward pass, is 1/64 of the square.
    assert largest(jax.make_jaxpr(jax.grad(loss))(q, medium).jaxpr) <= 2 * 65536 * 1024


def test_parameters_are_as_many_as_released():
    leaves = vision_leaves(VisionConfig(), 7168)
    counts = {
        name: sum(
            leaf.size for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Leaf))
        )
        for name, tree in leaves.items()
    }
    assert counts == {'vision_tower': 401_214_464, 'mm_projector': 46_144_512}


def test_media_that_are_none_are_refused():
    for grid in ((0, 2, 2), (5, 2, 2), (1, 3, 2), (1, 2, 0)):
        with pytest.raises(ValueError, match='medium 1: got a grid of'):
            media_of([(1, 2, 2), grid])
    with pytest.raises(ValueError, match='media: got 8 patches, wanted at most 7'):
        media_of([(1, 2, 4)], num_patches=7)
    with pytest.raises(ValueError, match='media: got 2 rows, wanted at most 1'):
        media_of([(1, 2, 4)], num_rows=1)


def test_no_media_are_padding_alone():
    media = media_of([], 8, 2)
    with jax.enable_x64(True):
        _, rows = compiled('k3')[1](np.zeros((8, 3, 2, 2)), media)
    assert rows.shape == (2, TEXT) and np.all(np.isfinite(rows))


def test_configs_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match='model.vision.qkv_hidden_size: got 30'):
        VisionConfig(num_attention_heads=4, qkv_hidden_size=30)
    with pytest.raises(ConfigError, match='model.vision.norm'):
        VisionConfig(norm='batch')
