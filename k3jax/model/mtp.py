"""Multi-token prediction: one more layer, which tells the token after next.

Source: the report says that K3 had one such layer, like those of its backbone, in pretraining. That
the embedding comes first in `eh_proj`, as in DeepSeek-V3 and loaders for K3, is UNCONFIRMED.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.model.layer import Depth, Left, Sequence, layer_class
from k3jax.model.layout import mtp_block, mtp_leaves
from k3jax.model.norms import project, rms_norm
from k3jax.model.param import declare
from k3jax.model.run import Run

Params = dict[str, Any]


def mtp_input(params: Params, hidden: jax.Array, embedded: jax.Array, eps: float) -> jax.Array:
    """What the layer reads: [hnorm(hidden), enorm(embedded)] projected to the model's width.

    Args: hidden, embedded [B, T, D], of a token and of the next one.
    """
    pair = rms_norm(embedded, params['enorm'], eps), rms_norm(hidden, params['hnorm'], eps)
    return project(jnp.concatenate(pair, axis=-1), params['eh_proj'])


class MTP(nn.Module):
    """The layer of multi-token prediction, for whole rows."""

    config: ModelConfig
    run: Run

    @nn.compact
    def __call__(
        self, hidden: jax.Array, embedded: jax.Array, sequence: Sequence
    ) -> tuple[jax.Array, Left]:
        """Hidden states [B, T, D] ready for the head, of the tokens after next; what is left.

        hidden: the running sum after the last layer. embedded: of the next token.
        """
        config, eps = self.config, self.config.rms_norm_eps
        leaves = {name: leaf for name, leaf in mtp_leaves(config).items() if name != 'layer'}
        params = declare(self, leaves, config.initializer_range, self.run)
        x = mtp_input(params, hidden, embedded, eps)
        layer = layer_class(self.run, in_scan=False)(mtp_block(config), self.run, 0, name='layer')
        x, left = layer(x, Depth(None, 0), sequence, True, None)
        return rms_norm(x, params['norm'], eps), left
