"""What of a repository a mirror holds: which libraries, versions, channels and archs; mirror.json remembers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from kartifacts.errors import ArtifactUnavailable, ConfigError, SourceError, VerificationError
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import canonical_json, strict_json
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import Descriptor
from kartifacts.trust.released import Released

MIRROR = "mirror.json"
MAX_MIRROR = 1 << 20  # bytes


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A selection; what is empty selects everything."""

    libraries: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()  # canonical; of machines, as in `fetch --archs`

    def __post_init__(self) -> None:
        for what, names in (("library", self.libraries), ("version", self.versions), ("channel", self.channels)):
            for name in names:
                check_name(name, what)
        for arch in self.archs:
            parse_arch(arch)

    def covers(self, other: Filter) -> bool:
        """Whether all that `other` selects is selected, whatever there is."""
        pairs = (
            (self.libraries, other.libraries),
            (self.versions, other.versions),
            (self.channels, other.channels),
            (self.archs, other.archs),
        )
        return all(not wide or (narrow and set(narrow) <= set(wide)) for wide, narrow in pairs)

    def __str__(self) -> str:
        """As options of the command line."""
        parts = [f"--library {name}" for name in self.libraries]
        parts += [f"--release-version {name}" for name in self.versions]
        parts += [f"--channel {name}" for name in self.channels]
        parts += [f"--archs '{' '.join(self.archs)}'"] if self.archs else []
        return " ".join(parts) or "everything"

    def of(self, releases: Sequence[Released]) -> list[Released]:
        """Those of the releases that are selected.

        Raises:
            ArtifactUnavailable: a name selects none: a misspelt one must not pass as done.
        """
        for what, names, known in (
            ("library", self.libraries, {release.pin.library for release in releases}),
            ("version", self.versions, {release.pin.version for release in releases}),
            ("channel", self.channels, {channel for release in releases for channel in release.channels}),
        ):
            for name in names:
                if name not in known:
                    listed = ", ".join(sorted(known)) or "none"
                    raise ArtifactUnavailable(f"there is no {what} {name!r} to mirror; there: {listed}")
        chosen = [release for release in releases if self._wants(release)]
        if not chosen:
            raise ArtifactUnavailable("no release is in all that was selected: library, version and channel")
        return chosen

    def _wants(self, release: Released) -> bool:
        return (
            (not self.libraries or release.pin.library in self.libraries)
            and (not self.versions or release.pin.version in self.versions)
            and (not self.channels or any(channel in self.channels for channel in release.channels))
        )

    def runs(self, bundle: Descriptor) -> bool:
        """Whether a machine of one of the archs may ask for something of a bundle."""
        return not self.archs or any(_runs_on(bundle, parse_arch(arch)) for arch in self.archs)

    def check_archs(self, bundles: Iterable[Descriptor]) -> None:
        """Raise `ArtifactUnavailable` if nothing of all that was selected runs on one of the archs."""
        held = list(bundles)
        for arch in self.archs:
            if not any(_runs_on(bundle, parse_arch(arch)) for bundle in held):
                built = ", ".join(sorted({bundle.note("arch") for bundle in held})) or "nothing"
                raise ArtifactUnavailable(f"nothing that was selected runs on {arch}; there is: {built[:500]}")


def _runs_on(bundle: Descriptor, device: Arch) -> bool:
    built_for = bundle.note("arch")
    if built_for == "any":
        return True
    try:
        return parse_arch(built_for).runs_on(device).ok
    except ConfigError:  # an arch that is newer than this version
        return False


class _Promise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of mirror.json."""

    version: int
    filter: Filter


def encode_filter(chosen: Filter) -> bytes:
    return canonical_json(msgspec.to_builtins(_Promise(version=1, filter=chosen)))


def held_filter(read: Callable[[str, int], bytes], name: str) -> Filter | None:
    """What mirror.json of a place says that it holds; None if there is none.

    Raises:
        VerificationError: it is malformed.
        SourceError: it cannot be read.
    """
    try:
        return decode_filter(read(MIRROR, MAX_MIRROR), what=f"{MIRROR} of {name}")
    except SourceError as error:
        if not error.missing:
            raise
        return None


def decode_filter(data: bytes, *, what: str) -> Filter:
    """Read mirror.json: a hint of what somebody meant to mirror, and no more than that.

    Raises:
        VerificationError: it is malformed.
    """
    try:
        promise = msgspec.convert(strict_json(data, what=what), type=_Promise)
    except (msgspec.ValidationError, ConfigError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    if promise.version != 1:
        raise VerificationError(f"version of {what}: expected 1, got {promise.version}")
    return promise.filter
