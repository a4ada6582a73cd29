"""Four layers of Kimi K3 at its full width: quick to compile, small enough for 64 v5p chips.

As `kimi_k3_pod` otherwise: a dense and two expert layers of KDA, one of MLA, in two
attention-residual blocks.
"""

import dataclasses

from configs.kimi_k3_pod import get_config as get_kimi_k3_pod
from k3jax.config import Config


def get_config() -> Config:
    config = get_kimi_k3_pod()
    linear = dataclasses.replace(
        config.model.linear_attn_config, kda_layers=(1, 2, 3), full_attn_layers=(4,)
    )
    model = dataclasses.replace(
        config.model, num_hidden_layers=4, attn_res_block_size=2, linear_attn_config=linear
    )
    return dataclasses.replace(config, model=model)
