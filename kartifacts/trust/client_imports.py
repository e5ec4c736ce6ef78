"""Imports what verifies signatures without what could make some in a cloud: half of the time of a cold sync."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CLOUD = "boto3"  # imported by securesystemslib where it is installed, for keys that lie at AWS


class _Later(ModuleType):
    """Stands for a module until something in it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _withdraw(self)
        return getattr(importlib.import_module(self.__name__), attribute)


def import_verifiers() -> None:
    """To be called before anything else imports tuf, while the process has one thread; signers work all the same."""
    if _CLOUD in sys.modules or "securesystemslib.signer" in sys.modules:
        return
    later = _Later(_CLOUD)
    sys.modules[_CLOUD] = later
    try:
        importlib.import_module("securesystemslib.signer")
    finally:
        _withdraw(later)


def _withdraw(later: _Later) -> None:
    if sys.modules.get(later.__name__) is later:
        del sys.modules[later.__name__]
