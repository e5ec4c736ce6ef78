"""The scripts that start stores: whoever else listens at a port is not taken for what was to be started."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "ci" / "stores"


def start(name: str, directory: Path, *port: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / name), "start", str(directory), *port]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["seaweedfs", "juicefs", "registry"])
def test_a_port_that_is_taken_is_not_started_on(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = start(name, tmp_path / "state", port)
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", f"port {port} is taken\n")


@pytest.mark.parametrize("port", ["abc", "0", "70000", "80;", "-1", "08"])
@pytest.mark.parametrize("name", ["seaweedfs", "juicefs", "registry"])
def test_what_is_no_port_is_said_to_be_none(name: str, port: str, tmp_path: Path) -> None:
    done = start(name, tmp_path / "state", port)
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == ("", f"not a port: '{port}'\n")
