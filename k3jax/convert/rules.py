"""What a rule table is: source tensor names -> leaf, for one model family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from k3jax.convert.files import ConversionError
from k3jax.convert.transforms import IDENTITY, Transform

LAYER, EXPERT = '{N}', '{E}'


@dataclasses.dataclass(frozen=True)
class Rule:
    """Source tensor name or names -> leaf path, through a transform."""

    source: str | tuple[str, ...]
    leaf: str
    transform: Transform = IDENTITY

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def is_stacked(self) -> bool:
        return EXPERT in self.sources[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """The tables of one model family."""

    rules: tuple[Rule, ...]
    experts: Mapping[tuple[str, str], tuple[Rule, ...]]  # (format in the source, ours) -> rules
    carried_prefixes: tuple[str, ...]  # of tensors outside the text model

    def table(self, source_format: str, our_format: str) -> tuple[Rule, ...]:
        """All rules for experts held as `source_format` there and `our_format` here."""
        try:
            return self.rules + self.experts[source_format, our_format]
        except KeyError:
            raise ConversionError(
                f'experts: got {source_format} in the source and {our_format} asked for, wanted '
                f'one of {[f"{a} -> {b}" for a, b in self.experts]}; quantising is not part of '
                'this converter: leave --experts out to keep what the source has'
            ) from None
