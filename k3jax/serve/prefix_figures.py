"""What a prefix cache tells of itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class PrefixFigures:
    """Of a prefix cache since it was made, and the bytes that it holds now.

    Attributes:
      hits, misses: prompts. hit_tokens: of prompts, that were not read again.
      evictions: beginnings that the device gave up. offloads: those that the host took.
      fetches: those that came back. host_evictions: those that the host gave up.
      corrupt_blocks: found in the host's memory.
      refusals: beginnings that were not held, since the device has no room for so much.
    """

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    offloads: int = 0
    fetches: int = 0
    host_evictions: int = 0
    corrupt_blocks: int = 0
    refusals: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
