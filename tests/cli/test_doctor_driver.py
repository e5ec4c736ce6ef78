"""A driver that hangs keeps nobody for ever who only wants to know what is wrong."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kartifacts.diagnostics import doctor
from kartifacts.runtime import host
from tests.conftest import Machine

DRIVER = """
#include <unistd.h>
int cuInit(unsigned flags) { for (;;) sleep(1000); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""


def test_doctor_says_that_the_driver_hangs(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(host, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "PATIENCE", 3.0)
    started = time.monotonic()
    findings = doctor.examine(machine.settings())
    assert time.monotonic() - started < 30
    (gpus,) = (finding for finding in findings if finding.subject == "GPUs")
    assert not gpus.ok
    assert "did not answer" in gpus.text
