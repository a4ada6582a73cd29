"""How the convolution is cut for the TPU: tiles of tokens and channels, rows shifted in place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiles import tiles_for

F32 = jnp.float32
LANES, SUBLANES = 128, 8
GROUP = 16  # rows read at a time: one bfloat16 tile of sublanes
TAPS = 4  # the sum over taps is arranged for this number
VMEM_LIMIT = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call.

    batch, length, width: B, T, P. rows, lanes: of a tile. step: columns of 128 lanes worked on
    together.
    packed: whether rows know how far back their document reaches.
    """

    batch: int
    length: int
    width: int
    rows: int
    lanes: int
    step: int
    packed: bool

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.length, self.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.width // self.lanes, self.tiles

    @property
    def padded(self) -> int:
        return self.tiles * self.rows

    @property
    def unroll(self) -> int:
        """Groups whose latencies overlap, where there are enough of them for it to matter."""
        return 4 if self.rows >= 16 * GROUP else 1

    @property
    def steps(self) -> list[list[slice]]:
        """Columns of 128 lanes, those of a list worked on together."""
        columns = [slice(c, c + LANES) for c in range(0, self.lanes, LANES)]
        return [columns[i : i + self.step] for i in range(0, len(columns), self.step)]


def plan_for(
    pass_name: str,
    shape: tuple[int, int, int],
    dtype: jnp.dtype,
    *,
    packed: bool,
    tiles: dict[str, int] | None = None,
) -> Plan:
    """Tiles: those given, else the stored ones of the shape, else the default ones."""
    batch, length, width = shape
    if tiles is None:
        default = {'rows': 512, 'lanes': 2048, 'step': 4}
        tiles = tiles_for(
            'short_conv', pass_name, {'T': length, 'P': width}, jnp.dtype(dtype).name, default
        )
    # Two cores share the programs of all rows and channels; a row's tokens are a sequence.
    blocks = width // LANES
    fitting = [n for n in range(1, blocks + 1) if blocks % n == 0 and n * LANES <= tiles['lanes']]
    even = [n for n in fitting if batch * (blocks // n) % 2 == 0]
    lanes = LANES * max(even or fitting)
    multiple = LANES if packed else GROUP
    rows = min(tiles['rows'], pl.cdiv(length, multiple) * multiple)
    return Plan(batch, length, width, rows, lanes, tiles['step'], packed)


def load(ref, start: jax.Array | int, lanes: slice) -> tuple[jax.Array, jax.Array]:
    """GROUP rows of a tile from `start`, in float32, as two registers high."""
    if not isinstance(start, int):
        start = pl.multiple_of(start, GROUP)
    rows = ref[pl.ds(start, GROUP), lanes].astype(F32)
    return rows[:SUBLANES], rows[SUBLANES:]


def down(value: jax.Array, rolled_before: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    """Row r of the first result is row r - shift; the second one is `value` rolled by shift.

    rolled_before: the eight rows before, rolled by shift.
    """
    rolled = roll(value, shift)
    row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
    return jnp.where(row < shift, rolled_before, rolled), rolled


def up(value: jax.Array, rolled_after: jax.Array, shift: int) -> tuple[jax.Array, jax.Array]:
    """Row r of the first result is row r + shift; the second one is `value` rolled by -shift."""
    rolled = roll(value, -shift)
    row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
    return jnp.where(row < SUBLANES - shift, rolled, rolled_after), rolled


def roll(value: jax.Array, shift: int) -> jax.Array:
    return pltpu.roll(value, shift % SUBLANES, 0)


def spread_reach(reach_ref, spread_ref, plan: Plan) -> None:
    """spread_ref [rows, 128]: each row's number on every lane, from numbers along the lanes."""
    for start in range(0, plan.rows, LANES):
        span = slice(start, start + LANES)
        numbers = jnp.broadcast_to(reach_ref[:, span], (LANES, LANES))
        spread_ref[span, :] = numbers.T


def reach_masks(spread_ref, start, half: int) -> tuple[jax.Array | None, jax.Array | None]:
    """Of eight rows [8, 128], whether the row one, and the row two before is of their document."""
    if spread_ref is None:
        return None, None
    reach = spread_ref[pl.ds(start + half * SUBLANES, SUBLANES), :]
    return reach >= 1, reach >= 2


def masked(value: jax.Array, mask: jax.Array | None) -> jax.Array:
    return value if mask is None else jnp.where(mask, value, 0.0)


def compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=VMEM_LIMIT
    )
