"""Bundles become a release: an index blob, an entry in the repository's OCI index, and a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kartifacts.errors import ConfigError
from kartifacts.model.digest import Digest, parse_digest, sha256
from kartifacts.model.layout import TIMESTAMP, blob_path, check_name, metadata_path, release_directory, release_path
from kartifacts.model.manifest import (
    MAX_INDEX,
    MEDIA_INDEX,
    NOTE,
    RELEASE_FORMAT,
    Descriptor,
    Pin,
    Release,
    encode,
)
from kartifacts.model.materials import Materials
from kartifacts.publish.buckets import Bucket, Unlisted
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.oci_index import claim, refuse_other_claim, refuse_unless_same
from kartifacts.publish.referrers import MATERIALS, index_of, refer
from kartifacts.publish.repository import Repository

_ENTRY_NOTES = frozenset(NOTE + name for name in ("family", "arch", "abi", "machine"))


def make_release(
    directory: Path,
    library: str,
    version: str,
    bundles: Sequence[Descriptor],
    materials: Mapping[str, Materials] | None = None,
) -> Descriptor:
    """Write the release index of `bundles`, which lie in the repository `directory` already.

    The same bundles give the same index.

    Args:
        materials: what they were made of, by the digests in their descriptors; index.json leads to it.

    Returns:
        The descriptor of the release index; its digest is what gets pinned.

    Raises:
        ConfigError: no bundles, or one of another library.
        VerificationError: a bundle is not in the repository, or damaged.
        PublishConflict: the repository holds another content of this version.
    """
    check_name(library, "library")
    check_name(version, "version")
    if not bundles:
        raise ConfigError(f"the release {library} {version} has no bundles", hint="build or import something first")
    repository = Repository(directory)
    for bundle in bundles:
        made_for = repository.bundle(bundle).annotations.get(NOTE + "library", "")
        if made_for != library:
            raise ConfigError(f"a bundle of {made_for!r} cannot be part of a release of {library!r}")
    unique = {bundle.digest: bundle for bundle in bundles}
    index = encode(
        Release(
            schema_version=2,
            media_type=MEDIA_INDEX,
            manifests=[_entry(bundle) for bundle in sorted(unique.values(), key=_order)],
            annotations={NOTE + "format": RELEASE_FORMAT, NOTE + "library": library, NOTE + "version": version},
        )
    )
    if len(index) > MAX_INDEX:
        raise ConfigError(f"the index of {library} {version} has {len(index)} bytes; at most {MAX_INDEX} are read")
    bucket = DirectoryBucket(directory)
    bucket.tidy()
    pin = Pin(library=library, version=version, sha256=sha256(index), size=len(index))
    refuse_signed(bucket)
    refuse_other_content(bucket, pin)
    bucket.put_if_absent(blob_path(sha256(index)), index)
    name_release(bucket, pin, _write_materials(bucket, pin, unique, materials) if materials else None)
    return Descriptor(media_type=MEDIA_INDEX, digest=f"sha256:{pin.sha256}", size=pin.size)


def _write_materials(
    bucket: Bucket, pin: Pin, bundles: Mapping[str, Descriptor], materials: Mapping[str, Materials]
) -> tuple[Digest, int]:
    """Write what bundles were made of; gives digest and size of the index of that."""
    made = [refer(MATERIALS, bundles[digest], [encode(materials[digest])]) for digest in sorted(materials)]
    index = index_of(MATERIALS, pin.library, pin.version, made)
    for digest, content in (*(blob for each in made for blob in each.blobs), (sha256(index), index)):
        bucket.put_if_absent(blob_path(digest), content)
    return sha256(index), len(index)


def _order(bundle: Descriptor) -> tuple[object, ...]:
    """Readers take the first that fits, so of several for one arch the one for the newest driver comes first."""
    driver = [-int(part) for part in bundle.note("driver").split(".") if part.isdigit()]
    return (*(bundle.note(name) for name in ("family", "arch", "abi", "machine")), driver, bundle.digest)


def _entry(bundle: Descriptor) -> Descriptor:
    """A bundle in an index: what a reader chooses by, since the whole index is sent anew when one bundle changes."""
    notes = {name: text for name, text in bundle.annotations.items() if name in _ENTRY_NOTES}
    return msgspec.structs.replace(bundle, annotations=notes)


def refuse_signed(bucket: Bucket) -> None:
    """Raise a `ConfigError` if readers of a bucket look for signatures: they would never see what has none."""
    if bucket.size(metadata_path("online", TIMESTAMP)) is not None:
        raise ConfigError(
            f"{bucket.name} has signed metadata, so only who signs can release there; nothing was changed",
            hint="kartifacts publish --keys DIR signs; build into a directory of its own",
        )


def refuse_other_content(bucket: Bucket, pin: Pin) -> None:
    """Raise `PublishConflict` if a bucket where nothing is signed knows this version with another content."""
    refuse_other_claim(bucket, pin)
    with suppress(Unlisted):  # the index alone decides where names cannot be listed
        for path, _, _ in bucket.list(release_directory(pin.library, pin.version)):
            refuse_unless_same(path.rpartition("/")[2].partition(".")[0], pin, bucket.name)


def name_release(bucket: Bucket, pin: Pin, made_of: tuple[Digest, int] | None = None) -> None:
    """Make a release whose blobs are all in place public where nothing is signed.

    First its entry in the OCI index, which one writer at a time can change, so that of two publishers of one version
    only the first comes to name it.
    """
    claim(bucket, pin, made_of)
    digest = parse_digest(pin.sha256)
    bucket.copy_if_absent(blob_path(digest), release_path(pin.library, pin.version, digest))
