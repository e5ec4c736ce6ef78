"""Reads one file of signed metadata, and writes and signs one: compact JSON, within what clients read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, cast

from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Signer
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import Metadata, Root, Signed, Snapshot, T, Targets, Timestamp
from tuf.api.serialization import DeserializationError, SerializationError
from tuf.ngclient.config import UpdaterConfig

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.layout import View

VIEW_FIELD = "dev.kartifacts.view"

_ROOT, _TARGETS = timedelta(days=3 * 365), timedelta(days=2 * 365)
_ONLINE: dict[View, dict[str, timedelta]] = {
    "online": {"snapshot": timedelta(days=30), "timestamp": timedelta(days=7)},
    "airgap": {"snapshot": timedelta(days=400), "timestamp": timedelta(days=400)},
}

# What a client reads at most; a longer file would lock all of them out.
_CLIENT = UpdaterConfig()
_LIMITS: dict[type[Signed], int] = {
    Root: _CLIENT.root_max_length,
    Targets: _CLIENT.targets_max_length,
    Snapshot: _CLIENT.snapshot_max_length,
    Timestamp: _CLIENT.timestamp_max_length,
}


def lifetime(role: str, view: View = "online") -> timedelta:
    """How long metadata of a role is good for; targets and libraries serve both views, so they have one."""
    return _ROOT if role == "root" else _ONLINE[view].get(role, _TARGETS)


def parse(content: bytes, kind: type[T], what: str) -> Metadata[T]:
    """Read metadata of a role without believing it."""
    metadata = parse_any(content, what)
    if not isinstance(metadata.signed, kind):
        raise VerificationError(f"{what} is a {metadata.signed.type}: expected {kind.__name__.lower()}")
    return metadata


def parse_any(content: bytes, what: str) -> Metadata[Any]:
    """Read metadata, of whichever role, without believing it."""
    try:
        return Metadata.from_bytes(content)
    except (DeserializationError, RecursionError) as error:
        check_parsed(error)
        cause = error.__cause__ or error
        said = f"it lacks {cause}" if isinstance(cause, KeyError) else cause
        raise VerificationError(f"{what} is not TUF metadata: {said}") from error


def check_parsed(error: BaseException) -> None:
    """Raise what lies behind `error` if it is a fault of this process, which says nothing of what was parsed.

    tuf calls whatever happens while it parses a fault of the metadata.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ImportError, MemoryError)):
            raise cause
        cause = cause.__cause__


def signed_bytes(metadata: Metadata[Any], what: str) -> bytes:
    """What signatures of metadata are over; a `VerificationError` if nothing can be, as over a fraction."""
    try:
        return metadata.signed_bytes
    except SerializationError as error:
        raise VerificationError(f"{what} cannot have been signed: {str(error.__cause__ or error)[-200:]}") from error


def view_in(root: bytes) -> View:
    """The view that a root is of."""
    view = parse(root, Root, "root").signed.unrecognized_fields.get(VIEW_FIELD)
    if not isinstance(view, str) or view not in _ONLINE:
        raise VerificationError(f"the root says {VIEW_FIELD} is {view!r:.100}: expected {' or '.join(_ONLINE)}")
    return view


def sign(
    signed: Signed, version: int, expires: datetime, signers: Sequence[Signer], what: str, *, enough: bool = True
) -> bytes:
    if enough and not signers:
        raise ConfigError(f"nobody signs {what!r}: no key of that role was given")
    signed.version = version
    signed.expires = expires.astimezone(timezone.utc)
    metadata: Metadata[Any] = Metadata(cast("Any", signed))
    add_signers(metadata, signers)
    return encode(metadata)


def add_signers(metadata: Metadata[Any], signers: Sequence[Signer]) -> None:
    content = signed_bytes(metadata, f"this {metadata.signed.type}")
    for signer in sorted(signers, key=lambda signer: str(signer.public_key.keyid)):
        key = signer.public_key
        try:
            signature = metadata.sign(signer, append=True)
            key.verify_signature(signature, content)
        except (UnsignedMetadataError, UnverifiedSignatureError) as error:
            raise ConfigError(
                f"the key {key.keyid[:8]} did not sign: {error}",
                hint="the signer must be reachable, and its private key must belong to the public key in keys.json",
            ) from error
    metadata.signatures = dict(sorted(metadata.signatures.items()))


def encode(metadata: Metadata[Any]) -> bytes:
    try:
        content = metadata.to_bytes()
    except SerializationError as error:
        raise ConfigError(f"this {metadata.signed.type} cannot be written: {error.__cause__ or error}") from error
    limit = _LIMITS[type(metadata.signed)]
    if len(content) > limit:
        raise ConfigError(
            f"this {metadata.signed.type} has {len(content)} bytes; clients read at most {limit}",
            hint="remove old versions of the library, or split it" if isinstance(metadata.signed, Targets) else None,
        )
    return content
