"""How a video file becomes chunks of a few frames: sampled, scaled, cut into squares.

UNCONFIRMED for K3, whose released processor takes images alone: the rules are K2.5's with the
numbers of K3's `media_proc_cfg`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
import numpy as np
from etils import epath

from k3jax.data.images import ImageConfig, ImageError, ImagePlan, Patches, plan_image, planned

MOST_FRAMES = 4  # of a chunk, that the vision tower has places in time for


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Limits and constants of the processor; field names are the release's own."""

    sample_fps: float = 8.0
    in_patch_limit_each_frame: int = 16384  # before padding, as all limits on patches
    in_patch_limit_video: int = 655360
    max_num_frames_each_video: int | None = None
    temporal_merge_kernel_size: int = MOST_FRAMES  # frames of a chunk
    max_bytes: int = 2**30  # of a file

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f'videos.{field.name}: got {value}, wanted a number above 0')
        if self.temporal_merge_kernel_size > MOST_FRAMES:
            raise ValueError(
                f'videos.temporal_merge_kernel_size: got {self.temporal_merge_kernel_size} frames '
                f'a chunk, wanted at most {MOST_FRAMES}, which the vision tower has places for'
            )


class VideoPlan(NamedTuple):
    """What becomes of a video.

    Attributes:
      frames: [n], which of its frames are used.
      chunks: how many frames each chunk has.
      times: in seconds, of each chunk's first frame.
      frame: what becomes of a frame.
    """

    frames: np.ndarray
    chunks: tuple[int, ...]
    times: tuple[float, ...]
    frame: ImagePlan

    @property
    def num_tokens(self) -> int:
        return len(self.chunks) * self.frame.num_tokens


def plan_video(
    num_frames: int,
    fps: float,
    size: tuple[int, int],
    images: ImageConfig,
    videos: VideoConfig,
) -> VideoPlan:
    """Which frames of a video are used, and how; size: width and height of a frame.

    Raises:
      ValueError: a video without frames, or without a rate.
    """
    if num_frames < 1:
        raise ValueError('video: no frames, wanted at least one')
    if not 0 < fps < float('inf'):
        raise ValueError(f'video: got {fps} frames a second, wanted a number above 0')
    count = max(1, round(num_frames * min(videos.sample_fps, fps) / fps))
    count = min(count, videos.max_num_frames_each_video or count)
    frames = np.round(np.linspace(0, num_frames - 1, count)).astype(np.int64)
    most = max(1, round(videos.in_patch_limit_video / count))
    limit = min(videos.in_patch_limit_each_frame, most)
    step = videos.temporal_merge_kernel_size
    starts = range(0, count, step)
    return VideoPlan(
        frames,
        tuple(min(step, count - start) for start in starts),
        tuple(float(frames[start]) / fps for start in starts),
        plan_image(*size, images, limit),
    )


def timestamp(seconds: float) -> str:
    """HH:MM:SS.mmm, hours of a day, milliseconds cut."""
    whole, thousandths = int(seconds), int(seconds % 1 * 1000)
    hours, rest = divmod(whole, 3600)
    return f'{hours % 24:02d}:{rest // 60:02d}:{rest % 60:02d}.{thousandths:03d}'


def chunk_prompt(seconds: float) -> str:
    """How a prompt shows a chunk; the pad stands for as many as it has tokens."""
    start = timestamp(seconds)
    return f'{start}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>'


class Chunk(NamedTuple):
    """prompt: with one pad. patches: of its frames, one after the other."""

    prompt: str
    patches: Patches


def _decoded(path: epath.Path, data: Any) -> Iterator[tuple[av.VideoFrame, float]]:
    """Each frame of the first video stream, and the stream's rate, 0 where it has none."""
    # A playlist would have it open other files.
    alone = {'protocol_whitelist': 'none'}
    with av.open(data, options=alone, metadata_errors='replace') as container:
        if not container.streams.video:
            raise ImageError(f'{path}: no video in it')
        stream = container.streams.video[0]
        stream.thread_type = 'AUTO'
        rate = stream.average_rate or stream.guessed_rate or 0
        for frame in container.decode(stream):
            yield frame, float(rate)


def read_video(path: epath.PathLike, images: ImageConfig, videos: VideoConfig) -> Iterator[Chunk]:
    """The chunks of a video file, local or gs://, one at a time; it is decoded twice.

    Rotation in the file's metadata is not applied, as with images.

    Raises:
      ImageError: it cannot be read, or used; names it.
    """
    path = epath.Path(path)
    try:
        size = path.stat().length
        if not 0 < size <= videos.max_bytes:
            wanted = f'wanted 1 to {videos.max_bytes} (videos.max_bytes)'
            raise ImageError(f'{path}: got {size} bytes, {wanted}')
        with path.open('rb') as file:
            count, rate, shape = 0, 0.0, (0, 0)
            for frame, rate in _decoded(path, file):  # noqa: B007
                shape = shape if count else (frame.width, frame.height)
                count += 1
                if frame.width * frame.height > images.max_pixels:
                    raise ImageError(
                        f'{path}: got frames of {frame.width}x{frame.height}, wanted at most '
                        f'{images.max_pixels} pixels (images.max_pixels)'
                    )
        if not count:
            raise ImageError(f'{path}: a video with no frames')
        try:
            plan = plan_video(count, rate, shape, images, videos)
        except ValueError as error:
            raise ImageError(f'{path}: {error}') from None
        with path.open('rb') as file:
            yield from _chunks(_decoded(path, file), plan, images)
    except (OSError, av.FFmpegError) as error:
        raise ImageError(f'{path}: cannot be read as a video ({error.strerror or error})') from None


def _chunks(
    frames: Iterator[tuple[av.VideoFrame, float]], plan: VideoPlan, images: ImageConfig
) -> Iterator[Chunk]:
    wanted = np.bincount(plan.frames)
    held: list[np.ndarray] = []
    lengths, times = iter(plan.chunks), iter(plan.times)
    length = next(lengths)
    for number, (frame, _) in enumerate(frames):
        if number >= len(wanted):
            return
        if not wanted[number]:
            continue
        image = frame.to_image()
        if image.size != (plan.frame.width, plan.frame.height):  # it may change on the way
            image = image.resize((plan.frame.width, plan.frame.height))
        held.append(planned(image, plan.frame, images))
        if len(held) == length:
            grid = length, plan.frame.rows, plan.frame.columns
            yield Chunk(chunk_prompt(next(times)), Patches(np.concatenate(held), grid))
            held, length = [], next(lengths, 0)
