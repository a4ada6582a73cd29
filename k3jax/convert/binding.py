"""Which source tensors each leaf of a model is made of, complete in both directions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np

from k3jax.config import ConfigError, ModelConfig
from k3jax.convert.files import ConversionError
from k3jax.convert.kimi_k3 import KIMI_K3
from k3jax.convert.kimi_linear import KIMI_LINEAR
from k3jax.convert.rules import EXPERT, LAYER, Rule
from k3jax.convert.safetensors_io import DTYPE_NAMES, DTYPES, TensorInfo
from k3jax.model.layout import Leaf, Tree, model_leaves

FAMILIES = {'kimi_k3': KIMI_K3, 'kimi_linear': KIMI_LINEAR}
PACKED, SCALE = '.weight_packed', '.weight_scale'
SHOWN = 3  # names in one message


def flatten(tree: Tree, prefix: str = '') -> dict[str, object]:
    """Nested dicts -> {'layers_0/self_attn/q_proj': leaf}, in the tree's order."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f'{prefix}{key}/')
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: Mapping[str, object]) -> Tree:
    """Inverse of `flatten`."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *folders, name = path.split('/')
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


@dataclasses.dataclass(frozen=True)
class Binding:
    """One leaf of a model and the source tensors it is made of."""

    path: str
    leaf: Leaf
    rule: Rule
    layer: str  # '' for a global leaf

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what one group of source tensors becomes: one expert, or the whole leaf."""
        return self.leaf.shape[1:] if self.rule.is_stacked else self.leaf.shape

    @property
    def num_parts(self) -> int:
        return self.leaf.shape[0] if self.rule.is_stacked else 1

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[_DTYPE_OF[self.leaf.dtype]]

    def source_names(self, part: int = 0) -> tuple[str, ...]:
        """Names of the source tensors of one part."""
        return tuple(
            source.replace(LAYER, self.layer).replace(EXPERT, str(part))
            for source in self.rule.sources
        )

    @functools.cached_property
    def source_specs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, safetensors dtype) of each source tensor of a part, as released."""
        transform = self.rule.transform
        return tuple(
            (shape, _DTYPE_OF[dtype])
            for shape, dtype in zip(
                transform.source_shapes(self.part_shape),
                transform.source_dtypes(self.leaf.dtype),
                strict=True,
            )
        )

    def source_tensors(self) -> Iterator[TensorInfo]:
        """Every source tensor of the leaf, as released."""
        for part in range(self.num_parts):
            for name, (shape, dtype) in zip(
                self.source_names(part), self.source_specs, strict=True
            ):
                yield TensorInfo(name, dtype, shape)


_DTYPE_OF = {dtype.name: name for dtype, name in DTYPE_NAMES.items()}


def bind(config: ModelConfig, rules: tuple[Rule, ...]) -> list[Binding]:
    """Each leaf of the model with its rule, in the layout's order.

    Raises:
      ConfigError: the family's release has no tensor for a leaf that the config asks for.
    """
    return bind_leaves(model_leaves(config), rules, config.family)


def bind_leaves(leaves: Tree, rules: tuple[Rule, ...], family: str) -> list[Binding]:
    """As `bind`, for a tree of leaves."""
    by_leaf = {rule.leaf: rule for rule in rules}
    assert len(by_leaf) == len(rules), 'two rules fill one leaf'
    bindings = []
    for path, leaf in flatten(leaves).items():
        top, _, rest = path.partition('/')
        layer = top.removeprefix('layers_') if top.startswith('layers_') else ''
        rule = by_leaf.get(f'layers_{LAYER}/{rest}' if layer else path)
        if rule is None:
            raise ConfigError(
                f'model.family: got {family!r}, whose release has no tensor for {path}; '
                'turn that mechanism off, or use the family that has it'
            )
        bindings.append(Binding(path, leaf, rule, layer))
    return bindings


def _names(names: list[str]) -> str:
    more = f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''
    return ', '.join(names[:SHOWN]) + more


def _check_pairs(missing: list[str], tensors: Mapping[str, TensorInfo]) -> None:
    for name in missing:
        for suffix, sibling, what in ((SCALE, PACKED, 'scale'), (PACKED, SCALE, 'packed codes')):
            other = name.removesuffix(suffix) + sibling
            if name.endswith(suffix) and other in tensors:
                raise ConversionError(
                    f'{other}: an MXFP4 tensor without its {what}: {name} is in no shard; '
                    'the checkpoint is incomplete: download it again'
                )


def check_complete(
    bindings: list[Binding], tensors: Mapping[str, TensorInfo], carried_prefixes: tuple[str, ...]
) -> list[str]:
    """Checks that the rules use every source tensor once and fill every leaf once.

    Returns:
      The names of the tensors outside the text model, which are carried as they are.

    Raises:
      ConversionError: names the tensors that are missing, unknown, or of another shape or dtype.
    """
    unused = dict.fromkeys(tensors)
    missing: list[str] = []
    for binding in bindings:
        transform = binding.rule.transform
        for wanted in binding.source_tensors():
            got = tensors.get(wanted.name)
            if got is None:
                missing.append(wanted.name)
                continue
            assert wanted.name in unused, f'two rules use {wanted.name}'
            del unused[wanted.name]
            if got.dtype != wanted.dtype or not transform.accepts(got.shape, wanted.shape):
                raise ConversionError(
                    f'{wanted.name}: got {got.dtype} {list(got.shape)}, wanted {wanted.dtype} '
                    f'{list(wanted.shape)} for {binding.path}; config.json and the weights are '
                    'of different models, or the tensor was changed'
                )
    unknown = [name for name in unused if not name.startswith(carried_prefixes or '\0')]
    _check_pairs(missing, tensors)
    if missing:
        also = f' (and these have no place in it: {_names(unknown)})' if unknown else ''
        raise ConversionError(
            f'missing {len(missing)} tensors that the model of config.json needs: '
            f'{_names(missing)}{also}; download the checkpoint again, or correct config.json'
        )
    if unknown:
        raise ConversionError(
            f'unknown tensors, {len(unknown)} in all: {_names(unknown)}; the model of config.json '
            'has no place for them: is the checkpoint of another model, or config.json changed?'
        )
    return list(unused)
