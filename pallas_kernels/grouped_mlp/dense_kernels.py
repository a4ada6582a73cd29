"""How the kernels for bfloat16 and float32 weights make up the experts and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.tiles import tiles_for
from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.experts import Experts, Kept
from pallas_kernels.grouped_mlp.row_kernel import NN, NT, Weight, over_rows, product
from pallas_kernels.grouped_mlp.visits import (
    Known,
    Table,
    visits_by_group,
    visits_by_tile,
)
from pallas_kernels.grouped_mlp.weight_gradient import weight_gradient


def default_rows(num_rows: int, num_groups: int, dtype: jnp.dtype, most_bfloat16: int = 512) -> int:
    """Near the average group: every group may cost up to a tile more than its rows."""
    average = max(1, num_rows // max(num_groups, 1))
    most, least = (most_bfloat16, 16) if dtype == jnp.bfloat16 else (256, 8)
    return max(least, min(most, 1 << (average - 1).bit_length()))


def plan(pass_name: str, num_rows: int, experts: Experts, dtype: jnp.dtype) -> dict[str, int]:
    """Rows and columns of the tiles: those stored for the shape, or near enough."""
    num_groups, inner, width = experts.w1.shape
    shape = {'M': num_rows, 'E': num_groups, 'L': width, 'F': inner}
    wide = 1 if dtype == jnp.bfloat16 else 2  # float32 takes twice the room
    # Forward, 256 rows cost 1% more cycles than 512 and take half as long to compile; backward, a
    # step of more rows adds less often to the gradient of the weights.
    most = 256 if pass_name == 'forward' else 512
    default = {
        'rows': default_rows(num_rows, num_groups, dtype, most),
        'inner': 768 // wide,
        'width': 896 // wide,
        'left': 1792 // wide,
        'right': 896 // wide,
    }
    return tiles_for('grouped_mlp', pass_name, shape, str(jnp.dtype(dtype)), default)


def column_tile(size: int, most: int) -> int:
    """Columns of a tile: an even number of equal tiles of whole lanes, for two cores, if it can be.

    Else all columns where they are few, or `most` with a short last tile.
    """
    for count in range(2, size // 128 + 1, 2):
        if size % (128 * count) == 0 and size // count <= most:
            return size // count
    return size if size <= most else max(128, most // 128 * 128)


def forward(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    activation: GatedActivation,
    *,
    keep: bool,
    interpret: bool,
    tiles: dict[str, int] | None = None,
    table: Table | None = None,
) -> tuple[jax.Array, Kept | None]:
    """[M, L] outputs, and what the backward pass needs if `keep`."""
    w1, w3, w2 = experts
    tiles = tiles or plan('forward', x.shape[0], experts, x.dtype)
    rows = tiles['rows']
    visits = visits_by_tile(group_sizes, x.shape[0], rows)
    shared = {
        'rows': rows,
        'table': table or Known(visits.tile.shape[0]),
        'interpret': interpret,
    }

    def gate_up(values, weights, _):
        a, b = (product(values[0], w[...], NT) for w in weights)
        hidden = activation(a, b)
        return (hidden, a, b) if keep else (hidden,)

    hidden, *kept = over_rows(
        gate_up,
        visits,
        whole=(x,),
        weights=(Weight(w1, 1), Weight(w3, 1)),
        num_products=2,
        num_columns=w1.shape[1],
        outs=[x.dtype] * (3 if keep else 1),
        columns=column_tile(w1.shape[1], tiles['inner']),
        name='grouped_gate_up',
        **shared,
    )
    (y,) = over_rows(
        lambda values, weights, _: (product(values[0], weights[0][...], NT),),
        visits,
        whole=(hidden,),
        weights=(Weight(w2, 1),),
        num_products=1,
        num_columns=w2.shape[1],
        outs=[x.dtype],
        columns=column_tile(w2.shape[1], tiles['width']),
        name='grouped_down',
        **shared,
    )
    return y, Kept(*kept) if keep else None


def backward(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    kept: Kept,
    dy: jax.Array,
    activation: GatedActivation,
    *,
    dtypes,
    interpret: bool,
    tiles: dict[str, int] | None = None,
    row_table: Table | None = None,
    group_table: Table | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """dx [M, L] and the gradients of w1, w3, w2 in `dtypes`."""
    w1, w3, w2 = experts
    num_groups = w1.shape[0]
    tiles = tiles or plan('backward', x.shape[0], experts, x.dtype)
    rows = tiles['rows']
    visits = visits_by_tile(group_sizes, x.shape[0], rows)
    shared = {
        'rows': rows,
        'table': row_table or Known(visits.tile.shape[0]),
        'interpret': interpret,
    }

    def hidden_gradient(values, weights, _):
        dy, a, b = values
        d_hidden = product(dy, weights[0][...], NN)
        hidden, vjp = jax.vjp(activation, a.astype(jnp.float32), b.astype(jnp.float32))
        return hidden, *vjp(d_hidden)

    hidden, da, db = over_rows(
        hidden_gradient,
        visits,
        whole=(dy,),
        parts=kept,
        weights=(Weight(w2, 2),),
        num_products=1,
        num_columns=w2.shape[2],
        outs=[x.dtype] * 3,
        columns=column_tile(w2.shape[2], tiles['inner']),
        name='grouped_hidden_gradient',
        **shared,
    )

    def input_gradient(values, weights, _):
        da, db = values
        return (product(da, weights[0][...], NN) + product(db, weights[1][...], NN),)

    (dx,) = over_rows(
        input_gradient,
        visits,
        whole=(da, db),
        weights=(Weight(w1, 2), Weight(w3, 2)),
        num_products=2,
        num_columns=w1.shape[2],
        outs=[x.dtype],
        columns=column_tile(w1.shape[2], tiles['width']),
        name='grouped_input_gradient',
        **shared,
    )
    visits = visits_by_group(group_sizes, x.shape[0], rows)
    pairs = ((da, x), (db, x), (dy, hidden))
    grads = [
        weight_gradient(
            left,
            right,
            visits,
            num_groups=num_groups,
            dtype=dtype,
            rows=rows,
            left_columns=column_tile(left.shape[1], tiles['left']),
            right_columns=column_tile(right.shape[1], tiles['right']),
            interpret=interpret,
            table=group_table or Known(visits.tile.shape[0]),
            name='grouped_weight_gradient',
        )
        for (left, right), dtype in zip(pairs, dtypes, strict=True)
    ]
    return dx, grads
