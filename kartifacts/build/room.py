"""Keeps the compilers of all builders that share a workspace on this machine within its memory.

Each builder writes into its staging directory how much each of its workers may take.  What the compiler of another one
may still take will be missing soon, though the system calls it free.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from kartifacts.build import workspace
from kartifacts.files import locking
from kartifacts.files.reading import read_regular

FILE = "memory.json"  # session of a worker → bytes
_MOST = 1 << 20  # bytes of such a file
_FRESH = 0.5  # seconds for which a look at the machine is good; what we give out ourselves is known
_PATIENCE = 5.0  # seconds; without the lock, two who look at once may both take the same bytes


class Room:
    """The memory that compilers of this builder may take beside what its neighbours' may.

    Args:
        place: the workspace.
        staging: our own directory in it.
        left: bytes that the machine has for one more compiler now; None if nothing limits it.
        limited: keep to it; else others only learn of what is taken.
    """

    def __init__(self, place: Path, staging: Path, left: Callable[[], int | None], *, limited: bool) -> None:
        self._staging = staging
        self._lock = workspace.locks(place) / "memory"
        self._left = left
        self._at_first = left() if limited else None
        self._looked = 0.0
        self._free = self._at_first
        self._given: dict[int, int] = {}

    def take(self, worker: int, wanted: int, *, anyway: bool = False) -> bool:
        """Whether the compiler of a worker may take `wanted` bytes; the only one of all builders always may.

        Args:
            worker: its process, which leads a session.
            anyway: it may; others learn of it.
        """
        neighbours = workspace.neighbours(self._staging)
        if not neighbours or anyway:
            return self._taken(worker, wanted, {}, anyway=anyway)
        with locking.hold(self._lock, patience=_PATIENCE):
            return self._taken(worker, wanted, given(neighbours))

    def give_back(self, worker: int) -> None:
        del self._given[worker]
        self._say()

    def _taken(self, worker: int, wanted: int, others: Mapping[int, int], *, anyway: bool = False) -> bool:
        limited = self._at_first is not None and not anyway and (self._given or others)
        if limited and not self._fits(wanted, others):
            return False
        self._given[worker] = wanted
        self._say()
        return True

    def _fits(self, wanted: int, others: Mapping[int, int]) -> bool:
        assert self._at_first is not None
        if self._given and sum(self._given.values()) + wanted > self._at_first:
            return False
        if time.monotonic() >= self._looked + _FRESH:
            self._free, self._looked = self._left(), time.monotonic()
        return self._free is None or wanted + to_come(others) <= self._free

    def _say(self) -> None:
        temporary = self._staging / f".{FILE}"
        with suppress(OSError):  # then others see what is taken by now, as they do of any program
            temporary.write_bytes(msgspec.json.encode(self._given))
            os.replace(temporary, self._staging / FILE)


def given(neighbours: Iterable[Path]) -> dict[int, int]:
    """What the workers of other builders may take, by session; of what cannot be read, nothing is known."""
    found: dict[int, int] = {}
    for staging in neighbours:
        with suppress(OSError, ValueError):  # of which msgspec's are
            found |= msgspec.json.decode(read_regular(staging / FILE, _MOST), type=dict[int, int])
    return found


def to_come(workers: Mapping[int, int], proc: Path = Path("/proc")) -> int:
    """Bytes that workers and what they have started may take beyond what they take now."""
    taken = Counter[int]()
    page = os.sysconf("SC_PAGESIZE")
    for process in proc.glob("[0-9]*/stat") if workers else ():
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = process.read_bytes().rpartition(b")")[2].split()
            taken[int(fields[3])] += int(fields[21]) * page
    return sum(max(0, most - taken[worker]) for worker, most in workers.items())
