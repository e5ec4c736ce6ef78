"""Says in root and targets files who may sign for a role; pure, as all of signing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from securesystemslib.signer import Key, Signer
from tuf.api.metadata import DelegatedRole, Delegations, Role, Root, Targets

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.layout import View
from kartifacts.trust.released import TOP_LEVEL, check_library
from kartifacts.trust.signed import VIEW_FIELD, add_signers, encode, lifetime, parse_any, sign, signed_bytes


class Grant(NamedTuple):
    """Who may sign for a role: `threshold` of `keys`."""

    keys: tuple[Key, ...]
    threshold: int


def root_of(roles: Mapping[str, Grant], *, view: View, version: int, signers: Sequence[Signer], now: datetime) -> bytes:
    """A root of a view.  Few or no `signers` are no fault: others add their signatures with `add_signatures`."""
    if set(roles) != set(TOP_LEVEL):
        raise ConfigError(f"a root names the roles {', '.join(TOP_LEVEL)}; got {', '.join(sorted(roles))}")
    root = Root(
        keys=_keys(roles),
        roles={name: Role(*_role(name, grant)) for name, grant in sorted(roles.items())},
        unrecognized_fields={VIEW_FIELD: view},
    )
    return sign(root, version, now + lifetime("root"), signers, "root", enough=False)


def targets_of(libraries: Mapping[str, Grant], *, version: int, signers: Sequence[Signer], now: datetime) -> bytes:
    """The top-level targets: nothing but who releases which library.  A name has one role, so one delegator."""
    roles = {
        name: DelegatedRole(check_library(name), *_role(name, grant), terminating=True, paths=[f"{name}/*/*"])
        for name, grant in sorted(libraries.items())
    }
    targets = Targets(delegations=Delegations(_keys(libraries), roles))
    return sign(targets, version, now + lifetime("targets"), signers, "targets", enough=False)


def grants_of(delegator: bytes, what: str = "metadata") -> dict[str, Grant]:
    """Who may sign for each role that a root or targets file names."""
    signed = parse_any(delegator, what).signed
    if isinstance(signed, Root):
        roles: Mapping[str, Role] = signed.roles
        keys = signed.keys
    elif isinstance(signed, Targets):
        roles = (signed.delegations.roles or {}) if signed.delegations else {}
        keys = signed.delegations.keys if signed.delegations else {}
    else:
        raise VerificationError(f"{what} is a {signed.type}: only root and targets say who may sign")
    return {
        name: Grant(tuple(keys[keyid] for keyid in role.keyids if keyid in keys), role.threshold)
        for name, role in roles.items()
    }


def add_signatures(content: bytes, signers: Sequence[Signer], *, others: bytes | None = None) -> bytes:
    """The same metadata with the signatures of `signers`, and those that another copy of it has.

    Raises:
        VerificationError: the other copy says something else.
    """
    metadata = parse_any(content, "metadata")
    if others is not None:
        copy = parse_any(others, "the other copy")
        if signed_bytes(copy, "the other copy") != signed_bytes(metadata, "metadata"):
            raise VerificationError("the other copy is not the same metadata: what was signed there differs")
        metadata.signatures = {**copy.signatures, **metadata.signatures}
    add_signers(metadata, signers)
    return encode(metadata)


def signed_by(content: bytes) -> set[str]:
    """The ids of keys that metadata bears signatures of; whether they hold is for `check_signed` to say."""
    return set(parse_any(content, "metadata").signatures)


def _role(name: str, grant: Grant) -> tuple[list[str], int]:
    keyids = sorted({key.keyid for key in grant.keys})
    if len(keyids) != len(grant.keys):
        raise ConfigError(f"role {name!r} has the same key twice")
    if not 1 <= grant.threshold <= len(keyids):
        raise ConfigError(f"role {name!r} cannot need {grant.threshold} signatures of {len(keyids)} keys")
    return keyids, grant.threshold


def _keys(roles: Mapping[str, Grant]) -> dict[str, Key]:
    return {key.keyid: key for grant in roles.values() for key in grant.keys}
