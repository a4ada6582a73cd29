"""What a converted folder holds, and its parameters.

conversion.json  written last: its presence says that the conversion is complete
params/          the text model's leaves, an Orbax checkpoint
carried/         tensors outside the text model under their release names, an Orbax checkpoint
release/         config.json, index, tokenizer and other small files, as released
headers/         each shard's header, byte for byte
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from k3jax.config import ModelConfig
from k3jax.config_dict import model_config_from_dict, to_dict
from k3jax.convert.binding import flatten, unflatten
from k3jax.convert.files import ConversionError, read_json_object
from k3jax.convert.orbax_tree import context, lost_chunk, open_array
from k3jax.model.layout import Tree, model_leaves

FORMAT, VERSION = 'k3jax-conversion', 1
CONVERSION_FILE = 'conversion.json'
STATE_FILE = 'conversion.partial.json'  # there while a conversion is under way
PARAMS, CARRIED, RELEASE, HEADERS = 'params', 'carried', 'release', 'headers'


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A complete converted folder."""

    path: epath.Path
    model_config: ModelConfig
    source_experts_format: str  # before any expansion
    fingerprint: str  # of the source
    shards: tuple[str, ...]  # file names in the source
    carried: tuple[str, ...]  # names of tensors outside the text model

    @property
    def experts_format(self) -> str:
        return self.model_config.experts_format

    @property
    def params_path(self) -> epath.Path:
        return self.path / PARAMS

    @property
    def carried_path(self) -> epath.Path:
        return self.path / CARRIED

    @property
    def release_path(self) -> epath.Path:
        """The folder with the tokenizer and the other small files of the release."""
        return self.path / RELEASE

    def header_path(self, shard: str) -> epath.Path:
        return self.path / HEADERS / f'{shard}.header'

    def to_json(self) -> dict[str, Any]:
        return {
            'format': FORMAT,
            'version': VERSION,
            'fingerprint': self.fingerprint,
            'source_experts_format': self.source_experts_format,
            'experts_format': self.experts_format,
            'model': to_dict(self.model_config),
            'shards': list(self.shards),
            'carried': list(self.carried),
        }


def read_conversion(path: epath.PathLike) -> Conversion:
    """The converted folder at `path`.

    Raises:
      ConversionError: not a converted folder, not complete, or of another version.
    """
    path = epath.Path(path)
    file = path / CONVERSION_FILE
    if not file.exists():
        if (path / STATE_FILE).exists():
            raise ConversionError(
                f'{path}: the conversion into this folder is not complete; run it again, it '
                'goes on where it stopped'
            )
        raise ConversionError(
            f'{path}: no {CONVERSION_FILE}, so not a converted checkpoint; make one with '
            'python -m experiments.convert --source=RELEASE --target=DIR'
        )
    fields = read_json_object(file)
    if fields.get('format') != FORMAT or fields.get('version') != VERSION:
        raise ConversionError(
            f'{file}: got format {fields.get("format")!r} version {fields.get("version")!r}, '
            f'wanted {FORMAT!r} version {VERSION}; convert the release again'
        )
    return Conversion(
        path=path,
        model_config=model_config_from_dict(fields['model']),
        source_experts_format=fields['source_experts_format'],
        fingerprint=fields['fingerprint'],
        shards=tuple(fields['shards']),
        carried=tuple(fields['carried']),
    )


def check_tree(params: Tree, config: ModelConfig, where: str) -> dict[str, Any]:
    """The flat leaves of `params`, checked to be those of the layout.

    Raises:
      ConversionError: names the leaf that is missing, unknown, or of another shape.
    """
    wanted, got = flatten(model_leaves(config)), flatten(params)
    for path in wanted.keys() - got.keys():
        raise ConversionError(f'{where}: {path}: missing, wanted {wanted[path].shape}')
    for path in got.keys() - wanted.keys():
        raise ConversionError(f'{where}: {path}: the model {config.name} has no such leaf')
    for path, leaf in wanted.items():
        if tuple(got[path].shape) != leaf.shape:
            raise ConversionError(
                f'{where}: {path}: got {tuple(got[path].shape)}, wanted {leaf.shape}; the '
                'parameters are of another model'
            )
    return {path: got[path] for path in wanted}


class _Stored:
    """A leaf on disk; slices of it are read as they are asked for."""

    def __init__(self, array: ts.TensorStore):
        self.shape, self.dtype = tuple(array.shape), array.dtype.numpy_dtype
        self._array = array

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._array[index].read().result())


def open_params(path: epath.PathLike) -> Tree:
    """All parameters of a converted folder, to be read by slices.

    Returns:
      The nested dict of `layout.model_leaves`, of what has a shape and a dtype and gives a NumPy
      array for a slice.

    Raises:
      ConversionError: the folder is not complete, or lacks a leaf of the model or a chunk of one.
    """
    conversion, limits = read_conversion(path), context()
    _check_chunks(conversion)
    names = flatten(model_leaves(conversion.model_config))
    found = {name: _Stored(open_array(conversion.params_path, name, limits)) for name in names}
    where = str(conversion.params_path)
    return unflatten(check_tree(unflatten(found), conversion.model_config, where))


def _check_chunks(conversion: Conversion) -> None:
    """Orbax refuses a checkpoint that lacks one too, but not in one line."""
    for name in flatten(model_leaves(conversion.model_config)):
        lost = lost_chunk(conversion.params_path, name)
        if lost is not None:
            raise ConversionError(
                f'{conversion.params_path}: {name}: {lost} is missing from its folder; the '
                'checkpoint is damaged: convert the release again'
            )


def load_params(path: epath.PathLike, *, dtype: Any = None) -> Tree:
    """All parameters of a converted folder, as NumPy arrays.

    Args:
      path: a converted folder.
      dtype: for the floating-point leaves; None keeps each leaf's own. MXFP4 bytes stay bytes.

    Returns:
      The nested dict of `layout.model_leaves`.

    Raises:
      ConversionError: the folder is not complete, or lacks a leaf of the model or a chunk of one.
    """
    conversion = read_conversion(path)
    _check_chunks(conversion)
    with ocp.PyTreeCheckpointer() as checkpointer:
        params = checkpointer.restore(conversion.params_path)
    flat = check_tree(params, conversion.model_config, str(conversion.params_path))
    if dtype is not None:
        for name, array in flat.items():
            if array.dtype != np.uint8:
                flat[name] = array.astype(dtype)
    return unflatten(flat)
