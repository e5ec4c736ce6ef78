"""Makes changes of signed metadata public, by one compare-and-swap of timestamp.json; whoever loses it begins anew.

1. roots of the keyring that are not public yet, as far as what is public holds under them too
2. N+1.<library>.json, for both views            create-once; a number that is taken is left behind
3. M+1.snapshot.json                             create-once
4. all that is newly released is there, and a reader who would see the new timestamp believes it
5. timestamp.json, if it is still the one of before                          now it is public
6. the same of the view `airgap`, which lists what `online` lists
7. index.json
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from tuf.api.metadata import MetaFile, Snapshot

from kartifacts.errors import ConfigError, PublishConflict, VerificationError
from kartifacts.model.layout import TIMESTAMP, View, metadata_path
from kartifacts.model.manifest import Synced
from kartifacts.publish import continuity, renewal, staged
from kartifacts.publish.buckets import Bucket, Raced, Unlisted
from kartifacts.publish.oci_index import change_index, reconciled
from kartifacts.publish.public import Public, read_as_reader, read_public
from kartifacts.trust.keygrants import grants_of, signed_by
from kartifacts.trust.released import Released
from kartifacts.trust.signed import lifetime, parse, parse_any
from kartifacts.trust.signing import check_signed, role_with, snapshot_of, timestamp_of

if TYPE_CHECKING:
    from kartifacts.trust.keyring import Keyring

log = logging.getLogger(__name__)

_MANY = 100  # objects, from which on they are listed instead of asked for one by one
_ROUNDS = 200  # races in a row that one publisher may lose, and numbers that others may have taken


class Edit(NamedTuple):
    """What is to change in the role of a library; nothing, if all is as it should be."""

    add: Sequence[Released] = ()
    remove: Sequence[str] = ()
    channels: Mapping[str, Sequence[str]] = {}
    anew: bool = False  # sign, though nothing changes


Change = Callable[[Sequence[Released]], Edit]
"""Decides on the releases of a library as they are public; asked again after each lost race."""


def commit(
    bucket: Bucket,
    keyring: Keyring,
    changes: Mapping[str, Change],
    *,
    needs: Mapping[str, int] | None = None,
    ready: Callable[[], None] = lambda: None,
    now: datetime | None = None,
) -> dict[View, Synced]:
    """Change the roles of libraries, together; and bring all that was left undone up to them.

    Args:
        changes: by library.
        needs: path → size of all that must be there before it becomes public.
        ready: called right before something becomes public; it raises if that must not be.

    Returns:
        What a reader who knows only the first root sees afterwards, by view.

    Raises:
        ConfigError: a library is not in the targets that are public or staged, or a key is not here.
        PublishConflict: a version is there with other content; `Raced`, if others were faster all the time.
        VerificationError: what is public does not hold, or what would become public is not complete.
        SourceError: the bucket cannot be written or read.
    """
    writer = _Writer(bucket, keyring, needs or {}, ready, now)
    writer.check_goes_on()
    writer.put_roots()
    writer.round(changes)
    writer.finish_rotation()
    return writer.seen_by_readers(changes)


def refresh_timestamp(
    bucket: Bucket,
    keyring: Keyring,
    views: Collection[View] | None = None,
    *,
    libraries: Collection[str] = (),
    clock_is_right: bool = False,
    now: datetime | None = None,
) -> dict[View, Synced]:
    """Sign the timestamps of views anew, and what grows old: snapshots past half of their life, roles of libraries in
    the last quarter of theirs, if their keys are here; see `commit`.

    Args:
        libraries: whose roles are signed anew however old they are.
        clock_is_right: though what is public was signed later than now.

    Raises:
        ConfigError: nothing is public there, so it is the wrong place; or a key is not here.
    """
    continuity.check_begun(bucket)
    writer = _Writer(bucket, keyring, {}, lambda: None, now)
    writer.check_goes_on(clock_is_right=clock_is_right)
    writer.put_roots()
    writer.round({library: _anew(library) for library in libraries}, anew=views or writer.views)
    writer.finish_rotation()
    return writer.seen_by_readers({})


def _anew(library: str) -> Change:
    def change(current: Sequence[Released]) -> Edit:
        if not current:
            raise ConfigError(f"library {library!r} has released nothing here, so there is nothing to sign anew")
        return Edit(anew=True)

    return change


def publish_staged(bucket: Bucket, keyring: Keyring, *, now: datetime | None = None) -> dict[View, Synced]:
    """Make the roots and targets of a keyring public that are not yet; see `commit`."""
    return commit(bucket, keyring, {}, now=now)


def check_change(
    bucket: Bucket, keyring: Keyring, changes: Mapping[str, Change], *, now: datetime | None = None
) -> None:
    """Raise what `commit` would raise, as far as that can be told before anything is sent."""
    writer = _Writer(bucket, keyring, {}, lambda: None, now)
    writer.warn = log.debug  # `commit` is about to say the same
    writer.check_goes_on()
    public = writer.public("online")
    targets = writer.targets(public)
    for library, change in changes.items():
        _check_delegated(library, targets.content)
        staged.signers(keyring, library, grants_of(targets.content)[library])
        change(public.releases(library))


class _Writer:
    """One publisher with its keys."""

    def __init__(
        self,
        bucket: Bucket,
        keyring: Keyring,
        needs: Mapping[str, int],
        ready: Callable[[], None],
        now: datetime | None,
    ) -> None:
        self.bucket = bucket
        self.keyring = keyring
        self.needs = needs
        self.ready = ready
        self.now = now or datetime.now(timezone.utc)
        self.warn: staged.Warn = staged.Once(log.warning)
        # Who signs for readers that are online need not hold the keys of the other view.
        self.views: list[View] = ["online"]
        if keyring.available("timestamp", view="airgap"):
            self.views.append("airgap")

    def public(self, view: View) -> Public:
        return read_public(self.bucket, self.keyring, view, self.now)

    def check_goes_on(self, *, clock_is_right: bool = False) -> None:
        continuity.check_goes_on(self.bucket, self.keyring, self.views, self.now, clock_is_right=clock_is_right)

    def put_roots(self) -> ConfigError | None:
        """Publish the roots that are staged, up to one that comes too early; then say why it does."""
        early = None
        for view in self.views:
            if not staged.roots_are_public(self.bucket, self.keyring, view):
                early = staged.put_roots(self.bucket, self.keyring, self.public(view), self.warn) or early
        return early

    def finish_rotation(self) -> None:
        """Sign what is public by the keys of today, until no staged root comes too early."""
        last = ""
        while (early := self.put_roots()) is not None:
            if early.message == last:
                raise early
            last = early.message
            self.round({}, anew=self.views)

    def targets(self, online: Public) -> staged.File:
        """The targets that are to be public; both views have the same."""
        return staged.targets(
            self.keyring, online, lambda: [self.public(view) for view in self.views if view != "online"], self.warn
        )

    # -- one change

    def round(self, changes: Mapping[str, Change], *, anew: Collection[View] = ()) -> None:
        """Change the view online, then bring the other up to it; `anew`: sign these, whether they change or not."""
        self._until_won(lambda: self._change_online(changes, anew="online" in anew))
        if "airgap" in self.views:
            self._until_won(lambda: self._follow(anew="airgap" in anew))

    def _until_won(self, attempt: Callable[[], None]) -> None:
        for number in range(1, _ROUNDS + 1):
            try:
                return attempt()
            except Raced as raced:
                if number == _ROUNDS:
                    raise
                log.info("another publisher was faster, attempt %d: %s", number, raced.message)
        raise AssertionError("unreachable")

    def _change_online(self, changes: Mapping[str, Change], *, anew: bool) -> None:
        public = self.public("online")
        targets = self.targets(public)
        roles: dict[str, bytes] = {}
        if targets.version != public.version("targets"):
            self._put(self.views, "targets", targets)
            roles[f"{targets.version}.targets.json"] = targets.content
        grants = grants_of(targets.content)
        # Those that do not change may have to be signed anew all the same.
        others = public.trusted.libraries if public.trusted is not None else {}
        for library in dict.fromkeys([*changes, *(name for name in others if name in grants)]):
            _check_delegated(library, targets.content)
            edit = changes[library](public.releases(library)) if library in changes else Edit()
            made = self._next_role(library, public, targets.content, edit)
            if made is not None:
                roles[f"{made.version}.{library}.json"] = made.content
        self._commit(public, roles, anew=anew)

    def _next_role(self, library: str, public: Public, targets: bytes, edit: Edit) -> staged.File | None:
        """The role with an edit made, put where readers will look for it; None if it stays as it is."""
        current = public.file(library)
        if any(edit):
            return self._put_role(library, public, targets, edit)
        if current is None:
            return None
        if renewal.must_be(library, current, targets, public, self.warn):
            return self._put_role(library, public, targets, edit)
        if renewal.may_be(library, current, targets, self.keyring, self.now):
            try:
                return self._put_role(library, public, targets, edit)
            except ConfigError as error:  # its keys are not here, or do not open
                renewal.warn_if_expired(library, current, self.now, error, self.warn)
        return None

    def _put_role(self, library: str, public: Public, targets: bytes, edit: Edit) -> staged.File:
        current = public.file(library)
        signers = staged.signers(self.keyring, library, grants_of(targets)[library])

        def make(version: int) -> bytes:
            content = role_with(
                current,
                library,
                version=version,
                signers=signers,
                now=self.now,
                add=edit.add,
                remove=edit.remove,
                channels=edit.channels,
            )
            check_signed(targets, library, content, f"{version}.{library}.json")
            return content

        return self._put_next(self.views, library, public.version(library) + 1, make)

    def _follow(self, *, anew: bool) -> None:
        """List in the view airgap what the view online lists."""
        public = self.public("airgap")
        online = self.public("online")  # read second, so it is never older than what the other was made of
        wanted, listed = _listed(online), _listed(public)
        roles: dict[str, bytes] = {}
        for file, meta in wanted.items():
            if file in listed and listed[file].version >= meta.version:
                continue
            name = f"{meta.version}.{file}"
            content = self.bucket.get(metadata_path("online", name))
            if MetaFile.from_data(meta.version, content, ["sha256"]) != meta:
                raise VerificationError(f"{name} in {self.bucket.name} is not what the public snapshot lists")
            self.bucket.put_if_absent(metadata_path("airgap", name), content)
            roles[name] = content
        self._commit(public, roles, anew=anew)

    def _commit(self, public: Public, roles: Mapping[str, bytes], *, anew: bool) -> None:
        """Make a view list `roles`; nothing is done if it does already, unless it is to be signed `anew` or expired."""
        view, current = public.view, public.file("snapshot")
        if not roles and not anew and not {"timestamp", "snapshot"} & {*public.expired(self.now)}:
            return
        if roles or current is None or self._is_due(view, current):
            signers = staged.signers_of_view(self.keyring, "snapshot", public)

            def make(version: int) -> bytes:
                return snapshot_of(current, roles, version=version, signers=signers, view=view, now=self.now)

            current = self._put_next([view], "snapshot", public.version("snapshot") + 1, make).content
        timestamp = timestamp_of(
            public.file("timestamp"),
            current,
            version=public.version("timestamp") + 1,
            signers=staged.signers_of_view(self.keyring, "timestamp", public),
            view=view,
            now=self.now,
        )
        if view == "online":
            _check_there(self.bucket, self.needs)
        read_as_reader(self.bucket, self.keyring, view, self.now, timestamp=timestamp)
        self.ready()
        self.bucket.swap(metadata_path(view, TIMESTAMP), timestamp, public.before)
        log.info("timestamp %d of the view %s is public in %s", public.version("timestamp") + 1, view, self.bucket.name)

    def _is_due(self, view: View, snapshot: bytes) -> bool:
        """Whether a snapshot is past half of its life, or a key of today has not signed it."""
        left = parse_any(snapshot, "the snapshot").signed.expires - self.now
        keys = {signer.public_key.keyid for signer in self.keyring.available("snapshot", view=view)}
        return left < lifetime("snapshot", view) / 2 or not keys <= signed_by(snapshot)

    # -- files

    def _put_next(self, views: Sequence[View], role: str, first: int, make: Callable[[int], bytes]) -> staged.File:
        """Put a role's metadata under the first number that is free: others may be publishing, or have been killed."""
        for version in itertools.count(first):
            made = staged.File(version, make(version))
            try:
                self._put(views, role, made)
            except PublishConflict:
                if version == first + _ROUNDS:
                    raise
                continue
            return made
        raise AssertionError("unreachable")

    def _put(self, views: Sequence[View], role: str, file: staged.File) -> None:
        for view in views:
            self.bucket.put_if_absent(metadata_path(view, f"{file.version}.{role}.json"), file.content)

    # -- afterwards

    def seen_by_readers(self, libraries: Collection[str]) -> dict[View, Synced]:
        """List the libraries in index.json as readers see them, who are to see both views."""
        seen: dict[View, Synced] = {}

        def listed(current: bytes | None) -> bytes:
            trusted = read_as_reader(self.bucket, self.keyring, "online", self.now)  # so it is newer than `current`
            seen["online"] = trusted.seen
            releases = {name: found.releases for name, found in trusted.libraries.items()}
            pins = {name: [release.pin for release in releases.get(name, ())] for name in libraries}
            said = [release for name in libraries for release in releases.get(name, ())]
            return reconciled(current, pins, self.bucket.name, said=said)

        if libraries:
            change_index(self.bucket, listed)
        for view in self.views:
            if view not in seen:
                seen[view] = read_as_reader(self.bucket, self.keyring, view, self.now).seen
        continuity.remember(self.keyring, self.bucket, seen, self.warn)
        return seen


