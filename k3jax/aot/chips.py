"""What a chip can do: the figures that estimates are made from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. flops: bfloat16 operations a second; hbm_bandwidth: bytes a second; clock: Hz;
    cores: TensorCores, between which parallel grid axes are split; hbm_bytes, vmem_bytes: what a
    program may use, VMEM a core."""

    flops: float
    hbm_bandwidth: float
    clock: float
    cores: int
    hbm_bytes: int
    vmem_bytes: int


# Google's published peaks; HBM and VMEM limits as libtpu 0.0.52 enforces them.
CHIPS = {
    'v5p': Chip(
        flops=459e12,
        hbm_bandwidth=2765e9,
        clock=1.75e9,
        cores=2,
        hbm_bytes=int(95.73 * 2**30),
        vmem_bytes=64 * 2**20,
    ),
    'v6e': Chip(
        flops=918e12,
        hbm_bandwidth=1640e9,
        clock=1.75e9,
        cores=1,
        hbm_bytes=32 * 2**30,
        vmem_bytes=128 * 2**20,
    ),
}

VECTOR_SLOTS = 4  # vector operations that a core starts in a cycle


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as 'v5p:2x2x1'.

    Raises:
      ValueError: no figures for it.
    """
    name = topology.split(':')[0]
    if name not in CHIPS:
        raise ValueError(
            f'topology is {topology!r}, wanted one of {", ".join(CHIPS)} and a shape of chips: '
            'v5p:2x2x1'
        )
    return CHIPS[name]
