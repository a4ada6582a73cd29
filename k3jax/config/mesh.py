"""How chips share the work."""

from __future__ import annotations

import dataclasses
from typing import Literal

from k3jax.config.checks import not_negative, positive, require

ExpertParallel = Literal['moon', 'plain']


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many chips share each axis of the work; the product is the number of chips."""

    data: int = -1  # rows of a batch; -1: all chips that the other axes leave
    expert: int = 1  # rows of a batch too, and each chip is home to its share of the experts
    sequence: int = 1  # tokens of a row
    tensor: int = 1  # heads and inner widths; serving only
    slices: int = 1  # of `data`: groups of chips joined by the data centre's network
    whole_below: int = 1 << 18  # parameters with fewer elements are whole on every chip
    expert_parallel: ExpertParallel = 'moon'  # balanced by replicas; or 'plain', at home only

    def __post_init__(self) -> None:
        require(
            self.data > 0 or self.data == -1, 'mesh.data', self.data, 'above 0, or -1 for the rest'
        )
        positive(
            'mesh',
            expert=self.expert,
            sequence=self.sequence,
            tensor=self.tensor,
            slices=self.slices,
        )
        not_negative('mesh', whole_below=self.whole_below)
        require(
            self.expert_parallel in ('moon', 'plain'),
            'mesh.expert_parallel',
            self.expert_parallel,
            "'moon' or 'plain'",
        )
