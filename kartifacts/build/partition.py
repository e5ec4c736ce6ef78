"""Shares work out by what it costs: longest first, each to whoever has least, the same on every machine."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kartifacts.model.spec import Spec


def partition(specs: Sequence[Spec], cost: Callable[[Spec], float], n: int) -> list[list[Spec]]:
    """Divide `specs` into `n` parts that take about as long; within each they keep their order.

    Args:
        cost: seconds that one takes, or is expected to.
    """
    costs = [cost(spec) for spec in specs]
    order = sorted(range(len(specs)), key=lambda i: (-costs[i], specs[i].uri, str(specs[i].arch)))
    loads = [(0.0, 0, part) for part in range(n)]  # seconds, how many, whose
    parts: list[list[int]] = [[] for _ in range(n)]
    for i in order:
        seconds, count, part = heapq.heappop(loads)
        parts[part].append(i)
        heapq.heappush(loads, (seconds + costs[i], count + 1, part))
    return [[specs[i] for i in sorted(part)] for part in parts]
