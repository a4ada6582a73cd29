"""What a --checkpoint is: a converted folder or a training workdir, as a model ready to run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from k3jax.config import ModelConfig
from k3jax.convert.converted import CONVERSION_FILE, STATE_FILE, load_params, read_conversion
from k3jax.data.tokenizer import Tokenizer, load_tokenizer
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.layer import Run
from k3jax.model.plan import depth_plan, stack_params, unstack_params
from k3jax.train.checkpoint import CONFIG_FILE, Checkpoints, read_config

UNROLL_UP_TO = 32  # layers; deeper models are scanned, which compiles faster than it runs


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with its parameters, and the tokenizer it was made for (None: it carries none)."""

    model: Kimi
    params: dict[str, Any]
    tokenizer: Tokenizer | None


def _from_workdir(path: epath.Path) -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
    config, scan_layers, tokenizer = read_config(path)
    trained = Kimi(config, Run(jnp.float32, jnp.float32), scan_layers)
    abstract = jax.eval_shape(lambda key: init_params(trained, key), jax.random.key(0))
    params, _ = Checkpoints(path).restore_params(abstract)
    return config, unstack_params(jax.device_get(params), trained.plan), load_tokenizer(tokenizer)


def _from_conversion(path: epath.Path) -> tuple[ModelConfig, dict[str, Any], Tokenizer | None]:
    conversion = read_conversion(path)
    release = conversion.release_path
    has_tokenizer = (release / 'tiktoken.model').exists()
    tokenizer = load_tokenizer(release) if has_tokenizer else None
    return conversion.model_config, load_params(path), tokenizer


def open_model(path: str, dtype: str = 'bfloat16') -> Loaded:
    """The model at `path`, its floating-point parameters held in at least `dtype`.

    Args:
      path: what `convert` made, or a workdir of `train`; local or gs://.
      dtype: of activations and matmul operands.

    Raises:
      ValueError: there is no such checkpoint, or it is not whole.
    """
    folder = epath.Path(path)
    if (folder / CONVERSION_FILE).exists() or (folder / STATE_FILE).exists():
        config, params, tokenizer = _from_conversion(folder)
    elif (folder / CONFIG_FILE).exists():
        config, params, tokenizer = _from_workdir(folder)
    else:
        raise ValueError(
            f'--checkpoint: {path} is neither a converted folder (no {CONVERSION_FILE}) nor a '
            f'training workdir (no {CONFIG_FILE}); make one with experiments.convert or '
            'experiments.train'
        )
    scan = config.num_hidden_layers > UNROLL_UP_TO
    model = Kimi(config, Run(jnp.dtype(dtype)), scan)
    params = stack_params(params, depth_plan(config, scan=scan), np.stack)
    return Loaded(model, jax.tree.map(lambda a: _place(a, dtype), params), tokenizer)


_KEPT_WIDE = 'float32'


def _place(array: np.ndarray, dtype: str) -> jax.Array:
    """On device: matrices in the compute dtype, so that no step converts them again."""
    if array.dtype == np.uint8 or (array.ndim < 2 and array.dtype == _KEPT_WIDE):
        return jnp.asarray(array)
    return jnp.asarray(array).astype(dtype)
