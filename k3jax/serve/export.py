"""How a training workdir becomes a folder in the released layout."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from k3jax.config import ModelConfig, QuantisationConfig
from k3jax.convert.binding import FAMILIES, flatten, unflatten
from k3jax.convert.progress import Progress
from k3jax.convert.to_safetensors import export_params
from k3jax.data.media import processor
from k3jax.data.processor import PROCESSOR_FILE, release_processor
from k3jax.data.tokenizer import BYTES, byte_tokenizer_files
from k3jax.data.video import VideoConfig
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.layout import model_leaves
from k3jax.model.plan import unstack_params
from k3jax.model.run import Run
from k3jax.serve.load import workdir_params
from k3jax.train.checkpoint import read_config
from pallas_kernels.grouped_mlp import fake_quantise_mxfp4, quantise_mxfp4


def released_form(
    params: dict[str, Any], config: ModelConfig, quantisation: QuantisationConfig
) -> tuple[dict[str, Any], ModelConfig]:
    """Masters, by layer, and their config as the release has them.

    Experts that were trained in MXFP4 are quantised from the float32 masters by the rule that
    training had: packed, or in bfloat16 (which is exact) where the family's release has no packed
    form. A layer of multi-token prediction is left out, as the release has none. Everything else is
    left as it is.
    """
    params = {name: tree for name, tree in params.items() if name != 'mtp'}
    config = dataclasses.replace(config, num_nextn_predict_layers=0)
    if quantisation.weights is None:
        return params, config
    rule, leaves = quantisation.scale_rule, flatten(model_leaves(config))
    packs = ('mxfp4', 'mxfp4') in FAMILIES[config.family].experts
    quantise = jax.jit(
        functools.partial(quantise_mxfp4 if packs else fake_quantise_mxfp4, rule=rule)
    )
    flat = {}
    for path, array in flatten(params).items():
        if not leaves[path].quantisable:
            flat[path] = array
        elif packs:
            found = jax.device_get(quantise(np.asarray(array)))
            flat |= {f'{path}_{part}': value for part, value in found._asdict().items()}
        else:
            flat[path] = jax.device_get(quantise(np.asarray(array)))
    form = 'mxfp4' if packs else config.experts_format
    return unflatten(flat), dataclasses.replace(config, experts_format=form)


def export_random(config: ModelConfig, target: epath.PathLike) -> None:
    """Writes a model of fresh parameters in the released layout, for measurements."""
    model = Kimi(config, Run(jnp.dtype('float32')), scan_layers=False)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    export_params(unstack_params(jax.device_get(params), model.plan), config, target)


def export_workdir(
    source: epath.PathLike, target: epath.PathLike, progress: Progress | None = None
) -> ModelConfig:
    """Writes the newest checkpoint of a workdir in the released layout, with its tokenizer's files.

    Of a model that sees, also its preprocessor_config.json. All parameters are in the host's memory
    at once.

    Returns:
      The config of what was written.

    Raises:
      ConversionError: `target` holds something else, or could not be written.
      ValueError: there is no checkpoint that can be read.
    """
    stored = read_config(epath.Path(source))
    params = workdir_params(epath.Path(source), stored.model, stored.scan_layers)
    params, config = released_form(params, stored.model, stored.quantisation)
    folder, files = stored.data.tokenizer, {}
    if folder == BYTES:
        folder, files = None, byte_tokenizer_files()
    if config.vision is not None:
        fields = release_processor(processor(stored.data), VideoConfig())
        files[PROCESSOR_FILE] = json.dumps(fields, indent=2).encode() + b'\n'
    export_params(params, config, target, small_files_of=folder, files=files, progress=progress)
    return config
