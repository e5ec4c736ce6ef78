"""A repository directory, read by whoever publishes or checks it: its releases, and every blob that they need."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kartifacts.errors import ConfigError, SourceError, VerificationError, printable
from kartifacts.files.reading import open_regular, read_regular
from kartifacts.model import frames
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.layout import OCI_INDEX, blob_path, check_name, release_directory, release_path
from kartifacts.model.manifest import (
    MAX_INDEX,
    BundleManifest,
    Descriptor,
    Pin,
    Release,
    Table,
    decode_bundle,
    decode_release,
    decode_table,
)
from kartifacts.model.materials import MAX_MATERIALS, Materials, decode_materials
from kartifacts.publish.buckets import MAX_SMALL
from kartifacts.publish.oci_index import listed_materials
from kartifacts.publish.signed_names import signed_pins, view_of

_RELEASE_NAME = re.compile(r"targets/([^/]+)/([^/]+)/([0-9a-f]{64})\.index\.json")

MAX_PROVENANCE = 64 << 20  # bytes of the index of what is said about a release


class Blob(NamedTuple):
    """One blob that a release needs, and what it is for."""

    digest: Digest
    size: int
    what: str


class MissingBlob(VerificationError):
    """A repository lacks what one of its releases needs."""


class Repository:
    """A directory in the layout of `model.layout`.  Nothing in it is believed before its digest was checked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Repository({str(self.path)!r})"

    def pins(self, library: str | None = None, version: str | None = None) -> list[Pin]:
        """The releases, sorted; of one library or version if given: those that signed metadata lists, or all by name.

        Raises:
            ConfigError: there is none.
            VerificationError: a name is malformed, or one version has two contents.
        """
        if not os.path.isdir(self.path):
            raise ConfigError(f"{str(self.path)!r} is not a repository: there is no such directory")
        found: dict[tuple[str, str], Pin] = {}
        for pin in self._all():
            name = (pin.library, pin.version)
            if name in found:
                raise VerificationError(
                    f"{str(self.path)!r} holds two contents of {pin.library} {pin.version}: "
                    f"{found[name].sha256} and {pin.sha256}",
                    source=str(self.path),
                )
            found[name] = pin
        chosen = [found[name] for name in sorted(found) if library in (None, name[0]) and version in (None, name[1])]
        if not chosen:
            wanted = " ".join(word for word in (library, version) if word) or "release"
            held = ", ".join(f"{pin.library} {pin.version}" for pin in found.values()) or "none"
            raise ConfigError(f"{str(self.path)!r} holds no {wanted}; releases there: {held}")
        return chosen

    def holds(self, library: str) -> bool:
        """Whether it holds a release of a library; no release is read yet."""
        if view_of(self.path) is not None:
            return any(pin.library == library for pin in self._all())
        return any(True for _ in _indexes(self.path / "targets" / check_name(library, "library"), 1))

    def _all(self) -> Iterator[Pin]:
        view = view_of(self.path)
        if view is not None:
            yield from signed_pins(self.path, view)
            return
        for place in _indexes(self.path / "targets", 2):
            yield self._pin(place)

    def _pin(self, place: Path) -> Pin:
        matched = _RELEASE_NAME.fullmatch(place.relative_to(self.path).as_posix())
        try:
            if matched is None:
                raise VerificationError(f"not the name of a release: {place.name[:100]!r}", source=str(place))
            library, version = check_name(matched[1], "library"), check_name(matched[2], "version")
            return Pin(library=library, version=version, sha256=matched[3], size=place.stat().st_size)
        except ConfigError as error:
            raise VerificationError(error.message, source=str(place)) from error
        except OSError as error:
            raise _unreadable(place, error) from error

    def blob(self, digest: Digest) -> Path:
        return self.path / blob_path(digest)

    def read(self, digest: str, size: int, what: str, *, limit: int = MAX_INDEX) -> bytes:
        """The content of a small blob, after its size and digest were checked."""
        path = self.blob(parse_digest(digest))
        if size > limit:
            raise VerificationError(f"{what} has {size} bytes; at most {limit} are read", source=str(path))
        try:
            with open_regular(path) as file:
                data = file.read(size + 1)
        except FileNotFoundError as error:
            raise MissingBlob(f"{what} is missing: {path.name}", source=str(path)) from error
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(data) != size or sha256(data) != path.name:
            raise VerificationError(
                f"{what} is damaged: {path.name}", source=str(path), expected=path.name, actual=sha256(data)
            )
        return data

    def part(self, digest: Digest, offset: int, length: int, what: str) -> bytes:
        """Some bytes of a blob, of which nothing was checked."""
        path = self.blob(digest)
        try:
            with open_regular(path) as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError as error:
            raise MissingBlob(f"{what} is missing: {path.name}", source=str(path)) from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def release(self, pin: Pin) -> Release:
        what = f"release index of {pin.library} {pin.version}"
        data = self.read(pin.sha256, pin.size, what)
        named = self.path / release_path(pin.library, pin.version, parse_digest(pin.sha256))
        try:
            with open_regular(named) as file:
                same = file.read(len(data) + 1) == data
        except OSError as error:
            raise _unreadable(named, error) from error
        release = decode_release(data, what=what)
        if not same or (release.library, release.version) != (pin.library, pin.version):
            raise VerificationError(
                f"{str(named)!r} is not the release that its name says", source=str(named), expected=pin.sha256
            )
        return release

    def provenance(self, pin: Pin) -> dict[Digest, bytes]:
        """Each index of what is said about a release, by its digest, under which it lies."""
        found = {}
        for place in sorted((self.path / release_directory(pin.library, pin.version)).glob("*.provenance.json")):
            digest = parse_digest(place.name.partition(".")[0], what=str(place))
            try:
                data = read_regular(place, MAX_PROVENANCE)
            except OSError as error:
                raise _unreadable(place, error) from error
            if sha256(data) != digest:
                raise VerificationError(
                    f"the provenance of {pin.library} {pin.version} is damaged: {place.name}",
                    source=str(place),
                    expected=digest,
                    actual=sha256(data),
                )
            found[digest] = data
        return found

    def made_of(self, pin: Pin) -> bytes | None:
        """The index of what the bundles of a release were made of, as who built them says; None if none is listed.

        Raises:
            VerificationError: it is missing or damaged, or index.json is malformed.
        """
        place = self.path / OCI_INDEX
        try:
            listed = listed_materials(read_regular(place, MAX_SMALL), pin, str(self.path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(place, error) from error
        return None if listed is None else self.read(*listed, f"materials of {pin.library} {pin.version}")

    def bundle(self, descriptor: Descriptor) -> BundleManifest:
        what = bundle_name(descriptor)
        return decode_bundle(self.read(descriptor.digest, descriptor.size, what), what=what)

    def table(self, bundle: BundleManifest, what: str) -> Table:
        """The kernel table of a bundle, decompressed within its bound and checked."""
        data = self.read(bundle.config.digest, bundle.config.size, what, limit=bundle.config.size)
        raw = frames.decompress(data, frames.table_size(bundle.config, what), what=what)
        return decode_table(raw, bundle, what=what)

    def materials(self, layer: Descriptor, what: str) -> Materials:
        """What a bundle was made of, by the last layer of what is said about it."""
        return decode_materials(self.read(layer.digest, layer.size, what, limit=MAX_MATERIALS), what=what)


def bundle_name(descriptor: Descriptor) -> str:
    """For messages, so escaped: nobody has checked yet what the annotations say."""
    arch = descriptor.note("arch")[:100] or "an unknown arch"
    return printable(f"bundle {descriptor.note('family')[:100] or descriptor.digest} for {arch}").replace("\n", "\\n")


def check_materials(materials: Materials, table: Table, what: str) -> None:
    """Raise a `VerificationError` if materials are not those of the kernels in a table."""
    about, of = ((each.library, each.family, each.arch, each.abi) for each in (materials, table))
    if about != of:
        raise VerificationError(f"the materials of {what} are those of {' '.join(about)[:300]!r}")
    if materials.kind == "build":
        said = {made.uri: (made.key, made.op_digest) for op in materials.ops for made in op.kernels}
        held = {kernel.uri: (kernel.key, kernel.op_digest) for kernel in table.kernels}
    else:
        said = {content.path: (content.sha256, str(content.size)) for content in materials.imported}
        held = {kernel.uri: (kernel.sha256, str(kernel.size)) for kernel in table.kernels}
    wrong = sorted(uri for uri in said.keys() | held.keys() if said.get(uri) != held.get(uri))
    if wrong:
        raise VerificationError(f"the materials of {what} are of other kernels: {wrong[0][:150]!r}, of {len(wrong)}")
    known = {content.path for content in materials.files}
    lacking = sorted({path for op in materials.ops for path in op.reached} - known)
    if lacking or len(known) != len(materials.files):
        raise VerificationError(f"the materials of {what} do not list each source once: {lacking[:3]}")


def blobs_of(descriptor: Descriptor, bundle: BundleManifest) -> Iterator[Blob]:
    """What a bundle needs, in the order in which it may appear in public: whatever names another comes after it."""
    name = bundle_name(descriptor)
    for number, layer in enumerate(bundle.layers):
        yield Blob(layer.sha256, layer.size, f"pack {number} of {name}")
    yield Blob(bundle.config.sha256, bundle.config.size, f"kernel table of {name}")
    yield Blob(descriptor.sha256, descriptor.size, name)


def _indexes(directory: Path, depth: int) -> Iterator[Path]:
    """The release indexes so many directories below one; what `glob` cannot look into, it passes over silently."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unreadable(directory, error) from error
    for name in names:
        if depth:
            yield from _indexes(directory / name, depth - 1)
        elif name.endswith(".index.json"):
            yield directory / name


def _unreadable(path: Path, error: OSError) -> SourceError:
    return SourceError(f"cannot read {str(path)!r}: {error.strerror or error}", permanent=True)
