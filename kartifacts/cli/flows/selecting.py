"""Which pinned kernels a command is about: by library, op, arch or path, and what `load` would take of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kartifacts.cli.flows.shared import native
from kartifacts.config import Settings
from kartifacts.errors import ArtifactUnavailable, ConfigError
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.manifest import KernelEntry, Pin
from kartifacts.runtime import Registry

if TYPE_CHECKING:
    from kartifacts.fetch import Bundle


@dataclass(frozen=True)
class Selection:
    """Which pinned kernels a command is about; what is empty selects everything."""

    library: str | None = None
    ops: str = ""
    archs: str = ""
    paths: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return self.ops.replace(",", " ").split()

    def takes(self, bundle: Bundle, entry: KernelEntry) -> bool:
        named = not self.words or any(called(bundle, entry, word) for word in self.words)
        return named and (not self.paths or entry.uri in self.paths)

    def check(self, chosen: list[Chosen]) -> None:
        """Complain about a path, an op or an arch that selected nothing: a misspelt one must not pass as done."""
        hint = "kartifacts list shows what is pinned"
        for path in self.paths:
            if not any(entry.uri == path for _, _, entries in chosen for entry in entries):
                raise ArtifactUnavailable(f"no pinned release holds {path!r}, or not for these archs", hint=hint)
        for word in self.words or [""]:
            for device in devices_of(self.archs) or [None]:
                if not any(
                    runs(bundle, device) is not None
                    and any(not word or called(bundle, entry, word) for entry in entries)
                    for _, bundle, entries in chosen
                ):
                    what, where = f" of {word!r}" if word else "", f" runs on {device}" if device else " is there"
                    raise ArtifactUnavailable(f"no selected kernel{what}{where}; nothing was fetched", hint=hint)


def called(bundle: Bundle, entry: KernelEntry, word: str) -> bool:
    """Whether `word` names the op of an entry, its family or its path."""
    name = entry.uri.partition("?")[0]
    return word in (name, bundle.descriptor.note("family")) or name.startswith(f"{word}/") or name.endswith(f"/{word}")


Chosen = tuple[Pin, "Bundle", list[KernelEntry]]


def pinned_registry(settings: Settings) -> Registry:
    registry = Registry(settings)
    if not registry.lock.releases:
        raise ConfigError(
            "no release is pinned, so there is nothing to fetch, list or keep",
            hint="set KARTIFACTS_LOCK to a kartifacts.lock; kartifacts lock REPOSITORY --out FILE writes one",
        )
    return registry


def pins_of(registry: Registry, selection: Selection) -> list[Pin]:
    pins = [pin for pin in registry.lock.releases if selection.library in (None, pin.library)]
    if not pins:
        pinned = ", ".join(pin.library for pin in registry.lock.releases)
        raise ConfigError(f"no release of {selection.library!r} is pinned; pinned: {pinned}")
    return pins


def choose(registry: Registry, selection: Selection, *, local: bool) -> Iterator[Chosen]:
    """For each arch and each kernel the bundle that `load` would take; without archs all of them."""
    fetcher = registry.local_fetcher() if local else registry.fetcher()
    for pin in pins_of(registry, selection):
        bundles = fetcher.bundles(pin)
        taken: set[tuple[str, str]] = set()  # bundle and uri
        for device in devices_of(selection.archs) or [None]:
            ranked = [(rank, bundle) for bundle in bundles if (rank := runs(bundle, device)) is not None]
            done: set[tuple[str, str]] = set()  # ABI and uri: which of several ABIs is wanted is not known here
            for _, bundle in sorted(ranked, key=lambda pair: pair[0]):
                abi = bundle.descriptor.note("abi")
                entries = entries_here(bundle) if local else bundle.table.kernels
                new = [
                    entry
                    for entry in entries or ()
                    if selection.takes(bundle, entry)
                    and (device is None or (abi, entry.uri) not in done)
                    and (bundle.descriptor.digest, entry.uri) not in taken
                ]
                done.update((abi, entry.uri) for entry in entries or ())
                taken.update((bundle.descriptor.digest, entry.uri) for entry in new)
                if new:
                    yield pin, bundle, new


def devices_of(archs: str) -> Sequence[Arch | None]:
    """The devices that an arch list speaks of; none means whatever there is."""
    return parse_archs(archs, native=native(archs)) if archs.strip() else ()


def runs(bundle: Bundle, device: Arch | None) -> int | None:
    """How well a bundle fits `device`, or any if it is None; None if it does not run there."""
    built_for = bundle.descriptor.note("arch")
    if device is None or built_for == "any":
        return 0
    try:
        verdict = parse_arch(built_for).runs_on(device)
    except ConfigError:  # an arch that is newer than this version
        return None
    return verdict.rank if verdict.ok else None


def entries_here(bundle: Bundle) -> list[KernelEntry] | None:
    """The entries of a bundle of a local fetcher; None if its table is not on this machine."""
    try:
        return bundle.table.kernels
    except ArtifactUnavailable:
        return None
