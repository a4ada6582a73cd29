"""How a model runs, as opposed to what it is."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from k3jax.config import QuantisationConfig, Remat
from k3jax.model.statistics import Watch
from k3jax.parallel.shard import Parallel
from pallas_kernels.common.platform import Implementation


class Run(NamedTuple):
    """What the modules share; static.

    Attributes:
      dtype: of activations and matmul operands.
      param_dtype: of fresh parameters; None for what the release stores.
      remat: 'layer' recomputes each layer in the backward pass, but for the values named in `keep`
        and `offload` (of `config.ACTIVATIONS`), which stay on the chip or wait in host memory.
      implementation: of the kernels; None for the best for the platform lowered for.
      watch: what layers report of a forward pass; None for nothing.
      quantisation: of the routed experts; activations here, weights in `train.state.working_copy`.
      taps: 0-based layers whose output the model hands out; see `kimi.tap_blocks`.
      parallel: the mesh, inside a `shard_map` over all of its axes; None on a single chip.
    """

    dtype: jnp.dtype
    param_dtype: jnp.dtype | None = None
    remat: Remat = 'none'
    implementation: Implementation | None = None
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    quantisation: QuantisationConfig = QuantisationConfig()
    taps: tuple[int, ...] = ()
    parallel: Parallel | None = None
    watch: Watch | None = None
