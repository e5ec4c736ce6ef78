"""Proves that a repository directory is complete and sound, without network, or lists all that is not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kartifacts.errors import KartifactsError, VerificationError
from kartifacts.files.reading import open_regular
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.frames import MAX_WINDOW
from kartifacts.model.manifest import Block, BundleManifest, Descriptor, KernelEntry, Pin, Table
from kartifacts.publish.referrers import MATERIALS, PROVENANCE, Kind, by_bundle, closure
from kartifacts.publish.repository import Blob, MissingBlob, Repository, blobs_of, bundle_name, check_materials

if TYPE_CHECKING:
    import zstandard

_PIECE = 1 << 20
_SHOWN = 10

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all."""


class Fault(NamedTuple):
    """One thing that is missing or damaged."""

    what: str
    problem: str
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


@dataclass(frozen=True)
class Report:
    """What was looked at, and every fault found."""

    pins: tuple[Pin, ...]
    blobs: tuple[Blob, ...]  # each once, whatever names another after it
    kernels: int
    faults: tuple[Fault, ...]

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)

    def check(self, where: str) -> None:
        """Raise a `VerificationError` that names the first faults, if there are any."""
        if self.faults:
            shown = "".join(f"\n  {fault}" for fault in self.faults[:_SHOWN])
            more = f"\n  and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
            raise VerificationError(f"{where} is incomplete or damaged, {len(self.faults)} faults:{shown}{more}")


