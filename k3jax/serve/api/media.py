"""Which image an image's URL in a message holds."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from k3jax.data.images import (
    ImageConfig,
    ImageError,
    Patches,
    image_patches,
    image_size,
    read_image,
)
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.rules import Rules

Result = TypeVar('Result')
_DATA_URL = re.compile(r'data:image/[a-z0-9.+-]{1,20};base64,', re.IGNORECASE)
_KINDS = (b'\x89PNG\r\n\x1a\n', b'\xff\xd8\xff', b'GIF87a', b'GIF89a')


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """An image as it was sent. url: 'data:image/...;base64,...'. param: its place in the body."""

    url: str
    param: str

    @property
    def num_bytes(self) -> int:
        """Of the file, as its base64 tells; not less than there are."""
        return len(self.url) * 3 // 4

    def data(self) -> bytes:
        """The file.

        Raises:
          ApiError: it is not base64, or no png, jpeg, webp or gif.
        """
        try:
            data = base64.b64decode(self.url.split(',', 1)[1], validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(f'{self.param}: not base64', param=self.param) from None
        is_webp = data[:4] == b'RIFF' and data[8:12] == b'WEBP'
        if not is_webp and not data.startswith(_KINDS):
            raise ApiError(
                f'{self.param}: not an image of type png, jpeg, webp or gif', param=self.param
            )
        return data

    def size(self, config: ImageConfig) -> tuple[int, int]:
        """(width, height), without reading its pixels.

        Raises:
          ApiError: as `data`, or it is damaged or too large.
        """
        return self._read(image_size, config)

    def patches(self, config: ImageConfig) -> Patches:
        """What the model sees of it.

        Raises:
          ApiError: as `size`.
        """
        return image_patches(self._read(read_image, config), config)

    def _read(
        self, read: Callable[[bytes, str, ImageConfig], Result], config: ImageConfig
    ) -> Result:
        try:
            return read(self.data(), self.param, config)
        except ImageError as error:
            raise ApiError(str(error), param=self.param) from None


def image_source(url: str, param: str) -> ImageSource:
    """The image of a URL, not yet read.

    Raises:
      ApiError: it is no data URL.
    """
    head = _DATA_URL.match(url[:60])
    if head is None:
        raise ApiError(
            f'{param}: got a URL that starts with {url[:12]!r}, '
            "wanted 'data:image/TYPE;base64,...'",
            param=param,
        )
    return ImageSource(url, param)


def check_images(images: Sequence[ImageSource], rules: Rules) -> None:
    """Raises ApiError for more images, or larger ones, than a request may have."""
    if len(images) > rules.max_images:
        raise ApiError(
            f'messages: got {len(images)} images, wanted at most {rules.max_images}',
            param='messages',
        )
    total = sum(image.num_bytes for image in images)
    if total > rules.max_image_bytes:
        raise ApiError(
            f'messages: got {total} bytes of images, wanted at most {rules.max_image_bytes}',
            param='messages',
        )
