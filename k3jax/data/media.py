"""How records of text and images fill rows: tokens, and the patches that some of them stand for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import grain
import numpy as np
from absl import logging

from k3jax.config import DataConfig
from k3jax.data import pack
from k3jax.data.images import (
    MERGE,
    ImageConfig,
    ImageError,
    Patches,
    image_patches,
    image_prompt,
    normalised,
    read_image,
)
from k3jax.data.records import Record, RecordError, Records, Text
from k3jax.data.tokenizer import Tokenizer

MEDIA_PAD = '<|media_pad|>'
PIXELS, GRIDS = 'pixels', 'grids'  # names in rows and batches


def processor(config: DataConfig) -> ImageConfig:
    """How images of the data become patches."""
    media = config.media
    return ImageConfig(patch_size=media.patch_size, in_patch_limit=media.in_patch_limit)


def media_tokens(prompt: str, num_tokens: int, tokenizer: Tokenizer) -> np.ndarray:
    """[T] int32 of a medium's markup, whose one pad stands for `num_tokens` of them."""
    pad = tokenizer.special_tokens[MEDIA_PAD]
    ids = tokenizer.encode(prompt, allow_special=True)
    place = ids.index(pad)
    return np.array([*ids[:place], *[pad] * num_tokens, *ids[place + 1 :]], np.int32)


class Encoded(NamedTuple):
    """A part of a record.

    Attributes:
      tokens: [T] int32. loss: whether they are predicted.
      patches: of an image, or None.
    """

    tokens: np.ndarray
    loss: bool
    patches: Patches | None


def encoded_parts(record: Record, tokenizer: Tokenizer, images: ImageConfig) -> list[Encoded]:
    """The parts of a record.

    Raises:
      ImageError, RecordError: an image that cannot be read or used; names it.
    """
    found = []
    for part in record.parts:
        if isinstance(part, Text):
            found.append(Encoded(tokenizer.encode_array(part.text), part.loss, None))
            continue
        image = read_image(part.read(images), part.name, images)
        patches = image_patches(image, images)
        num_tokens = len(patches.pixels) // MERGE**2
        tokens = media_tokens(image_prompt(*image.size), num_tokens, tokenizer)
        found.append(Encoded(tokens, False, patches))
    return found


@dataclasses.dataclass
class RowMaker:
    """Records as elements that `pack_media` packs.

    A record that is longer than a row loses its end, images whole; one that cannot be used is
    passed over, or ends the run, as the config says.
    """

    config: DataConfig
    tokenizer: Tokenizer
    num_records: int
    _bad: set[str] = dataclasses.field(default_factory=set)  # faults that were told
    _bad_in_a_row: int = 0
    _cut: bool = False

    def __call__(self, record: Record | Exception) -> dict[str, np.ndarray] | None:
        try:
            if isinstance(record, Exception):
                raise record
            parts = encoded_parts(record, self.tokenizer, processor(self.config))
            element = self._element(parts, record.name)
        except (ImageError, RecordError) as error:
            if self.config.media.bad_records == 'stop':
                raise
            self._bad_in_a_row += 1
            if str(error) not in self._bad:
                self._bad.add(str(error))
                logging.warning('passed over a record: %s', error)
            if self._bad_in_a_row > self.num_records:
                raise ValueError(
                    f'data.media.sources: none of {self.num_records} records can be used; the last '
                    f'fault is {error}'
                ) from None
            return None
        self._bad_in_a_row = 0
        return element

    def _element(self, parts: list[Encoded], name: str) -> dict[str, np.ndarray]:
        length, most = self.config.sequence_length, self.config.media.patches_per_row
        size = self.config.media.patch_size
        tokens, losses = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
        pixels, grids = [np.zeros((0, 3, size, size), np.uint8)], []
        num_tokens = num_patches = 0
        end = Encoded(np.int32([self.tokenizer.eos_id]), True, None)
        for part in (*parts, end):
            patches = 0 if part.patches is None else len(part.patches.pixels)
            left = length - num_tokens
            too_long = len(part.tokens) > left or num_patches + patches > most
            own = part.tokens
            if too_long and part.patches is not None and not num_tokens:
                raise RecordError(
                    f'{name}: begins with an image of {len(own)} tokens and {patches} patches, '
                    f'wanted at most {length} (data.sequence_length) and {most} '
                    '(data.media.patches_per_row); a lower data.media.in_patch_limit scales it down'
                )
            if too_long:
                self._say_cut(name)
                own = own[: left if part.patches is None else 0]
            tokens.append(own)
            losses.append(np.full(len(own), part.loss))
            num_tokens += len(own)
            if too_long:
                break
            if part.patches is not None:
                pixels.append(part.patches.pixels)
                grids.append(part.patches.grid)
                num_patches += patches
        ids = np.concatenate(tokens)
        targets = pack.following(ids)
        targets[:-1][~np.concatenate(losses)[1:]] = pack.IGNORE
        grids = np.array(grids, np.int32).reshape(-1, 3)
        return pack.pairs(ids, targets) | {PIXELS: np.concatenate(pixels), GRIDS: grids}

    def _say_cut(self, name: str) -> None:
        if not self._cut:
            self._cut = True
            logging.warning(
                '%s is longer than a row (data.sequence_length, data.media.patches_per_row) and '
                'loses its end, as others may',
                name,
            )


class Safe:
    """Records by index, or the error in place of one that cannot be read."""

    def __init__(self, records: Records):
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record | RecordError:
        try:
            return self._records[index]
        except RecordError as error:
            return error


def pack_media(records: grain.IterDataset, config: DataConfig) -> grain.IterDataset:
    """Rows of whole records, each in the first row that has room; padded at the end.

    A row has `pairs` as `pack.pack` makes them, pixels [P, 3, size, size] uint8 of its media one
    after the other, and grids [P / 4, 3] int32, of padding 0.
    """
    patches = config.media.patches_per_row
    lengths = pack.lengths(config.sequence_length)
    lengths |= {PIXELS: patches, GRIDS: patches // MERGE**2}
    rows = grain.experimental.FirstFitPackIterDataset(
        records,
        length_struct=lengths,
        num_packing_bins=config.media.open_rows,
        seed=config.shuffle_seed,
    )
    wanted = (*pack.names(), PIXELS, GRIDS)
    return rows.map(lambda row: {name: row[name] for name in wanted})


def without_media(row: dict[str, np.ndarray], config: DataConfig) -> dict[str, np.ndarray]:
    """A row of text as one of `pack_media`; the empty arrays take no memory."""
    media = config.media
    shape = media.patches_per_row, 3, media.patch_size, media.patch_size
    return {name: row[name] for name in pack.names()} | {
        PIXELS: np.broadcast_to(np.uint8(0), shape),
        GRIDS: np.zeros((media.patches_per_row // MERGE**2, 3), np.int32),
    }


def as_batch(rows: dict[str, np.ndarray], config: DataConfig) -> dict[str, np.ndarray]:
    """`pack.as_batch` of stacked rows; with media, pixels [B, P, 3, size, size] float32 too.

    And grids [B, P / 4, 3]; both as `pack_media` orders them.
    """
    batch = pack.as_batch(rows)
    if PIXELS in batch:
        batch[PIXELS] = normalised(batch[PIXELS], processor(config))
    return batch
