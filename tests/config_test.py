"""Configs: values that cannot work, and dicts that are not a config, are errors with a name."""

import dataclasses
import json
import math

import pytest

from configs import tiny_k3
from k3jax import config as config_lib
from k3jax.config_dict import config_from_dict, model_config_from_dict, to_dict

MODEL = tiny_k3.get_config().model


def test_a_model_config_survives_json():
    fields = json.loads(json.dumps(to_dict(MODEL)))
    assert model_config_from_dict(fields) == MODEL


def test_absent_fields_with_a_default_take_it():
    fields = to_dict(MODEL)
    del fields['rms_norm_eps'], fields['linear_attn_config']['short_conv_kernel_size']
    config = model_config_from_dict(fields)
    assert config.rms_norm_eps == 1e-5
    assert config.linear_attn_config.short_conv_kernel_size == 4


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda m: m.pop('hidden_size'), 'model.hidden_size: got nothing, wanted the int'),
        (lambda m: m.update(hidden=3), 'model.hidden: got 3, wanted one of name, family'),
        (lambda m: m.pop('linear_attn_config'), 'model.linear_attn_config: got nothing'),
        (lambda m: m.update(linear_attn_config=None), 'model.linear_attn_config: got None'),
        (
            lambda m: m['linear_attn_config'].pop('kda_layers'),
            'model.linear_attn_config.kda_layers: got nothing',
        ),
        (
            lambda m: m['linear_attn_config'].update(kda_layers=1),
            'model.linear_attn_config.kda_layers: got 1, wanted a list',
        ),
        (
            lambda m: m['linear_attn_config'].update(heads=2),
            'model.linear_attn_config.heads: got 2, wanted one of num_heads',
        ),
    ],
)
def test_a_dict_that_is_not_a_model_config_is_refused_by_field(change, message):
    fields = to_dict(MODEL)
    change(fields)
    with pytest.raises(config_lib.ConfigError, match=message):
        model_config_from_dict(fields)


@pytest.mark.parametrize(
    ('config_class', 'fields', 'message'),
    [
        (
            config_lib.DataConfig,
            {'ramp_steps': (5, 5), 'ramp_batch_sizes': (1, 2)},
            r'data.ramp_steps: got \(5, 5\), wanted steps above 0, each later',
        ),
        (
            config_lib.DataConfig,
            {'ramp_steps': (5,)},
            r'data.ramp_batch_sizes: got \(\), wanted as many as data.ramp_steps \(1\)',
        ),
        (
            config_lib.DataConfig,
            {'ramp_steps': (5,), 'ramp_batch_sizes': (3,), 'num_streams': 2},
            r'data.ramp_batch_sizes: got \(3,\), wanted multiples of data.num_streams \(2\)',
        ),
        (
            config_lib.OptimizerConfig,
            {'qk_clip_threshold': 0.0},
            'optimizer.qk_clip_threshold: got 0.0, wanted a number above 0',
        ),
        (
            config_lib.QuantileBalanceConfig,
            {'bins': 1},
            r'optimizer.quantile_balance.bins: got 1, wanted 2 to 2\^20',
        ),
        (
            config_lib.QuantileBalanceConfig,
            {'bins': 3_000_000_000},
            'optimizer.quantile_balance.bins: got 3000000000',
        ),
        (config_lib.MuonConfig, {'steps': 3_000_000_000}, 'optimizer.muon.steps: got 3000000000'),
        (config_lib.MuonConfig, {'update_rms': math.inf}, 'optimizer.muon.update_rms: got inf'),
        (
            config_lib.MuonConfig,
            {'coefficients': (math.nan, 1.0, 1.0)},
            r'optimizer.muon.coefficients: got \(nan, 1.0, 1.0\), wanted three finite numbers',
        ),
        (config_lib.TrainConfig, {'z_loss': math.inf}, 'train.z_loss: got inf'),
        (config_lib.TrainConfig, {'sample_tokens': -1}, 'train.sample_tokens: got -1, wanted 0 or'),
        (config_lib.TrainConfig, {'eval_every': -5}, 'train.eval_every: got -5, wanted 0 or more'),
        (config_lib.TrainConfig, {'sample_prompt': ''}, "train.sample_prompt: got '', wanted at"),
        (config_lib.TrainConfig, {'seed': -1}, 'train.seed: got -1, wanted a whole number in 0'),
        (config_lib.TrainConfig, {'seed': 2**32}, 'train.seed: got 4294967296, wanted'),
        (config_lib.DataConfig, {'shuffle_seed': -1}, 'data.shuffle_seed: got -1, wanted'),
        (config_lib.DataConfig, {'shuffle_seed': 2**32}, 'data.shuffle_seed: got 4294967296'),
        (config_lib.OptimizerConfig, {'weight_decay': -0.1}, 'optimizer.weight_decay: got -0.1'),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(config_class, fields, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        config_class(**fields)


def test_values_at_the_edge_are_taken():
    train = config_lib.TrainConfig(sample_tokens=0, sample_prompt='', eval_every=0, seed=2**32 - 1)
    assert train.seed == 2**32 - 1
    assert config_lib.DataConfig(shuffle_seed=0).shuffle_seed == 0
    assert config_lib.OptimizerConfig(weight_decay=0.0).weight_decay == 0


def test_a_whole_config_survives_json_with_its_stages():
    config = tiny_k3.get_config()
    changes = {'sequence_length': 512, 'ramp_steps': (7,), 'ramp_batch_sizes': (2,)}
    stages = (
        config_lib.StageConfig(first_step=0),
        config_lib.StageConfig(first_step=5, data=changes, mesh={'sequence': 2}),
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, stages=stages))
    assert config_from_dict(json.loads(json.dumps(to_dict(config)))) == config
