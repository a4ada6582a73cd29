"""What a release's `preprocessor_config.json` says of images and videos; the same in reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3jax.data.images import MERGE, ImageConfig
from k3jax.data.video import VideoConfig

PROCESSOR_FILE = 'preprocessor_config.json'
_MEDIA, _BACKGROUND = 'media_proc_cfg', 'transparent_bg_config'

# Of images and videos, fields that have the same name here.
_IMAGES = (
    'patch_size',
    'in_patch_limit',
    'patch_limit_on_one_side',
    'image_mean',
    'image_std',
)
_VIDEOS = (
    'sample_fps',
    'in_patch_limit_each_frame',
    'in_patch_limit_video',
    'max_num_frames_each_video',
    'temporal_merge_kernel_size',
)
_CHESSBOARD = {name: f'chessboard_{name}' for name in ('square', 'white', 'gray')}
# Fields that the code implements for these values only.
_FIXED: dict[str, tuple[Any, ...]] = {
    'merge_kernel_size': (MERGE, [MERGE, MERGE]),
    'fixed_output_tokens': (None,),
    'transparent_bg_fill_stage': ('after_resize',),
}
_FIXED_VIDEO: dict[str, tuple[Any, ...]] = {'timestamp_mode': ('hh:mm:ss.fff',)}
_FIXED_BACKGROUND: dict[str, tuple[Any, ...]] = {'pattern': ('chessboard',)}


def _error(name: str, got: Any, wanted: str) -> ValueError:
    return ValueError(f'{PROCESSOR_FILE}: {name}: got {got!r}, wanted {wanted}')


def _object(fields: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping):
        raise _error(name, fields, 'an object')
    return fields


def _media(processor: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its part about media: all of it where it has none of its own."""
    return _object(processor.get(_MEDIA, processor), _MEDIA)


def _check_fixed(fields: Mapping[str, Any], fixed: dict[str, tuple[Any, ...]]) -> None:
    for name, allowed in fixed.items():
        if fields.get(name) not in (*allowed, None):
            raise _error(name, fields[name], f'{allowed[0]!r}, which is all this code implements')


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _value(name: str, value: Any, default: Any) -> Any:
    """A value of the kind that the field's default has."""
    if isinstance(default, tuple):
        if not (isinstance(value, list) and len(value) == 3 and all(map(_is_number, value))):
            raise _error(name, value, 'three numbers')
        return tuple(map(float, value))
    if isinstance(default, float):
        if not _is_number(value):
            raise _error(name, value, 'a number')
    elif type(value) is not int:
        raise _error(name, value, 'a whole number')
    return value


def _config(kind: type, values: dict[str, Any]) -> Any:
    """A config of the values that are not null; the others keep their defaults."""
    default = kind()
    given = {k: _value(k, v, getattr(default, k)) for k, v in values.items() if v is not None}
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f'{PROCESSOR_FILE}: {error}') from None


def image_config(processor: Mapping[str, Any]) -> ImageConfig:
    """How images become patches; a constant that the file does not name is K3's.

    Raises:
      ValueError: a value of a wrong kind, out of range or not implemented; names it.
    """
    fields = _media(processor)
    background = _object(fields.get(_BACKGROUND) or {}, _BACKGROUND)
    _check_fixed(fields, _FIXED)
    _check_fixed(background, _FIXED_BACKGROUND)
    shades = {ours: background.get(theirs) for theirs, ours in _CHESSBOARD.items()}
    return _config(ImageConfig, {name: fields.get(name) for name in _IMAGES} | shades)


def video_config(processor: Mapping[str, Any]) -> VideoConfig:
    """How videos become chunks; a constant that the file does not name is K3's.

    Raises:
      ValueError: a value of a wrong kind, out of range or not implemented; names it.
    """
    fields = _media(processor)
    _check_fixed(fields, _FIXED_VIDEO)
    return _config(VideoConfig, {name: fields.get(name) for name in _VIDEOS})


def release_processor(images: ImageConfig, videos: VideoConfig) -> dict[str, Any]:
    """The file's fields, which `image_config` and `video_config` read back.

    Limits that a release does not have (max_pixels, max_bytes) are not in it.
    """
    fixed = {name: allowed[0] for name, allowed in (_FIXED | _FIXED_VIDEO).items()}
    own = {name: getattr(images, name) for name in _IMAGES}
    own |= {name: getattr(videos, name) for name in _VIDEOS}
    own = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
    background = {theirs: getattr(images, ours) for theirs, ours in _CHESSBOARD.items()}
    pattern = {name: allowed[0] for name, allowed in _FIXED_BACKGROUND.items()}
    return {_MEDIA: own | fixed | {_BACKGROUND: pattern | background}}
