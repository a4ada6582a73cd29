"""How much an engine takes on, and in what sizes."""

from __future__ import annotations

import dataclasses

from k3jax.serve.prefix_cache import HASH_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much an engine takes on.

    Attributes:
      num_slots: requests that are decoded together.
      max_length: tokens of a prompt and its answer.
      max_waiting: requests that wait for a slot; more are refused.
      pieces: sizes in which prompts are read, ascending; each is compiled.
      lane_sizes: lengths of the caches that prompts are read in, ascending; each is compiled with
        each piece. The longest is max_length whatever is said here.
      prefix_cache_bytes: for beginnings of prompts that need not be read again; 0: none.
      prefix_host_bytes: in the host's memory, for those that the device has no room for; 0: none.
        On their way there at most four pages or states are on the device once more.
      prefix_hash_tokens: of which those are multiples.
    """

    num_slots: int = 16
    max_length: int = 4096
    max_waiting: int = 256
    pieces: tuple[int, ...] = (32, 512)
    lane_sizes: tuple[int, ...] = (1024, 8192, 65536)
    prefix_cache_bytes: int = 0
    prefix_host_bytes: int = 0
    prefix_hash_tokens: int = HASH_TOKENS

    def __post_init__(self) -> None:
        for name in ('num_slots', 'max_length', 'max_waiting', 'prefix_hash_tokens'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name}: got {getattr(self, name)}, wanted 1 or more')
        for name in ('prefix_cache_bytes', 'prefix_host_bytes'):
            if getattr(self, name) < 0:
                raise ValueError(f'{name}: got {getattr(self, name)}, wanted 0 (none) or more')
        if self.prefix_host_bytes and not self.prefix_cache_bytes:
            raise ValueError(
                f'prefix_host_bytes: got {self.prefix_host_bytes} without prefix_cache_bytes; what '
                'is on the host comes from there and goes back there'
            )
        for name in ('pieces', 'lane_sizes'):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f'{name}: got {sizes}, wanted sizes above 0, ascending')

    def lane_size(self, length: int) -> int:
        """Of the smallest cache that holds a prompt."""
        fitting = (size for size in self.lane_sizes if length <= size < self.max_length)
        return next(fitting, self.max_length)

    def piece(self, length: int) -> int:
        """The smallest that holds `length` tokens, or the largest."""
        return next((size for size in self.pieces if length <= size), self.pieces[-1])
