"""The vision part alone of a release, whatever its text model: K2.5's, whose text is not K3's."""

from __future__ import annotations

from etils import epath

from k3jax.config import ConfigError, VisionConfig
from k3jax.convert.binding import bind_leaves, check_complete, unflatten
from k3jax.convert.release import open_release
from k3jax.convert.to_orbax import gather_rows
from k3jax.convert.vision import PREFIXES, VISION
from k3jax.convert.vision_config import vision_config_from_release
from k3jax.model.layout import Tree, vision_leaves


def load_vision(source: epath.PathLike) -> tuple[VisionConfig, Tree]:
    """The tower and the projector in `source`, as NumPy arrays of `layout.vision_leaves`.

    Raises:
      ConversionError, ConfigError: no such folder, or what is in it is damaged or not understood.
    """
    release = open_release(source)
    text = release.config.get('text_config', release.config)
    width = text.get('hidden_size') if isinstance(text, dict) else None
    if type(width) is not int:
        raise ConfigError(
            f'config.json: text_config.hidden_size: got {width!r}, wanted a whole number'
        )
    config = vision_config_from_release(release.config.get('vision_config'), width)
    bindings = bind_leaves(vision_leaves(config, width), VISION, 'release')
    tensors = {name: info for name, info in release.tensors.items() if name.startswith(PREFIXES)}
    check_complete(bindings, tensors, ())
    flat = {b.path: gather_rows(release, b, 0, b.leaf.shape[0]) for b in bindings}
    return config, unflatten(flat)
