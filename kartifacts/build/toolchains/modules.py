"""Directories of objects that belong together, one for each specialisation of an op, as a worker keeps them.

modules/<library>.<family>.<op>.<arch>/<specialisation>.o
                                      /meta.json     what all of them were made of, and the digest of each

meta.json is written last.  When anything that they were made of changes, which is the compiler's package or a source,
none of them is valid any more, and the directory is begun anew.  Nothing but the standard library is here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

META = "meta.json"
SCHEMA = 1


class Module:
    """One such directory.

    Args:
        made_of: by name, whatever the objects depend on.
    """

    def __init__(self, place: str, made_of: dict[str, Any]) -> None:
        self.place = place
        self.made_of = made_of

    def find(self, name: str, asked: list[str]) -> tuple[bytes, list[str]] | None:
        """The object of a specialisation, and what its source read of the library; None if there is no valid one.

        Args:
            asked: of the compiler, beside what the module was made of.
        """
        try:
            entry = self._meta()["entries"][name]
            content = self._read(entry["object"])
            if entry["asked"] == asked and hashlib.sha256(content).hexdigest() == entry["sha256"]:
                return content, [str(path) for path in entry["read"]]
        except (OSError, ValueError, KeyError, TypeError):  # nobody's fault: it is made again
            pass
        return None

    def keep(self, name: str, asked: list[str], content: bytes, read: list[str]) -> None:
        """Put the object of a specialisation there."""
        os.makedirs(self.place, exist_ok=True)
        with self._locked():
            try:
                meta = self._meta()
            except (OSError, ValueError, KeyError, TypeError):
                self._empty()
                meta = {"schema": SCHEMA, "made_of": self.made_of, "entries": {}}
            self._write(f"{name}.o", content)
            digest = hashlib.sha256(content).hexdigest()
            meta["entries"][name] = {"object": f"{name}.o", "sha256": digest, "asked": asked, "read": read}
            self._write(META, json.dumps(meta, indent=2, sort_keys=True).encode())

    def _meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = json.loads(self._read(META))
        if meta["schema"] != SCHEMA or meta["made_of"] != self.made_of:
            raise ValueError("it is of another compiler or other sources")
        return meta

    def _read(self, name: str) -> bytes:
        with open(os.path.join(self.place, name), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("others could have changed it")
            return file.read()

    def _empty(self) -> None:
        """The old meta.json goes first, so that nobody takes it for what is there afterwards."""
        names = os.listdir(self.place)
        for name in sorted(names, key=lambda name: name != META):
            os.unlink(os.path.join(self.place, name))

    def _write(self, name: str, content: bytes) -> None:
        handle, staged = tempfile.mkstemp(prefix=".", dir=self.place)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(handle, 0o644)
            file.flush()
            os.fsync(handle)
        os.replace(staged, os.path.join(self.place, name))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
