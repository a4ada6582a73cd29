"""What layers report of a forward pass, for the rules of training that need more than a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Watch(NamedTuple):
    """What to report; static. bins: of the histograms of required biases, 0 for none."""

    bins: int = 0


class LayerStatistics(NamedTuple):
    """Of one layer, or of a stack of equal layers on leading axes; None where it has no such thing.

    Attributes:
      load: [E] int32, tokens that each routed expert has got; padding does not count.
      histogram: [E, bins] int32, `routing.required_bias_histogram`.
      max_logit: [H] float32, the largest attention logit of each head, scaled; -inf for no token.
    """

    load: jax.Array | None = None
    histogram: jax.Array | None = None
    max_logit: jax.Array | None = None


def _by_kind(tree: Any, of_counts: Callable[..., Any], of_logits: Callable[..., Any], *rest: Any):
    """of_counts or of_logits of equal leaves of trees of LayerStatistics."""

    def one(*parts: LayerStatistics) -> LayerStatistics:
        forms = of_counts, of_counts, of_logits
        return LayerStatistics(
            *(
                None if x[0] is None else f(*x)
                for f, x in zip(forms, zip(*parts, strict=True), strict=True)
            )
        )

    return jax.tree.map(one, tree, *rest, is_leaf=lambda x: isinstance(x, LayerStatistics))


def added(a: Any, b: Any) -> Any:
    """Trees of statistics of two parts of a batch as those of both."""
    return _by_kind(a, jnp.add, jnp.maximum, b)


def added_over(tree: Any, axes: tuple[str, ...]) -> Any:
    """Those of the parts of a batch that lie along mesh axes, inside a `shard_map`."""
    return _by_kind(
        tree,
        functools.partial(lax.psum, axis_name=axes),
        functools.partial(lax.pmax, axis_name=axes),
    )


def nothing_seen(shapes: Any) -> Any:
    """Statistics of no token."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    return _by_kind(shapes, zeros, lambda x: jnp.full(x.shape, -jnp.inf, x.dtype))
