"""How an image file becomes patches: read, scaled down if need be, padded, cut into squares.

Source: the release's `preprocessor_config.json` (see `processor`); where that is silent, the public
processors for K3, which agree.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import warnings
from typing import NamedTuple

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

MERGE = 2  # patches along each side that become one token
# What Pillow decodes itself: it would hand an EPS file to Ghostscript.
FORMATS = ('PNG', 'JPEG', 'WEBP', 'GIF', 'BMP', 'TIFF', 'PPM', 'JPEG2000', 'AVIF')


class NamedFault(ValueError):
    """Its message names what came, which may hold what no terminal or log can show."""

    def __init__(self, message: str):
        super().__init__(message.encode('utf-8', 'backslashreplace').decode())


class ImageError(NamedFault):
    """An image that cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Limits and constants of the processor; field names are the release's own."""

    patch_size: int = 14
    in_patch_limit: int = 65536  # of an image, before padding
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    chessboard_square: int = 8  # pixels of a square behind what is transparent
    chessboard_white: int = 255
    chessboard_gray: int = 180
    max_pixels: int = 7168 * 7168  # of a file, before it is scaled: larger ones are refused
    max_bytes: int = 32 * 2**20  # of a file

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_shade = field.name in ('chessboard_white', 'chessboard_gray')
            if is_shade and not 0 <= value <= 255:
                raise ValueError(f'images.{field.name}: got {value}, wanted 0 to 255')
            if isinstance(value, int) and value < 1 and not is_shade:
                raise ValueError(f'images.{field.name}: got {value}, wanted 1 or more')
        if not all(map(math.isfinite, self.image_mean)):
            raise ValueError(f'images.image_mean: got {self.image_mean}, wanted finite numbers')
        if not all(0 < x < math.inf for x in self.image_std):
            raise ValueError(f'images.image_std: got {self.image_std}, wanted numbers above 0')


class ImagePlan(NamedTuple):
    """What becomes of an image of some size.

    Attributes:
      width, height: of the file's image, as the prompt tells them.
      new_width, new_height: after scaling, in pixels.
      rows, columns: of patches, with padding at the right and the bottom; both even.
    """

    width: int
    height: int
    new_width: int
    new_height: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns // MERGE**2


