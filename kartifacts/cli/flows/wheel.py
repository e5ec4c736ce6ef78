"""The release engineer's flow from a release to wheels: select, verify, write, check, place, index."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kartifacts.cli.flows.selecting import called, pinned_registry
from kartifacts.cli.flows.shared import Report, bar, native
from kartifacts.config import Settings
from kartifacts.errors import ConfigError, StoreError
from kartifacts.files.directories import check_place
from kartifacts.model.arch import Arch, parse_arch, parse_archs
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.manifest import KernelEntry, Pin

if TYPE_CHECKING:
    from kartifacts.fetch import Bundle, Fetcher
    from kartifacts.publish.wheel import Kernel, Wheel, Written


def wheel(
    settings: Settings,
    *,
    source: Path | None,
    library: str | None,
    version: str | None,
    ops: str,
    name: str,
    one_per_arch: bool,
    out: Path,
    max_bytes: int,
    index: bool,
) -> Report:
    """Make wheels of a release that `source` holds, or else of what the lock pins, and put them into `out`.

    Nothing is written to `out` unless every wheel is made, small enough and what its tag says.
    """
    from kartifacts.publish import wheel as wheels
    from kartifacts.publish.wheel_audit import audit

    check_place(out, "--out", directory=True)
    archs = parse_archs(settings.archs, native=native(settings.archs)) if settings.archs else ()
    with _scratch() as scratch:
        pins, fetcher = _release(settings, source, library, version, scratch / "store")
        for pin in pins:
            wheels.wheel_version(pin)  # now, not after everything was fetched
        planned: list[Wheel] = []
        for pin in pins:
            chosen = _choose(fetcher.bundles(pin), pin, archs, ops.replace(",", " ").split())
            metadata = _metadata(fetcher, pin)
            kernels = [kernel for bundle, entries in chosen for kernel in _kernels(fetcher, bundle, entries)]
            planned += wheels.plan_wheels(pin, metadata, kernels, name=name, one_per_arch=one_per_arch)
        _check_names(planned)
        written = _write(settings, planned, scratch)
        wheels.check_sizes(written, max_bytes)
        checked = [audit(made.path) for made in written]
        paths = wheels.place(written, out)
    return {
        "wheels": [
            _described(made, path, audited) for made, path, audited in zip(written, paths, checked, strict=True)
        ],
        "index": write_index(out)["index"] if index else None,
    }


def write_index(directory: Path) -> Report:
    """Make the index of a directory of wheels say what is there."""
    from kartifacts.publish import wheel_index

    listed = wheel_index.write_index(directory)
    return {
        "index": str(directory / wheel_index.SIMPLE),
        "files": [
            {"project": each.project, "file": each.file_name, "sha256": each.sha256, "bytes": each.size}
            for each in listed
        ],
    }


@contextmanager
def _scratch() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="kartifacts-wheel-") as directory:
            yield Path(directory)
    except OSError as error:
        raise StoreError(
            f"cannot prepare wheels in a temporary directory: {error}",
            hint="TMPDIR names another place; it takes the kernels and the wheels",
        ) from error


def _release(
    settings: Settings, source: Path | None, library: str | None, version: str | None, store: Path
) -> tuple[Sequence[Pin], Fetcher]:
    """The releases to make wheels of, one version of each library, and what reads them."""
    from kartifacts.fetch import Fetcher
    from kartifacts.publish.lockfile import one_version_each
    from kartifacts.publish.verify import verify_repository
    from kartifacts.sources.directory import DirectorySource
    from kartifacts.store import Store

    settings = replace(settings, verify="on")
    if source is not None:
        report = verify_repository(source, library=library, version=version)
        report.check(str(source))
        # Two threads: each holds a window to decompress into, and compressing afterwards takes far longer.
        alone = replace(settings, path=(), mirrors=(), offline=True, store=store, download_threads=2)
        return [*one_version_each(report.pins).values()], Fetcher(Store(store), [DirectorySource(source)], alone)
    registry = pinned_registry(settings)
    pins = [pin for pin in registry.lock.releases if library in (None, pin.library) and version in (None, pin.version)]
    if not pins:
        pinned = ", ".join(f"{pin.library} {pin.version}" for pin in registry.lock.releases)
        raise ConfigError(f"no release of {library or 'any library'} {version or ''} is pinned; pinned: {pinned}")
    return [*one_version_each(pins).values()], registry.fetcher()


def _choose(
    bundles: Sequence[Bundle], pin: Pin, archs: Sequence[Arch], words: Sequence[str]
) -> list[tuple[Bundle, list[KernelEntry]]]:
    """The kernels made for these archs, and those tied to none; an arch or op that selects nothing is refused."""
    chosen = []
    for bundle in bundles:
        arch = _arch(bundle)
        if not archs or arch is None or arch in archs:
            entries = [
                entry
                for entry in bundle.table.kernels
                if not words or any(called(bundle, entry, word) for word in words)
            ]
            if entries:
                chosen.append((bundle, entries))
    release = f"{pin.library} {pin.version}"
    for arch in archs:
        if not any(_arch(bundle) == arch for bundle, _ in chosen):
            held = ", ".join(sorted({bundle.descriptor.note("arch") for bundle in bundles}))
            of = f" of {' '.join(words)}" if words else ""
            raise ConfigError(f"{release} holds no kernel{of} made for {arch}; it is made for: {held}")
    for word in words:
        if not any(called(bundle, entry, word) for bundle, entries in chosen for entry in entries):
            families = ", ".join(sorted({bundle.descriptor.note("family") for bundle in bundles}))
            raise ConfigError(f"{release} holds no kernel of {word!r} for these archs; its families: {families}")
    return chosen


def _arch(bundle: Bundle) -> Arch | None:
    """The arch of a bundle; None if it is tied to none."""
    text = bundle.descriptor.note("arch")
    return None if text == "any" else parse_arch(text)


def _metadata(fetcher: Fetcher, pin: Pin) -> dict[Digest, bytes]:
    """All of a release but its packs: with the tables of what a wheel does not hold, the rest is one request away."""
    named = [(pin.sha256, pin.size, "release index")]
    for bundle in fetcher.bundles(pin):
        config = bundle.manifest.config
        named.append((bundle.descriptor.sha256, bundle.descriptor.size, f"manifest of bundle {bundle.name}"))
        named.append((config.sha256, config.size, f"kernel table of bundle {bundle.name}"))
    return {parse_digest(digest): fetcher.blob(parse_digest(digest), size, what=what) for digest, size, what in named}


def _kernels(fetcher: Fetcher, bundle: Bundle, entries: Sequence[KernelEntry]) -> list[Kernel]:
    from kartifacts.publish.wheel import Kernel

    places = fetcher.ensure(bundle, entries)
    return [
        Kernel(
            op=entry.uri.partition("?")[0] if entry.op_digest else bundle.descriptor.note("family"),
            arch=bundle.descriptor.note("arch"),
            path=places[entry.uri],
            sha256=entry.sha256,
            size=entry.size,
            suffix=entry.suffix,
            needs=entry.needs,
        )
        for entry in entries
    ]


def _check_names(planned: Sequence[Wheel]) -> None:
    names = [each.file_name for each in planned]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two wheels would be called {name}; nothing was written", hint="choose one library with --library"
            )


def _write(settings: Settings, planned: Sequence[Wheel], scratch: Path) -> list[Written]:
    from kartifacts.publish.wheel import write_wheel

    total = sum(kernel.size for each in planned for kernel in each.kernels)
    done = 0
    with bar(settings, "writing wheels", "B") as show:

        def progress(size: int) -> None:
            nonlocal done
            done += size
            show(done, total)

        return [write_wheel(each, scratch, progress=progress) for each in planned]


def _described(made: Written, path: Path, audited: str | None) -> Report:
    return {
        "name": made.wheel.name,
        "version": made.wheel.version,
        "tag": f"py3-none-{made.wheel.platform}",
        "file": str(path),
        "bytes": made.size,
        "sha256": made.sha256,
        "archs": list(made.wheel.archs),
        "kernels": len(made.compressed),
        "auditwheel": audited,
    }
