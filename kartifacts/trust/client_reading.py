"""Reads verified metadata: whom it delegates to, what they have released, and that nothing is older than it was."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tuf.api.metadata import DelegatedRole, Key, Role, Root, Signed, Snapshot, T, TargetFile, Targets, Timestamp

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.layout import TIMESTAMP, View, check_name, metadata_path
from kartifacts.model.manifest import MAX_INDEX, Pin, Synced
from kartifacts.trust import signed as signed_metadata
from kartifacts.trust.client import Trusted, repository_id, view_of
from kartifacts.trust.client_session import MAX_METADATA, expired, kept
from kartifacts.trust.clock import tell_if_behind
from kartifacts.trust.released import Library, Released, check_library

MAX_PROVENANCE = 64 << 20  # bytes
_MAX_VERSION = 2**53  # what every reader of JSON keeps exactly
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_PUBLISHED = re.compile(rf"([0-9-]{{10}})(T{_CLOCK}(:[0-5][0-9](\.[0-9]{{1,9}})?)?(Z|[+-]{_CLOCK})?)?")


class Verified(NamedTuple):
    """Metadata whose signatures hold, as bytes; `roles` are those of libraries."""

    roots: Mapping[int, bytes]  # version → all from the root of trust to the newest
    timestamp: bytes
    snapshot: bytes
    targets: bytes
    roles: dict[str, bytes]

    @property
    def root(self) -> Root:
        return parse(self.roots[max(self.roots)], Root, "root.json")

    def signed(self) -> dict[str, Signed]:
        """Role → what was signed, of all that is in force."""
        return {
            "root": self.root,
            "timestamp": parse(self.timestamp, Timestamp, TIMESTAMP),
            "snapshot": parse(self.snapshot, Snapshot, "snapshot.json"),
            "targets": parse(self.targets, Targets, "targets.json"),
        } | {name: parse(data, Targets, f"{name}.json") for name, data in self.roles.items()}


def of_state(state: Path, root: bytes) -> Verified:
    """What a run of the updater has left, before it asks for any library."""
    first, last = (parse(data, Root, "root.json").version for data in (root, kept(state, "root")))
    history = state / "root_history"
    roots = {number: read_regular(history / f"{number}.root.json", MAX_METADATA) for number in range(first, last + 1)}
    return Verified(roots, kept(state, "timestamp"), kept(state, "snapshot"), kept(state, "targets"), {})


def parse(data: bytes, kind: type[T], what: str) -> T:
    """What a file of metadata has signed; read by the parser that verified it, since others may read it otherwise."""
    signed = signed_metadata.parse(data, kind, what).signed
    if type(signed.version) is not int or signed.version > _MAX_VERSION:
        raise VerificationError(f"{what} has the version {str(signed.version)[:100]!r}: expected a whole number of use")
    return signed


# -- who may sign what -------------------------------------------------------------------------------------------------


def delegated(targets: Targets) -> dict[str, DelegatedRole]:
    """Library → its role.  Each has one delegator, one directory, and the last word there, or nothing is believed."""
    if targets.targets:
        raise VerificationError(f"targets.json lists {next(iter(targets.targets))[:100]!r}: only libraries may release")
    delegations = targets.delegations
    if delegations is None:
        return {}
    if delegations.roles is None:
        raise VerificationError("targets.json delegates to bins, where each library has to have a role of its own")
    for name, role in delegations.roles.items():
        try:
            check_library(name)
        except ConfigError as error:
            raise VerificationError(f"targets.json delegates to a role of a bad name: {error.message}") from error
        if role.paths != [f"{name}/*/*"] or role.path_hash_prefixes is not None or not role.terminating:
            raise VerificationError(
                f"targets.json delegates to {name!r} otherwise than for its own releases, with the last word",
                expected=f"['{name}/*/*'], terminating",
                actual=f"{role.paths!r}{', terminating' if role.terminating else ''}"[:200],
            )
        _check_keys(role, delegations.keys, name)
    return dict(delegations.roles)


def _check_keys(role: Role, keys: Mapping[str, Key], name: str) -> None:
    """A key under two names would count twice towards a threshold."""
    known = [str(sorted(keys[keyid].keyval.items())) for keyid in role.keyids if keyid in keys]
    if len(set(known)) != len(known):
        raise VerificationError(f"{name} has one key under two names, which would count twice towards its threshold")


def chosen(verified: Verified, libraries: Sequence[str] | None, floor: Synced | None) -> list[str]:
    """The libraries to ask for: those that are named, or all that have released anything now or before."""
    listed = parse(verified.snapshot, Snapshot, "snapshot.json").meta
    known = delegated(parse(verified.targets, Targets, "targets.json"))
    if libraries is None:
        before = floor.libraries if floor is not None else {}
        return [name for name in known if f"{name}.json" in listed or name in before]
    for name in libraries:
        if name not in known or f"{name}.json" not in listed:
            there = ", ".join(sorted(known)) or "none"
            raise ConfigError(
                f"the library {name!r} has released nothing here yet"
                if name in known
                else f"nobody may release a library {name!r} here; there are: {there}",
                hint="--library names one of those that the repository's targets.json delegates to",
            )
    return list(dict.fromkeys(libraries))


def below(library: str) -> str:
    """Some name that only the role of a library can speak of."""
    return f"{library}/0/none"


# -- what it comes to --------------------------------------------------------------------------------------------------


def trusted(verified: Verified, root: bytes, floor: Synced | None) -> Trusted:
    """Everything that was asked for, after the last checks.

    Raises:
        VerificationError: it is of another view or lower than `floor`, or a library speaks of what is not its own.
    """
    signed = verified.signed()
    last, targets = verified.root, signed["targets"]
    assert isinstance(targets, Targets)
    _check_root(last, view_of(root), verified)
    roles = delegated(targets)
    keys = targets.delegations.keys if targets.delegations is not None else {}
    libraries = {
        name: _library(signed[name], roles[name], tuple(keys[keyid] for keyid in roles[name].keyids if keyid in keys))
        for name in verified.roles
    }
    seen = Synced(
        repository=repository_id(root),
        view=view_of(root),
        root=last.version,
        timestamp=signed["timestamp"].version,
        snapshot=signed["snapshot"].version,
        targets=targets.version,
        libraries={name: library.version for name, library in libraries.items()},
        expires=min(each.expires for each in signed.values()).isoformat().replace("+00:00", "Z"),
        at="",
    )
    if floor is not None:
        _check_floor(seen, floor, verified.roots, last)
    tell_if_behind(signed, libraries.values(), view_of(root))
    return Trusted(view_of(root), seen, libraries, _files(verified, seen, view_of(root)))


def check_fresh(verified: Verified, now: datetime | None) -> None:
    """Refuse what is expired at `now`."""
    if now is not None:
        for name, each in verified.signed().items():
            if each.is_expired(now):
                raise expired(name, each, now)


def _check_root(last: Root, view: View, verified: Verified) -> None:
    newest = view_of(verified.roots[last.version])
    if newest != view:
        raise VerificationError("a newer root is of another view than the root of trust", expected=view, actual=newest)
    if last.consistent_snapshot is not True:
        raise VerificationError("the root does not promise consistent snapshots, without which states could be mixed")
    for name, role in last.roles.items():
        _check_keys(role, last.keys, f"the role {name}")


def _library(signed: Signed, role: DelegatedRole, keys: tuple[Key, ...]) -> Library:
    assert isinstance(signed, Targets)
    if signed.delegations is not None and (signed.delegations.roles or signed.delegations.succinct_roles):
        raise VerificationError(f"{role.name}.json delegates further, so that a role could have two delegators")
    indexes: dict[str, TargetFile] = {}
    provenances: dict[str, TargetFile] = {}
    for path, target in signed.targets.items():
        version, kind = _release_and_kind(path, role.name)
        if kind == "index.json":
            indexes[version] = target
        elif kind == "provenance.json":
            provenances[version] = target
    releases = tuple(_released(role.name, each, indexes[each], provenances.get(each)) for each in indexes)
    return Library(role.name, signed.version, keys, role.threshold, releases)


def _release_and_kind(path: str, library: str) -> tuple[str, str]:
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != library:
        raise VerificationError(f"{library}.json lists {path[:150]!r}, which is not one of its own releases")
    try:
        return check_name(parts[1], "version"), check_name(parts[2], "file")
    except ConfigError as error:
        raise VerificationError(f"{library}.json lists {path[:150]!r}: {error.message}") from error


def _released(library: str, version: str, index: TargetFile, provenance: TargetFile | None) -> Released:
    what = f"{library} {version} in {library}.json"
    digest, size = _digest_and_size(index, MAX_INDEX, what)
    custom = index.unrecognized_fields.get("custom", {})
    channels, published = (
        (custom.get("channels", []), custom.get("published", "")) if isinstance(custom, dict) else (None, None)
    )
    if not isinstance(channels, list) or not all(isinstance(channel, str) for channel in channels):
        raise VerificationError(f"{what} has channels that are no list of names: {repr(channels)[:100]}")
    if not isinstance(published, str) or not (published == "" or _is_time(published)):
        raise VerificationError(f"{what} was published at no time of ISO 8601: {repr(published)[:100]}")
    return Released(
        Pin(library=library, version=version, sha256=digest, size=size),
        tuple(channels),
        published,
        None if provenance is None else _digest_and_size(provenance, MAX_PROVENANCE, f"the provenance of {what}"),
    )


def _is_time(text: str) -> bool:
    matched = _PUBLISHED.fullmatch(text)
    try:
        return matched is not None and date.fromisoformat(matched[1]).isoformat() == matched[1]
    except ValueError:  # the calendar has no such day
        return False


def _digest_and_size(target: TargetFile, limit: int, what: str) -> tuple[Digest, int]:
    # Another algorithm beside it would be checked by nobody, and one instead of it may be weak.
    if set(target.hashes) != {"sha256"}:
        raise VerificationError(
            f"{what} is listed by other hashes than sha256", expected="sha256", actual=", ".join(sorted(target.hashes))
        )
    if type(target.length) is not int or not 0 < target.length <= limit:
        raise VerificationError(f"{what} has {str(target.length)[:50]} bytes; at most {limit} are read")
    return parse_digest(target.hashes["sha256"], what=what), target.length


def _check_floor(seen: Synced, floor: Synced, roots: Mapping[int, bytes], last: Root) -> None:
    """Nothing may be lower than it was, unless its keys were changed: so one recovers from stolen ones."""
    if floor.repository != seen.repository:
        raise ConfigError("the lowest versions that will do were given for another root of trust")
    _not_lower("root", seen.root, floor.root, floor)
    then = parse(roots[floor.root], Root, "root.json") if floor.root in roots else last
    if not _replaced("timestamp", then, last):
        _not_lower("timestamp", seen.timestamp, floor.timestamp, floor)
        _not_lower("snapshot", seen.snapshot, floor.snapshot, floor)
    if not _replaced("snapshot", then, last):
        _not_lower("targets", seen.targets, floor.targets, floor)
        for name, version in seen.libraries.items():
            _not_lower(name, version, floor.libraries.get(name, 0), floor)


def _replaced(role: str, then: Root, last: Root) -> bool:
    """Whether what the keys of that time have signed is worth nothing any more."""
    known = {str(then.keys[keyid].keyval) for keyid in then.roles[role].keyids if keyid in then.keys}
    still = {keyid for keyid in last.roles[role].keyids if keyid in last.keys}
    return sum(str(last.keys[keyid].keyval) in known for keyid in still) < last.roles[role].threshold


def _not_lower(role: str, version: int, lowest: int, floor: Synced) -> None:
    if version < lowest:
        raise VerificationError(
            f"{role}.json is of version {version}, but the lock was made from version {lowest} "
            f"(synced {floor.at or 'earlier'})",
            expected=f"version {lowest} or newer",
            actual=f"version {version}",
            hint="the mirror went back to an older state; ask another, or its keeper",
        )


def _files(verified: Verified, seen: Synced, view: View) -> dict[str, bytes]:
    named = chain(
        ((f"{number}.root.json", data) for number, data in sorted(verified.roots.items())),
        ((f"{seen.libraries[name]}.{name}.json", data) for name, data in verified.roles.items()),
        (
            (f"{seen.targets}.targets.json", verified.targets),
            (f"{seen.snapshot}.snapshot.json", verified.snapshot),
            (TIMESTAMP, verified.timestamp),
        ),
    )
    return {metadata_path(view, name): data for name, data in named}
