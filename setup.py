"""Puts the kernel sources into the built wheel, so that the JIT works from it; all else stands in pyproject.toml.

They are copied into the build directory only: an editable install keeps reading ``kernels/`` itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
KEPT = {".toml", ".cu", ".cuh", ".h", ".cpp", ".py"}


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


setup(cmdclass={"build_py": BuildWithKernels})
