"""Ragged exchanges: any rows to any places, back again, and the TPU form by its documentation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.parallel.exchange import (
    Transfers,
    exchange,
    exchange_into,
    ragged_exchange_into,
)


def documented_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What the documentation of `lax.ragged_all_to_all` says, on backends that do not have it."""
    rank = lax.axis_index(axis_name)
    sent = (operand, input_offsets, send_sizes, output_offsets)
    operands, starts, sizes, targets = (lax.all_gather(x, axis_name) for x in sent)
    index = jnp.arange(output.shape[0])
    for sender in range(operands.shape[0]):
        step = index - targets[sender, rank]
        is_sent = (step >= 0) & (step < sizes[sender, rank]) & (step < recv_sizes[sender])
        rows = operands[sender].at[starts[sender, rank] + step].get(mode='clip')
        output = jnp.where(is_sent[:, None], rows, output)
    return output


def test_exchange_moves_the_named_rows_and_its_gradient_brings_them_back(monkeypatch):
    """Rows in any place of either array; others are left as they are. The TPU form too, by the
    documented meaning of its collective."""
    monkeypatch.setattr(lax, 'ragged_all_to_all', documented_ragged_all_to_all)
    ranks, length = 4, 9
    mesh = jax.make_mesh((2, ranks), ('data', 'expert'), axis_types=(AxisType.Auto,) * 2)
    size = np.array([[1, 2, 0, 3], [0, 0, 4, 1], [2, 0, 1, 0], [0, 5, 0, 2]], np.int32)
    source = np.cumsum(size, axis=1) - size + np.arange(ranks)[:, None] % 2
    target = np.cumsum(size, axis=0) - size + np.arange(ranks) % 2
    transfers = Transfers(*(jnp.asarray(t, jnp.int32) for t in (size, source, target)))
    rows = np.arange(2 * ranks * length, dtype=np.float32).reshape(ranks, length, 2)
    want = np.zeros((ranks, length, 2), np.float32)
    is_sent = np.zeros((ranks, length, 1), bool)
    for s in range(ranks):
        for r in range(ranks):
            here, there = source[s, r], target[s, r]
            want[r, there : there + size[s, r]] = rows[s, here : here + size[s, r]]
            is_sent[s, here : here + size[s, r]] = True

    def local(rows):
        out, back = jax.vjp(lambda x: exchange(x, transfers, length, 'expert'), rows)
        kept = exchange_into(jnp.full_like(rows, -1), rows, transfers, 'expert')
        on_tpu = ragged_exchange_into(jnp.full_like(rows, -1), rows, transfers, 'expert')
        return out, back(out)[0], kept, on_tpu

    specs = {'in_specs': P('expert'), 'out_specs': P('expert'), 'check_vma': False}
    program = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    out, back, kept, on_tpu = (x.reshape(rows.shape) for x in program(rows.reshape(-1, 2)))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(back, np.where(is_sent, rows, 0))
    np.testing.assert_array_equal(np.where(want == 0, 0, kept), want)
    assert (np.asarray(kept)[1, 0] == -1).all()
    np.testing.assert_array_equal(on_tpu, kept)
