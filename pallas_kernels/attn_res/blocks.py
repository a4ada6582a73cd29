"""How the bank is cut for the TPU: tiles of tokens, and which snapshots are fetched at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiles import tiles_for

GROUP = 16  # rows worked on at a time: one bfloat16 tile of sublanes
LANES = 128
VMEM_LIMIT = 64 * 2**20
_TILE_BUDGET = 24 * 2**20  # bytes of one tile of every candidate, twice, since copies overlap work
_STEPS = 8
STATS = 128  # lanes of the saved row statistics: score n at lane n, 1 / rms of n at lane 32 + n
RMS_LANE = 32
OUT_RMS_LANE = 64
MAX_CANDIDATES = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call.

    rows: tokens, B * T. size: D; width: D up to a multiple of 128, the rest being zeros. num:
    snapshots. num_live, use_prefix: which candidates count, None where only the device knows.
    tile: rows a grid step. cores: 2 where the tiles split evenly, else 1.
    """

    rows: int
    size: int
    num: int
    num_live: int | None
    use_prefix: bool | None
    tile: int
    eps: float

    @property
    def width(self) -> int:
        return pl.cdiv(self.size, LANES) * LANES

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.rows, self.tile)

    @property
    def is_ragged(self) -> bool:
        """Whether the last tile has rows past the end, which hold anything."""
        return self.rows % self.tile != 0

    @property
    def cores(self) -> int:
        return 2 if self.tiles % 2 == 0 else 1

    @property
    def steps(self) -> int:
        return self.tiles // self.cores

    @property
    def grid(self) -> tuple[int, int]:
        return self.cores, self.steps

    @property
    def groups(self) -> int:
        return self.tile // GROUP

    def columns(self) -> Iterator[slice]:
        """Slices of 128 lanes that cover the width."""
        return (slice(c, c + LANES) for c in range(0, self.width, LANES))


def plan_for(
    pass_name: str,
    rows: int,
    size: int,
    num: int,
    dtype: jnp.dtype,
    *,
    num_live: int | None,
    use_prefix: bool | None,
    eps: float,
    tile: int | None = None,
) -> Plan:
    """Tile: the given one, else the stored one of the shape, else as many rows as fit."""
    arrays = num + 2 if pass_name == 'forward' else 2 * num + 3
    fitting = _TILE_BUDGET // (2 * arrays * size * jnp.dtype(dtype).itemsize)
    # Short inputs still give each of two cores some steps, since the first copy overlaps nothing.
    fitting = min(fitting, rows // (2 * _STEPS), 256)
    default = max(GROUP, 1 << max(fitting, 1).bit_length() - 1)
    if tile is None:
        shape = {'N': num, 'D': size}
        name = jnp.dtype(dtype).name
        tile = tiles_for('attn_res', pass_name, shape, name, {'tile': default})['tile']
    return Plan(rows, size, num, num_live, use_prefix, tile, eps)


def counts(live_ref, n: int, plan: Plan) -> jax.Array | bool:
    """Whether snapshot n counts, or the running sum for n = num; a bool where it is known."""
    if n == plan.num:
        return live_ref[1] > 0 if plan.use_prefix is None else plan.use_prefix
    return n < (live_ref[0] if plan.num_live is None else plan.num_live)


def when(condition: jax.Array | bool, run: Callable[[], None]) -> None:
    """Runs `run` where the condition holds, without a branch where that is known."""
    if not isinstance(condition, bool):
        pl.when(condition)(run)
    elif condition:
        run()


def where_counts(live_ref, n: int, plan: Plan, value: jax.Array, other: float) -> jax.Array:
    on = counts(live_ref, n, plan)
    if isinstance(on, bool):
        return value if on else jnp.full(value.shape, other, value.dtype)
    return jnp.where(on, value, other)


def candidate_specs(plan: Plan) -> list[pl.BlockSpec]:
    """One spec a snapshot, each over the whole bank, and the running sum's.

    A candidate that does not count stays at its first tile, so nothing new is fetched for it.
    """

    def snapshot(n: int) -> pl.BlockSpec:
        def index(core, step, live):
            return n, jnp.where(counts(live, n, plan), core * plan.steps + step, 0), 0

        return pl.BlockSpec((None, plan.tile, plan.width), index)

    def prefix(core, step, live):
        return jnp.where(counts(live, plan.num, plan), core * plan.steps + step, 0), 0

    return [
        *(snapshot(n) for n in range(plan.num)),
        pl.BlockSpec((plan.tile, plan.width), prefix),
    ]


def row_spec(plan: Plan, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((plan.tile, width), lambda core, step, live: (core * plan.steps + step, 0))


def gain_spec(plan: Plan) -> pl.BlockSpec:
    """A [D] vector repeated over GROUP rows, so that no step has to spread it."""
    return pl.BlockSpec((GROUP, plan.width), lambda core, step, live: (0, 0))


def repeated(vector: jax.Array) -> jax.Array:
    return jnp.broadcast_to(vector.astype(jnp.float32), (GROUP, vector.shape[0]))


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT
    )


def group_rows(group: jax.Array) -> pl.Slice:
    return pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)
