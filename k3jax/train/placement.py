"""Which rows of a batch a process reads, and how they come to lie on the mesh."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import DataConfig
from k3jax.train.media import with_media

Batch = dict[str, Any]


class Placement:
    """Which streams of the data this process reads, and the place of their rows.

    Chips of one host need not be neighbours along the mesh, so a process may hold any rows. It
    reads every stream that has one of them; with one row a stream it reads no others.
    """

    def __init__(
        self,
        config: DataConfig,
        mesh: Mesh,
        spec: PartitionSpec,
        process_index: int | None = None,
    ):
        """process_index: whose rows; None for this process's."""
        process = jax.process_index() if process_index is None else process_index
        self._sharding = NamedSharding(mesh, spec)
        self._num_streams = config.num_streams
        streams: set[int] = set()
        for size in config.batch_sizes:
            indices = self._sharding.devices_indices_map((size, config.sequence_length)).items()
            mine = [index[0] for device, index in indices if device.process_index == process]
            rows = np.unique(np.concatenate([np.arange(size)[at] for at in mine]))
            streams |= {int(n) for n in rows // (size // config.num_streams)}
        self.streams = tuple(sorted(streams))

    def place(self, batch: Batch) -> Batch:
        """Rows of this process's streams, in their order, as arrays over the whole mesh."""
        size = len(batch['tokens']) // len(self.streams)
        here = np.concatenate([np.arange(n * size, (n + 1) * size) for n in self.streams])
        where = np.full(size * self._num_streams, -1)
        where[here] = np.arange(len(here))
        return jax.tree.map(lambda array: self._placed(array, where), with_media(batch))

    def place_whole(self, batch: Batch) -> Batch:
        """A batch of which every process has all rows, as arrays over the mesh."""
        where = np.arange(len(batch['tokens']))
        return jax.tree.map(lambda array: self._placed(array, where), with_media(batch))

    def _placed(self, array: np.ndarray, where: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            rows, *others = index
            return array[where[rows]][:, *others]

        shape = len(where), *array.shape[1:]
        return jax.make_array_from_callback(shape, self._sharding, part)


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
