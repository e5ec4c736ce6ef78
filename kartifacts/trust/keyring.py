"""A keyring directory: which keys there are, where their private halves lie, and the roots and targets made so far.

    keys.json                         by key id: the public key and the URI of its signer; and what is being rotated
    private/<role>-<id>.pem           private keys (PKCS8), if they are files of this keyring
    metadata/{N.root,N.targets}.json  signed files for the bucket; the roots say who signs what, and nothing else does
    airgap/N.root.json
    buckets.json                      where it has published to, and the newest timestamps there: nothing may go back

Private keys may lie elsewhere, or not be on this machine: what lacks them cannot sign, and can do all else.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
from securesystemslib.signer import Key, Signer

from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import check_trusted
from kartifacts.model.digest import strict_json
from kartifacts.model.layout import VIEWS, View, metadata_path
from kartifacts.trust.keygrants import Grant, grants_of
from kartifacts.trust.keysigner import Secret, is_encrypted, open_signer
from kartifacts.trust.released import TOP_LEVEL
from kartifacts.trust.signed import parse_any

KEYS = "keys.json"
BUCKETS = "buckets.json"
ELSEWHERE = (
    "if they were exchanged, or this role was left out, export a new keyring from the one where the keys were made: "
    "`kartifacts keys export RING OUT --roles ROLE,...`, with --replace over an older one"
)
_WATCHED = (KEYS, BUCKETS, "private", "metadata", "airgap")  # where others might change what is signed, or by what
_MAX_KEYS = 4 << 20  # bytes of keys.json
_MAX_METADATA = 5_000_000
_FILE = re.compile(r"([1-9][0-9]{0,17})\.(root|targets)\.json")


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One key: its public half as TUF writes it, and the URI of what signs by it; none if that is held elsewhere."""

    public: dict[str, Any]
    uri: str = ""


class Exchange(msgspec.Struct, forbid_unknown_fields=True):
    """Keys of a role that are good together until the old ones are taken away."""

    old: list[str]
    new: list[str]


class Listed(msgspec.Struct, forbid_unknown_fields=True):
    """The content of keys.json."""

    version: int
    keys: dict[str, Entry]
    exchanges: dict[str, Exchange] = {}  # by role, with its view
    encrypted: bool = False  # so new private keys are to be, too


def label(role: str, view: View) -> str:
    """How a role is called where both views are meant: their root, snapshot and timestamp have keys of their own."""
    return f"{view}:{role}" if is_per_view(role) else role


def is_per_view(role: str) -> bool:
    return role in TOP_LEVEL and role != "targets"


