"""Imports what verifies signatures without clouds to sign in and a second HTTP client: half the time of a cold sync."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CLOUD = "boto3"  # imported by securesystemslib where it is installed, for keys that lie at AWS
_FETCHER = "tuf.ngclient.urllib3_fetcher"  # which tuf uses where it is given no fetcher; ours is given always


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


class _NoFetcher:
    def __init__(self) -> None:
        raise AssertionError("metadata is read by the fetcher that the updater was given")


def import_verifiers() -> None:
    """To be called before anything else imports tuf, while the process has one thread; signers work all the same."""
    if {_CLOUD, "securesystemslib.signer", "tuf.ngclient"} & sys.modules.keys():
        return
    later = _Later(_CLOUD)
    sys.modules[_CLOUD] = later
    absent = ModuleType(_FETCHER)
    vars(absent)["Urllib3Fetcher"] = _NoFetcher
    sys.modules[_FETCHER] = absent
    try:
        importlib.import_module("securesystemslib.signer")
        importlib.import_module("tuf.ngclient")
    finally:
        _withdraw(later)
        _withdraw(absent)


def _withdraw(later: ModuleType) -> None:
    if sys.modules.get(later.__name__) is later:
        del sys.modules[later.__name__]
