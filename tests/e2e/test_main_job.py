"""The main job on real parts: build, publish, serve, fetch, load, call; and a second process that does none of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kartifacts.testing import Mirror, faults
from tests.conftest import CALL, CPU_ARCHS, Compiler, Machine, Released, declared
from tests.processes import free_ports

CHECKOUT = Path(__file__).parents[2]
TOLERANCE = {"float16": 5e-4, "float32": 1e-6}  # relative, of a whole array
WARM = """
import sys, kartifacts
kernel, error = error_of(kartifacts, sys.argv[1])
result = {"origin": kernel.origin, "arch": str(kernel.arch), "path": str(kernel.path), "error": error}
"""


@contextmanager
def nginx(tree: Path, state: Path) -> Iterator[str]:
    """The URL of a real nginx that serves `tree`."""
    script = CHECKOUT / "ci/stores/nginx"
    port = free_ports(4)
    try:
        subprocess.run([script, "start", state, tree, str(port)], check=True, stdout=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{port}"
    finally:
        subprocess.run([script, "stop", state], check=True)


@pytest.fixture(params=["mirror", pytest.param("nginx", marks=pytest.mark.nginx)])
def served(request: pytest.FixtureRequest, released: Released, machine: Machine, tmp_path: Path) -> Iterator[str]:
    """What was built, published into a bucket and served over HTTP; gives the URL."""
    bucket = tmp_path / "bucket"
    answer = machine.cli("publish", f"dir:{bucket}", "--from", released.path)
    assert answer.code == 0, answer.err
    if request.param == "mirror":
        with Mirror(bucket) as mirror:
            yield mirror.url
        return
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx")
    with nginx(bucket, tmp_path / "nginx") as url:
        yield url


def error_of(registry: Any, dtype: str) -> tuple[Any, float]:
    """What a user's program finds: see CALL."""
    scope: dict[str, Any] = {}
    exec(CALL, scope)
    found: tuple[Any, float] = scope["error_of"](registry, dtype)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cold_process_fetches_what_a_warm_one_then_loads_without_a_socket_or_a_write(
    served: str, released: Released, machine: Machine, dtype: str
) -> None:
    settings: dict[str, Any] = {"mirrors": served, "lock": released.lock_file, "jit": "never"}
    kernel, error = error_of(machine.registry(**settings), dtype)
    assert error < TOLERANCE[dtype]
    assert (kernel.origin, kernel.arch) == (served, released.best)

    warm = machine.watched(WARM, dtype, **settings)
    assert warm.seen == []
    assert warm.result["error"] < TOLERANCE[dtype]
    assert (warm.result["origin"], warm.result["path"]) == ("store", str(kernel.path))


def test_a_prefetched_release_serves_every_op_with_the_mirror_gone(released: Released, machine: Machine) -> None:
    with Mirror(released.path) as mirror:
        fetched = machine.cli("fetch", "--json", lock=released.lock_file, mirrors=mirror.url)
    assert fetched.code == 0, fetched.err
    assert fetched.data["fetched"] == fetched.data["kernels"] == len(declared()) * len(released.archs)
    offline: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "offline": 1}
    assert machine.cli("status", "--json", **offline).data["complete"]
    registry = machine.registry(**offline)
    for uri, axes in declared().items():
        op = uri.partition("?")[0]
        kernel = registry.load(op, device="cpu", **axes)
        assert (kernel.uri, kernel.origin, kernel.arch) == (uri, "store", released.best)
        assert callable(getattr(kernel, op.partition("/")[2]))


def outputs(machine: Machine, count: int, code: str, **settings: Any) -> list[Any]:
    """What `count` processes that start together find."""
    command = machine.watching(code, "float32")
    environ = machine.environ(settings)
    running = [subprocess.Popen(command, env=environ, cwd=machine.home, stdout=subprocess.PIPE) for _ in range(count)]
    found = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * count
    return [json.loads(out.splitlines()[-1])["result"] for out in found]


def test_many_cold_processes_ask_for_each_blob_once(released: Released, machine: Machine) -> None:
    with Mirror(released.path) as mirror:
        mirror.order(faults.delay(0.5))  # so that they all meet
        found = outputs(machine, 8, WARM, lock=released.lock_file, mirrors=mirror.url, jit="never")
        paths = [request.path for request in mirror.requests]
    assert sorted(paths) == sorted(set(paths))
    assert len(paths) == 4  # release, manifest, table, pack
    assert len({result["path"] for result in found}) == 1
    assert all(result["error"] < TOLERANCE["float32"] for result in found)


def test_many_cold_processes_compile_once(machine: Machine, compiler: Compiler) -> None:
    found = outputs(machine, 8, WARM, cxx=compiler.path)
    assert compiler.compiled == 2  # the kernel and its binding
    assert len({result["path"] for result in found}) == 1
    assert all(result["error"] < TOLERANCE["float32"] for result in found)


