"""Which rows of a batch a process reads, and how they come to lie on the mesh."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError, DataConfig

Batch = dict[str, Any]


class Placement:
    """Rows of this process and their place; rows: a slice of the batch; streams: of the data."""

    def __init__(self, config: DataConfig, mesh: Mesh, spec: PartitionSpec):
        """Raises ConfigError where the data's streams cannot be shared out to the processes."""
        self._sharding = NamedSharding(mesh, spec)
        self._shape = config.batch_size, config.sequence_length
        mine = self._sharding.addressable_devices_indices_map(self._shape).values()
        first = min(index[0].start or 0 for index in mine)
        end = max(config.batch_size if i[0].stop is None else i[0].stop for i in mine)
        self.rows = slice(first, end)
        size = config.batch_size // config.num_streams
        if first % size or end % size:
            raise ConfigError(
                f'data.num_streams: got {config.num_streams}, wanted a multiple of the '
                f'{config.batch_size // (end - first)} groups of processes that read different rows'
            )
        self.streams = range(first // size, end // size)

    def place(self, batch: Batch) -> Batch:
        """This process's rows as part of arrays over the whole mesh."""
        return {name: self._placed(array, self.rows.start) for name, array in batch.items()}

    def place_whole(self, batch: Batch) -> Batch:
        """A batch of which every process has all rows, as arrays over the mesh."""
        return {name: self._placed(array, 0) for name, array in batch.items()}

    def _placed(self, array: np.ndarray, first: int) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows, tokens = index
            start = (rows.start or 0) - first
            stop = (self._shape[0] if rows.stop is None else rows.stop) - first
            return array[start:stop, tokens]

        return jax.make_array_from_callback(self._shape, self._sharding, part)


def joined_positions(state: dict[str, Any]) -> dict[str, Any]:
    """A data state with the positions of all processes' streams; to be called by all of them."""
    if jax.process_count() == 1:
        return state
    own = np.frombuffer(json.dumps(state['positions']).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = own
    texts = multihost_utils.process_allgather(padded)
    positions = {}
    for text, size in zip(texts, sizes, strict=True):
        positions |= json.loads(text[:size].tobytes())
    return state | {'positions': positions}
