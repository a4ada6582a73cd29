"""The rule tables are complete, both ways, for the released models' full lists of tensors."""

import dataclasses

import pytest

from k3jax.config import ConfigError
from k3jax.convert.binding import FAMILIES, bind, check_complete, flatten, unflatten
from k3jax.convert.files import ConversionError
from k3jax.convert.release_config import model_config_from_release
from k3jax.convert.safetensors_io import TensorInfo
from k3jax.model.layout import VISION
from tests import release


def _tensors(config, **kwargs):
    return {
        t.name: TensorInfo(t.name, t.dtype, t.shape)
        for t in release.release_tensors(config, **kwargs)
    }


def _bindings(config, source_format, our_format):
    model = model_config_from_release(config, experts_format=our_format, name='x')
    family = FAMILIES[model.family]
    return bind(model, family.table(source_format, our_format)), family.carried_prefixes


@pytest.fixture(scope='module')
def k3_index():
    return _tensors(release.k3_full())


@pytest.mark.parametrize('our_format', ['mxfp4', 'bf16'])
def test_full_k3_maps_completely(k3_index, our_format):
    bindings, prefixes = _bindings(release.k3_full(), 'mxfp4', our_format)
    carried = check_complete(bindings, k3_index, prefixes)
    assert len(k3_index) == 497_220
    assert carried == []
    seeing = [b for b in bindings if b.path.startswith(VISION)]
    assert sum(b.num_parts for b in seeing) == 165 + 3
    assert sum(b.leaf.size for b in seeing) == 401_214_464 + 46_144_512
    assert sum(t.nbytes for b in bindings for t in b.source_tensors()) == 1_560_860_324_864
    if our_format == 'bf16':
        text = sum(b.leaf.size for b in bindings if b not in seeing)
        assert text == 2_779_484_476_000


def test_full_kimi_linear_maps_completely():
    index = _tensors(release.kimi_linear_48b())
    bindings, prefixes = _bindings(release.kimi_linear_48b(), 'bf16', 'bf16')
    assert check_complete(bindings, index, prefixes) == []
    assert len(index) == 20_493
    assert sum(b.leaf.size for b in bindings) == 49_122_681_728


@pytest.fixture
def small():
    config = release.k3_mxfp4()
    return _tensors(config), *_bindings(config, 'mxfp4', 'mxfp4')


LAYER = 'language_model.model.layers.4.'
PACKED = f'{LAYER}block_sparse_moe.experts.3.w1.weight_packed'
SCALE = f'{LAYER}block_sparse_moe.experts.3.w1.weight_scale'


def _refused(small, message):
    index, bindings, prefixes = small
    with pytest.raises(ConversionError, match=message) as error:
        check_complete(bindings, index, prefixes)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', [f'{LAYER}input_layernorm.weight', f'{LAYER}self_attn.A_log'])
def test_missing_tensor_is_named(small, name):
    del small[0][name]
    _refused(small, f'missing 1 tensors.*{name}')


@pytest.mark.parametrize(
    'name',
    [
        'language_model.model.layers.9.input_layernorm.weight',
        'language_model.model.layers.04.input_layernorm.weight',
        f'{LAYER}block_sparse_moe.experts.8.w1.weight_packed',
        f'{LAYER}self_attn.q_proj.bias',
        'model.embed_tokens.weight',
        'audio_tower.weight',
    ],
)
def test_unknown_tensor_is_named(small, name):
    small[0][name] = TensorInfo(name, 'BF16', (1,))
    _refused(small, f'unknown tensors, 1 in all: {name}')


def test_renamed_tensor_is_named_with_what_it_was_taken_for(small):
    info = small[0].pop(f'{LAYER}mlp_res_norm.weight')
    small[0][f'{LAYER}mlp_res.norm'] = info
    _refused(small, r'missing 1 tensors.*mlp_res_norm.weight.*no place in it: .*mlp_res\.norm')


def test_codes_without_their_scale_are_named(small):
    del small[0][SCALE]
    _refused(small, f'{PACKED}: an MXFP4 tensor without its scale')


def test_scale_without_its_codes_is_named(small):
    del small[0][PACKED]
    _refused(small, f'{SCALE}: an MXFP4 tensor without its packed codes')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'shape': (64, 96)}, r'got BF16 \[64, 96\], wanted BF16 \[96, 64\]'),
        ({'dtype': 'F32'}, r'got F32 \[96, 64\], wanted BF16'),
    ],
)
def test_wrong_shape_or_dtype_is_named(small, change, message):
    name = f'{LAYER}self_attn.k_proj.weight'
    small[0][name] = dataclasses.replace(small[0][name], **change)
    _refused(small, f'{name}: {message}.*layers_4/self_attn/k_proj')


@pytest.mark.parametrize('size', [3, 4, 128])
def test_any_padding_of_a_log_is_accepted(size):
    config = release.k3_bf16()
    bindings, prefixes = _bindings(config, 'bf16', 'bf16')
    check_complete(bindings, _tensors(config, a_log_size=size), prefixes)


def test_quantising_is_refused_with_what_to_do():
    with pytest.raises(ConversionError, match='bf16 in the source and mxfp4 asked.*--experts'):
        _bindings(release.k3_bf16(), 'bf16', 'mxfp4')


def test_mechanism_without_a_tensor_in_the_family_is_refused():
    config = release.kimi_linear() | {'attn_res_block_size': 4}
    with pytest.raises(ConfigError, match="'kimi_linear', whose release has no tensor for .*res"):
        _bindings(config, 'bf16', 'bf16')


def test_flatten_and_unflatten_are_inverse():
    tree = {'a': 1, 'b': {'c': 2, 'd': {'e': 3}}}
    assert flatten(tree) == {'a': 1, 'b/c': 2, 'b/d/e': 3}
    assert unflatten(flatten(tree)) == tree