def test_the_ops_a_user_calls_come_from_the_mirror_too(released: Released, machine: Machine) -> None:
    code = """
import kartifacts.ops as ops, kartifacts
x = np.linspace(-3, 3, 4096, dtype=np.float32).reshape(4, 1024)
got = ops.silu_and_mul(x)
gate = x[:, :512].astype(np.float64)
np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * x[:, 512:], rtol=1e-5, atol=1e-6)
print(kartifacts.load("activation/silu_and_mul", device="cpu", dtype="float32").origin)
"""
    with Mirror(released.path) as mirror:
        answer = machine.python(code, lock=released.lock_file, mirrors=mirror.url, jit="never")
        assert (answer.code, answer.out.strip()) == (0, mirror.url), answer.err


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_system_sees_no_socket_and_no_write_of_a_warm_process_either(released: Released, machine: Machine) -> None:
    settings: dict[str, Any] = {"mirrors": f"file://{released.path}", "lock": released.lock_file, "jit": "never"}
    machine.registry(**settings).load("norm/rmsnorm", device="cpu", dtype="float32")
    trace = machine.home / "trace"
    calls = (
        "trace=socket,connect,open,openat,openat2,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,symlink,"
        "symlinkat,unlink,unlinkat,rmdir,truncate,ftruncate,chmod,fchmod,fchmodat,utimensat,memfd_create,execve"
    )
    strace = ["strace", "-f", "-qq", "-o", str(trace), "-e", calls]
    settings["mirrors"] = "http://127.0.0.1:9"
    warm = machine.watched(WARM, "float32", prefix=strace, **settings)
    assert warm.result["origin"] == "store"
    lines = trace.read_text().splitlines()
    assert any(warm.result["path"] in line for line in lines)  # the trace did see what the process opened
    harmless = re.compile(r"O_RDONLY|ENOENT|\"/dev/null\"|\d+ +\+\+\+|resumed>|execve\(.*= 0$")
    assert [line for line in lines if not harmless.search(line) or "O_CREAT" in line] == []


@pytest.mark.nvcc
@pytest.mark.usefixtures("toolkit")
def test_a_release_for_cpus_and_gpus_gives_each_device_its_own(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lock = tmp_path / "out", tmp_path / "kartifacts.lock"
    archs = f"{CPU_ARCHS} 9.0a"
    answer = machine.cli("build", "--archs", archs, "--ops", "rmsnorm", "--out", out, "--lock", lock, "--json")
    assert answer.code == 0, answer.err
    assert sorted({row["arch"] for row in answer.data["bundles"]}) == sorted(archs.split())
    with Mirror(out) as mirror:
        settings: dict[str, Any] = {"mirrors": mirror.url, "lock": lock, "jit": "never"}
        registry = machine.registry(**settings)
        assert error_of(registry, "float32")[1] < TOLERANCE["float32"]
        pretend_gpus(monkeypatch, "9.0")
        kernel = registry.load("norm/rmsnorm", device="cuda", dtype="float32")
        assert str(kernel.arch) == "9.0a"
        assert callable(kernel.rmsnorm)
        assert str(registry.load("norm/rmsnorm", dtype="float32").arch) == "9.0a"  # the GPU where there is one


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    from kartifacts.model.arch import parse_arch
    from kartifacts.runtime import host

    monkeypatch.setattr(host, "_cuda", lambda: (tuple(map(parse_arch, names)), ""))
    monkeypatch.setattr(host, "driver", lambda: (13, 0))


def test_both_ways_to_name_an_op_and_an_axis_give_one_kernel(released: Released, machine: Machine) -> None:
    registry = machine.registry(path=released.path, lock=released.lock_file, jit="never")
    one = registry.load("norm/rmsnorm", device="cpu", dtype="float32")
    assert registry.load("rmsnorm", device="cpu", dtype=np.dtype("float32")).path == one.path
    assert registry.load("norm/rmsnorm", device="cpu", dtype="float32") is one


def test_the_demo_that_the_readme_promises_runs_whatever_the_user_has_set(machine: Machine) -> None:
    config = machine.home / ".config/kartifacts/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('offline = true\njit = "never"\nmirrors = ["http://127.0.0.1:9"]\npath = ["/nowhere"]\n')
    answer = machine.run_cli("demo", "--json", lock=machine.home / "no.lock", TMPDIR=machine.home)
    assert answer.code == 0, answer.err
    assert answer.data["ok"]
    assert len(answer.data["steps"]) == 6
    assert not list(machine.home.glob("kartifacts-demo-*"))
    assert os.listdir(machine.home) == [".config"]
