"""A model that sees, on a mesh: loss and gradients of one chip; rows are whose tokens they say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MeshConfig, OptimizerConfig, VisionConfig
from k3jax.model.cache import init_cache
from k3jax.model.kimi import Kimi, forward, init_params, prefill
from k3jax.model.run import Run
from k3jax.model.vision import MediaInputs, media_of, media_rows
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.train.optim import make_optimizer
from k3jax.train.state import TrainState
from k3jax.train.step import make_gradient, make_train_step, next_targets
from tests import tiny
from tests.compare import relative_error

MEDIA_ID = 39
VISION = VisionConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    qkv_hidden_size=16,
    intermediate_size=16,
    patch_size=2,
    pos_emb_height=4,
    pos_emb_width=4,
)
# No KDA and no experts: that these go along with meshes is tested elsewhere, and they compile long.
CONFIG = tiny.k3(
    (),
    (1,),
    hidden_size=32,
    num_attention_heads=4,
    vision=VISION,
    media_placeholder_token_id=MEDIA_ID,
)
RUN = Run(jnp.dtype('float32'), jnp.dtype('float32'), implementation='xla')
BATCH, LENGTH, PATCHES, ROWS = 4, 32, 48, 16
# Of each row of the batch: images of some size, a chunk of video, none.
GRIDS = [[(1, 4, 6), (1, 2, 4)], [(4, 2, 2), (1, 4, 4)], [], [(1, 6, 8)]]


@functools.cache
def batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, MEDIA_ID, (BATCH, LENGTH + 1)).astype(np.int32)
    media = []
    for row, grids in enumerate(GRIDS):
        at = 3
        for _, height, width in grids:
            count = height * width // 4
            tokens[row, at : at + count] = MEDIA_ID
            at += count + 2
        media.append(media_of(grids, PATCHES, ROWS))
    targets = np.where(tokens[:, 1:] == MEDIA_ID, -1, tokens[:, 1:])
    pixels = rng.uniform(-1, 1, (BATCH, PATCHES, 3, 2, 2)).astype(np.float32)
    inputs = MediaInputs(pixels, jax.tree.map(lambda *x: np.stack(x), *media))
    ids = np.ones_like(targets)
    return {'tokens': tokens[:, :-1], 'targets': targets, 'segment_ids': ids, 'media': inputs}


@functools.cache
def params(config=CONFIG):
    values = jax.jit(lambda key: init_params(Kimi(config, RUN), key))(jax.random.key(0))
    return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, values)


def model_on(shape, **run):
    axes = dict(zip(('data', 'expert', 'sequence'), shape, strict=True))
    config = MeshConfig(**axes, whole_below=0)
    mesh = make_mesh(config, jax.devices()[: int(np.prod(shape))])
    return Kimi(CONFIG, RUN._replace(parallel=parallel_of(mesh, config, 'train'), **run)), mesh


@functools.cache
def on_one_chip():
    return jax.jit(make_gradient(Kimi(CONFIG, RUN), 1, None))(params(), batch())


def assert_same(got, want):
    np.testing.assert_allclose(got.sums, want.sums, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(want.grads), jax.tree.leaves(got.grads), strict=True
    ):
        assert relative_error(b, a) <= 2e-5, jax.tree_util.keystr(path)


def test_the_tower_learns_from_the_loss_of_the_text():
    grads = on_one_chip().grads
    for name in ('vision_tower', 'mm_projector'):
        for path, x in jax.tree_util.tree_leaves_with_path(grads[name]):
            assert np.abs(x).max() > 1e-6, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ('shape', 'slices'),
    [((2, 1, 2), 2), pytest.param((1, 1, 4), 1, marks=pytest.mark.slow)],
)
def test_loss_and_gradients_on_a_mesh_are_those_of_one_chip(shape, slices):
    model, mesh = model_on(shape, remat='layer')
    assert_same(jax.jit(make_gradient(model, slices, mesh))(params(), batch()), on_one_chip())


def test_a_row_in_place_of_an_embedding_is_as_good_as_the_token():
    """Rows that are embeddings of other tokens: the logits are of these tokens, in pieces too."""
    model, table = Kimi(CONFIG, RUN), params()['embed_tokens']
    others = np.random.default_rng(2).integers(0, MEDIA_ID, (2, LENGTH)).astype(np.int32)
    is_media = np.random.default_rng(3).random((2, LENGTH)) < 0.4
    tokens = np.where(is_media, MEDIA_ID, others)
    rows = np.zeros((2, LENGTH, CONFIG.hidden_size), np.float32)
    for row in range(2):
        found = others[row][is_media[row]]
        rows[row, : len(found)] = np.asarray(table)[found]
    run = jax.jit(functools.partial(forward, model))
    want = run(params(), others, None, rows)
    np.testing.assert_array_equal(run(params(), tokens, None, rows), want)
    cache = init_cache(CONFIG, model.plan, 2, LENGTH, jnp.float32)
    piece = jax.jit(functools.partial(prefill, model))
    half, num_real = LENGTH // 2, np.full(2, LENGTH // 2, np.int32)
    _, cache = piece(params(), tokens[:, :half], num_real, cache, rows)
    later = np.stack([np.roll(rows[i], -is_media[i, :half].sum(), axis=0) for i in range(2)])
    got, _ = piece(params(), tokens[:, half:], num_real, cache, later)
    assert relative_error(got, want[:, -1]) < 1e-5


def test_rows_of_a_batch_are_those_of_each_row_alone():
    find = jax.jit(lambda p, media: media_rows(p, media, CONFIG, RUN))
    inputs = batch()['media']
    whole = find(params(), inputs)
    for row in range(BATCH):
        alone = find(params(), jax.tree.map(lambda x, r=row: x[r : r + 1], inputs))
        np.testing.assert_array_equal(alone[0], whole[row])


@pytest.mark.parametrize('name', ['adamw', pytest.param('muon', marks=pytest.mark.slow)])
def test_a_step_tells_the_gradient_norms_of_text_and_of_vision(name):
    model = Kimi(CONFIG, RUN)
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=0), 10, model)
    state = TrainState(jnp.int32(0), params(), jax.jit(optimizer.init)(params()))
    after, metrics = jax.jit(make_train_step(model, optimizer))(state, batch())
    text, vision = metrics['grad_norm_text'], metrics['grad_norm_vision']
    assert text > 0 and vision > 0
    np.testing.assert_allclose(np.hypot(text, vision), metrics['grad_norm'], rtol=1e-6)
    for tree in ('vision_tower', 'mm_projector'):
        moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after.params[tree], params()[tree])
        assert all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_what_predicts_the_token_after_next_is_given_rows_too():
    """Targets that are media tokens, as their rows stand for tokens of the table."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    model, values = Kimi(config, RUN), params(config)
    others = np.random.default_rng(2).integers(0, MEDIA_ID, (1, LENGTH + 1)).astype(np.int32)
    is_media = np.random.default_rng(3).random((1, LENGTH + 1)) < 0.4
    tokens = np.where(is_media, MEDIA_ID, others)
    rows = np.asarray(values['embed_tokens'])[others[is_media]][None]
    assert len(next_targets(others)) == 1

    @jax.jit
    def run(tokens, following):
        return model.apply(
            {'params': values}, tokens, next_tokens=following, media_rows=rows
        ).next_hidden

    want, got = run(others[:, :-1], others[:, 1:]), run(tokens[:, :-1], tokens[:, 1:])
    np.testing.assert_array_equal(got, want)
