"""How parameters are moved."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from k3jax.config.checks import not_negative, positive, require
from k3jax.config.precision import Dtype

StateMemory = Literal['device', 'pinned_host']
OptimizerName = Literal['adamw', 'muon']


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Per-head Muon. Of K3's own, the report says only that heads are apart: the rest is K2's."""

    per_head: bool = True  # False: matrices are whole, as in K2
    momentum: float = 0.95
    nesterov: bool = False
    coefficients: tuple[float, ...] = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz polynomial
    steps: int = 5  # of Newton-Schulz
    dtype: Dtype = 'bfloat16'  # of its products' operands and what chips exchange
    update_rms: float = 0.2  # of an update, before the learning rate: that of Adam
    split_kv_b: bool = True  # keys and values of a head are two blocks
    router: bool = True  # False: AdamW moves the router

    def __post_init__(self) -> None:
        where = 'optimizer.muon'
        require(0 <= self.momentum < 1, f'{where}.momentum', self.momentum, 'a number in [0, 1)')
        positive(where, update_rms=self.update_rms)
        require(1 <= self.steps <= 100, f'{where}.steps', self.steps, '1 to 100')
        require(
            len(self.coefficients) == 3 and all(map(math.isfinite, self.coefficients)),
            f'{where}.coefficients',
            self.coefficients,
            'three finite numbers',
        )
        require(
            self.dtype in get_args(Dtype), f'{where}.dtype', self.dtype, "'float32' or 'bfloat16'"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileBalanceConfig:
    """How the experts' selection biases are set. Source: report section 2.3.3, appendix D."""

    enabled: bool = True  # False: the biases stay as they are
    bins: int = 1000  # of the histogram of required biases
    momentum: float = 0.0  # of the old bias in the new one; UNCONFIRMED whether K3 had any

    def __post_init__(self) -> None:
        where = 'optimizer.quantile_balance'
        require(2 <= self.bins <= 1 << 20, f'{where}.bins', self.bins, '2 to 2^20')
        require(0 <= self.momentum < 1, f'{where}.momentum', self.momentum, 'a number in [0, 1)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon or AdamW with linear warm-up and cosine decay; with Muon, AdamW moves the rest."""

    name: OptimizerName = 'adamw'
    muon: MuonConfig = MuonConfig()
    learning_rate: float = 3e-4  # peak
    final_learning_rate_ratio: float = 0.1  # of the peak, at the last step
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    state_memory: StateMemory = 'device'  # 'pinned_host': moments and masters wait there
    grad_clip_norm: float = 1.0
    quantile_balance: QuantileBalanceConfig = QuantileBalanceConfig()
    # Instead of it, how far each selection bias moves in a step, towards an equal load; 0: no such
    # rule. 1e-3 is DeepSeek-V3's, whose method K2 takes over.
    sign_balance_step: float = 0.0
    # Heads with a larger attention logit are clipped; None: none. 100 is K2's; UNCONFIRMED for K3.
    qk_clip_threshold: float | None = 100.0

    def __post_init__(self) -> None:
        positive(
            'optimizer',
            learning_rate=self.learning_rate,
            eps=self.eps,
            grad_clip_norm=self.grad_clip_norm,
        )
        if self.qk_clip_threshold is not None:
            positive('optimizer', qk_clip_threshold=self.qk_clip_threshold)
        require(
            self.name in get_args(OptimizerName), 'optimizer.name', self.name, "'adamw' or 'muon'"
        )
        require(
            self.state_memory in ('device', 'pinned_host'),
            'optimizer.state_memory',
            self.state_memory,
            "'device' or 'pinned_host'",
        )
        not_negative(
            'optimizer',
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            sign_balance_step=self.sign_balance_step,
        )
        require(
            not (self.sign_balance_step and self.quantile_balance.enabled),
            'optimizer.sign_balance_step',
            self.sign_balance_step,
            '0, or optimizer.quantile_balance.enabled=false: one rule sets the biases',
        )
        for name in ('b1', 'b2'):
            value = getattr(self, name)
            require(0 <= value < 1, f'optimizer.{name}', value, 'a number in [0, 1)')
        require(
            0 <= self.final_learning_rate_ratio <= 1,
            'optimizer.final_learning_rate_ratio',
            self.final_learning_rate_ratio,
            'a number in [0, 1]',
        )
