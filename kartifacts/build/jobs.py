"""How many compilers run at once: from cores, memory and the limits of the container, or from what the user says."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from kartifacts.errors import ConfigError

RESERVE = 1 << 30  # bytes left to everything else
PIDS_PER_JOB = 8  # a worker with its thread, the driver, and what the driver starts
_PIDS_RESERVED = 8
_GIB = 1 << 30


class Jobs(NamedTuple):
    n: int
    reason: str


@dataclass(frozen=True)
class Machine:
    """What there is to use; None where nothing limits it, or nothing can be found out."""

    cores: int
    cgroup_cpu: float | None = None  # CPUs' worth of time
    available_memory: int | None = None  # bytes
    cgroup_memory_left: int | None = None  # bytes
    pids_left: int | None = None


def jobs(
    machine: Machine, *, per_job: int, reserve: int = RESERVE, max_jobs: str = "", setting: int | None = None
) -> Jobs:
    """The number of compilers and what set it.

    Args:
        per_job: bytes that the hungriest one needs.
        reserve: bytes of memory left to everything else.
        max_jobs: MAX_JOBS of the environment.
        setting: our own setting, which goes first.
    """
    check_max_jobs(max_jobs)
    if setting is not None:
        return Jobs(setting, "setting jobs")
    if max_jobs:
        return Jobs(int(max_jobs), "MAX_JOBS")
    limits = [Jobs(machine.cores, "cores")]
    if machine.cgroup_cpu is not None:
        limits.append(Jobs(int(machine.cgroup_cpu), "cgroup cpu"))
    memories = ((machine.available_memory, "memory"), (machine.cgroup_memory_left, "cgroup memory"))
    for memory, name in memories:
        if memory is not None:
            reason = f"{name}: {memory / _GIB:.1f} GiB left, {per_job / _GIB:.1f} GiB a job"
            limits.append(Jobs((memory - reserve) // per_job, reason))
    if machine.pids_left is not None:
        limits.append(Jobs((machine.pids_left - _PIDS_RESERVED) // PIDS_PER_JOB, "limit of processes"))
    lowest = min(limits, key=lambda limit: limit.n)
    return Jobs(max(1, lowest.n), lowest.reason)


def check_max_jobs(text: str) -> None:
    """Raise `ConfigError` unless MAX_JOBS, if it says anything, is a number of jobs."""
    if text and not re.fullmatch(r"[1-9][0-9]{0,3}", text.strip()):
        raise ConfigError(f"MAX_JOBS={text!r}: expected a whole number from 1 to 9999")


# -- reading the machine -----------------------------------------------------------------------------------------------


def machine(root: Path = Path("/")) -> Machine:
    """This machine, or the one whose /proc and /sys lie under `root`."""
    groups = list(_cgroups(root))
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cgroup_cpu=_least(_cpu_quota(place) for place in groups),
        available_memory=_available(root),
        cgroup_memory_left=_least(_memory_left(place) for place in groups),
        pids_left=_least([*(_pids_left(place) for place in groups), _user_processes_left(root)]),
    )


def memory_now(root: Path = Path("/"), reserve: int = RESERVE) -> int | None:
    """Bytes that compilers may take now; None if nothing limits them."""
    left = _least((_available(root), *map(_memory_left, _cgroups(root))))
    return None if left is None else max(0, left - reserve)


_N = TypeVar("_N", int, float)


def _least(values: Iterable[_N | None]) -> _N | None:
    return min((value for value in values if value is not None), default=None)


def _text(path: Path) -> str:
    """The content of a file of the kernel; empty where it has none, as in another version or another container."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _available(root: Path) -> int | None:
    return _field(_text(root / "proc/meminfo"), "MemAvailable:", 1 << 10)


def _field(text: str, name: str, unit: int = 1) -> int | None:
    match = re.search(rf"^{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) * unit if match else None


def _number(path: Path) -> int | None:
    """None where there is no limit: no such file, or ``max``, or -1."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _cgroups(root: Path) -> Iterator[Path]:
    """Every directory, of either version of cgroups, whose limits may hold for this process."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part]
        # In a container the path may be the host's and not be visible; the top is then the container's own group.
        for depth in range(len(parts), -1, -1):
            yield (mount / controllers if controllers else mount).joinpath(*parts[:depth])


def _cpu_quota(place: Path) -> float | None:
    quota, _, period = _text(place / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    old_quota, old_period = _number(place / "cpu.cfs_quota_us"), _number(place / "cpu.cfs_period_us")
    return old_quota / old_period if old_quota and old_period else None


def _memory_left(place: Path) -> int | None:
    """What the group may still take; files in the page cache count as taken but are given up when asked for."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _number(place / limit), _number(place / usage)
        if most is not None and used is not None:
            return most - used + (_field(_text(place / "memory.stat"), cache) or 0)
    return None


def _pids_left(place: Path) -> int | None:
    most, used = _number(place / "pids.max"), _number(place / "pids.current")
    return None if most is None or used is None else most - used


def _user_processes_left(root: Path) -> int | None:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:  # root is not held to it
        return None
    mine = sum(1 for path in (root / "proc").glob("[0-9]*") if _owner(path) == os.geteuid())
    return most - mine


def _owner(path: Path) -> int | None:
    """None for a process that has ended meanwhile."""
    try:
        return path.stat().st_uid
    except OSError:
        return None
