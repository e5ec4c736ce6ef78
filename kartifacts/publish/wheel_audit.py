"""Asks auditwheel whether a wheel keeps what its platform tag promises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kartifacts.errors import VerificationError

PROVIDED = {"libtvm_ffi.so"}  # comes with apache-tvm-ffi and is in the process before any kernel is loaded


def audit(path: Path) -> str | None:
    """What auditwheel says of a wheel with host code; None if it is not installed, or there is no host code.

    Raises:
        VerificationError: a kernel needs a newer system, or another library, than the tag allows.
    """
    platform = path.stem.rpartition("-")[2]
    if platform == "any" or find_spec("auditwheel") is None:
        return None
    # Which of the CPU's extensions there are is seen at run time, so that a tag need not promise them.
    command = [sys.executable, "-m", "auditwheel", "show", "--json", "--disable-isa-ext-check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer: Any = json.loads(done.stdout)
        found, libraries = answer["sym_tag"], set(answer["external_libs"]) - PROVIDED
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(
            f"auditwheel does not understand {path.name}: {(done.stdout + done.stderr).strip()[-500:]}",
            source=str(path),
            hint="auditwheel 6.8 or later is needed; without it the tag is not checked",
        ) from error
    if libraries or _glibc(found) > _glibc(platform):
        beyond = f"; and libraries outside it: {', '.join(sorted(libraries))}" if libraries else ""
        raise VerificationError(
            f"{path.name} is not what its tag says: auditwheel finds symbols of {found}{beyond}; nothing was written",
            source=str(path),
            expected=platform,
            actual=found,
        )
    return f"symbols of {found}"


def _glibc(tag: str) -> tuple[int, int]:
    matched = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(matched[1]), int(matched[2])) if matched else (99, 0)
