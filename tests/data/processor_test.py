"""What a preprocessor_config.json says: limits read, written, and refused by name."""

import pytest

from k3jax.data.images import ImageConfig
from k3jax.data.processor import image_config, release_processor, video_config
from k3jax.data.video import VideoConfig

# As the release has it.
K3 = {
    'in_patch_limit': 65536,
    'patch_limit_on_one_side': 512,
    'patch_size': 14,
    'merge_kernel_size': 2,
    'fixed_output_tokens': None,
    'image_mean': [0.5, 0.5, 0.5],
    'image_std': [0.5, 0.5, 0.5],
    'in_patch_limit_each_frame': 16384,
    'in_patch_limit_video': 655360,
    'sample_fps': 8.0,
    'max_num_frames_each_video': None,
    'temporal_merge_kernel_size': 4,
    'timestamp_mode': 'hh:mm:ss.fff',
    'transparent_bg_config': {'pattern': 'chessboard', 'square': 8, 'white': 255, 'gray': 180},
    'transparent_bg_fill_stage': 'after_resize',
}


def test_limits_come_from_the_release():
    assert image_config({}) == image_config({'media_proc_cfg': K3}) == ImageConfig()
    assert video_config({}) == video_config({'media_proc_cfg': K3}) == VideoConfig()
    own = {
        'in_patch_limit': 16384,
        'image_mean': [0.1, 0.2, 0.3],
        'transparent_bg_config': {'square': 4, 'gray': 7},
        'sample_fps': 2.0,
        'in_patch_limit_each_frame': 4096,
    }
    assert image_config({'media_proc_cfg': own}) == ImageConfig(
        in_patch_limit=16384, image_mean=(0.1, 0.2, 0.3), chessboard_square=4, chessboard_gray=7
    )
    want = VideoConfig(sample_fps=2.0, in_patch_limit_each_frame=4096)
    assert video_config({'media_proc_cfg': own}) == want


def test_what_is_written_is_read_back():
    assert release_processor(ImageConfig(), VideoConfig()) == {'media_proc_cfg': K3}
    images = ImageConfig(patch_size=7, in_patch_limit=99, image_std=(1.0, 2.0, 3.0))
    videos = VideoConfig(sample_fps=0.5, max_num_frames_each_video=9)
    written = release_processor(images, videos)
    assert (image_config(written), video_config(written)) == (images, videos)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'in_patch_limit': '9'}, "in_patch_limit: got '9', wanted a whole number"),
        ({'patch_size': True}, 'patch_size: got True, wanted a whole number'),
        ({'patch_size': 0}, 'images.patch_size: got 0, wanted 1 or more'),
        ({'image_std': [0, 1, 1]}, 'images.image_std: got .* wanted numbers above 0'),
        ({'image_mean': ['a', 1, 1]}, 'image_mean: got .* wanted three numbers'),
        ({'image_mean': [float('nan')] * 3}, 'images.image_mean: got .* finite'),
        ({'merge_kernel_size': 4}, 'merge_kernel_size: got 4, wanted 2, which is all'),
        ({'fixed_output_tokens': 64}, 'fixed_output_tokens: got 64, wanted None'),
        ({'transparent_bg_fill_stage': 'before'}, "transparent_bg_fill_stage: got 'before'"),
        ({'transparent_bg_config': [8]}, r'transparent_bg_config: got \[8\], wanted an object'),
        ({'transparent_bg_config': {'pattern': 'plain'}}, "pattern: got 'plain'"),
        ({'transparent_bg_config': {'square': 0}}, 'images.chessboard_square: got 0, wanted 1'),
        ({'transparent_bg_config': {'gray': 256}}, 'images.chessboard_gray: got 256, wanted 0 to'),
        ({'sample_fps': 'fast'}, "sample_fps: got 'fast', wanted a number"),
        ({'temporal_merge_kernel_size': 8}, 'got 8 frames a chunk, wanted at most 4'),
        ({'timestamp_mode': 's'}, "timestamp_mode: got 's', wanted 'hh:mm:ss.fff'"),
    ],
)
def test_mistakes_name_the_field_and_the_file(fields, message):
    with pytest.raises(ValueError, match=f'preprocessor_config.json: .*{message}'):
        image_config({'media_proc_cfg': fields})
        video_config({'media_proc_cfg': fields})


@pytest.mark.parametrize('fields', [None, [], 'x'])
def test_a_file_of_something_else_is_refused(fields):
    for read in (image_config, video_config):
        with pytest.raises(ValueError, match='media_proc_cfg: got .* wanted an object'):
            read({'media_proc_cfg': fields})
