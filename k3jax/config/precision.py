"""In what numbers is computed."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from k3jax.config.checks import require
from k3jax.config.model import ModelConfig, check_whole_groups

Dtype = Literal['float32', 'bfloat16']
ScaleRule = Literal['ocp_floor', 'ceil']


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationConfig:
    """In what the routed experts are computed, for four-bit weights and eight-bit activations.

    Source: K3 report section 4.1.4: weights MXFP4, the activations that enter them MXFP8.
    """

    weights: Literal['mxfp4'] | None = None  # once a step, from the float32 masters
    activations: Literal['mxfp8'] | None = None  # that enter each of the experts' products
    scale_rule: ScaleRule = 'ocp_floor'  # of both; UNCONFIRMED which one K3 was trained with

    def __post_init__(self) -> None:
        where = 'train.quantisation'
        require(
            self.weights in ('mxfp4', None), f'{where}.weights', self.weights, "'mxfp4' or None"
        )
        require(
            self.activations in ('mxfp8', None),
            f'{where}.activations',
            self.activations,
            "'mxfp8' or None",
        )
        require(
            self.scale_rule in get_args(ScaleRule),
            f'{where}.scale_rule',
            self.scale_rule,
            "'ocp_floor' or 'ceil'",
        )


def check_quantisation(model: ModelConfig, quantisation: QuantisationConfig) -> None:
    """Raises ConfigError for no experts, or ones whose rows are no whole groups of 32."""
    if quantisation.weights or quantisation.activations:
        has_experts = any(map(model.is_moe, range(model.num_hidden_layers)))
        wanted = 'none: no layer of the model has experts'
        require(has_experts, 'train.quantisation', dataclasses.asdict(quantisation), wanted)
        check_whole_groups(model, 'which train.quantisation shares scales in')
