"""From the releases that were chosen to everything that a mirror of them holds, in the order in which it may appear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kartifacts.errors import KartifactsError, SourceError, VerificationError
from kartifacts.fetch.parallel import run_all
from kartifacts.mirror.filters import Filter
from kartifacts.mirror.reading import Reader
from kartifacts.mirror.trusting import Basis
from kartifacts.model.digest import Digest, parse_digest
from kartifacts.model.layout import blob_path, release_path, target_path
from kartifacts.model.manifest import Descriptor, decode_bundle, decode_release
from kartifacts.publish.referrers import PROVENANCE, closure
from kartifacts.publish.repository import Blob, blobs_of, bundle_name
from kartifacts.trust.released import Released


class Target(NamedTuple):
    """A file that signed metadata names."""

    path: str
    blob: Blob  # it lies among the blobs too


@dataclass(frozen=True)
class Contents:
    """What a mirror holds of some releases; whoever names something comes after it."""

    basis: Basis
    releases: tuple[Released, ...]
    ranks: tuple[tuple[Blob, ...], ...]  # packs and tables, manifests, what is said of them, indexes
    targets: tuple[Target, ...]
    read: Mapping[Digest, bytes] = field(repr=False)  # manifests and indexes, which had to be read to know the rest

    @property
    def blobs(self) -> list[Blob]:
        return [blob for rank in self.ranks for blob in rank]

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)

    @property
    def paths(self) -> set[str]:
        """All that lies in a mirror under a name that never changes."""
        return {
            *(blob_path(blob.digest) for blob in self.blobs),
            *(target.path for target in self.targets),
            *self.basis.metadata,
        }


def contents_of(basis: Basis, chosen: Filter, reader: Reader, *, threads: int) -> Contents:
    """Follow the chosen releases to the last blob; only indexes and manifests are read.

    Raises:
        ArtifactUnavailable: a part of the filter selects nothing.
        SourceError, VerificationError: an index or a manifest cannot be had, or is wrong.
    """
    contents, faults = survey(basis, chosen, reader, threads=threads)
    if faults:
        raise _worst([error for _, error in faults])
    return contents


def survey(
    basis: Basis, chosen: Filter, reader: Reader, *, threads: int
) -> tuple[Contents, list[tuple[str, KartifactsError]]]:
    """As `contents_of`, but gives what can be known, and names what cannot."""
    releases = chosen.of(basis.releases)
    walk = _Walk(reader)
    run(threads, [partial(walk.release, release) for release in releases])
    held = [bundle for release in releases for bundle in walk.bundles.get(release.pin.sha256, ())]
    if not walk.faults:
        chosen.check_archs(held)
    bundles = {bundle.digest: bundle for bundle in held if chosen.runs(bundle)}
    run(threads, [partial(walk.bundle, bundle) for bundle in bundles.values()])
    run(threads, [partial(walk.provenance, release) for release in releases])
    said = [blob for release in releases for blob in walk.said.get(release.pin.sha256, ())]
    contents = Contents(
        basis=basis,
        releases=tuple(releases),
        ranks=(
            _once(blob for bundle in bundles for blob in walk.parts.get(bundle, ())),
            _once(map(_manifest, bundles.values())),
            _once(blob for blob in said if blob.digest not in walk.read),
            _once(blob for blob in said if blob.digest in walk.read),  # their manifests
            _once([*map(_index, releases), *(target.blob for release in releases for target in _targets(release))]),
        ),
        targets=tuple(target for release in releases for target in _targets(release)),
        read=walk.read,
    )
    return contents, walk.faults


def run(threads: int, jobs: Sequence[Callable[[], None]]) -> None:
    """Do the jobs on some threads; raises the error that matters most if any failed."""
    errors = run_all(jobs, threads) if jobs else []
    if errors:
        raise _worst(errors)


def _worst(errors: Sequence[KartifactsError]) -> KartifactsError:
    first = next((error for error in errors if isinstance(error, VerificationError)), errors[0])
    if len(errors) > 1:
        first.message += f"; and {len(errors) - 1} more {'faults' if len(errors) > 2 else 'fault'}"
    return first


class _Walk:
    """What has been read so far, by several threads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.read: dict[Digest, bytes] = {}
        self.bundles: dict[str, list[Descriptor]] = {}  # by the digest of the release
        self.parts: dict[str, list[Blob]] = {}  # by the digest of the bundle
        self.said: dict[str, list[Blob]] = {}  # by the digest of the release
        self.faults: list[tuple[str, KartifactsError]] = []

    def release(self, release: Released) -> None:
        index = _index(release)
        with self._noting(index.what):
            content = self._reader.small(index)
            found = decode_release(content, what=index.what)
            if (found.library, found.version) != (release.pin.library, release.pin.version):
                says = f"{found.library[:100]!r} {found.version[:100]!r}"
                raise VerificationError(f"the {index.what} says that it is {says}", source=index.digest)
            self.read[index.digest] = content
            self.bundles[release.pin.sha256] = found.manifests

    def bundle(self, descriptor: Descriptor) -> None:
        blob = _manifest(descriptor)
        with self._noting(blob.what):
            content = self._reader.small(blob)
            *self.parts[descriptor.digest], _ = blobs_of(descriptor, decode_bundle(content, what=blob.what))
            self.read[blob.digest] = content

    def provenance(self, release: Released) -> None:
        """All that is said about a release; of bundles that are left out too, since the index of it is one."""
        if release.provenance is None:
            return
        pin = release.pin
        index = Blob(*release.provenance, f"provenance of {pin.library} {pin.version}")
        with self._noting(index.what):
            content = self.read[index.digest] = self._reader.small(index)
            self.said[pin.sha256] = list(closure(PROVENANCE, content, pin.library, pin.version, self._referrer))[:-1]

    def _referrer(self, digest: Digest, size: int, what: str) -> bytes:
        content = self.read[digest] = self._reader.small(Blob(digest, size, what))
        return content

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SourceError, VerificationError) as error:
            self.faults.append((what, error))


def _once(blobs: Iterable[Blob]) -> tuple[Blob, ...]:
    return tuple({blob.digest: blob for blob in blobs}.values())


def _manifest(bundle: Descriptor) -> Blob:
    return Blob(bundle.sha256, bundle.size, bundle_name(bundle))


def _index(release: Released) -> Blob:
    pin = release.pin
    return Blob(parse_digest(pin.sha256), pin.size, f"release index of {pin.library} {pin.version}")


def _targets(release: Released) -> list[Target]:
    pin, index = release.pin, _index(release)
    found = [Target(release_path(pin.library, pin.version, index.digest), index)]
    if release.provenance is not None:
        path = target_path(pin.library, pin.version, release.provenance[0], "provenance")
        found.append(Target(path, Blob(*release.provenance, f"provenance of {pin.library} {pin.version}")))
    return found
