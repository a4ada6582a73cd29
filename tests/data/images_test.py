"""Sizes by the published table, pixels by hand, and files that are not what they seem."""

import io
import struct
import subprocess
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3jax.data.images import (
    ImageConfig,
    ImageError,
    image_patches,
    image_prompt,
    image_size,
    load_image,
    normalised,
    plan_image,
    read_image,
)

CONFIG = ImageConfig()


@pytest.mark.parametrize(
    ('size', 'resized', 'grid', 'tokens'),
    [
        ((224, 224), (224, 224), (16, 16), 64),
        ((100, 100), (100, 100), (8, 8), 16),
        ((640, 480), (640, 480), (36, 46), 414),
        ((1920, 1080), (1920, 1080), (78, 138), 2691),
        ((3584, 3584), (3584, 3584), (256, 256), 16384),
        ((4096, 4096), (3591, 3591), (258, 258), 16641),
        ((8000, 6000), (4142, 3107), (222, 296), 16428),
        ((10000, 500), (7168, 358), (26, 512), 3328),
        ((20000, 20), (7168, 7), (2, 512), 256),
        ((1, 1), (1, 1), (2, 2), 1),
    ],
)
def test_sizes_are_those_of_the_published_table(size, resized, grid, tokens):
    plan = plan_image(*size, CONFIG)
    assert (plan.new_width, plan.new_height) == resized
    assert (plan.rows, plan.columns) == grid
    assert plan.num_tokens == tokens


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 30000), st.integers(1, 30000))
def test_every_plan_keeps_the_limits_and_even_grids(width, height):
    plan = plan_image(width, height, CONFIG)
    assert plan.rows % 2 == plan.columns % 2 == 0
    assert 1 <= plan.new_width <= min(width, 7168) and 1 <= plan.new_height <= min(height, 7168)
    assert plan.rows <= 512 and plan.columns <= 512
    assert plan.num_tokens <= 16_800
    # Padding is less than two patches, and one scale gives both sides, rounded down.
    assert 0 <= plan.columns * 14 - plan.new_width < 28
    assert 0 <= plan.rows * 14 - plan.new_height < 28
    sides = [(plan.new_width, width), (plan.new_height, height)]
    sides = [(new, old) for new, old in sides if new > 1] or sides[:1]
    assert max(new / old for new, old in sides) < min((new + 1) / old for new, old in sides)


def patches_of(pixels, mode=None, **config):
    image = Image.fromarray(np.asarray(pixels, np.uint8), mode)
    return image_patches(image, ImageConfig(**config))


