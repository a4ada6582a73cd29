"""Videos: which frames are used, what the prompt says of them, what cannot be read."""

import fractions

import av
import numpy as np
import pytest

from k3jax.data.images import ImageConfig, ImageError
from k3jax.data.video import (
    VideoConfig,
    chunk_prompt,
    plan_video,
    read_video,
    timestamp,
)

IMAGES, VIDEOS = ImageConfig(), VideoConfig()


def write_video(path, frames, rate=30, size=(64, 48)):
    """A video whose frame n has the gray value 2 n, nearly."""
    with av.open(str(path), 'w') as container:
        stream = container.add_stream('mpeg4', rate=fractions.Fraction(rate))
        stream.width, stream.height = size
        stream.pix_fmt = 'yuv420p'
        stream.bit_rate = 4_000_000
        for n in range(frames):
            pixels = np.full((size[1], size[0], 3), 2 * n, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, 'rgb24')):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


@pytest.mark.parametrize(
    ('frames', 'size', 'sampled', 'resized', 'grid', 'chunks', 'tokens'),
    [
        (300, (1280, 720), 80, (1280, 720), (52, 92), 20, 23_920),
        (1800, (1920, 1080), 480, (690, 388), (28, 50), 120, 42_000),
        (4, (640, 480), 1, (640, 480), (36, 46), 1, 414),
    ],
)
def test_worked_examples(frames, size, sampled, resized, grid, chunks, tokens):
    plan = plan_video(frames, 30.0, size, IMAGES, VIDEOS)
    assert len(plan.frames) == sampled
    assert (plan.frame.new_width, plan.frame.new_height) == resized
    assert (plan.frame.rows, plan.frame.columns) == grid
    assert len(plan.chunks) == chunks and sum(plan.chunks) == sampled
    assert plan.num_tokens == tokens


def test_four_frames_that_are_all_used_are_one_chunk():
    plan = plan_video(4, 8.0, (640, 480), IMAGES, VIDEOS)
    assert plan.frames.tolist() == [0, 1, 2, 3]
    assert plan.chunks == (4,) and plan.num_tokens == 414


def test_frames_are_spread_over_the_whole_video():
    plan = plan_video(61, 30.0, (64, 48), IMAGES, VIDEOS)
    assert plan.frames[0] == 0 and plan.frames[-1] == 60
    assert plan.chunks == (4, 4, 4, 4)
    assert plan.times == tuple(plan.frames[[0, 4, 8, 12]] / 30)
    capped = VideoConfig(max_num_frames_each_video=5)
    plan = plan_video(61, 30.0, (64, 48), IMAGES, capped)
    assert plan.frames.tolist() == [0, 15, 30, 45, 60] and plan.chunks == (4, 1)
    slow = plan_video(10, 2.0, (64, 48), IMAGES, VIDEOS)
    assert slow.frames.tolist() == list(range(10))


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0.0, '00:00:00.000'),
        (1.5, '00:00:01.500'),
        (59.9999, '00:00:59.999'),
        (3661.25, '01:01:01.250'),
        (25 * 3600 + 0.5, '01:00:00.500'),
    ],
)
def test_times_are_told_to_the_millisecond(seconds, text):
    assert timestamp(seconds) == text


def test_the_prompt_of_a_chunk():
    want = '00:00:00.500<|media_begin|>video<|media_content|><|media_pad|><|media_end|>'
    assert chunk_prompt(0.5) == want


def test_a_file_becomes_chunks(tmp_path):
    path = write_video(tmp_path / 'a.mp4', 100, rate=20)
    chunks = list(read_video(path, IMAGES, VIDEOS))
    plan = plan_video(100, 20.0, (64, 48), IMAGES, VIDEOS)
    assert len(plan.frames) == 40 and [c.patches.grid[0] for c in chunks] == [4] * 10
    got = []
    for chunk, time in zip(chunks, plan.times, strict=True):
        assert chunk.prompt == chunk_prompt(time)
        frames, rows, columns = chunk.patches.grid
        assert (rows, columns) == (4, 6)
        pixels = chunk.patches.pixels.reshape(frames, rows, columns, 3, 14, 14)
        assert not pixels[:, 3:, :, :, 6:].any()  # padding
        got += [float(frame[0, 0].mean()) for frame in pixels]
    np.testing.assert_allclose(got, 2 * plan.frames, atol=4)


def test_a_short_last_chunk(tmp_path):
    path = write_video(tmp_path / 'a.mp4', 6, rate=8)
    assert [c.patches.grid for c in read_video(path, IMAGES, VIDEOS)] == [(4, 4, 6), (2, 4, 6)]


def _empty(path):
    path.write_bytes(b'')


def _no_video(path):
    with av.open(str(path), 'w', format='wav') as container:
        stream = container.add_stream('pcm_s16le', rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), 's16', 'mono')
        frame.sample_rate = 8000
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)


def _truncated(path):
    write_video(path, 30)
    path.write_bytes(path.read_bytes()[:400])


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda path: None, 'cannot be read as a video'),
        (_empty, 'got 0 bytes, wanted 1 to'),
        (lambda path: path.write_bytes(b'no video ' * 100), 'cannot be read as a video'),
        (_truncated, 'cannot be read as a video'),
        (_no_video, 'no video in it'),
        (lambda path: write_video(path, 0), 'no frames|cannot be read|no video'),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, damage, message):
    path = tmp_path / 'bad.mp4'
    damage(path)
    with pytest.raises(ImageError, match=f'bad.mp4: .*({message})'):
        list(read_video(path, IMAGES, VIDEOS))


def test_a_playlist_opens_no_other_file(tmp_path):
    write_video(tmp_path / 'other.mp4', 3)
    lists = {
        'a.mp4': f'#EXTM3U\n#EXTINF:9,\n{tmp_path}/other.mp4\n#EXT-X-ENDLIST\n',
        'b.mp4': 'ffconcat version 1.0\nfile other.mp4\n',
    }
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ImageError, match=f'{name}: cannot be read as a video'):
            list(read_video(tmp_path / name, IMAGES, VIDEOS))


def test_a_title_that_is_no_text_is_no_fault(tmp_path):
    path = write_video(tmp_path / 'a.mp4', 4, rate=8)
    data = path.read_bytes()
    assert b'isomiso2' in data
    path.write_bytes(data.replace(b'isomiso2', b'isomis\xff2'))
    assert [c.patches.grid[0] for c in read_video(path, IMAGES, VIDEOS)] == [4]


def test_videos_beyond_a_limit_are_refused(tmp_path):
    path = write_video(tmp_path / 'a.mp4', 3)
    with pytest.raises(ImageError, match=r'a.mp4: got \d+ bytes, wanted 1 to 100 '):
        list(read_video(path, IMAGES, VideoConfig(max_bytes=100)))
    with pytest.raises(ImageError, match='a.mp4: got frames of 64x48, wanted at most 1000 pixels'):
        list(read_video(path, ImageConfig(max_pixels=1000), VIDEOS))
    with pytest.raises(ValueError, match='video: no frames'):
        plan_video(0, 30.0, (64, 48), IMAGES, VIDEOS)
    with pytest.raises(ValueError, match='got 0.0 frames a second'):
        plan_video(3, 0.0, (64, 48), IMAGES, VIDEOS)
