"""How the media of a batch become what the model is fed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from k3jax.config import Config, DataConfig, require
from k3jax.data.media import MEDIA_PAD
from k3jax.data.tokenizer import Tokenizer
from k3jax.model.vision import Media, MediaInputs, media_of

_PIXELS, _GRIDS = 'pixels', 'grids'


def with_media(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as the loader makes it, with `media` in place of its pixels and grids, if any.

    Shapes depend on those of the batch alone: a row has places for all its patches, and for the
    rows for the text of as many patches of images.
    """
    if _PIXELS not in batch:
        return batch
    pixels, rest = batch[_PIXELS], {k: v for k, v in batch.items() if k not in (_PIXELS, _GRIDS)}
    num_patches = pixels.shape[1]
    rows = [
        media_of([tuple(grid) for grid in grids.tolist() if any(grid)], num_patches, len(grids))
        for grids in batch[_GRIDS]
    ]
    media = Media(*map(np.stack, zip(*rows, strict=True)))
    return rest | {'media': MediaInputs(pixels, media)}


def abstract_media(data: DataConfig) -> MediaInputs:
    """Shapes of a batch's media."""
    rows, patches, size = data.batch_size, data.media.patches_per_row, data.media.patch_size
    one = media_of([], patches, patches // 4)
    media = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), one)
    pixels = jax.ShapeDtypeStruct((rows, patches, 3, size, size), np.float32)
    return MediaInputs(pixels, media)


def check_media(config: Config, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the model cannot read the data's media."""
    media, model = config.data.media, config.model
    if not media.sources:
        return
    require(model.vision is not None, 'model.vision', None, 'a tower, for data.media.sources')
    size = model.vision.patch_size
    require(
        media.patch_size == size,
        'data.media.patch_size',
        media.patch_size,
        f'{size} (model.vision.patch_size)',
    )
    pad = tokenizer.special_tokens[MEDIA_PAD]
    require(
        model.media_placeholder_token_id == pad,
        'model.media_placeholder_token_id',
        model.media_placeholder_token_id,
        f"{pad}, the tokenizer's {MEDIA_PAD}",
    )
    unit = 4 * config.mesh.sequence
    require(
        media.patches_per_row % unit == 0,
        'data.media.patches_per_row',
        media.patches_per_row,
        f'a multiple of {unit}, so that chips can share it (mesh.sequence {config.mesh.sequence})',
    )
