"""What one machine compiled, another takes from a bucket, by sccache: the same bytes, under the same keys."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kartifacts.build.toolchains import nvcc
from tests.conftest import Machine
from tests.processes import free_ports
from tests.sites import plan_text
from tests.stores.conftest import AWS, PATH, S3Server, require

pytestmark = [
    pytest.mark.stores,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the archs are those of x86-64"),
]

SCRIPT = Path(__file__).parents[2] / "ci/release"
OPS = ["norm/layernorm", "norm/rmsnorm"]


@dataclass(frozen=True)
class Built:
    """What `ci/release build` made of a plan on a machine of its own, and what sccache says of it."""

    shards: Path
    said: str

    def count(self, what: str) -> int:
        """A figure of sccache's statistics, 0 where it does not stand there."""
        found = re.search(rf"^{re.escape(what)} +(\d+)$", self.said, re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def kernels(self) -> dict[str, tuple[str, str]]:
        """Key → what it is, and the digest of its bytes."""
        records = [json.loads(path.read_bytes()) for path in (self.shards / "kernels").iterdir()]
        return {record["key"]: (f"{record['uri']} {record['arch']}", record["sha256"]) for record in records}


Build = Callable[..., Built]


@pytest.fixture
def build(seaweedfs: S3Server, tmp_path: Path) -> Build:
    """Builds a plan with `ci/release` on a machine of its own; with a cache, a bucket that all of them share."""
    require("sccache")
    place = seaweedfs.place(own=True)
    bucket = place.text.removeprefix("s3://").partition("/")[0]
    plan = tmp_path / "plan.toml"

    def run(name: str, *archs: str, cuda: str = "", cached: bool = True, **settings: str) -> Built:
        asked = {"name": "one", "machine": "x86_64", "cuda": cuda, "archs": list(archs), "ops": OPS}
        plan.write_text(plan_text("kartifacts", asked))
        machine, port = Machine(tmp_path / name), free_ports(1)
        environ = {**machine.environ({}), **AWS, "PATH": PATH, "SCCACHE_SERVER_PORT": str(port), **settings}
        environ |= {"RELEASE_PLAN": str(plan), "RELEASE_SHARDS": f"dir:{machine.home / 'shards'}"}
        if cached:
            environ |= {"RELEASE_CACHE": bucket, "RELEASE_CACHE_ENDPOINT": seaweedfs.endpoint}
        command = [str(SCRIPT), "build", "one", "1/1"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server of sccache is still there"
        return Built(machine.home / "shards", done.stderr)

    return run


def test_a_second_machine_takes_host_code_from_the_bucket_and_makes_the_same(build: Build) -> None:
    first, second = build("first", "cpu:x86-64-v3"), build("second", "cpu:x86-64-v3")
    sources = 8  # of six kernels, and of two bindings
    assert (first.count("Cache hits"), first.count("Cache misses")) == (0, sources)
    assert (second.count("Cache hits"), second.count("Cache misses")) == (sources, 0)
    plain = build("plain", "cpu:x86-64-v3", cached=False)
    assert plain.count("Compile requests") == 0
    assert len(plain.kernels) == 6
    assert first.kernels == second.kernels == plain.kernels


@pytest.mark.nvcc
def test_what_nvcc_made_comes_from_the_bucket_too(build: Build, toolkit: Path, machine: Machine) -> None:
    """nvcc is a program, and its launcher stores what cicc and ptxas make; an image stays an image."""
    cuda = nvcc.discover(machine.settings()).facts["release"]
    compiler = {"cuda": cuda, "KARTIFACTS_CUDA_COMPILER": "nvcc", "CUDA_HOME": str(toolkit)}
    first, second = (build(name, "9.0a", "9.0+PTX", **compiler) for name in ("first", "second"))
    assert first.count("Cache misses (CUBIN)") == 12
    assert (second.count("Cache hits (CUBIN)"), second.count("Cache misses")) == (12, 0)
    assert second.count("Cache hits (C/C++)") == first.count("Cache misses (C/C++)") > 0
    plain = build("plain", "9.0a", "9.0+PTX", cached=False, **compiler)
    assert first.kernels == second.kernels == plain.kernels
    assert len(plain.kernels) == 12


@pytest.mark.nvrtc
def test_what_nvrtc_makes_passes_a_cache_by(build: Build, machine: Machine) -> None:
    """It is a library that our own worker calls: there is no program that a launcher could start."""
    from kartifacts.build.toolchains import find
    from kartifacts.errors import NoCompiler

    settings = machine.settings(cuda_compiler="nvrtc")
    try:
        cuda = ".".join(find("nvrtc", settings).fingerprint["version"].split(".")[:2])
    except NoCompiler as error:
        pytest.skip(f"needs NVRTC: {error.message}")
    built = build("only", "9.0a", cuda=cuda, KARTIFACTS_CUDA_COMPILER="nvrtc")
    assert len(built.kernels) == 6
    assert built.count("Compile requests") == 4  # the bindings and launchers of two ops
    assert not re.search("CUDA|CUBIN|PTX", built.said)
