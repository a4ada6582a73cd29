"""What of a prompt is seen: image and video files become media tokens, and rows in their place."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from k3jax.config import ModelConfig
from k3jax.data.images import (
    ImageConfig,
    ImageError,
    Patches,
    image_patches,
    image_prompt,
    load_image,
    normalised,
)
from k3jax.data.media import MEDIA_PAD, media_tokens
from k3jax.data.tokenizer import Tokenizer
from k3jax.data.video import VideoConfig, read_video
from k3jax.model.kimi import Kimi
from k3jax.model.layout import VISION
from k3jax.model.vision import MediaInputs, media_of, media_rows
from k3jax.serve.load import Loaded

LEAST_PATCHES = 256  # that a medium is padded to


def check_files(
    image_files: Sequence[epath.PathLike], video_files: Sequence[epath.PathLike]
) -> None:
    """What can be said of files before a large model is read.

    Raises:
      ImageError: an image cannot be read, or a video is not there; names it.
    """
    for path in image_files:
        load_image(path, ImageConfig())
    for path in map(epath.Path, video_files):
        if not path.is_file():
            raise ImageError(f'{path}: cannot be read (no such file)')


class Seen(NamedTuple):
    """Media of a prompt.

    tokens: their markup, each pad standing for one token. rows: [N, D], in place of the pads.
    """

    tokens: list[int]
    rows: jax.Array


def patch_bucket(count: int) -> int:
    """How many patches a medium is padded to: at most a quarter more, and few sizes in all."""
    step = max(LEAST_PATCHES, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rows(config: ModelConfig, run: Any, params: Any, inputs: MediaInputs) -> jax.Array:
    return media_rows(params, inputs, config, run)[0]


def rows_of(model: Kimi, params: Any, patches: Patches, images: ImageConfig) -> jax.Array:
    """[N, D] of one medium."""
    size = patch_bucket(len(patches.pixels))
    missing = size - len(patches.pixels)
    pixels = normalised(patches.pixels, images)
    pixels = np.pad(pixels, ((0, missing), *[(0, 0)] * 3))
    media = media_of([patches.grid], size, size // 4)
    inputs = MediaInputs(pixels[None], jax.tree.map(lambda x: x[None], media))
    _, rows, columns = patches.grid
    seeing = {name: params[name] for name in VISION}
    return _rows(model.config, model.run, seeing, inputs)[: rows * columns // 4]


def check_sees(loaded: Loaded) -> tuple[Tokenizer, ImageConfig, VideoConfig]:
    """The tokenizer and the limits of a model that can be shown files.

    Raises:
      ValueError: it sees nothing, or what it came with does not fit together.
    """
    config = loaded.model.config
    if config.vision is None:
        raise ValueError(f'--image, --video: {config.name} has no vision tower')
    if loaded.tokenizer is None:
        raise ValueError('--image, --video: the checkpoint carries no tokenizer (tiktoken.model)')
    pad = loaded.tokenizer.special_tokens.get(MEDIA_PAD)
    if pad != config.media_placeholder_token_id:
        raise ValueError(
            f"--image, --video: the tokenizer's {MEDIA_PAD} is {pad}, the model's "
            f'media_placeholder_token_id {config.media_placeholder_token_id}; wanted the same'
        )
    size = config.vision.patch_size
    if loaded.images.patch_size != size:
        raise ValueError(
            f'preprocessor_config.json: patch_size: got {loaded.images.patch_size}, wanted {size}, '
            "the vision tower's"
        )
    return loaded.tokenizer, loaded.images, loaded.videos


def _shown(
    image_files: Sequence[epath.PathLike],
    video_files: Sequence[epath.PathLike],
    images: ImageConfig,
    videos: VideoConfig,
) -> Iterator[tuple[str, Patches]]:
    for path in image_files:
        image = load_image(path, images)
        yield image_prompt(*image.size), image_patches(image, images)
    for path in video_files:
        yield from read_video(path, images, videos)


def see(
    loaded: Loaded,
    image_files: Sequence[epath.PathLike] = (),
    video_files: Sequence[epath.PathLike] = (),
) -> Seen:
    """The files as the model reads them, images first; one medium at a time is in memory.

    Raises:
      ValueError: the model cannot be shown files, or one cannot be read; names it.
    """
    tokenizer, images, videos = check_sees(loaded)
    tokens: list[int] = []
    found: list[jax.Array] = []
    for prompt, patches in _shown(image_files, video_files, images, videos):
        rows = rows_of(loaded.model, loaded.params, patches, images)
        tokens += media_tokens(prompt, len(rows), tokenizer).tolist()
        found.append(rows)
    return Seen(tokens, jnp.concatenate(found))