def verify_repository(
    path: Path,
    *,
    library: str | None = None,
    version: str | None = None,
    deep: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check everything that the releases of a repository need.

    Args:
        library, version: look at these only.
        deep: decompress and hash every kernel too, not only the blobs that hold them.

    Raises:
        ConfigError: it holds no such release.
        VerificationError: its names of releases contradict each other.
    """
    repository = Repository(path)
    pins = repository.pins(library, version)
    faults: list[Fault] = []
    blobs: dict[str, Blob] = {}
    tables: dict[str, tuple[str, BundleManifest, Table]] = {}
    for pin in pins:
        for blob, contents in _closure(repository, pin, faults):
            blobs.setdefault(blob.digest, blob)
            if contents is not None:
                tables.setdefault(blob.digest, (blob.what, *contents))
    faults += _unsound(repository, list(blobs.values()), progress)
    if deep and not faults:
        for what, bundle, table in tables.values():
            faults += _wrong_kernels(repository, what, bundle, table)
    return Report(
        pins=tuple(pins),
        blobs=tuple(blobs.values()),
        kernels=sum(len(table.kernels) for _, _, table in tables.values()),
        faults=tuple(faults),
    )


def _closure(
    repository: Repository, pin: Pin, faults: list[Fault]
) -> Iterator[tuple[Blob, tuple[BundleManifest, Table] | None]]:
    """Every blob of a release, its index last; a bundle's manifest comes with what it and its table say."""
    name = f"{pin.library} {pin.version}"
    try:
        release = repository.release(pin)
    except KartifactsError as error:
        faults.append(_fault(name, error))
        return
    if not release.manifests:
        faults.append(Fault(name, "a release without bundles"))
    tables: dict[Digest, Table] = {}
    for descriptor in release.manifests:
        try:
            bundle = repository.bundle(descriptor)
        except KartifactsError as error:
            faults.append(_fault(f"{bundle_name(descriptor)} of {name}", error))
            continue
        contents = None
        try:
            contents = (bundle, repository.table(bundle, f"kernel table of {bundle_name(descriptor)}"))
            tables[descriptor.sha256] = contents[1]
        except KartifactsError as error:
            if not isinstance(error, MissingBlob):  # else it is found below, among all blobs
                faults.append(_fault(f"kernel table of {bundle_name(descriptor)} of {name}", error))
        for blob in blobs_of(descriptor, bundle):
            yield blob, contents if blob.digest == descriptor.sha256 else None
    yield Blob(parse_digest(pin.sha256), pin.size, f"release index of {name}"), None
    for blob in _said(repository, pin, release.manifests, tables, faults):
        yield blob, None


def _said(
    repository: Repository,
    pin: Pin,
    bundles: Sequence[Descriptor],
    tables: Mapping[Digest, Table],
    faults: list[Fault],
) -> Iterator[Blob]:
    """Every blob of what is said about a release; materials that only who built it has are looked at, and not given."""
    name = f"{pin.library} {pin.version}"
    try:
        for index in repository.provenance(pin).values():
            yield from closure(PROVENANCE, index, pin.library, pin.version, repository.read)
            faults += _wrong_materials(repository, PROVENANCE, index, pin, bundles, tables)
    except KartifactsError as error:
        faults.append(_fault(f"provenance of {name}", error))
    try:
        made_of = repository.made_of(pin)
        if made_of is not None:
            faults += _wrong_materials(repository, MATERIALS, made_of, pin, bundles, tables)
    except KartifactsError as error:
        faults.append(_fault(f"materials of {name}", error))


def _wrong_materials(
    repository: Repository,
    kind: Kind,
    index: bytes,
    pin: Pin,
    bundles: Sequence[Descriptor],
    tables: Mapping[Digest, Table],
) -> Iterator[Fault]:
    told = by_bundle(kind, index, pin, bundles, repository.read)
    for bundle in bundles:
        referrer, table = told.get(bundle.sha256), tables.get(bundle.sha256)
        if referrer is None:
            continue
        what = bundle_name(bundle)
        try:
            materials = repository.materials(referrer.layers[-1], f"materials of {what}")
            if table is not None:
                check_materials(materials, table, what)
        except KartifactsError as error:
            yield _fault(f"materials of {what} of {pin.library} {pin.version}", error)


def _fault(what: str, error: KartifactsError) -> Fault:
    return Fault(what, error.message, missing=isinstance(error, MissingBlob))


def _unsound(repository: Repository, blobs: list[Blob], progress: Progress | None) -> Iterator[Fault]:
    done, total = 0, sum(blob.size for blob in blobs)
    for blob in blobs:
        yield from _faults_of(repository.blob(blob.digest), blob)
        done += blob.size
        if progress is not None:
            progress(done, total)


def _faults_of(path: Path, blob: Blob) -> Iterator[Fault]:
    """What is wrong with a blob's file, if anything."""
    hashed = hashlib.sha256()
    size = 0
    try:
        with open_regular(path) as file:
            while size <= blob.size and (piece := file.read(_PIECE)):
                hashed.update(piece)
                size += len(piece)
    except FileNotFoundError:
        yield Fault(blob.what, f"missing: {path.name}", missing=True)
    except OSError as error:
        yield Fault(blob.what, f"cannot be read: {error.strerror or error}: {path.name}")
    else:
        if size != blob.size:
            got = "more" if size > blob.size else size
            yield Fault(blob.what, f"expected {blob.size} bytes, got {got}: {path.name}")
        elif hashed.hexdigest() != blob.digest:
            yield Fault(blob.what, f"damaged, its sha256 is {hashed.hexdigest()}: {path.name}")


# -- kernels -----------------------------------------------------------------------------------------------------------


def _wrong_kernels(repository: Repository, what: str, bundle: BundleManifest, table: Table) -> Iterator[Fault]:
    import zstandard

    kernels: dict[int, list[KernelEntry]] = {}
    for kernel in table.kernels:
        kernels.setdefault(kernel.block, []).append(kernel)
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    for number, block in enumerate(table.blocks):
        path = repository.blob(bundle.layers[block.pack].sha256)
        try:
            yield from _wrong_in_block(reader, path, block, kernels.get(number, []), what)
        except (zstandard.ZstdError, OSError) as error:
            yield Fault(f"block {number} of {what}", f"cannot be decompressed: {error}")
    yield from _wrong_deltas(repository, what, bundle, table)


def _wrong_deltas(repository: Repository, what: str, bundle: BundleManifest, table: Table) -> Iterator[Fault]:
    """Whether each frame is the one that the table names; what it starts from need not be here."""
    for kernel in table.kernels:
        delta = kernel.delta
        if delta is None:
            continue
        with open_regular(repository.blob(bundle.layers[delta.pack].sha256)) as file:
            file.seek(delta.offset)
            frame = file.read(delta.length)
        if sha256(frame) != delta.sha256:
            yield Fault(f"{kernel.uri} in {what}", "its delta is not the one that the table names")


def _wrong_in_block(
    reader: zstandard.ZstdDecompressor, path: Path, block: Block, kernels: list[KernelEntry], what: str
) -> Iterator[Fault]:
    """Decompress one block piece by piece and hash each kernel in it."""
    hashes = {kernel.uri: hashlib.sha256() for kernel in kernels}
    position = 0
    with open_regular(path) as file:
        file.seek(block.offset)
        compressed = file.read(block.length)
    if hashlib.sha256(compressed).hexdigest() != block.sha256:
        yield Fault(what, f"the block at {block.offset} of pack {path.name} is not the one that the table names")
        return
    with reader.stream_reader(compressed) as content:
        while position <= block.size and (piece := content.read(_PIECE)):
            for kernel in kernels:
                start = max(kernel.offset - position, 0)
                stop = min(kernel.offset + kernel.size - position, len(piece))
                if start < stop:
                    hashes[kernel.uri].update(piece[start:stop])
            position += len(piece)
    if position != block.size:
        yield Fault(what, f"the block at {block.offset} of pack {path.name} does not hold {block.size} bytes")
    for kernel in kernels:
        if hashes[kernel.uri].hexdigest() != kernel.sha256:
            yield Fault(f"{kernel.uri} in {what}", f"its sha256 is {hashes[kernel.uri].hexdigest()}")
