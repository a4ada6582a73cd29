"""Loading: a converted folder and a workdir both run; what must stay float32 does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError, MeshConfig
from k3jax.convert.to_orbax import convert
from k3jax.serve import load as load_lib
from k3jax.train.eval import logits_of
from tests import release

KEPT_WIDE = {
    'A_log',
    'dt_bias',
    'o_norm',
    'q_conv1d',
    'k_conv1d',
    'v_conv1d',
    'e_score_correction_bias',
}


@pytest.fixture(scope='module')
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp('load')
    release.write_release(folder / 'release', release.k3_mxfp4())
    convert(folder / 'release', folder / 'converted')
    return folder / 'converted'


@pytest.mark.parametrize('unroll_up_to', [0, 100])
def test_what_the_release_stores_as_float32_stays_float32(converted, monkeypatch, unroll_up_to):
    monkeypatch.setattr(load_lib, 'UNROLL_UP_TO', unroll_up_to)
    loaded = load_lib.open_model(str(converted), 'bfloat16')
    assert loaded.model.scan_layers == (unroll_up_to == 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded.params):
        name = path[-1].key
        if name.endswith(('_packed', '_scale')):
            assert leaf.dtype == jnp.uint8
        else:
            assert leaf.dtype == ('float32' if name in KEPT_WIDE else 'bfloat16'), name


def test_scanned_and_unrolled_models_give_the_same_logits(converted, monkeypatch):
    ids = [5, 17, 200, 3]
    flat = load_lib.open_model(str(converted), 'float32')
    monkeypatch.setattr(load_lib, 'UNROLL_UP_TO', 0)
    scanned = load_lib.open_model(str(converted), 'float32')
    np.testing.assert_allclose(
        logits_of(scanned.model, scanned.params, ids),
        logits_of(flat.model, flat.params, ids),
        atol=1e-4,
    )


@pytest.mark.parametrize('unroll_up_to', [0, 100])
def test_a_mesh_holds_the_same_parameters_each_chip_its_part(converted, monkeypatch, unroll_up_to):
    monkeypatch.setattr(load_lib, 'UNROLL_UP_TO', unroll_up_to)
    whole = load_lib.open_model(str(converted), 'bfloat16').params
    loaded = load_lib.open_model(str(converted), 'bfloat16', mesh=MeshConfig(expert=4))
    assert dict(loaded.mesh.shape) == {'data': 2, 'expert': 4, 'sequence': 1, 'tensor': 1}
    cut = 0
    leaves = jax.tree_util.tree_leaves_with_path(loaded.params)
    for (path, found), want in zip(leaves, jax.tree.leaves(whole), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
        held = found.addressable_shards[0].data.size
        if 'experts' in [key.key for key in path]:
            assert held == found.size // 8
            cut += 1
    assert cut >= 6


def test_a_mesh_that_heads_cannot_be_cut_along_is_named(converted):
    with pytest.raises(ConfigError, match='mesh.tensor: got 2, wanted a divisor of .* .3.;'):
        load_lib.open_model(str(converted), mesh=MeshConfig(tensor=2))


def test_what_is_no_checkpoint_is_an_error_that_says_what_one_is(tmp_path):
    with pytest.raises(ValueError, match='neither a converted folder .* nor a training workdir'):
        load_lib.open_model(str(tmp_path / 'nothing'))


def test_a_release_that_was_not_converted_is_told_how(converted):
    with pytest.raises(ValueError, match='convert it first: python -m experiments.convert'):
        load_lib.open_model(str(converted.parent / 'release'))
