"""Which pinned kernels a command is about: by library, op, arch or path, and what `load` would take of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kartifacts.cli.flows.shared import native
from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, ConfigError, VerificationError
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.manifest import Descriptor, KernelEntry, Listed, Pin
from kartifacts.runtime import Registry
from kartifacts.runtime.pins import to_pin

if TYPE_CHECKING:
    from kartifacts.fetch import Bundle, Fetcher


@dataclass(frozen=True)
class Selection:
    """Which pinned kernels a command is about; what is empty selects everything."""

    library: str | None = None
    ops: str = ""
    archs: str = ""
    paths: tuple[str, ...] = ()

    @cached_property
    def words(self) -> list[str]:
        return self.ops.replace(",", " ").split()

    def of(self, bundle: Bundle, entries: list[KernelEntry]) -> list[KernelEntry]:
        """Those of the entries that are selected."""
        if self.words:
            entries = [entry for entry in entries if any(called(bundle, entry, word) for word in self.words)]
        return [entry for entry in entries if entry.uri in self.paths] if self.paths else entries

    def check(self, chosen: Sequence[Chosen]) -> None:
        """Raise `ArtifactUnavailable` if a part of the selection selected nothing."""
        for complaint in self.in_vain(chosen):
            raise ArtifactUnavailable(complaint, hint="kartifacts list shows what is pinned")

    def in_vain(self, chosen: Sequence[tuple[object, Described, Sequence[KernelEntry]]]) -> Iterator[str]:
        """A sentence for each path, op and arch that selected nothing: a misspelt one must not pass as done."""
        for path in self.paths:
            if not any(entry.uri == path for _, _, entries in chosen for entry in entries):
                yield f"no pinned release holds {path!r}{' for these archs' if self.archs else ''}"
        for word in self.words or [""]:
            for device in devices_of(self.archs) or [None]:
                if not any(
                    runs(bundle, device) is not None
                    and any(not word or called(bundle, entry, word) for entry in entries)
                    for _, bundle, entries in chosen
                ):
                    what, where = f" of {word!r}" if word else "", f" runs on {device}" if device else " is there"
                    yield f"no selected kernel{what}{where}"


class Described(Protocol):
    """A bundle as far as its descriptor tells of it."""

    @property
    def descriptor(self) -> Descriptor: ...


def called(bundle: Described, entry: KernelEntry, word: str) -> bool:
    """Whether `word` names the op of an entry, its family or its path."""
    name = entry.uri.partition("?")[0]
    return word in (name, bundle.descriptor.note("family")) or name.startswith(f"{word}/") or name.endswith(f"/{word}")


Chosen = tuple[Pin, "Bundle", list[KernelEntry]]


class Unread(NamedTuple):
    """A release or a table that could not be read, so that what it lists is not known."""

    pin: Pin
    what: str
    error: ArtifactUnavailable | VerificationError


@contextmanager
def reading(pin: Pin, what: str, unread: list[Unread]) -> Iterator[None]:
    """Note that something cannot be read, so that it does not keep the rest from being looked at."""
    try:
        yield
    except (ArtifactUnavailable, VerificationError) as error:
        if all((pin, what) != (other.pin, other.what) for other in unread):
            unread.append(Unread(pin, what, error))


def bundles_of(fetcher: Fetcher, pin: Pin, unread: list[Unread]) -> list[Bundle]:
    """The bundles of a release; none, which is noted, if its index cannot be read."""
    with reading(pin, f"release index of {pin.library} {pin.version}", unread):
        return fetcher.bundles(pin)
    return []


def entries_of(bundle: Bundle, pin: Pin, unread: list[Unread]) -> list[KernelEntry] | None:
    """The entries of a bundle; None, which is noted, if its table cannot be read."""
    with reading(pin, f"kernel table of {bundle.name}", unread):
        return bundle.table.kernels
    return None


def listed_of(bundle: Bundle, pin: Pin, unread: list[Unread]) -> list[Listed] | None:
    """As `entries_of`, for those who only count."""
    with reading(pin, f"kernel table of {bundle.name}", unread):
        return bundle.listed()
    return None


def pinned_registry(settings: Settings) -> Registry:
    registry = Registry(settings)
    if not registry.lock.releases:
        raise ConfigError(
            "no release is pinned, so there is nothing to fetch, list or keep",
            hint=to_pin(settings)
            or "set KARTIFACTS_LOCK to a kartifacts.lock; kartifacts sync writes one from what a publisher has signed, "
            "kartifacts lock REPOSITORY --out FILE one of what you have",
        )
    return registry


def pins_of(registry: Registry, selection: Selection) -> list[Pin]:
    pins = [pin for pin in registry.lock.releases if selection.library in (None, pin.library)]
    if not pins:
        pinned = ", ".join(pin.library for pin in registry.lock.releases)
        raise ConfigError(f"no release of {selection.library!r} is pinned; pinned: {pinned}")
    return pins


def choose(registry: Registry, selection: Selection, unread: list[Unread], *, local: bool) -> Iterator[Chosen]:
    """For each arch and each kernel the bundle that `load` would take; without archs all of them.

    What cannot be read is added to `unread`.
    """
    fetcher = registry.local_fetcher() if local else registry.fetcher()
    for pin in pins_of(registry, selection):
        bundles = bundles_of(fetcher, pin, unread)
        taken: set[tuple[str, str]] = set()  # bundle and uri
        devices = devices_of(selection.archs)
        if not local:
            fetcher.open(
                bundle for bundle in bundles if any(runs(bundle, each) is not None for each in devices or [None])
            )
        for device in devices or [None]:
            ranked = [(rank, bundle) for bundle in bundles if (rank := runs(bundle, device)) is not None]
            done: set[tuple[str, str]] = set()  # ABI and uri: which of several ABIs is wanted is not known here
            for _, bundle in sorted(ranked, key=lambda pair: pair[0]):
                entries = entries_of(bundle, pin, unread) or []
                new = selection.of(bundle, entries)
                if devices:
                    abi, name = bundle.descriptor.note("abi"), bundle.descriptor.digest
                    new = [entry for entry in new if (abi, entry.uri) not in done and (name, entry.uri) not in taken]
                    done.update((abi, entry.uri) for entry in entries)
                    taken.update((name, entry.uri) for entry in new)
                if new:
                    yield pin, bundle, new
                if local and not devices:  # each table is looked at once: a list of all kernels need not hold all
                    bundle.forget()


def devices_of(archs: str) -> Sequence[Arch | None]:
    """The devices that an arch list speaks of; none means whatever there is."""
    return parse_archs(archs, native=native(archs)) if archs.strip() else ()


def runs(bundle: Described, device: Arch | None) -> int | None:
    """How well a bundle fits `device`, or any if it is None; None if it does not run there."""
    built_for = bundle.descriptor.note("arch")
    if device is None or built_for == "any":
        return 0
    try:
        verdict = parse_arch(built_for).runs_on(device)
    except ConfigError:  # an arch that is newer than this version
        return None
    return verdict.rank if verdict.ok else None
