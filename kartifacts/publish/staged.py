"""What a keyring holds for a bucket that is not public there yet, and which of its keys sign for what is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.layout import View, metadata_path
from kartifacts.publish.buckets import Bucket
from kartifacts.publish.public import Public
from kartifacts.trust.keygrants import Grant, grants_of
from kartifacts.trust.keyring import ELSEWHERE
from kartifacts.trust.signing import check_overlap, check_signed

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

    from kartifacts.trust.keyring import Keyring


Warn = Callable[[str], None]


class Once:
    """Says each thing once, however often it is told."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._say("%s", message)


class File(NamedTuple):
    """Metadata under its number."""

    version: int
    content: bytes


def roots_are_public(bucket: Bucket, keyring: Keyring, view: View) -> bool:
    """Whether the newest root is, so that all are."""
    return bucket.size(metadata_path(view, f"{_of(keyring, view, 'root')[-1].version}.root.json")) is not None


def put_roots(bucket: Bucket, keyring: Keyring, public: Public, warn: Warn) -> ConfigError | None:
    """Publish the roots of a view, up to one that comes too early; then say why it does."""
    found = {role: public.file(role) for role in ("root", "timestamp", "snapshot", "targets")}
    held = {role: content for role, content in found.items() if content is not None}
    for version, content in _of(keyring, public.view, "root"):
        if version <= public.version("root"):
            continue
        name = f"{version}.root.json"
        try:
            check_overlap(content, held)
        except ConfigError as early:
            return early
        except VerificationError as error:
            warn(f"{name} of the view {public.view} stays in the keyring: {error.message}")
            return None
        bucket.put_if_absent(metadata_path(public.view, name), content)
        held["root"] = content
    return None


def targets(keyring: Keyring, online: Public, others: Callable[[], Sequence[Public]], warn: Warn) -> File:
    """The targets that are to be public: the newest of the keyring, once all views let its signers sign.

    Raises:
        ConfigError: none are public, and the keyring holds none.
        VerificationError: none are public, and those of the keyring lack signatures.
    """
    current = online.file("targets")
    staged = [file for file in _of(keyring, "online", "targets") if file.version > online.version("targets")]
    views = (online, *others()) if staged else ()
    for file in reversed(staged):
        try:
            for public in views:
                what = f"{file.version}.targets.json of the view {public.view}"
                check_signed(newest_root(keyring, public), "targets", file.content, what)
        except VerificationError as error:
            if current is None:
                raise
            warn(f"{file.version}.targets.json stays in the keyring: {error.message}")
            continue
        return file
    if current is None:
        raise ConfigError("the keyring holds no targets to begin with", hint="kartifacts keys init makes them")
    return File(online.version("targets"), current)


def newest_root(keyring: Keyring, public: Public) -> bytes:
    """The newest that is public; before the first timestamp, of those that were just put there."""
    root = public.file("root")
    return root if root is not None else _of(keyring, public.view, "root")[-1].content


def _of(keyring: Keyring, view: View, role: str) -> list[File]:
    staged = keyring.staged(view).items()
    return sorted(File(int(name.split(".")[0]), content) for name, content in staged if f".{role}." in name)


# -- who signs ---------------------------------------------------------------------------------------------------------


def signers_of_view(keyring: Keyring, role: str, public: Public) -> list[Signer]:
    """All that the public root knows, and those that the newest root of the keyring does, which is to come."""
    known = signers(keyring, role, grants_of(newest_root(keyring, public))[role])
    ids = {signer.public_key.keyid for signer in known}
    coming = keyring.available(role, view=public.view)
    return [*known, *(signer for signer in coming if signer.public_key.keyid not in ids)]


def signers(keyring: Keyring, role: str, grant: Grant) -> list[Signer]:
    """Signers of the keys that may sign for a role, as far as they are in the keyring.

    Raises:
        ConfigError: those are too few.
    """
    held = [keyring.signer(key) for key in grant.keys if keyring.holds(key.keyid)]
    if len(held) < grant.threshold:
        raise ConfigError(
            f"the keyring {str(keyring.path)!r} cannot sign for {role!r}: "
            f"{len(held)} of {grant.threshold} private keys are here",
            hint=f"keys that may sign for it: {', '.join(key.keyid[:8] for key in grant.keys)}; {ELSEWHERE}",
        )
    return held
