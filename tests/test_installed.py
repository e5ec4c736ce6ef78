"""What users install: a whole wheel that works by itself, and compiles for GPUs where there is no program at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kartifacts
from tests.conftest import Machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).parents[1]
PACKAGE = CHECKOUT / "kartifacts"


def wheel_of(place: Path, **environ: str) -> Path:
    """The wheel of this checkout, built from a copy, so that nothing lands here and nothing stale gets in."""
    copy, out = place / "checkout", place / "wheel"
    ignored = shutil.ignore_patterns("__pycache__", "_kernels", "*.egg-info")
    for name in ("kartifacts", "kernels"):
        shutil.copytree(CHECKOUT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"):
        shutil.copy(CHECKOUT / name, copy)
    stale = copy / "build" / "lib" / "kartifacts"  # of an earlier build, as `pip install .` leaves it
    for name in ("gone.py", "_kernels/gone/op.toml"):
        (stale / name).parent.mkdir(parents=True, exist_ok=True)
        (stale / name).write_text("")
    offline = ["--no-build-isolation", "--no-deps", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *offline, "-w", str(out), str(copy)]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("kartifacts-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_module_and_every_kernel_source_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = [path.relative_to(CHECKOUT) for path in PACKAGE.rglob("*.py") if "_kernels" not in path.parts]
    assert {str(path) for path in modules} <= names
    sources = {
        str(path.relative_to(CHECKOUT / "kernels"))
        for path in (CHECKOUT / "kernels").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(("test_", "conftest"))
    }
    assert {"norm/op.toml", "rope/apply_rope.cu.jinja"} <= sources
    assert {f"kartifacts/_kernels/{name}" for name in sources} <= names
    assert not [name for name in names if "gone" in name]
    assert "kartifacts/py.typed" in names
    stray = re.compile(r"(^|[^a-z])(conf)?tests?([^a-z]|$)")  # as a word: attestations are not tests
    assert not [name for name in names if stray.search(name) and not name.startswith("kartifacts/testing/")]
    assert {name.partition("/")[0] for name in names} == {
        "kartifacts",
        f"kartifacts-{kartifacts.__version__}.dist-info",
    }


_BUILD_NEEDS = """
import json, os, sys
from importlib.metadata import packages_distributions
from pathlib import Path
from kartifacts import config
from kartifacts.build import launchers, library
settings = config.read({"PATH": os.environ["PATH"]}, {"workspace": Path(sys.argv[2], "workspace")})
assert launchers.prebuild(library.open_library(Path(sys.argv[1])), Path(sys.argv[2], "made"), settings)
owners = packages_distributions()
print(json.dumps(sorted({o for name in sys.modules for o in owners.get(name.partition(".")[0], ())})))
"""


def test_a_build_in_isolation_has_every_package_that_it_imports(machine: Machine) -> None:
    """pip builds the wheel where nothing but `build-system.requires` is installed."""
    requires = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["build-system"]["requires"]
    allowed, pending = {"kartifacts"}, [Requirement(text) for text in requires]
    while pending:
        each = pending.pop()
        if canonicalize_name(each.name) in allowed or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        allowed.add(canonicalize_name(each.name))
        pending += [Requirement(text) for text in metadata.requires(each.name) or ()]
    command = [sys.executable, "-c", _BUILD_NEEDS, str(CHECKOUT / "kernels"), str(machine.home)]
    done = subprocess.run(command, env=machine.environ({}), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = {canonicalize_name(name) for name in json.loads(done.stdout)}
    assert {"jinja2", "msgspec"} <= imported
    assert imported <= allowed


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; what it depends on is borrowed from this one."""
    root = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    python = root / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    [site] = root.glob("lib/python*/site-packages")
    borrowed = {place for place in sys.path if place.endswith("-packages")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return python


def test_the_ops_work_from_the_wheel_alone(installed: Path, machine: Machine) -> None:
    code = """
import kartifacts, sys
import numpy as np
from kartifacts import ops
assert kartifacts.__file__.startswith(sys.prefix), kartifacts.__file__
x = np.random.default_rng().standard_normal((8, 4096), dtype=np.float32)
y = ops.rmsnorm(x, np.ones(4096, np.float32))
exact = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6)
assert abs(y - exact).max() < 1e-5
"""
    environ = machine.environ({})
    package = next(installed.parents[1].glob("lib/python*/site-packages/kartifacts"))
    before = sorted(path.stat().st_mtime_ns for path in package.rglob("*"))
    command = [str(installed), "-B", "-c", code]
    done = subprocess.run(command, env=environ, cwd=machine.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.stat().st_mtime_ns for path in package.rglob("*")) == before
    for program in ([str(installed.parent / "kartifacts")], [str(installed), "-m", "kartifacts"]):
        done = subprocess.run(
            [*program, "doctor"], env=environ, cwd=machine.home, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{package}/_kernels" in done.stdout


def test_the_checkout_and_the_wheel_agree_on_what_an_op_is(installed: Path, machine: Machine) -> None:
    """Else nothing that CI publishes would fit what users install."""
    arguments = ["explain-key", "norm/rmsnorm", "dtype=float32", "--arch", "cpu:x86-64", "--json"]
    here = machine.cli(*arguments).data
    environ = machine.environ({})
    command = [str(installed), "-m", "kartifacts", *arguments]
    done = subprocess.run(command, env=environ, cwd=machine.home, capture_output=True, text=True, check=True)
    assert f'"op_digest": "{here["op_digest"]}"' in done.stdout
    assert f'"key": "{here["key"]}"' in done.stdout


# -- for GPUs ----------------------------------------------------------------------------------------------------------

OPS = ["norm/rmsnorm", "norm/layernorm", "norm/fused_add_rmsnorm", "rope/apply_rope"]
OPS += ["activation/silu_and_mul", "activation/gelu_tanh_and_mul"]
BUILD = """
import json, os, sys
from pathlib import Path
started = []
def note(event, arguments):
    if event == "subprocess.Popen":
        started.append([os.fsdecode(word) for word in arguments[1]])
    elif event.startswith(("os.exec", "os.posix_spawn", "os.system", "os.fork", "pty.spawn")):
        started.append([event, repr(arguments)])
sys.addaudithook(note)
import kartifacts
from kartifacts import config
from kartifacts.build import elf, images, launchers
from kartifacts.build.jit import build_one
from kartifacts.build.library import discover
from kartifacts.errors import KartifactsError
from kartifacts.model.arch import parse_arch
library = discover().library_of("norm/rmsnorm")
spec = library.spec("norm/rmsnorm", {"dtype": "bfloat16"}, parse_arch("9.0a"))
result = {"root": spec.root, "started": started}
try:
    built = build_one(spec, config.read())
    image, notes = images.attached(built.path.read_bytes())
    launcher = launchers.place(Path(spec.root), spec)
    as_it_came = launcher.exists() and images.attach(launcher.read_bytes(), image, notes) == built.path.read_bytes()
    inspected = elf.inspect(built.path)
    result |= {"toolchain": built.toolchain, "exports": inspected.exports, "archs": [str(a) for a in inspected.archs],
               "functions": list(inspected.functions), "notes": notes, "as_it_came": as_it_came}
except KartifactsError as error:
    result |= {"error": type(error).__name__, "said": str(error)}
print(json.dumps(result))
"""


def built_by(python: Path, machine: Machine, *, prefix: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    """What became of a kernel for a GPU, and which processes were started."""
    environ = machine.environ({"CUDA_HOME": None, "CUDA_PATH": None, "cuda_compiler": "nvrtc", **settings})
    command = [*prefix, str(python), "-B", "-c", BUILD]
    done = subprocess.run(command, env=environ, cwd=machine.home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def skip_without_nvrtc(result: dict[str, Any]) -> None:
    if "NVRTC was not found" in result.get("said", ""):
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.mark.nvrtc
def test_where_no_program_is_reachable_nvrtc_makes_a_kernel_with_the_launcher_that_came_along(
    installed: Path, machine: Machine, tmp_path: Path
) -> None:
    strace = shutil.which("strace")  # sees what the worker starts, too
    traced = [] if strace is None else [strace, "-f", "-qq", "-e", "trace=execve", "-o", str(tmp_path / "trace")]
    result = built_by(installed, machine, prefix=traced, PATH="")
    skip_without_nvrtc(result)
    assert result.get("said") is None
    assert Path(result["root"]).is_relative_to(installed.parents[1])
    assert result["toolchain"]["kind"] == "nvrtc"
    assert (result["exports"], result["archs"]) == (["rmsnorm"], ["9.0a"])
    assert "rmsnorm_held_1" in result["functions"]
    assert result["notes"]["define.KART_DTYPE"] == "2"
    assert result["as_it_came"]
    package = Path(result["root"]).parent
    worker = [str(installed), "-I", "-S", str(package / "build/toolchains/nvrtc_worker.py")]
    assert result["started"]
    assert all(command[:4] == worker for command in result["started"])  # no compiler, no linker, no shell
    if strace is not None:
        assert set(re.findall(r'execve\("([^"]*)"', (tmp_path / "trace").read_text())) == {str(installed)}


def test_a_wheel_made_beside_a_compiler_brings_the_launcher_of_every_image_and_is_for_such_machines(
    wheel: Path,
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for suffix in (".so", ".json"):
        found = {name for name in names if name.endswith(f".launcher{suffix}")}
        assert found == {f"kartifacts/_kernels/{op}.launcher{suffix}" for op in OPS}
    assert re.fullmatch(rf"kartifacts-[^-]+-py3-none-linux_{os.uname().machine}\.whl", wheel.name)
    assert (
        "Root-Is-Purelib: false"
        in zipfile.ZipFile(wheel).read(f"kartifacts-{kartifacts.__version__}.dist-info/WHEEL").decode()
    )


@pytest.mark.nvrtc
def test_a_wheel_made_without_a_compiler_compiles_launchers_at_first_use_or_says_what_is_missing(
    machine: Machine, tmp_path: Path
) -> None:
    wheel = wheel_of(tmp_path, PATH="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".launcher.json"))]
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    result = built_by(Path(sys.executable), machine, PATH="", PYTHONPATH=site)
    skip_without_nvrtc(result)
    assert Path(result["root"]).is_relative_to(site)
    assert result["error"] == "NoCompiler"
    for part in ("launcher of norm/rmsnorm", "no host C++ compiler was found", "KARTIFACTS_CXX"):
        assert part in result["said"]
    assert all(command[3].endswith("/nvrtc_worker.py") for command in result["started"])
    result = built_by(Path(sys.executable), machine, PYTHONPATH=site)
    assert result.get("said") is None
    assert (result["exports"], result["archs"], result["as_it_came"]) == (["rmsnorm"], ["9.0a"], False)
