"""A kernel file that fits a request, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kartifacts.model.arch import Arch


class Found(NamedTuple):
    path: Path
    arch: Arch
    origin: str  # "store", the name of a source, "built here before" or "jit"
    exports: tuple[str, ...]
