"""What is no regular file is refused at once, with what it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.files.reading import open_regular, read_regular


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
        try:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def plant_linked_pipe(path: Path) -> None:
    os.mkfifo(f"{path}.pipe")
    path.symlink_to(f"{path}.pipe")


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "socket": (plant_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "directory": (Path.mkdir, "a directory"),
    "link to a pipe": (plant_linked_pipe, "a named pipe"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    plant, name = PLANTED[kind]
    plant(tmp_path / "it")
    with pytest.raises(OSError, match=f"it is {name}, not a regular file"):
        open_regular(tmp_path / "it")


@pytest.mark.parametrize("name", ["a\0b", "\udcff\ud800"])
def test_a_name_that_no_file_can_have_is_an_oserror(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"not a name of a file|No such file"):
        open_regular(tmp_path / name)


def test_a_file_is_read_through_links_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "link", 4)


def test_a_file_of_terabytes_costs_no_more_than_its_limit(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        read_regular(tmp_path / "sparse", 1000)


def test_a_file_without_a_size_is_read_to_its_end() -> None:
    assert read_regular("/proc/self/status", 1 << 20).startswith(b"Name:")
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_regular("/proc/self/status", 10)


def test_a_limit_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1")
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from kartifacts.files.reading import read_regular
print(read_regular(sys.argv[1], 1 << 40))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "small")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b'1'\n"
