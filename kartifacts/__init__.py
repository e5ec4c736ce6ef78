"""kartifacts: an artifact registry and ahead-of-time distribution system for GPU kernels.

    import kartifacts
    rmsnorm = kartifacts.load("norm/rmsnorm", dtype="bfloat16")

Importing this package reads no variable, touches no file and imports no framework; names are resolved at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kartifacts.runtime import Kernel as Kernel
    from kartifacts.runtime import Registry as Registry
    from kartifacts.runtime import load as load
    from kartifacts.runtime.lifecycle import build_and_load as build_and_load

__version__ = "0.1.0"  # the one place the version is written; pyproject.toml reads it from here

__all__ = ["Kernel", "Registry", "__version__", "build_and_load", "load"]


def __getattr__(name: str) -> object:
    if name in ("Kernel", "Registry", "load"):
        from kartifacts import runtime

        return getattr(runtime, name)
    if name == "build_and_load":
        from kartifacts.runtime import lifecycle

        return lifecycle.build_and_load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