def _listed(public: Public) -> Mapping[str, MetaFile]:
    snapshot = public.file("snapshot")
    return parse(snapshot, Snapshot, "the snapshot").signed.meta if snapshot is not None else {}


def _check_delegated(library: str, targets: bytes) -> None:
    known = grants_of(targets)
    if library not in known:
        raise ConfigError(
            f"nobody may release a library {library!r} here; there are: {', '.join(sorted(known)) or 'none'}",
            hint="kartifacts keys add-library gives it a key",
        )


def _check_there(bucket: Bucket, needs: Mapping[str, int]) -> None:
    """Refuse to make public what is not complete: an object may be gone since it was sent."""
    listed = _listed_sizes(bucket) if len(needs) > _MANY else {}
    for path, size in needs.items():
        found = size if listed.get(path) == size else bucket.size(path)
        if found != size:
            raise VerificationError(
                f"{bucket.name} does not hold what is to become public: {path} has {found} bytes of {size}"
                if found is not None
                else f"{bucket.name} does not hold what is to become public: {path} is gone",
                hint="publish again; nothing was made public",
            )


def _listed_sizes(bucket: Bucket) -> dict[str, int]:
    """The sizes of all blobs, a thousand in a request; nothing where they cannot be listed."""
    try:
        return {path: size for path, size, _ in bucket.list("blobs")}
    except Unlisted:
        return {}