def test_patches_go_row_by_row_and_are_normalised_after_padding():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    patches = patches_of(pixels)
    assert patches.grid == (1, 2, 4) and patches.pixels.shape == (8, 3, 14, 14)
    whole = np.zeros((28, 56, 3))
    whole[:20, :30] = pixels
    whole = whole / 127.5 - 1
    for number, patch in enumerate(normalised(patches.pixels, CONFIG)):
        row, column = divmod(number, 4)
        want = whole[14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        np.testing.assert_allclose(patch, want.transpose(2, 0, 1), atol=1e-6)


def test_what_is_transparent_lies_on_a_chessboard():
    pixels = np.zeros((28, 28, 4), np.uint8)
    pixels[..., :3] = 100
    pixels[:, 14:, 3] = 255  # the right half is opaque
    pixels[20, 3, 3] = 51  # a fifth
    values = patches_of(pixels).pixels
    image = values.reshape(2, 2, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 28, 3)
    assert np.all(image[:, 14:] == 100)
    for y, x in ((0, 0), (0, 8), (8, 0), (9, 9), (27, 13)):
        assert image[y, x, 0] == (180 if (y // 8 + x // 8) % 2 else 255)
    assert image[20, 3, 0] == int(0.2 * 100 + 0.8 * 255)


def encoded(image, kind='PNG', **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_every_mode_of_a_file_becomes_rgb_or_rgba():
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (9, 7)).astype(np.uint8)
    colour = Image.fromarray(rng.integers(0, 256, (9, 7, 3)).astype(np.uint8))
    got = read_image(encoded(Image.fromarray(gray)), 'x', CONFIG)
    np.testing.assert_array_equal(np.asarray(got), np.repeat(gray[..., None], 3, axis=-1))
    low = rng.integers(0, 256, (9, 7)).astype(np.uint16)  # is dropped, as of 16 bits a colour
    sixteen = Image.fromarray(gray.astype(np.uint16) * 256 + low)
    got = read_image(encoded(sixteen), 'x', CONFIG)
    np.testing.assert_array_equal(np.asarray(got)[..., 0], gray)
    clear = int(np.asarray(sixteen)[2, 3])
    got = np.asarray(read_image(encoded(sixteen, transparency=clear), 'x', CONFIG))
    np.testing.assert_array_equal(got[..., 3] == 0, np.asarray(sixteen) == clear)
    numbers = Image.fromarray(np.float32([[-5, 0.4, 7.6, 300, np.nan, np.inf]]))
    got = np.asarray(read_image(encoded(numbers, 'TIFF'), 'x', CONFIG))
    assert got[0, :, 0].tolist() == [0, 0, 8, 255, 0, 255]
    assert read_image(encoded(Image.fromarray(gray > 99)), 'x', CONFIG).mode == 'RGB'
    assert read_image(encoded(colour.convert('CMYK'), 'JPEG'), 'x', CONFIG).mode == 'RGB'
    assert read_image(encoded(colour.convert('LA')), 'x', CONFIG).mode == 'RGBA'
    palette = colour.quantize(8)
    np.testing.assert_array_equal(
        np.asarray(read_image(encoded(palette), 'x', CONFIG)), np.asarray(palette.convert('RGB'))
    )
    data = encoded(palette, transparency=0)
    assert read_image(data, 'x', CONFIG).mode == 'RGBA'


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new('RGB', (5, 4), colour) for colour in ('red', 'blue')]
    data = encoded(frames[0], 'GIF', save_all=True, append_images=frames[1:])
    image = read_image(data, 'x', CONFIG)
    assert image.size == (5, 4) and image.convert('RGB').getpixel((0, 0)) == (255, 0, 0)


def test_exif_rotation_is_left_alone():
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = encoded(Image.new('RGB', (30, 20)), 'JPEG', exif=exif)
    assert read_image(data, 'x', CONFIG).size == (30, 20)


def test_a_tiff_is_turned_and_so_is_its_size():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new('RGB', (30, 20)), 'TIFF', exif=exif)
    assert read_image(data, 'x', CONFIG).size == image_size(data, 'x', CONFIG) == (20, 30)


def test_no_other_program_is_asked_to_read_a_file(monkeypatch):
    def run(*args, **options):
        raise AssertionError('a program was started')

    monkeypatch.setattr(subprocess, 'Popen', run)
    monkeypatch.setattr(subprocess, 'check_call', run)
    with pytest.raises(ImageError, match='not an image of a kind that is known here'):
        read_image(encoded(Image.new('RGB', (4, 4)), 'EPS'), 'x.png', CONFIG)


@pytest.mark.parametrize('kind', ['PNG', 'GIF', 'WEBP', 'AVIF', 'JPEG2000', 'BMP', 'PPM'])
def test_damage_anywhere_gives_an_image_or_its_error(kind):
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f'this Pillow was built without {kind}')
    rng = np.random.default_rng(0)
    data = encoded(Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)), kind)
    for _ in range(40):
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        try:
            image = read_image(damaged.tobytes(), 'x', CONFIG)
            assert image.size == image_size(damaged.tobytes(), 'x', CONFIG)
        except ImageError as error:
            assert str(error).startswith('x: ')


def bomb(width, height):
    """A PNG that claims to be large, in a few bytes."""
    head = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    data = b'\x89PNG\r\n\x1a\n'
    for chunk in (b'IHDR' + head, b'IDAT' + zlib.compress(b'')):
        data += struct.pack('>I', len(chunk) - 4) + chunk + struct.pack('>I', zlib.crc32(chunk))
    return data


JPEG = encoded(Image.new('RGB', (64, 64), 'green'), 'JPEG')


@pytest.mark.parametrize(
    ('data', 'message'),
    [
        (b'', 'an empty file'),
        (b'hello', 'not an image of a kind that is known'),
        (JPEG[: len(JPEG) - 20], 'a damaged image'),
        (JPEG[: len(JPEG) // 2], 'cannot be read as an image'),
        (JPEG[:8], 'cannot be read as an image|not an image'),
        (bomb(10_000, 10_000), '10000x10000 pixels, wanted at most 51380224'),
        (bomb(100_000, 100_000), 'cannot be read as an image|pixels, wanted at most'),
        (encoded(Image.new('RGB', (4, 4))) + bytes(2000), 'bytes, wanted at most 1000'),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, data, message):
    path = tmp_path / 'odd.png'
    path.write_bytes(data)
    with pytest.raises(ImageError, match=f'odd.png: .*({message})'):
        load_image(path, ImageConfig(max_bytes=1000))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ImageError, match='gone.png: cannot be read'):
        load_image(tmp_path / 'gone.png', CONFIG)


def test_a_prompt_tells_the_size_of_the_file():
    want = '<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>'
    assert image_prompt(640, 480) == want
