"""Muon: a matrix moves along its momentum made orthogonal; heads and experts are matrices too."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from k3jax.config import MuonConfig

EPSILON = 1e-7  # beside the norm that the momentum is divided by


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the rows of a matrix [..., rows, columns] are cut: `count` times blocks of `rows` each.

    One block of all rows is the whole matrix. Axes before the last two number matrices.
    """

    count: int
    rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.count * sum(self.rows)


def newton_schulz(x: jax.Array, config: MuonConfig) -> jax.Array:
    """Matrices with the same singular vectors and singular values near 1.

    X_0 = x / (|x|_F + 1e-7);  A = X X^T;  X <- a X + (b A + c A A) X, on the shorter side.

    Args:
      x: [..., n, m]; products in `config.dtype`, sums in float32.

    Returns:
      [..., n, m] float32 (float64 for float64 x).

    Source: Muon; Kimi K2 report, algorithm 1.
    """
    exact = jnp.promote_types(x.dtype, jnp.float32)
    dtype = exact if config.dtype == 'float32' else jnp.dtype(config.dtype)
    x = x.astype(exact)
    if wide := x.shape[-2] > x.shape[-1]:
        x = jnp.swapaxes(x, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + EPSILON)
    a, b, c = config.coefficients

    def product(p: jax.Array, q: jax.Array, of: str) -> jax.Array:
        args = (p.astype(dtype), q.astype(dtype))
        return jnp.einsum(of, *args, preferred_element_type=exact, precision=lax.Precision.HIGHEST)

    def improve(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gram = product(x, x, '...ik,...jk->...ij')
        polynomial = b * gram + c * product(gram, gram, '...ij,...jk->...ik')
        return a * x + product(polynomial, x, '...ij,...jk->...ik'), None

    x, _ = lax.scan(improve, x, length=config.steps)
    return jnp.swapaxes(x, -1, -2) if wide else x


def muon_direction(x: jax.Array, blocks: Blocks, config: MuonConfig) -> jax.Array:
    """The update of momentum x [..., rows, columns]: each block orthogonal, of RMS `update_rms`.

    An orthogonal n x m block has an RMS of 1 / sqrt(max(n, m)); it is scaled to the RMS that an
    update of Adam has. Zeros stay zeros.
    """
    assert x.shape[-2] == blocks.num_rows, (x.shape, blocks)
    lead, columns = x.shape[:-2], x.shape[-1]
    heads = x.reshape(*lead, blocks.count, -1, columns)
    starts = [sum(blocks.rows[:i]) for i in range(1, len(blocks.rows))]
    moved = [
        newton_schulz(part, config) * (config.update_rms * math.sqrt(max(part.shape[-2:])))
        for part in jnp.split(heads, starts, axis=-2)
    ]
    return jnp.concatenate(moved, axis=-2).reshape(x.shape)


class MuonState(NamedTuple):
    """momentum: float32, a tree like the parameters."""

    momentum: Any


def scale_by_muon(blocks: Any, config: MuonConfig) -> optax.GradientTransformation:
    """Gradients become Muon's directions; not yet scaled by the learning rate.

    M <- mu M + G; the direction is that of M, or of G + mu M with Nesterov's.

    Args:
      blocks: a tree of Blocks like the parameters.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        momentum = jax.tree.map(lambda m, g: config.momentum * m + g, state.momentum, grads)
        ahead = momentum
        if config.nesterov:
            ahead = jax.tree.map(lambda m, g: g + config.momentum * m, momentum, grads)
        moved = jax.tree.map(lambda x, cut: muon_direction(x, cut, config), ahead, blocks)
        return moved, MuonState(momentum)

    return optax.GradientTransformation(init, update)
