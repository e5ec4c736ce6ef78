"""A publisher that signs whatever a test tells it to, with keys of its own, and an attacker who has some of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

from securesystemslib.signer import CryptoSigner, Signer
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Signed,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

from kartifacts.errors import SourceError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import View, metadata_path
from kartifacts.sources.directory import DirectorySource

TOP = ("root", "timestamp", "snapshot", "targets")


def soon(days: float = 100) -> datetime:
    return (datetime.now(timezone.utc) + timedelta(days=days)).replace(microsecond=0)


@cache
def key(name: str) -> CryptoSigner:
    """The same name is the same key for the whole run, since making them takes longer than most tests."""
    return CryptoSigner.generate_ed25519()


class Publisher:
    """All metadata of one view in memory; `publish` writes what `changed` and all that has to name it.

    Attributes change as a test likes; nothing is checked here.
    """

    def __init__(self, path: Path, *libraries: str, view: View = "online") -> None:
        self.path = path
        self.view: View = view
        self.signers: dict[str, list[Signer]] = {role: [key(f"{view} {role}")] for role in TOP}
        self.root = Root(expires=soon(), unrecognized_fields={"dev.kartifacts.view": view})
        for role in TOP:
            self.root.add_key(self.signers[role][0].public_key, role)
        self.targets = Targets(expires=soon(), delegations=Delegations({}, {}))
        self.snapshot = Snapshot(expires=soon(29))
        self.timestamp = Timestamp(expires=soon(7))
        self.roles: dict[str, Targets] = {}
        for name in libraries:
            self.delegate(name)
        self.write("root", self.root)
        self.publish("targets", *libraries)
        self.trust = self.content("1.root.json")  # what clients begin with

    # -- content -----------------------------------------------------------------------------------------------------

    def delegate(self, name: str, **changes: Any) -> None:
        self.signers[name] = [key(name)]
        self.roles[name] = Targets(expires=soon())
        assert self.targets.delegations is not None
        assert self.targets.delegations.roles is not None
        fields: dict[str, Any] = {"threshold": 1, "terminating": True, "paths": [f"{name}/*/*"], **changes}
        self.targets.delegations.roles[name] = DelegatedRole(name, [key(name).public_key.keyid], **fields)
        self.targets.delegations.keys[key(name).public_key.keyid] = key(name).public_key

    def revoke(self, name: str) -> None:
        assert self.targets.delegations is not None
        assert self.targets.delegations.roles is not None
        del self.targets.delegations.roles[name]

    def add(self, library: str, version: str, content: bytes = b"{}", **custom: Any) -> None:
        path = f"{library}/{version}/index.json"
        fields = {"custom": {"channels": [], "published": "2026-01-01", **custom}}
        self.roles[library].targets[path] = TargetFile(len(content), {"sha256": sha256(content)}, path, fields)

    def release(self, library: str, version: str, content: bytes = b"{}", **custom: Any) -> None:
        self.add(library, version, content, **custom)
        self.publish(library)

    def replace_key(self, role: str, name: str) -> None:
        """Have the root name another key for a role, from its next version on."""
        for keyid in tuple(self.root.roles[role].keyids):
            self.root.revoke_key(keyid, role)
        self.signers[role] = [key(name)]
        self.root.add_key(key(name).public_key, role)

    # -- writing -----------------------------------------------------------------------------------------------------

    def signed(self, role: str) -> Signed:
        return self.roles[role] if role in self.roles else getattr(self, role)

    def encode(self, role: str, signed: Signed, signers: Iterable[Signer] | None = None) -> bytes:
        metadata: Metadata[Any] = Metadata(deepcopy(signed))
        for signer in self.signers[role] if signers is None else signers:
            metadata.sign(signer, append=True)
        return metadata.to_bytes()

    def file(self, name: str) -> Path:
        return self.path / metadata_path(self.view, name)

    def content(self, name: str) -> bytes:
        return self.file(name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        self.file(name).parent.mkdir(parents=True, exist_ok=True)
        self.file(name).write_bytes(content)

    def name(self, role: str) -> str:
        return "timestamp.json" if role == "timestamp" else f"{self.signed(role).version}.{role}.json"

    def write(self, role: str, signed: Signed | None = None, signers: Iterable[Signer] | None = None) -> None:
        self.put(self.name(role), self.encode(role, signed or self.signed(role), signers))

    def publish(self, *changed: str) -> None:
        """New versions of roles, and of the snapshot and timestamp above them; the first are version 1."""
        for role in changed:
            if f"{role}.json" in self.snapshot.meta and role != "snapshot":
                self.signed(role).version += 1
            self.write(role)
            self.list(role)
        self.commit()

    def list(self, role: str) -> None:
        self.snapshot.meta[f"{role}.json"] = MetaFile.from_data(
            self.signed(role).version, self.content(self.name(role)), ["sha256"]
        )

    def commit(self) -> None:
        if self.file("timestamp.json").exists():
            self.snapshot.version += 1
            self.timestamp.version += 1
        self.write("snapshot")
        self.name_snapshot()
        self.write("timestamp")

    def name_snapshot(self) -> None:
        content = self.content(self.name("snapshot"))
        self.timestamp.snapshot_meta = MetaFile.from_data(self.snapshot.version, content, ["sha256"])

    def next_root(self, *also: Signer) -> None:
        """The next root, signed by its own keys and by `also`, those of the one before if they are others."""
        self.root.version += 1
        self.write("root", signers=[*self.signers["root"], *also])

    # -- reading -----------------------------------------------------------------------------------------------------

    def copy(self, name: str) -> Path:
        """The repository as it is now, for a mirror that stands still."""
        return Path(shutil.copytree(self.path, self.path.with_name(name)))

    def read(self, path: str, limit: int) -> bytes:
        return DirectorySource(self.path).document(path, limit)


def instead(publisher: Publisher, contents: Mapping[str, bytes | None]) -> Any:
    """A mirror of it that serves other contents under some names; None: it has no such file."""

    def read(path: str, limit: int) -> bytes:
        name = path.rpartition("/")[2]
        if name not in contents:
            return publisher.read(path, limit)
        content = contents[name]
        if content is None:
            raise SourceError(f"{path} is not here", missing=True)
        return content

    return read
