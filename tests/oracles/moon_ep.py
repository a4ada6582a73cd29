"""MoonEP's plan and tables, one loop at a time, as the specification words them."""

from __future__ import annotations

import numpy as np


def plan(counts: np.ndarray, num_entries: int) -> np.ndarray:
    """[E, R] entries of each expert on each rank; counts: [R, E] choices of each rank."""
    num_ranks, num_experts = counts.shape
    own = num_experts // num_ranks
    total = counts.sum(axis=0).astype(np.int64)
    home = [e // own for e in range(num_experts)]
    amount = np.zeros((num_experts, num_ranks), np.int64)
    for e in range(num_experts):
        amount[e, home[e]] = total[e]
    surplus = [int(total[h * own : (h + 1) * own].sum()) - num_entries for h in range(num_ranks)]
    quota = np.zeros((num_ranks, num_ranks), np.int64)
    while max(surplus) > 0:
        giver, taker = surplus.index(max(surplus)), surplus.index(min(surplus))
        quota[giver, taker] = -surplus[taker]
        surplus[giver] += surplus[taker]
        surplus[taker] = 0
    for h in range(num_ranks):
        left = [int(t) for t in total[h * own : (h + 1) * own]]
        open_ = [int(q) for q in quota[h]]
        while max(open_) > 0:
            taker, e = open_.index(max(open_)), left.index(max(left))
            step = min(left[e], open_[taker])
            amount[h * own + e, taker] += step
            amount[h * own + e, h] -= step
            left[e] -= step
            open_[taker] -= step
    return amount


def copies(amount: np.ndarray) -> list[list[int]]:
    """Of each rank, the experts from elsewhere that it computes, ascending, filled up with -1."""
    num_experts, num_ranks = amount.shape
    own = num_experts // num_ranks
    found = []
    for d in range(num_ranks):
        away = [e for e in range(num_experts) if e // own != d and amount[e, d] > 0]
        found.append(away + [-1] * (own - len(away)))
    return found


def rows_per_rank(num_entries: int, own: int, padding: int) -> int:
    most = num_entries + 2 * own * (padding - 1)
    return (most + padding - 1) // padding * padding


def layout(amount: np.ndarray, padding: int) -> tuple[np.ndarray, dict[tuple[int, int], int], list]:
    """Ends of the groups [R, 2 E / R], first row of (rank, expert), padding (first, number)."""
    num_experts, num_ranks = amount.shape
    own = num_experts // num_ranks
    ends = np.zeros((num_ranks, 2 * own), np.int64)
    first: dict[tuple[int, int], int] = {}
    fill = []
    for d, away in enumerate(copies(amount)):
        at = 0
        fill.append([])
        for g, e in enumerate([*range(d * own, (d + 1) * own), *away]):
            size = int(amount[e, d]) if e >= 0 else 0
            first[d, e] = at
            pad = -size % padding
            fill[-1].append((at + size, pad))
            at += size + pad
            ends[d, g] = at
    return ends, first, fill


def destinations(chosen: np.ndarray, amount: np.ndarray, padding: int, dedup: bool) -> np.ndarray:
    """[R, S, K] rows of every entry; chosen: [R, S, K]."""
    num_ranks, num_tokens, num_chosen = chosen.shape
    own = amount.shape[0] // num_ranks
    per_rank = rows_per_rank(num_tokens * num_chosen, own, padding)
    _, first, _ = layout(amount, padding)
    seen = np.zeros(amount.shape[0], np.int64)
    out = np.zeros(chosen.shape, np.int64)
    for r in range(num_ranks):
        for s in range(num_tokens):
            visited = set()
            for j in range(num_chosen):
                e = int(chosen[r, s, j])
                place = int(seen[e])
                seen[e] += 1
                d = 0
                while place >= amount[e, d]:
                    place -= int(amount[e, d])
                    d += 1
                row = d * per_rank + first[d, e] + place
                out[r, s, j] = -row - 1 if dedup and d in visited else row
                visited.add(d)
    return out
