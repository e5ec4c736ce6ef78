"""Decides which roles of libraries are signed anew though nothing of them changes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.publish.public import Public
from kartifacts.trust.keygrants import grants_of, signed_by
from kartifacts.trust.signed import lifetime, parse_any
from kartifacts.trust.signing import check_signed

if TYPE_CHECKING:
    from kartifacts.publish.staged import Warn
    from kartifacts.trust.keyring import Keyring


def must_be(library: str, current: bytes, targets: bytes, public: Public, warn: Warn) -> bool:
    """Whether a role lacks signatures that new targets ask for."""
    try:
        check_signed(targets, library, current, library)
    except VerificationError as error:
        before = public.file("targets")
        known = grants_of(before)[library].keys if before is not None else ()
        # In an exchange of two steps the new keys were public before, and who held them has signed.
        if {key.keyid for key in grants_of(targets)[library].keys} - {key.keyid for key in known}:
            warn(f"{error.message}; it is signed anew as it is: look whether all its releases are yours")
        return True
    return False


def may_be(library: str, current: bytes, targets: bytes, keyring: Keyring, now: datetime) -> bool:
    """Whether it would be well to sign a role anew: its life is nearly over, or a new key is to sign beside the old."""
    if parse_any(current, library).signed.expires - now < lifetime(library) / 4:
        return True
    exchange = keyring.listed.exchanges.get(library)
    if exchange is None:
        return False
    known = {key.keyid for key in grants_of(targets)[library].keys}
    new = {keyid for keyid in exchange.new if keyid in known and keyring.holds(keyid)}
    return not new <= signed_by(current)


def warn_if_expired(library: str, current: bytes, now: datetime, error: ConfigError, warn: Warn) -> None:
    """Say of a role that could not be signed anew that it expired: it stops nobody but its own readers."""
    signed = parse_any(current, library).signed
    if signed.is_expired(now):
        warn(
            f"the role of library {library!r} expired at {signed.expires:%Y-%m-%dT%H:%M:%SZ}, so who reads it, or all "
            f"libraries at once, is refused; it was not signed anew: {error.message}.  `kartifacts timestamp refresh` "
            "does so with its keys, or its next release; `kartifacts keys remove-library` takes it out"
        )
