"""Which server a conversation belongs to: consistent hashing, with who comes after whom."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class Rendezvous:
    """An order of the servers for each key: its primary, its secondary, and who comes then.

    Rendezvous hashing: each server draws a number for a key, and the largest is first. Without a
    server the order is the same with this one left out, and with another the same with that put in
    somewhere. So a server that comes or goes moves only the keys that become or were its own, and
    those of a lost one are shared out evenly among all others. Points on a ring would do the first
    and not the second: with 256 of each of 8 servers one heir had three times as many as another.
    """

    def __init__(self, servers: Sequence[str]):
        """Raises ValueError where there is no server, or one twice."""
        if not servers or len(set(servers)) != len(servers):
            raise ValueError(f'servers: got {list(servers)}, wanted at least one, each once')
        self._salts = {s: hashlib.sha256(s.encode()).digest() for s in servers}

    def order(self, key: str) -> list[str]:
        """All servers, the key's primary first."""
        data = key.encode('utf-8', 'replace')

        def drawn(server: str) -> bytes:
            return hashlib.blake2b(data, key=self._salts[server], digest_size=16).digest()

        return sorted(self._salts, key=drawn, reverse=True)
