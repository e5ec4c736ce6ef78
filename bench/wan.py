"""A line with delay, rate and loss, for the time of a `with`: compiles and runs wan.c, or says what is missing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

RTT_MS, RATE_MBIT, QUEUE_BYTES, SEED = 20, 1000, 8_000_000, 20260000
SERVER, CLIENT = "198.18.0.1", "198.18.0.2"
TUN = Path("/dev/net/tun")


class Unavailable(Exception):
    """What this machine lacks."""


class Line(NamedTuple):
    server: list[str]  # what to put before a command that is to run at that end
    client: list[str]
    process: subprocess.Popen[str]

    def cpu(self) -> float:
        """CPU seconds that the line has taken, which a machine of few cores takes from those who are measured."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def line(scratch: Path, *, loss: float, congestion: str) -> Iterator[Line]:
    """Two ends; both vanish with the process between them, whatever becomes of this one."""
    _check()
    program = scratch / "wan"
    compiled = subprocess.run(["cc", "-O2", "-o", str(program), str(Path(__file__).with_name("wan.c"))], check=False)
    if compiled.returncode:
        raise Unavailable("wan.c does not compile here")
    asked = [RTT_MS * 500, RATE_MBIT, loss, SEED, QUEUE_BYTES]
    process = subprocess.Popen([str(program), *map(str, asked)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        if len(names) != 2:
            raise Unavailable("the two network namespaces could not be made")
        ends = [["nsenter", f"--net={name}"] for name in names]
        for end, address in zip(ends, (SERVER, CLIENT), strict=True):
            # Of the route, as a namespace may not choose every kind for all that is in it.
            route = ["198.18.0.0/24", "dev", "wan", "proto", "kernel", "scope", "link", "src", address]
            chosen = subprocess.run([*end, "ip", "route", "change", *route, "congctl", congestion], check=False)
            if chosen.returncode:
                raise Unavailable(f"this kernel has no congestion control {congestion!r}")
        yield Line(ends[0], ends[1], process)
    finally:
        process.terminate()
        process.wait()


def _check() -> None:
    if os.geteuid() != 0:
        raise Unavailable("only root may make network namespaces")
    for program in ("cc", "nsenter", "ip"):
        if shutil.which(program) is None:
            raise Unavailable(f"the program {program} is not installed")
    if not TUN.exists():
        try:
            TUN.parent.mkdir(exist_ok=True)
            os.mknod(TUN, stat.S_IFCHR | 0o600, os.makedev(10, 200))
        except OSError as error:
            raise Unavailable(f"{TUN} is missing and cannot be made: {error}") from error
