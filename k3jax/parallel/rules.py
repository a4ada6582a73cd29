"""Which mesh axes a logical axis is cut along: one table per strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from jax.sharding import PartitionSpec

AXES = ('data', 'expert', 'sequence', 'tensor')
Strategy = Literal['train', 'prefill', 'decode']


class Described(Protocol):
    """A parameter's shape and logical axes, one a dimension."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str | None, ...]: ...


@dataclasses.dataclass(frozen=True)
class Rules:
    """One strategy.

    Attributes:
      weights: logical axis of a parameter -> mesh axes that it is cut along.
      kept: logical axes that the computation uses as they are cut; the others are only stored so,
        and gathered before use.
      rows, tokens: mesh axes that cut the rows of a batch, and the tokens of a row.
      experts: mesh axes among which tokens travel to their experts.
    """

    weights: Mapping[str, tuple[str, ...]]
    kept: frozenset[str]
    rows: tuple[str, ...]
    tokens: tuple[str, ...]
    experts: tuple[str, ...]


def _rules(weights: dict[str, tuple[str, ...]], kept: tuple[str, ...], **cuts: tuple[str, ...]):
    return Rules(MappingProxyType(weights), frozenset(kept), **cuts)


def _stored(first: tuple[str, ...], second: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Matrices cut along both dimensions, so that each chip stores an equal share of all."""
    outputs = ('heads', 'kda_heads', 'mlp', 'vocab', 'router', 'rank', 'latent', 'features')
    return {
        'embed': first,
        **dict.fromkeys(outputs, second),
        'expert': second,
        # Rows only: a cut of the last dimension would be padded to 128 lanes.
        'expert_rows': first,
    }


RULES: Mapping[Strategy, Rules] = MappingProxyType(
    {
        'train': _rules(
            _stored(('data', 'sequence'), ('expert',)),
            kept=('expert',),
            rows=('data', 'expert'),
            tokens=('sequence',),
            experts=('expert',),
        ),
        # One long row at a time: the chips that share its tokens share the experts too.
        'prefill': _rules(
            _stored(('data', 'expert'), ('sequence',)),
            kept=('expert',),
            rows=('data', 'expert'),
            tokens=('sequence',),
            experts=('sequence',),
        ),
        # Nothing is gathered for the few tokens of a step: every weight is used where it lies.
        'decode': _rules(
            {
                **dict.fromkeys(('heads', 'kda_heads', 'mlp', 'vocab'), ('tensor',)),
                'expert': ('data', 'expert', 'tensor'),
            },
            kept=('heads', 'kda_heads', 'mlp', 'vocab', 'expert'),
            rows=('data', 'expert'),
            tokens=(),
            experts=('data', 'expert', 'tensor'),
        ),
    }
)


def axes_of(cut: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return (cut,) if isinstance(cut, str) else tuple(cut or ())


def spec_of(
    leaf: Described, rules: Rules, sizes: Mapping[str, int], whole_below: int
) -> PartitionSpec:
    """How a parameter is cut.

    A dimension that is only stored is cut along as many of its mesh axes as divide it; a parameter
    with fewer than `whole_below` elements is not.

    Raises:
      ValueError: a dimension that the computation keeps cut is not divisible, or two dimensions
        want the same mesh axis.
    """
    small = math.prod(leaf.shape) < whole_below
    cuts: list[tuple[str, ...] | None] = []
    for size, name in zip(leaf.shape, leaf.axes, strict=True):
        wanted = tuple(a for a in rules.weights.get(name, ()) if sizes.get(a, 1) > 1)
        if name in rules.kept:
            parts = math.prod(sizes[a] for a in wanted)
            if size % parts:
                raise ValueError(
                    f'mesh: {name} of a parameter {leaf.shape} has {size} elements, wanted a '
                    f'multiple of the {parts} chips along {" x ".join(wanted)}'
                )
        elif small:
            wanted = ()
        else:
            while size % math.prod(sizes[a] for a in wanted):
                wanted = wanted[:-1]
        cuts.append(wanted or None)
    used = [axis for cut in cuts if cut for axis in cut]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise ValueError(
            f'rules: mesh axis {", ".join(twice)} cuts two dimensions of a parameter '
            f'{leaf.shape} with axes {leaf.axes}; give one of them another mesh axis'
        )
    return PartitionSpec(*cuts)
