"""Refuses to build on, export or hand out signed files of a keyring that were changed after they were signed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from securesystemslib.exceptions import UnverifiedSignatureError

from kartifacts.errors import VerificationError
from kartifacts.model.layout import VIEWS
from kartifacts.trust.keygrants import grants_of
from kartifacts.trust.keyring import Keyring
from kartifacts.trust.signed import parse_any, signed_bytes
from kartifacts.trust.signing import check_signed


def check_sound(keyring: Keyring) -> None:
    """Check all roots, each by the one before it and itself, and the newest targets by the newest roots.

    A file may wait for signatures of keys that are elsewhere, whose holders look at it before they sign.

    Raises:
        VerificationError: one was changed, or lacks the signature of a key that is here.
    """
    newest = []
    for view in VIEWS:
        before: list[bytes] = []
        for path in keyring.roots(view):
            content = keyring.content(path)
            _check(keyring, path, content, [*before, content])
            before = [content]
        newest += before
    path = keyring.targets_file()
    _check(keyring, path, keyring.content(path), newest)


def _check(keyring: Keyring, path: Path, content: bytes, delegators: Sequence[bytes]) -> None:
    signed = parse_any(content, str(path)).signed
    check_unchanged(path, content, delegators)
    for delegator in delegators:
        try:
            check_signed(delegator, signed.type, content, str(path))
        except VerificationError as error:
            signatures = parse_any(content, str(path)).signatures
            for key in grants_of(delegator)[signed.type].keys:
                if keyring.holds(key.keyid) and key.keyid not in signatures:
                    raise VerificationError(
                        f"{error.message}; key {key.keyid[:8]} is here and has not signed it, so somebody else made it",
                        hint=f"look at what it says; then `kartifacts keys sign {path} --keys {keyring.path}`",
                    ) from error


def check_unchanged(path: Path, content: bytes, delegators: Sequence[bytes]) -> None:
    """Refuse a file that bears a signature, of a key that is known, over something else."""
    metadata = parse_any(content, str(path))
    over = signed_bytes(metadata, str(path))
    for key in [key for delegator in delegators for key in grants_of(delegator)[metadata.signed.type].keys]:
        signature = metadata.signatures.get(key.keyid)
        try:
            if signature is not None:
                key.verify_signature(signature, over)
        except UnverifiedSignatureError as error:
            raise VerificationError(
                f"{str(path)!r} was changed after key {key.keyid[:8]} had signed it",
                hint="put back the file that was signed, from another copy of the keyring or what is public",
            ) from error
