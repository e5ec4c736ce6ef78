"""Where a package, its environment or a toolkit lies is in no key: what was built is found again after a move."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest

import kartifacts
from kartifacts.build.closure import own_root
from kartifacts.build.compile import compile_specs
from kartifacts.build.toolchains import find
from kartifacts.build.toolchains.nvcc import Nvcc
from kartifacts.build.toolchains.nvrtc import Nvrtc
from kartifacts.config import Settings
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import Spec

from .conftest import CPU

MakeSettings = Callable[..., Settings]
USE = """
import json, sys
import kartifacts
from kartifacts import config
from kartifacts.build.compile import compile_specs
from kartifacts.build.jit import explain_key
from kartifacts.build.library import discover
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_arch

settings, made = config.read(), {}
library = discover(workspace=settings.workspace).find("norm/rmsnorm")
assert all(place.startswith(sys.prefix) for place in (kartifacts.__file__, str(library.root))), sys.path
for arch in sys.argv[1:]:
    spec = library.spec("norm/rmsnorm", {"dtype": "float32"}, parse_arch(arch))
    try:
        key = explain_key(spec, settings)["key"]
    except NoCompiler:
        continue
    build = compile_specs([spec], settings)
    made[arch] = [key, str(build.kernels[0].path), build.report["compiled"] + build.report["linked"]]
print(json.dumps(made))
"""


class Environment(NamedTuple):
    """A Python environment with copies of this package, as its wheel has it, and of TVM-FFI."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        (site,) = root.glob("lib/python*/site-packages")
        package, kernels = Path(kartifacts.__file__).parent, own_root()
        assert kernels is not None
        left_out = shutil.ignore_patterns("__pycache__", "_kernels")
        shutil.copytree(package, site / "kartifacts", ignore=left_out)
        shutil.copytree(kernels, site / "kartifacts/_kernels", ignore=left_out)
        ffi = distribution("apache-tvm-ffi")
        for name in {file.parts[0] for file in ffi.files or () if ".." not in file.parts}:
            place = Path(str(ffi.locate_file(name)))
            shutil.copytree(place, site / name) if place.is_dir() else shutil.copy(place, site)
        (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        return cls(root)

    def use(self, workspace: Path, *archs: str) -> dict[str, list[object]]:
        """Arch → key of a kernel, where it is in the workspace, and how many commands it took to get it there."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(workspace.parent), "KARTIFACTS_WORKSPACE": str(workspace)}
        command = [str(self.root / "bin/python"), "-B", "-c", USE, *archs]
        where = workspace.parent
        done = subprocess.run(command, cwd=where, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, list[object]] = json.loads(done.stdout)
        return found


def test_an_environment_at_two_places_has_the_same_keys_and_one_that_was_moved_compiles_nothing(
    tmp_path: Path,
) -> None:
    archs = (str(CPU), "9.0a")  # the second where NVRTC is
    first = Environment.make(tmp_path / "image/venv")
    before = first.use(tmp_path / "workspace", *archs)
    assert before[str(CPU)][2] == 3
    assert all(commands for _, _, commands in before.values())
    shutil.copytree(first.root, tmp_path / "home/another venv", symlinks=True)
    again = {arch: [key, path, 0] for arch, (key, path, _) in before.items()}
    assert Environment(tmp_path / "home/another venv").use(tmp_path / "workspace", *archs) == again
    shutil.rmtree(first.root)
    assert Environment(tmp_path / "home/another venv").use(tmp_path / "workspace", *archs) == again
    apart = Environment(tmp_path / "home/another venv").use(tmp_path / "apart", *archs)
    assert {arch: key for arch, (key, *_) in apart.items()} == {arch: key for arch, (key, *_) in before.items()}


def toolkit(kind: str, make_settings: MakeSettings) -> Path:
    """The toolkit of this machine, or what of it came in wheels."""
    environ = {name: os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ}
    try:
        found = find("nvrtc", make_settings(**environ, KARTIFACTS_CUDA_COMPILER=kind))
    except NoCompiler as error:
        pytest.skip(f"needs a CUDA compiler: {error.message}")
    if isinstance(found, Nvrtc):
        return found.library.parent.parent
    assert isinstance(found, Nvcc)
    return found.root


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param("nvcc", "variable", marks=pytest.mark.nvcc),
        pytest.param("nvcc", "PATH", marks=pytest.mark.nvcc),
        pytest.param("nvrtc", "variable", marks=pytest.mark.nvrtc),
    ],
)
def test_a_toolkit_under_two_names_is_one_compiler(
    kind: str, way: str, make_settings: MakeSettings, image_spec: Callable[..., Spec], tmp_path: Path
) -> None:
    """As /usr/local/cuda and /usr/local/cuda-13.0: a login shell may have one in PATH, and another shell the other."""
    root = toolkit(kind, make_settings)
    names = (tmp_path / "cuda-13.0", tmp_path / "cuda")
    for name in names:
        name.symlink_to(root)
    made = []
    for name in names:
        search = f"{name}/bin:{os.environ['PATH']}"
        environ = {"CUDA_HOME": str(name)} if way == "variable" else {"PATH": search}
        settings = make_settings(**environ, KARTIFACTS_CUDA_COMPILER=kind)
        toolchain = find("nvrtc", settings)
        build = compile_specs([image_spec()], settings)
        made.append((image_spec().key(toolchain.made_with(image_spec())), build.kernels, build.report["linked"]))
        if way == "variable":
            assert str(toolchain.place).startswith(str(name))
    (key, kernels, linked), (other, others, more) = made
    assert (key, kernels) == (other, others)
    assert (linked, more) == (1, 0)
    assert kernels[0].arch == parse_arch("9.0a")