def plan_image(
    width: int, height: int, config: ImageConfig, patch_limit: int | None = None
) -> ImagePlan:
    """How an image is scaled and padded; it is never scaled up.

    The limit on patches holds before padding, so that a plan may have a few more.

    Args:
      width, height: in pixels.
      patch_limit: in place of the config's, as for a frame of a video.
    """
    if width < 1 or height < 1:
        raise ValueError(f'image: got {width}x{height} pixels, wanted at least 1x1')
    size, side = config.patch_size, config.patch_limit_on_one_side * config.patch_size
    patches = max(1, width // size) * max(1, height // size)
    limit = config.in_patch_limit if patch_limit is None else patch_limit
    scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
    new_width, new_height = (min(max(int(x * scale), 1), side) for x in (width, height))
    unit = MERGE * size
    return ImagePlan(
        width,
        height,
        new_width,
        new_height,
        MERGE * -(-new_height // unit),
        MERGE * -(-new_width // unit),
    )


def _reason(error: Exception) -> str:
    return getattr(error, 'strerror', None) or str(error) or type(error).__name__


def check_bytes(size: int, name: str, config: ImageConfig) -> None:
    """Raises ImageError where a file is too large to be read."""
    if size > config.max_bytes:
        raise ImageError(
            f'{name}: got {size} bytes, wanted at most {config.max_bytes} (images.max_bytes)'
        )


@functools.cache
def _formats() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _opened(data: bytes, name: str, config: ImageConfig) -> Image.Image:
    if not data:
        raise ImageError(f'{name}: an empty file, wanted an image')
    check_bytes(len(data), name, config)
    try:
        with warnings.catch_warnings():
            # Its own limit comes later and is another one.
            warnings.simplefilter('ignore', Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_formats())
    except UnidentifiedImageError:
        raise ImageError(
            f'{name}: not an image of a kind that is known here ({", ".join(_formats())})'
        ) from None
    except Exception as error:  # what decoders make of damage has no class of its own
        raise ImageError(f'{name}: cannot be read as an image ({_reason(error)})') from None
    width, height = image.size
    if width * height > config.max_pixels:
        raise ImageError(
            f'{name}: got {width}x{height} pixels, wanted at most {config.max_pixels} '
            '(images.max_pixels)'
        )
    return image


def image_size(data: bytes, name: str, config: ImageConfig) -> tuple[int, int]:
    """(width, height) of an image file by its head, as `read_image` will have it.

    Raises:
      ImageError: empty, no image, or beyond a limit; names the file.
    """
    return _opened(data, name, config).size


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 bits, or of numbers, as gray of 8: the highest of 16 bits, as colours have them.

    Numbers with a point count as gray values; one that is none is 0.
    """
    if not image.mode.startswith(('I', 'F')):
        return image
    values = np.asarray(image)
    if image.mode == 'F':
        gray = np.rint(np.clip(np.nan_to_num(values, posinf=255), 0, 255))
    else:
        gray = np.clip(values, 0, 65535) >> 8
    found = Image.fromarray(gray.astype(np.uint8))
    transparent = image.info.get('transparency')
    if not isinstance(transparent, int):
        return found
    alpha = np.where(values == transparent, 0, 255).astype(np.uint8)
    return Image.merge('LA', (found, Image.fromarray(alpha)))


def read_image(data: bytes, name: str, config: ImageConfig) -> Image.Image:
    """The first frame of an image file, RGB or RGBA.

    Gray becomes three equal channels, 16 bits become their highest 8, a palette its colours, CMYK
    RGB. EXIF rotation is not applied (UNCONFIRMED for K3): the size in the prompt is that of the
    stored pixels. Of a TIFF alone it is, by Pillow, and in the size too.

    Args:
      data: of the file. name: for messages.

    Raises:
      ImageError: empty, no image, damaged, or beyond a limit; names the file.
    """
    image = _opened(data, name, config)
    try:
        image.load()
        image = _eight_bits(image)
        return image.convert('RGBA' if image.has_transparency_data else 'RGB')
    except Exception as error:  # as in `_opened`
        raise ImageError(f'{name}: a damaged image ({_reason(error)})') from None


def _on_chessboard(pixels: np.ndarray, config: ImageConfig) -> np.ndarray:
    """RGBA [H, W, 4] over white and gray squares, white at the top left: RGB, truncated."""
    square = config.chessboard_square
    rows, columns = (np.arange(n) // square for n in pixels.shape[:2])
    is_gray = (rows[:, None] + columns) % 2 == 1
    behind = np.where(is_gray, config.chessboard_gray, config.chessboard_white)[..., None]
    alpha = pixels[..., 3:] / 255.0
    return (alpha * pixels[..., :3] + (1 - alpha) * behind).astype(np.uint8)


class Patches(NamedTuple):
    """pixels: [t * h * w, 3, P, P] uint8, by frames, rows, columns. grid: (t, h, w)."""

    pixels: np.ndarray
    grid: tuple[int, int, int]


def _scaled(image: Image.Image, plan: ImagePlan, config: ImageConfig) -> np.ndarray:
    """[rows * P, columns * P, 3] uint8, padded with 0."""
    size = plan.new_width, plan.new_height
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    if pixels.shape[-1] == 4:
        pixels = _on_chessboard(pixels, config)
    whole = plan.rows * config.patch_size, plan.columns * config.patch_size
    missing = [(0, full - part) for full, part in zip(whole, pixels.shape[:2], strict=True)]
    return np.pad(pixels, (*missing, (0, 0)))


def _cut(pixels: np.ndarray, config: ImageConfig) -> np.ndarray:
    """[rows * columns, 3, P, P]."""
    size = config.patch_size
    rows, columns = (n // size for n in pixels.shape[:2])
    values = pixels.reshape(rows, size, columns, size, 3)
    return np.ascontiguousarray(values.transpose(0, 2, 4, 1, 3).reshape(-1, 3, size, size))


def normalised(pixels: np.ndarray, config: ImageConfig) -> np.ndarray:
    """What the vision tower is fed, float32, of pixels [..., 3, P, P] uint8."""
    mean, std = (np.asarray(x, np.float32) for x in (config.image_mean, config.image_std))
    return (pixels.astype(np.float32) / 255 - mean[:, None, None]) / std[:, None, None]


def planned(image: Image.Image, plan: ImagePlan, config: ImageConfig) -> np.ndarray:
    """[rows * columns, 3, P, P] uint8 of an image, scaled and padded by its plan."""
    return _cut(_scaled(image, plan, config), config)


def image_patches(image: Image.Image, config: ImageConfig) -> Patches:
    """What becomes of one image, as `read_image` gives it."""
    plan = plan_image(*image.size, config)
    return Patches(planned(image, plan, config), (1, plan.rows, plan.columns))


def image_bytes(path: epath.PathLike, name: str, config: ImageConfig) -> bytes:
    """What is in a file, local or gs://; name: for messages.

    Raises:
      ImageError: it cannot be read, or is too large; names it.
    """
    try:
        path = epath.Path(path)
        size = path.stat().length
        if not path.is_file():
            raise ImageError(f'{name}: a folder or a device, wanted an image file')
        check_bytes(size, name, config)
        return path.read_bytes()
    except ImageError:
        raise
    # Of names that are none, and of URLs of a kind that is not known or lacks its package.
    except (OSError, ValueError, KeyError, ImportError) as error:
        fault = f'no {error} here' if isinstance(error, KeyError) else _reason(error)
        raise ImageError(f'{name}: cannot be read ({fault})') from None


def load_image(path: epath.PathLike, config: ImageConfig) -> Image.Image:
    """`read_image` of a file, local or gs://.

    Raises:
      ImageError: it cannot be read, or used; names it.
    """
    return read_image(image_bytes(path, str(path), config), str(path), config)


def image_prompt(width: int, height: int) -> str:
    """How a prompt shows an image of this size; the pad stands for as many as it has tokens."""
    size = f'{width}x{height}'
    return f'<|media_begin|>image {size}<|media_content|><|media_pad|><|media_end|>'
