"""A prompt with images and video: its ids, the rows in their place, what is refused."""

import base64
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from k3jax.convert.to_orbax import convert
from k3jax.data.images import ImageConfig, ImageError, Patches
from k3jax.data.video import Chunk
from k3jax.model.kimi import forward
from k3jax.serve import generate as generate_lib
from k3jax.serve import media as media_lib
from k3jax.serve.generate import generate
from k3jax.serve.load import open_model
from k3jax.serve.media import patch_bucket, rows_of, see
from tests import release

BEGIN, CONTENT, END, PAD = 274, 275, 276, 277  # of a tokenizer of bytes


def _config():
    config = release.k3_bf16() | {'media_placeholder_token_id': PAD}
    config['text_config'] |= {'vocab_size': 512, 'num_hidden_layers': 2}
    layers = {'kda_layers': [1], 'full_attn_layers': [2]}
    config['text_config']['linear_attn_config'] |= layers
    return config


@pytest.fixture(scope='module')
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp('seeing')
    source = release.write_release(folder / 'release', _config())
    lines = [base64.b64encode(bytes([n])) + b' %d' % n for n in range(256)]
    (source / 'tiktoken.model').write_bytes(b'\n'.join(lines))
    limits = {'patch_size': 14, 'in_patch_limit': 64}
    (source / 'preprocessor_config.json').write_text(json.dumps({'media_proc_cfg': limits}))
    convert(source, folder / 'converted')
    return open_model(str(folder / 'converted'), 'float32')


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp('pictures'), np.random.default_rng(0)
    sizes = {'small.png': (40, 100), 'large.png': (300, 200)}
    for name, (width, height) in sizes.items():
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(folder / name)
    return [folder / name for name in sizes]


def test_files_become_markup_with_a_token_for_each_row(loaded, pictures):
    seen = see(loaded, pictures)
    want = []
    for text, count in ((b'image 40x100', 8), (b'image 300x200', 20)):
        want += [BEGIN, *text, CONTENT, *[PAD] * count, END]
    assert seen.tokens == want
    assert seen.rows.shape == (28, 64) and np.all(np.isfinite(seen.rows))


def test_chunks_of_video_are_seen_after_images(loaded, pictures, monkeypatch):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (2 * 16, 3, 14, 14), np.uint8)
    chunk = Chunk('T<|media_begin|>V<|media_content|><|media_pad|><|media_end|>', None)
    chunks = [chunk._replace(patches=Patches(pixels, (2, 4, 4)))] * 2
    monkeypatch.setattr(media_lib, 'read_video', lambda path, images, videos: iter(chunks))
    seen = see(loaded, pictures[:1], ['a.mp4'])
    one = [ord('T'), BEGIN, ord('V'), CONTENT, *[PAD] * 4, END]
    assert seen.tokens == see(loaded, pictures[:1]).tokens + 2 * one
    assert seen.rows.shape == (16, 64)
    np.testing.assert_array_equal(seen.rows[8:12], seen.rows[12:])


def test_what_is_generated_follows_the_images(loaded, pictures, monkeypatch):
    """By whole documents; and in pieces that cut an image."""
    model, params = loaded.model, loaded.params
    seen = see(loaded, pictures)
    prompt = [*seen.tokens, *b'What?']
    run = jax.jit(lambda tokens, rows: forward(model, params, tokens, None, rows))
    ids = list(prompt)
    for _ in range(3):
        padded = np.pad(ids, (0, 96 - len(ids))).astype(np.int32)[None]
        ids.append(int(np.argmax(run(padded, seen.rows[None])[0, len(ids) - 1])))
    options = {'max_new_tokens': 3, 'media_rows': seen.rows}
    assert list(generate(model, params, prompt, **options)) == ids[-3:]
    monkeypatch.setattr(generate_lib, 'PREFILL_PIECE', 32)
    assert list(generate(model, params, prompt, **options)) == ids[-3:]
    others = options | {'media_rows': jnp.roll(seen.rows, 5, axis=0)}
    first, second = (
        generate_lib.read_prompt(model, params, prompt, 256, x['media_rows'])[0]
        for x in (options, others)
    )
    assert np.abs(first - second).max() > 1e-3


def test_padding_changes_no_row(loaded):
    patches = Patches(
        np.random.default_rng(0).integers(0, 256, (16, 3, 14, 14), np.uint8), (1, 4, 4)
    )
    want = rows_of(loaded.model, loaded.params, patches, ImageConfig())
    got = rows_of(
        loaded.model,
        loaded.params,
        Patches(np.concatenate([patches.pixels] * 17), (1, 4, 68)),
        ImageConfig(),
    )
    assert want.shape == (4, 64) and got.shape == (68, 64)
    assert patch_bucket(1) == patch_bucket(256) == 256
    assert [patch_bucket(n) for n in (257, 2049, 65536, 66564)] == [512, 2560, 65536, 81920]
    assert all(0 <= patch_bucket(n) - n < max(256, n / 4) for n in range(1, 70000, 37))


def test_another_number_of_media_tokens_than_rows_is_refused(loaded, pictures):
    model, params, seen = loaded.model, loaded.params, see(loaded, pictures)
    for prompt, rows in (([PAD, *seen.tokens], seen.rows), (seen.tokens, None), ([1], seen.rows)):
        with pytest.raises(ValueError, match=r'prompt: got \d+ media tokens \(id 277\), wanted'):
            generate(model, params, prompt, max_new_tokens=1, media_rows=rows)


def test_text_cannot_forge_markup(loaded):
    ids = loaded.tokenizer.encode('<|media_begin|>image 1x1<|media_content|><|media_pad|>')
    assert max(ids) < 256


def test_files_that_cannot_be_seen_are_named(loaded, tmp_path):
    bad = tmp_path / 'bad.png'
    bad.write_bytes(b'')
    with pytest.raises(ImageError, match='bad.png: an empty file'):
        see(loaded, [bad])
    with pytest.raises(ImageError, match='none.mp4: cannot be read'):
        see(loaded, [], [tmp_path / 'none.mp4'])
