"""Makes signed metadata out of metadata, and checks one against the other: no function reads a file or a clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from securesystemslib.signer import Signer
from tuf.api.metadata import MetaFile, Root, Signed, Snapshot, T, TargetFile, Targets, Timestamp

from kartifacts.errors import ConfigError, PublishConflict, VerificationError
from kartifacts.model.layout import View, check_name, target_name
from kartifacts.trust.keygrants import grants_of
from kartifacts.trust.released import Released, check_library
from kartifacts.trust.signed import lifetime, parse, parse_any, sign, signed_bytes, view_in

_VERSIONED = re.compile(r"([1-9][0-9]{0,17})\.(.+\.json)")


# -- releases ----------------------------------------------------------------------------------------------------------


def role_with(
    current: bytes | None,
    library: str,
    *,
    version: int,
    signers: Sequence[Signer],
    now: datetime,
    add: Sequence[Released] = (),
    remove: Sequence[str] = (),
    channels: Mapping[str, Sequence[str]] | None = None,
) -> bytes:
    """The next metadata of a library's role.

    Args:
        current: what is public now; None for the first.
        add: new releases; one that is there already only gains channels and provenance.
        remove: versions that are listed no more; their bytes stay as long as somebody may still read them.
        channels: version → all channels that the release is in from now on.

    Raises:
        PublishConflict: a version is there already, with other content.
        ConfigError: a version to change is not there, or the result is too long for clients to read.
    """
    check_library(library)
    targets = _next(current, Targets, version, library) or Targets()
    if targets.delegations is not None:
        raise VerificationError(f"the role of library {library!r} hands its right on, which no library may")
    for gone in remove:
        _entry(targets, library, gone)
        for kind in ("index", "provenance"):
            targets.targets.pop(target_name(library, gone, kind), None)
    for release in add:
        _add(targets, library, release)
    for name, wanted in (channels or {}).items():
        entry = _entry(targets, library, name)
        entry.unrecognized_fields["custom"] = {**_custom(entry), "channels": _channels(wanted)}
    return sign(targets, version, now + lifetime(library), signers, library)


def _add(targets: Targets, library: str, release: Released) -> None:
    pin = release.pin
    if pin.library != library:
        raise ConfigError(f"a release of {pin.library!r} cannot be listed by the role of {library!r}")
    index = target_name(library, pin.version)
    before = targets.targets.get(index)
    earlier = _custom(before) if before is not None else {}
    channels = _channels([*earlier.get("channels", ()), *release.channels])
    custom = {"published": release.published, **earlier, "channels": channels}
    _put(targets, TargetFile(pin.size, {"sha256": pin.sha256}, index, {"custom": custom}))
    if release.provenance is not None:
        digest, size = release.provenance
        _put(targets, TargetFile(size, {"sha256": digest}, target_name(library, pin.version, "provenance")))


def _put(targets: Targets, file: TargetFile) -> None:
    before = targets.targets.get(file.path)
    if before is not None and (before.hashes, before.length) != (file.hashes, file.length):
        raise PublishConflict(
            f"{file.path} is released with sha256 {before.hashes.get('sha256')}, and would become {file.hashes}",
            hint="a version never changes its content: release under another version",
        )
    targets.targets[file.path] = file


def _entry(targets: Targets, library: str, version: str) -> TargetFile:
    found = targets.targets.get(target_name(library, version))
    if found is None:
        raise ConfigError(f"{library} {version} is not among the releases of {library!r}")
    return found


def _custom(entry: TargetFile) -> dict[str, Any]:
    custom = entry.custom
    return custom if isinstance(custom, dict) else {}


def _channels(names: Iterable[str]) -> list[str]:
    return sorted({check_name(name, "channel") for name in names})


# -- what is current ---------------------------------------------------------------------------------------------------


def snapshot_of(
    current: bytes | None,
    roles: Mapping[str, bytes],
    *,
    version: int,
    signers: Sequence[Signer],
    view: View,
    now: datetime,
) -> bytes:
    """The next snapshot of a view: what the `current` one lists, with `roles` in place of their earlier versions.

    Args:
        roles: content by file name with its version (``3.kartifacts.json``, ``2.targets.json``).

    Raises:
        PublishConflict: a role would go back to an older version, or have two contents in one.
    """
    snapshot = _next(current, Snapshot, version, "snapshot") or Snapshot(meta={})
    for name, content in roles.items():
        number, file = _named(name)
        if parse(content, Targets, name).signed.version != number:
            raise VerificationError(f"{name} says that it is another version")
        found = MetaFile.from_data(number, content, ["sha256"])
        before = snapshot.meta.get(file)
        # Clients refuse a role that goes back, and what is public under a version may be in their hands.
        if before is not None and (before.version > number or (before.version == number and before != found)):
            raise PublishConflict(
                f"the snapshot lists version {before.version} of {file!r}; other content of version {number} came"
            )
        snapshot.meta[file] = found
    if "targets.json" not in snapshot.meta:
        raise ConfigError("a snapshot has to list the targets role")
    return sign(snapshot, version, now + lifetime("snapshot", view), signers, "snapshot")


def timestamp_of(
    current: bytes | None,
    snapshot: bytes,
    *,
    version: int,
    signers: Sequence[Signer],
    view: View,
    now: datetime,
) -> bytes:
    """The next timestamp of a view, by which `snapshot` becomes what clients see.

    Raises:
        PublishConflict: it would lead clients back to an older snapshot.
    """
    number = parse(snapshot, Snapshot, "snapshot").signed.version
    found = MetaFile.from_data(number, snapshot, ["sha256"])
    before = _next(current, Timestamp, version, "timestamp")
    if before is not None and before.snapshot_meta.version > number:
        raise PublishConflict(f"snapshot {before.snapshot_meta.version} is public; {number} is older")
    return sign(Timestamp(snapshot_meta=found), version, now + lifetime("timestamp", view), signers, "timestamp")


# -- checking ----------------------------------------------------------------------------------------------------------


def check_signed(delegator: bytes, role: str, content: bytes, what: str) -> None:
    """Refuse metadata that lacks signatures by what `delegator` (a root or targets file) asks of `role`.

    Raises:
        VerificationError: naming how many of how many hold.
    """
    signed = parse_any(delegator, "the delegator").signed
    if not isinstance(signed, (Root, Targets)):
        raise VerificationError(f"a {signed.type} cannot say who signs {what}")
    metadata = parse_any(content, what)
    over = signed_bytes(metadata, what)
    try:
        result = signed.get_verification_result(role, over, metadata.signatures)
    except ValueError as error:
        raise VerificationError(f"{what}: {signed.type} {signed.version} names no role {role!r}") from error
    if not result:
        raise VerificationError(
            f"{what} has {len(result.signed)} of {result.threshold} signatures that {signed.type} {signed.version} "
            f"asks of role {role!r}",
            expected=f"{result.threshold} of {', '.join(keyid[:8] for keyid in {**result.signed, **result.unsigned})}",
            actual=", ".join(keyid[:8] for keyid in result.signed) or "none",
            hint="kartifacts keys sign adds a signature",
        )


def check_overlap(delegator: bytes, public: Mapping[str, bytes]) -> None:
    """Refuse a new root or targets file that readers could not combine with what is public now.

    Args:
        delegator: the new root or targets file.
        public: role → what is public of it now.  Its own role among them (``root`` for a root) is the version before
            it: a root follows that by one, and is signed by both.

    Raises:
        ConfigError: what is public would not hold under it; the message says which role must be signed anew first.
        VerificationError: it lacks signatures itself.
    """
    signed = parse_any(delegator, "the new file").signed
    name = f"{signed.version}.{signed.type}.json"
    if isinstance(signed, Root):
        check_signed(delegator, "root", delegator, name)
    before = public.get(signed.type)
    if before is not None:
        _check_follows(delegator, signed, before, name)
    for role, grant in grants_of(delegator).items():
        if role not in public or role == signed.type:
            continue
        try:
            check_signed(delegator, role, public[role], f"the public {role}")
        except VerificationError as error:
            raise ConfigError(
                f"{name} comes too early: {error.message}; readers would fail until {role!r} is signed by the new keys",
                hint=f"sign it first by the keys that {name} names ({grant.threshold} of them): "
                "`kartifacts timestamp refresh` does so for timestamp and snapshot, a publish for a library",
            ) from error


def _check_follows(delegator: bytes, signed: Signed, before: bytes, name: str) -> None:
    earlier = parse_any(before, "the public version").signed
    if isinstance(signed, Root):
        if view_in(delegator) != view_in(before):
            raise ConfigError(f"{name} is the root of the other view")
        if signed.version != earlier.version + 1:
            raise ConfigError(f"{name} cannot follow root {earlier.version}: readers go from one version to the next")
        check_signed(before, "root", delegator, name)
    elif signed.version <= earlier.version and delegator != before:
        raise PublishConflict(f"{name} is not newer than version {earlier.version}, which is public")


def _next(current: bytes | None, kind: type[T], version: int, what: str) -> T | None:
    if current is None:
        return None
    signed = parse(current, kind, f"the current {what}").signed
    if version <= signed.version:
        raise PublishConflict(f"version {signed.version} of {what!r} is there already: {version} cannot follow it")
    return signed


def _named(name: str) -> tuple[int, str]:
    match = _VERSIONED.fullmatch(name)
    if match is None:
        raise ConfigError(f"{name!r} is no name of a metadata file: expected VERSION.ROLE.json")
    return int(match[1]), match[2]
