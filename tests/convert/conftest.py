"""Release folders for the converter's tests."""

import pytest

from tests import release
from tests.convert.folders import CONFIGS


@pytest.fixture(scope='session')
def sources(tmp_path_factory):
    """Release folders by name, with the small files a release has; not to be changed."""
    folder = tmp_path_factory.mktemp('releases')
    for name, config in CONFIGS.items():
        source = release.write_release(folder / name, config())
        (source / 'tiktoken.model').write_bytes(bytes(range(256)))
        (source / 'modeling_kimi.py').write_text('# remote code\n')
        (source / 'chat_template.jinja').write_text('{{ messages }}')
        (source / 'assets').mkdir()
        (source / 'assets' / 'logo.svg').write_text('<svg/>')
        (source / '.cache').mkdir()
        (source / '.cache' / 'lock').write_text('')
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A two-layer MXFP4 release that a test may damage."""
    config = release.k3_mxfp4()
    config['text_config'] |= {'num_hidden_layers': 2, 'num_experts': 3, 'vocab_size': 64}
    config['text_config']['linear_attn_config'] |= {'kda_layers': [1], 'full_attn_layers': [2]}
    config['vision_config'] |= {'vt_num_hidden_layers': 1}
    config['media_placeholder_token_id'] = 60
    return release.write_release(tmp_path / 'tiny', config)
