"""Run time: which kernel fits this machine, where it is, and how it becomes callable."""

from __future__ import annotations

from kartifacts.runtime.kernel import Kernel
from kartifacts.runtime.registry import Registry, load

__all__ = ["Kernel", "Registry", "load"]
