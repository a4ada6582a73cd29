"""How the training kernels cut up their work: heads a program, lanes a head, blocks of tokens.

Scores are held transposed, keys by queries: what is kept a query (maximum, denominator) is then a
row along the lanes, and a sum over keys adds registers instead of lanes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
BLOCK = 512  # tokens of queries and of keys in one step
LOWEST = -1e30  # a score that is not seen; finite, so that rows without a key stay finite
NO_KEY = -1  # run of a key that is padding
NO_QUERY = -2  # run of a query that is padding; matches nothing, padding neither
VMEM_LIMIT = 60 * 2**20  # bytes
LOG2_E = 1.4426950408889634  # exp(x) = 2 ** (LOG2_E x)
PARTS = 2  # of a block's queries
MOST_HEADS = 4  # in one program, to fill whole registers of 128 lanes


class How(NamedTuple):
    """How queries meet keys. causal: as one row, each key seen from its own place on; else every
    key by every query. out_dtype: of o and of gradients; None for that of the inputs."""

    causal: bool = True
    out_dtype: jnp.dtype | None = None


ONE_ROW = How()


class Window(NamedTuple):
    """Whole registers that hold a head's lanes: [start, stop), the head's own from `offset` on."""

    start: int
    stop: int
    offset: int

    @property
    def lanes(self) -> slice:
        return slice(self.start, self.stop)


class Plan(NamedTuple):
    """What is known while tracing.

    Attributes:
      heads: a program; their q and k lie side by side on whole registers.
      key_width: lanes a head of q and k takes. value_width: of v and o, a multiple of 128.
      block: tokens of queries and of keys in one step, a multiple of 128.
      num_blocks: of a row.
      packed: run numbers are given.
      skips: with `packed`, key blocks before a query block's first document are left out.
      dtype: of q, k, v and do.
      scale: of q . k.
      causal: keys after a query are not seen; else all are, and `skips` is not for it.
      out_dtype: of o, dq, dk and dv.
    """

    heads: int
    key_width: int
    value_width: int
    block: int
    num_blocks: int
    packed: bool
    skips: bool
    dtype: jnp.dtype
    scale: float
    causal: bool
    out_dtype: jnp.dtype

    @property
    def windows(self) -> list[Window]:
        out = []
        for head in range(self.heads):
            start = head * self.key_width // LANES * LANES
            stop = up_to((head + 1) * self.key_width, LANES)
            out.append(Window(start, stop, head * self.key_width - start))
        return out

    def values(self, head: int) -> slice:
        """Lanes of v, o and do."""
        return slice(head * self.value_width, (head + 1) * self.value_width)

    @property
    def precision(self) -> lax.Precision:
        """One pass over bfloat16 operands; float32 ones are not rounded."""
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        """Product over axis contract[0] of a and contract[1] of b, in float32."""
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Part(NamedTuple):
    """Some queries of a block, and how many keys, from the block's first on, they may see."""

    queries: slice
    keys: int


def parts(plan: Plan, on_diagonal: bool) -> list[Part]:
    """A block's work as independent pieces; on the diagonal, the first queries see fewer keys."""
    size = plan.block // PARTS if plan.block % (PARTS * LANES) == 0 else plan.block
    return [
        Part(slice(start, start + size), start + size if on_diagonal else plan.block)
        for start in range(0, plan.block, size)
    ]


def heads_a_program(heads: int, key_width: int) -> int | None:
    """Fewest heads that fill whole registers with a width; None where the width must be padded."""
    together = LANES // math.gcd(key_width, LANES)
    # Rows of a turned block are cut between heads: 16 sublanes of two bfloat16 each.
    if key_width % 32 == 0 and together <= MOST_HEADS and heads % together == 0:
        return together
    return None


def own_lanes(q: jax.Array, window: Window, width: int) -> jax.Array:
    """q [block, stop - start] with the lanes of other heads set to 0.

    One zero factor is enough: the other one is used with its neighbour's lanes, and never cut
    inside a register.
    """
    if window.offset == 0 and window.stop - window.start == width:
        return q
    lane = lax.broadcasted_iota(jnp.int32, q.shape, 1)
    own = (lane >= window.offset) & (lane < window.offset + width)
    return jnp.where(own, q.astype(jnp.float32), 0.0).astype(q.dtype)


def column_of(row: jax.Array) -> jax.Array:
    """[1, n] int32 as [n, 128], the same in every lane."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def seen(plan: Plan, on_diagonal: bool, query_run, key_run) -> jax.Array | None:
    """[block, block] bool, keys by queries; None where every pair is seen."""
    shape = plan.block, plan.block
    masks = []
    if on_diagonal:
        key, query = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        masks.append(key <= query)
    if plan.packed:
        column = column_of(key_run)
        column = jnp.concatenate([column] * (plan.block // LANES), axis=1)
        masks.append(column == query_run)
    if not masks:
        return None
    return masks[0] if len(masks) == 1 else masks[0] & masks[1]
