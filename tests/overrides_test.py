"""--set: values by the type of their field, all changes together, and errors that help."""

import dataclasses
import re
from typing import Literal

import pytest

from configs import tiny_k3
from k3jax.config import ConfigError, StageConfig
from k3jax.overrides import apply_overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    rate: float = 0.1
    layers: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, 'a')
    cap: float | None = None
    mode: Literal['fast', 'slow'] = 'fast'

    def __post_init__(self):
        if len(self.layers) >= self.size:
            raise ConfigError(
                f'inner.layers: got {self.layers}, wanted fewer than inner.size ({self.size})'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    name: str = 'x'
    on: bool = True
    label: str | None = None

    def __post_init__(self):
        if self.name == 'bad':
            raise ConfigError("name: got 'bad', wanted another")


@pytest.mark.parametrize(
    'override, value',
    [
        ('inner.size=7', 7),
        ('inner.size=1e3', 1000),
        ('inner.size=1_000', 1000),
        ('inner.rate=1e-3', 1e-3),
        ('inner.rate=2', 2.0),
        ('inner.layers=5', (5,)),
        ('inner.layers=5, 6', (5, 6)),
        ('inner.layers=(5,6,)', (5, 6)),
        ('inner.layers=', ()),
        ('inner.pair=4,b', (4, 'b')),
        ('inner.cap=None', None),
        ('inner.cap=2.5', 2.5),
        ('inner.mode=slow', 'slow'),
        ('name=a=b', 'a=b'),
        ('name=None', 'None'),
        ('label=None', None),
        ('label=gs://b/c', 'gs://b/c'),
        ('on=false', False),
        ('on=True', True),
        ('on=0', False),
    ],
)
def test_values_are_read_by_the_type_of_the_field(override, value):
    config = apply_overrides(Outer(), [override])
    for name in override.partition('=')[0].split('.'):
        config = getattr(config, name)
    assert config == value and type(config) is type(value)


def test_the_rest_stays_and_the_original_is_untouched():
    config = Outer(name='y')
    changed = apply_overrides(config, ['inner.rate=0.5', 'on=no'])
    assert changed == Outer(name='y', on=False, inner=Inner(rate=0.5))
    assert config == Outer(name='y')
    assert apply_overrides(config, []) == config


def test_changes_that_must_agree_are_made_together_and_the_last_value_holds():
    changed = apply_overrides(Outer(), ['inner.layers=1,2,3,4', 'inner.size=9', 'inner.size=5'])
    assert changed.inner.layers == (1, 2, 3, 4) and changed.inner.size == 5


@pytest.mark.parametrize(
    'override, message',
    [
        ('inner.sise=3', r"--set inner.sise: inner has no field 'sise'; did you mean 'inner.size'"),
        ('iner.size=3', r"the config has no field 'iner'; did you mean 'inner'"),
        ('zzzz=3', r"no field 'zzzz'; It has: inner, name, on, label"),
        ('inner.size=many', r"--set inner.size: got 'many', wanted an integer"),
        ('inner.size=1.5', r"got '1.5', wanted an integer"),
        ('inner.size=None', r"got 'None', wanted an integer"),
        ('inner.size=inf', r"got 'inf', wanted an integer"),
        ('inner.rate=fast', r"got 'fast', wanted a number"),
        ('inner.layers=1,x', r"got '1,x', wanted values with commas, each an integer"),
        ('inner.pair=1', r'wanted 2 values with commas: an integer, text'),
        ('inner.cap=x', r"got 'x', wanted a number or 'None'"),
        ('inner.mode=slwo', r"got 'slwo', wanted 'fast' or 'slow'"),
        ('on=maybe', r"got 'maybe', wanted 'true' or 'false'"),
        ('inner=3', r'--set inner: is a group, wanted one of its fields: size, rate'),
        ('name.x=3', r"--set name.x: name is 'x', a value without fields; set name itself"),
        ('inner.size', r"--set: got 'inner.size', wanted path=value"),
        ('=3', r"--set: got '=3', wanted path=value"),
        ('name=bad', r"name: got 'bad', wanted another \(after --set name=bad\)"),
        ('inner.size=2', r'wanted fewer than inner.size \(2\) \(after --set inner.size=2\)'),
    ],
)
def test_errors_say_what_came_what_was_wanted_and_where(override, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(Outer(), [override])


def test_the_projects_own_config_takes_overrides():
    from k3jax import config as config_lib

    train = apply_overrides(
        config_lib.TrainConfig(), ['num_steps=1e4', 'dtype=float32', 'scan_layers=false']
    )
    assert train.num_steps == 10_000 and train.dtype == 'float32' and not train.scan_layers
    data = apply_overrides(config_lib.DataConfig(), ['source=/data/text', 'batch_size=16'])
    assert data.source == '/data/text' and data.batch_size == 16
    with pytest.raises(ConfigError, match=r"got 'float16', wanted 'float32' or 'bfloat16'"):
        apply_overrides(config_lib.TrainConfig(), ['dtype=float16'])
    with pytest.raises(ConfigError, match=r'data.batch_size: got 0, wanted a number above 0'):
        apply_overrides(config_lib.DataConfig(), ['batch_size=0'])


def test_a_stage_of_a_run_is_changed_by_its_number_with_the_types_of_what_it_changes():
    config = tiny_k3.get_config()
    stages = tuple(StageConfig(first_step=step) for step in (0, 5))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, stages=stages))
    changed = apply_overrides(
        config,
        ['train.stages.1.data.sequence_length=1e3', 'train.stages.1.mesh.expert=2']
        + ['train.stages.0.train.keep=ffn_input', 'train.stages.1.first_step=9'],
    )
    first, second = changed.train.stages
    assert (second.first_step, second.data, second.mesh) == (
        9,
        {'sequence_length': 1000},
        {'expert': 2},
    )
    assert first.train == {'keep': ('ffn_input',)} and not first.data
    assert apply_overrides(config, ['train.stages=()']).train.stages == ()
    for override, message in (
        ('train.stages.2.first_step=9', "train.stages has no field '2'; It has: 0, 1"),
        ('train.stages.1.data.batchsize=9', "did you mean 'train.stages.1.data.batch_size'"),
        ('train.stages.1.data.batch_size=x', "got 'x', wanted an integer"),
        ('train.stages.1.data.tokenizer=x', "data.tokenizer: got 'x', wanted one of source"),
        ('train.stages.1=x', 'is a group, wanted one of its fields: first_step, data, mesh, train'),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            apply_overrides(config, [override])
