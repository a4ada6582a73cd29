"""What a --draft is: a workdir of `experiments.draft`, and the parameters in it."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from k3jax.config import ConfigError, ModelConfig, QuantisationConfig
from k3jax.config_dict import model_config_from_dict, to_dict
from k3jax.files import write_json
from k3jax.model.draft import draft_leaves, init_draft, with_taps
from k3jax.model.kimi import Kimi
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.quantise import quantised_leaves

DRAFT_FILE = 'draft_config.json'


SHOWN = 3  # fields in one message


def write_draft(
    folder: epath.Path, model: Kimi, how: QuantisationConfig, training: dict[str, Any]
) -> None:
    """Stores whose draft a folder holds, whole or not at all; the folder need not exist.

    model: with its taps. training: what `stored_training` gives back.
    """
    fields = {
        'model': to_dict(model.config),
        'taps': model.run.taps,
        'quantisation': to_dict(how),
        'training': training,
    }
    write_json(folder / DRAFT_FILE, fields)


def _read(folder: epath.Path) -> tuple[ModelConfig, tuple[int, ...], QuantisationConfig]:
    path = folder / DRAFT_FILE
    if not path.exists():
        raise ValueError(
            f'--draft: {folder} has no {DRAFT_FILE}; make one with '
            'python -m experiments.draft --checkpoint=MODEL --workdir=DIR'
        )
    try:
        fields = json.loads(path.read_text())
        model = model_config_from_dict(fields['model'])
        return model, tuple(fields['taps']), QuantisationConfig(**fields['quantisation'])
    except (json.JSONDecodeError, KeyError, TypeError, ConfigError) as error:
        raise ValueError(f'{path}: not the config of a draft ({error}); was it edited?') from None


def stored_training(folder: epath.PathLike) -> dict[str, Any]:
    """How the draft of a folder is trained, as JSON has it."""
    return json.loads((epath.Path(folder) / DRAFT_FILE).read_text()).get('training', {})


def check_draft(folder: epath.PathLike, config: ModelConfig) -> None:
    """Raises ValueError, naming the fields, if a folder holds the draft of another model."""
    theirs, ours = to_dict(_read(epath.Path(folder))[0]), to_dict(config)
    differ = [
        f'{name} is {theirs[name]!r} there, {ours[name]!r} here'
        for name in ours
        # How experts are held, and what the model is called, do not change what it says.
        if theirs[name] != ours[name] and name not in ('experts_format', 'name')
    ]
    if differ:
        more = f' and {len(differ) - SHOWN} more' if len(differ) > SHOWN else ''
        raise ValueError(
            f'--draft: {folder} is the draft of another model: {"; ".join(differ[:SHOWN])}{more}'
        )


def open_draft(folder: epath.PathLike, model: Kimi) -> tuple[Kimi, dict[str, Any]]:
    """The model with the taps that its draft needs, and the draft's parameters.

    Raises:
      ValueError: there is no draft, it is of another model, or none of its checkpoints can be read.
    """
    folder = epath.Path(folder)
    _, taps, how = _read(folder)
    check_draft(folder, model.config)
    model = with_taps(model, taps)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        jax.eval_shape(lambda: init_draft(model, {}, jax.random.key(0))),
    )
    checkpoints = Checkpoints(folder)
    try:
        params, _ = checkpoints.restore_params(abstract)
    finally:
        checkpoints.close()
    leaves = draft_leaves(model.config, len(taps))
    return model, jax.tree.map(
        lambda leaf, x: x.astype(jnp.promote_types(model.run.dtype, leaf.dtype)),
        leaves,
        quantised_leaves(leaves, params, how),
    )
