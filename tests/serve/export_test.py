"""A workdir in the released layout: what its model reads text and sees files with comes along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import Config, DataConfig, MediaDataConfig, TrainConfig, VisionConfig
from k3jax.convert.to_orbax import convert
from k3jax.data.images import ImageConfig
from k3jax.data.tokenizer import byte_tokenizer
from k3jax.data.video import VideoConfig
from k3jax.model.kimi import Kimi
from k3jax.model.plan import stack_params
from k3jax.model.run import Run
from k3jax.serve.export import export_workdir
from k3jax.serve.load import open_model
from k3jax.serve.media import check_sees
from k3jax.train.checkpoint import Checkpoints, write_config
from k3jax.train.state import TrainState
from tests import tiny

TOWER = VisionConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    qkv_hidden_size=8,
    intermediate_size=8,
    patch_size=7,
    pos_emb_height=4,
    pos_emb_width=4,
)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    """What a run leaves, without the training."""
    folder = tmp_path_factory.mktemp('export') / 'run'
    folder.mkdir()
    model = tiny.k3((1,), (2,), vocab_size=512, vision=TOWER, media_placeholder_token_id=277)
    data = DataConfig(
        source='pictures',
        media=MediaDataConfig(sources=('pictures',), patch_size=7, in_patch_limit=36),
    )
    write_config(folder, Config(model=model, data=data, train=TrainConfig(dtype='float32')))
    kimi = Kimi(model, Run(jnp.dtype('float32')), TrainConfig().scan_layers)
    values = jax.tree.map(np.float32, tiny.random_params(model))
    params = jax.device_put(stack_params(values, kimi.plan, np.stack), jax.devices()[0])
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(TrainState(jnp.int32(0), params, {'none': jnp.zeros(1)}), {})
    checkpoints.wait()
    return folder


def test_an_exported_model_sees_with_the_limits_of_its_run(workdir, tmp_path):
    export_workdir(workdir, tmp_path / 'release')
    convert(tmp_path / 'release', tmp_path / 'converted')
    for path in (workdir, tmp_path / 'converted'):
        tokenizer, images, videos = check_sees(open_model(str(path), 'float32'))
        assert images == ImageConfig(patch_size=7, in_patch_limit=36)
        assert videos == VideoConfig()
        assert tokenizer.special_tokens == byte_tokenizer().special_tokens
