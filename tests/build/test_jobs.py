from __future__ import annotations

import os
from pathlib import Path

import pytest

from kartifacts.build.jobs import RESERVE, Machine, jobs, machine, memory_now
from kartifacts.errors import ConfigError

GIB = 1 << 30
FREE = Machine(cores=20, available_memory=512 * GIB)


@pytest.mark.parametrize(
    ("limits", "n", "reason"),
    [
        (FREE, 20, "cores"),
        (Machine(20, available_memory=32 * GIB), 3, "memory: 32.0 GiB left, 8.0 GiB a job"),
        (Machine(20, available_memory=512 * GIB, cgroup_memory_left=32 * GIB), 3, "cgroup memory: 32.0 GiB left"),
        (Machine(20, available_memory=4 * GIB), 1, "memory"),  # less than the reserve: one, never none
        (Machine(20, cgroup_cpu=2.5), 2, "cgroup cpu"),
        (Machine(20, cgroup_cpu=0.5), 1, "cgroup cpu"),
        (Machine(20, pids_left=100), 11, "limit of processes"),
        (Machine(20, pids_left=3), 1, "limit of processes"),
        (Machine(20), 20, "cores"),  # nothing known about memory
    ],
)
def test_as_many_compilers_run_as_the_scarcest_resource_carries(limits: Machine, n: int, reason: str) -> None:
    found = jobs(limits, per_job=8 * GIB, reserve=8 * GIB)
    assert found.n == n
    assert reason in found.reason


def test_what_the_user_says_goes_before_what_is_measured() -> None:
    starved = Machine(20, available_memory=GIB)
    assert jobs(starved, per_job=8 * GIB, max_jobs="2") == (2, "MAX_JOBS")
    assert jobs(starved, per_job=8 * GIB, max_jobs="2", setting=5) == (5, "setting jobs")


@pytest.mark.parametrize("text", ["abc", "0", "-1", "2.5", "1e3", "99999", "٣", " "])
def test_a_max_jobs_that_is_no_number_is_an_error_and_not_ignored(text: str) -> None:
    with pytest.raises(ConfigError, match="MAX_JOBS="):
        jobs(FREE, per_job=GIB, max_jobs=text)


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  99 kB\nMemFree:  1 kB\nMemAvailable:   1048576 kB\n"


def test_limits_of_cgroups_v2_are_read_at_every_level(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/container"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file 5\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "1\n",
        f"{group}/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
        f"{group}/pids.max": "100\n",
        f"{group}/pids.current": "40\n",
    }
    found = machine(lay(tmp_path, files))
    assert found.available_memory == GIB
    assert found.cgroup_memory_left == 2 * GIB  # the page cache of the group can be had back
    assert memory_now(tmp_path, reserve=GIB // 4) == GIB - GIB // 4  # the least of all limits, which is the machine's
    lay(tmp_path, {"sys/fs/cgroup/pod/memory.current": f"{4 * GIB + GIB // 2}\n"})
    assert memory_now(tmp_path, reserve=GIB // 4) == GIB // 4  # another process of the container has taken the rest
    assert memory_now(tmp_path, reserve=GIB) == 0
    assert found.cgroup_cpu == 1.5
    assert found.pids_left == 60


def test_limits_of_cgroups_v1_are_read_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n3:pids:/docker/0123\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/pids/pids.max": "max",
    }
    found = machine(lay(tmp_path, files))
    assert (found.cgroup_memory_left, found.cgroup_cpu, found.pids_left) == (GIB, 3.0, None)


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path) == Machine(cores=len(os.sched_getaffinity(0)))
    assert memory_now(tmp_path) is None


def test_this_machine_can_be_read() -> None:
    found = machine()
    assert found.cores >= 1
    assert found.available_memory is None or found.available_memory > 0
    left = memory_now()
    assert left is None or 0 <= left <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") - RESERVE