class Keyring:
    """A keyring as it was when it was loaded; its signed files are read when they are asked for."""

    def __init__(self, path: Path, listed: Listed, secret: Secret | None = None) -> None:
        self.path = path
        self.listed = listed
        self._secret = secret

    @classmethod
    def load(cls, path: Path, *, secret: Secret | None = None) -> Keyring:
        """Open a keyring.

        Args:
            secret: asked for the passphrase of a private key or the PIN of a token, by a name for it.

        Raises:
            ConfigError: it is none, it is damaged, or others may write to it.
        """
        try:
            for each in (path, *(path / name for name in _WATCHED)):
                check_trusted(each)
        except StoreError as error:
            raise ConfigError(f"the keyring cannot be trusted: {error.message}") from error
        return cls(path, _decode(_read(path / KEYS, _MAX_KEYS), path / KEYS), secret)

    def with_listed(self, listed: Listed) -> Keyring:
        """The same keyring after keys.json was changed."""
        return Keyring(self.path, listed, self._secret)

    # -- what was made

    def root(self, view: View) -> bytes:
        """The first root of a view, by which readers begin to trust."""
        return self._content(view, "root", min(self._versions(view, "root")))

    def numbered_root(self, view: View, number: int) -> bytes:
        return self._content(view, "root", number)

    def newest_root(self, view: View) -> bytes:
        return self._content(view, "root", max(self._versions(view, "root")))

    def targets(self) -> bytes:
        """The newest targets; both views have the same."""
        return self.content(self.targets_file())

    def staged(self, view: View) -> dict[str, bytes]:
        """What the bucket is to hold of this view, by file name: every root in order, and the newest targets."""
        files = {f"{number}.root.json": self._content(view, "root", number) for number in self._versions(view, "root")}
        number = max(self._versions("online", "targets"))
        return {**files, f"{number}.targets.json": self._content("online", "targets", number)}

    def file(self, view: View, name: str) -> Path:
        """Where a signed file lies in this directory."""
        return self.path / metadata_path(view, name)

    def files(self) -> list[Path]:
        """Where all signed files lie."""
        numbers = self._versions(VIEWS[0], "targets")
        targets = [self.file(VIEWS[0], f"{number}.targets.json") for number in numbers]
        return [*(path for view in VIEWS for path in self.roots(view)), *targets]

    def roots(self, view: View) -> list[Path]:
        """Where the roots of a view lie, in order."""
        return [self.file(view, f"{number}.root.json") for number in self._versions(view, "root")]

    def targets_file(self) -> Path:
        """Where the newest targets lie."""
        return self.file("online", f"{max(self._versions('online', 'targets'))}.targets.json")

    def content(self, path: Path) -> bytes:
        """A signed file, if it is the one that its name says."""
        content = _read(path, _MAX_METADATA)
        signed = parse_any(content, str(path)).signed
        if f"{signed.version}.{signed.type}.json" != path.name:
            raise VerificationError(f"{str(path)!r} says that it is version {signed.version} of {signed.type}")
        return content

    def _versions(self, view: View, role: str) -> list[int]:
        directory = self.file(view, "x").parent
        try:
            matches = [_FILE.fullmatch(name) for name in os.listdir(directory)]
        except OSError as error:
            raise ConfigError(f"cannot list {str(directory)!r}: {error.strerror or error}") from error
        found = sorted(int(match[1]) for match in matches if match and match[2] == role)
        if not found:
            raise ConfigError(f"the keyring {str(self.path)!r} holds no {role} of the view {view!r}")
        return found

    def _content(self, view: View, role: str, number: int) -> bytes:
        return self.content(self.file(view, f"{number}.{role}.json"))

    def buckets(self) -> dict[str, dict[View, int]]:
        """Where it has published to, and the newest timestamp of each view there."""
        path = self.path / BUCKETS
        if not os.path.lexists(path):
            return {}
        try:
            return msgspec.convert(strict_json(_read(path, _MAX_METADATA), what=str(path)), dict[str, dict[View, int]])
        except (msgspec.ValidationError, VerificationError) as error:
            raise ConfigError(f"{str(path)!r} is damaged: {error}", hint="restore it from a backup") from error

    # -- who signs

    def grant(self, role: str, view: View = "online") -> Grant:
        """Who may sign for a role, by the newest root or targets of this keyring."""
        delegator = self.newest_root(view) if role in TOP_LEVEL else self.targets()
        found = grants_of(delegator).get(role)
        if found is None:
            raise ConfigError(
                f"the keyring {str(self.path)!r} knows no library {role!r}",
                hint=f"kartifacts keys add-library {self.path} {role}",
            )
        return found

    def grants(self) -> dict[str, Grant]:
        """Who may sign for each role, by its label."""
        views = {label(role, view): self.grant(role, view) for view in VIEWS for role in TOP_LEVEL}
        return {**views, **self.libraries()}

    def exchange(self, role: str, view: View = "online") -> Exchange | None:
        """The exchange of a role's keys that is under way; one that was killed before it was staged is none."""
        found = self.listed.exchanges.get(label(role, view))
        keys = {key.keyid for key in self.grant(role, view).keys}
        return found if found is not None and keys & set(found.new) else None

    def libraries(self) -> dict[str, Grant]:
        return grants_of(self.targets())

    def signers(self, role: str, *, view: View = "online") -> list[Signer]:
        """Signers of all keys of a role that are here.  In a rotation, old and new ones sign together.

        Raises:
            ConfigError: they are fewer than the role needs; or one cannot be used, as with a wrong passphrase.
        """
        grant = self.grant(role, view)
        held = self.available(role, view=view)
        if len(held) < grant.threshold:
            raise ConfigError(
                f"the keyring {str(self.path)!r} cannot sign for {label(role, view)!r}: "
                f"{len(held)} of {grant.threshold} private keys are here",
                hint=f"keys of that role: {', '.join(key.keyid[:8] for key in grant.keys)}; {ELSEWHERE}",
            )
        return held

    def available(self, role: str, *, view: View = "online") -> list[Signer]:
        """Signers of the keys of a role that are here; there may be none."""
        return [self.signer(key) for key in self.grant(role, view).keys if self.holds(key.keyid)]

    def holds(self, keyid: str) -> bool:
        """Whether a key's private half is here, as far as can be told without asking a service for it."""
        entry = self.listed.keys.get(keyid)
        if entry is None or not entry.uri:
            return False
        path = self.private_file(keyid)
        return path is None or os.path.lexists(path)

    def private_file(self, keyid: str) -> Path | None:
        """The file of a key's private half; None if it is none."""
        scheme, _, rest = self.listed.keys[keyid].uri.partition(":")
        return self.path / rest if scheme == "file2" else None

    @property
    def encrypted(self) -> bool:
        """Whether new private keys have to be encrypted: it was made so, or one that is here is."""
        return self.listed.encrypted or any(
            path is not None and is_encrypted(path)
            for path in (self.private_file(keyid) for keyid in self.listed.keys if self.holds(keyid))
        )

    def signer(self, key: Key) -> Signer:
        """The signer of one key that is here."""
        uri = self.listed.keys[key.keyid].uri
        return open_signer(uri, key, directory=self.path, secret=self._secret)


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{str(path.parent)!r} is not a keyring: it has no {path.name}", hint="kartifacts keys init makes one"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error


def _decode(content: bytes, path: Path) -> Listed:
    try:
        listed = msgspec.convert(strict_json(content, what=str(path)), type=Listed)
        if listed.version != 1:
            raise VerificationError(f"{path} is of version {listed.version}: expected 1")
        for keyid, entry in listed.keys.items():
            public_key(keyid, entry)
            if ".." in Path(entry.uri.removeprefix("file2:")).parts:
                raise VerificationError(f"key {keyid[:16]!r} leads out of the keyring: {entry.uri!r}")
    except (msgspec.ValidationError, VerificationError) as error:
        raise ConfigError(
            f"the keyring is damaged: {error}",
            hint="restore keys.json; it holds no secret, so a backup may lie anywhere",
        ) from error
    return listed


def public_key(keyid: str, entry: Entry) -> Key:
    try:
        return Key.from_dict(keyid, msgspec.json.decode(msgspec.json.encode(entry.public)))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise VerificationError(f"key {keyid[:16]!r} is malformed: {error!r}") from error
