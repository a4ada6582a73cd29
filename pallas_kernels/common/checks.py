"""What every kernel refuses by name: dtypes of the wrong kind, axes without anything on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def check_floating(name: str, **arrays: jax.Array | None) -> None:
    """Raises ValueError for an array that holds no floating-point numbers."""
    for field, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f'{name}: {field} is {array.dtype}, wanted a floating-point dtype')


def check_integer(name: str, **arrays: jax.Array | None) -> None:
    """Raises ValueError for an array that holds no integers."""
    for field, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f'{name}: {field} is {array.dtype}, wanted integers')


def check_not_empty(name: str, **arrays: jax.Array) -> None:
    """Raises ValueError for an array with an axis of length 0."""
    for field, array in arrays.items():
        if 0 in array.shape:
            raise ValueError(f'{name}: {field} has shape {array.shape}, wanted no empty axis')
