"""Puts the kernel sources and their launchers into the built wheel, so that the JIT works from it with NVRTC alone.

Both go into the build directory only: an editable install keeps reading ``kernels/`` itself, and compiles nothing.
Launchers are made where a host compiler is, with what pyproject.toml requires for a build; else the wheel has none, and
is for every machine.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # without build isolation nobody holds what is installed against pyproject.toml
    sys.exit(
        f"kartifacts is built by setuptools 77 or later; here is {setuptools.__version__}: pip install -U setuptools"
    )

HERE = Path(__file__).parent
KEPT = {".toml", ".cu", ".cuh", ".h", ".cpp", ".jinja", ".py"}
READ = ("PATH", "HOME", "KARTIFACTS_CXX")  # no flags: those are for kernels of one's own
log = logging.getLogger(__name__)


def prebuild(into: Path) -> bool:
    """Compile the launchers of our kernels into the directory `into`; whether there are any."""
    sys.path.insert(0, str(HERE))
    try:
        from kartifacts import config
        from kartifacts.build import launchers, library
        from kartifacts.errors import KartifactsError
    except ImportError as error:
        log.warning("the wheel brings no launchers: %s", error)
        return False
    try:
        environ = {name: os.environ[name] for name in READ if name in os.environ}
        settings = config.read(environ, {"workspace": into / "workspace"})
        return bool(launchers.prebuild(library.open_library(HERE / "kernels"), into / "kernels", settings))
    except KartifactsError as error:
        log.warning("the wheel brings no launchers: %s", error)
        return False


class BuildWithKernels(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # what an earlier build left there may be gone from the sources
            shutil.rmtree(Path(self.build_lib, "kartifacts"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for path in sorted((HERE / "kernels").rglob("*")):
                if path.suffix in KEPT and path.is_file() and not path.name.startswith(("test_", "conftest")):
                    target = Path(self.build_lib, "kartifacts", "_kernels", path.relative_to(HERE / "kernels"))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)


class WheelWithLaunchers(bdist_wheel):
    def run(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            self.made = Path(place, "kernels") if prebuild(Path(place)) else None
            if self.made is not None:
                self.root_is_pure = False
                self.distribution.has_ext_modules = lambda: True
            super().run()

    def run_command(self, command: str) -> None:
        super().run_command(command)
        if command == "build" and self.made is not None:
            target = Path(self.get_finalized_command("build_py").build_lib, "kartifacts", "_kernels")
            shutil.copytree(self.made, target, dirs_exist_ok=True)

    def get_tag(self) -> tuple[str, str, str]:
        """Of the machine, but of no version of Python: nothing in it knows Python."""
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithLaunchers})
