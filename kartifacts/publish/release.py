"""Bundles become a release: an index blob, its name, and an entry in the repository's OCI index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kartifacts.errors import ConfigError, PublishConflict, VerificationError
from kartifacts.model.digest import Digest, canonical_json, sha256, strict_json
from kartifacts.model.layout import (
    OCI_INDEX,
    OCI_LAYOUT,
    OCI_LAYOUT_CONTENT,
    blob_path,
    check_name,
    release_directory,
    release_path,
)
from kartifacts.model.manifest import (
    MAX_INDEX,
    MEDIA_INDEX,
    NOTE,
    RELEASE_FORMAT,
    Descriptor,
    Release,
    encode,
)
from kartifacts.publish.buckets import Bucket, update
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.repository import Repository

_REF_NAME = "org.opencontainers.image.ref.name"


def make_release(directory: Path, library: str, version: str, bundles: Sequence[Descriptor]) -> Descriptor:
    """Write the release index of `bundles`, which lie in the repository `directory` already.

    The same bundles give the same index.

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
        repository.bundle(bundle)
        if bundle.note("library") != library:
            raise ConfigError(f"a bundle of {bundle.note('library')!r} cannot be part of a release of {library!r}")
    unique = {bundle.digest: _of_version(bundle, version) for bundle in bundles}.values()
    index = encode(
        Release(
            schema_version=2,
            media_type=MEDIA_INDEX,
            manifests=sorted(
                unique, key=lambda bundle: (*(bundle.note(name) for name in ("family", "arch", "abi")), bundle.digest)
            ),
            annotations={NOTE + "format": RELEASE_FORMAT, NOTE + "library": library, NOTE + "version": version},
        )
    )
    if len(index) > MAX_INDEX:
        raise ConfigError(f"the index of {library} {version} has {len(index)} bytes; at most {MAX_INDEX} are read")
    bucket = DirectoryBucket(directory)
    bucket.tidy()
    refuse_other_content(bucket, library, version, sha256(index))
    bucket.put_if_absent(blob_path(sha256(index)), index)
    name_release(bucket, library, version, index)
    return _descriptor(library, version, index)


def _of_version(bundle: Descriptor, version: str) -> Descriptor:
    return msgspec.structs.replace(bundle, annotations={**bundle.annotations, NOTE + "version": version})


def refuse_other_content(bucket: Bucket, library: str, version: str, digest: Digest) -> None:
    """Raise `PublishConflict` if the bucket knows this version with another content."""
    expected = release_path(library, version, digest)
    for path, _, _ in bucket.list(release_directory(library, version)):
        if path != expected:
            raise PublishConflict(
                f"{bucket.name} already holds another content of {library} {version}: {path!r}; nothing was changed",
                hint="a version never changes: publish these bundles under another one, with --release-version",
            )


def name_release(bucket: Bucket, library: str, version: str, index: bytes) -> None:
    """Make a release whose blobs are all in place public: first its name, then its entry in the OCI index."""

    def with_release(current: bytes | None) -> bytes:
        # Here, where no other writer is, so that of two publishers of one version only the first can name it.
        refuse_other_content(bucket, library, version, sha256(index))
        bucket.put_if_absent(release_path(library, version, sha256(index)), index)
        return _indexed(current, _descriptor(library, version, index), bucket.name)

    if bucket.size(OCI_LAYOUT) is None:
        bucket.put_if_absent(OCI_LAYOUT, OCI_LAYOUT_CONTENT)
    update(bucket, OCI_INDEX, with_release)


def _descriptor(library: str, version: str, index: bytes) -> Descriptor:
    # What skopeo takes as a tag: single separators between letters and digits, and no '+'.
    tag = re.sub(r"[^a-z0-9]+", lambda run: run[0][0].replace("+", "_"), f"{library}-{version}")
    return Descriptor(
        media_type=MEDIA_INDEX,
        digest=f"sha256:{sha256(index)}",
        size=len(index),
        annotations={_REF_NAME: tag, NOTE + "library": library, NOTE + "version": version},
    )


def _indexed(current: bytes | None, release: Descriptor, where: str) -> bytes:
    """The OCI index with an entry for `release`; entries that other tools made are kept."""
    what = f"{OCI_INDEX} of {where}"
    index: Any = {"schemaVersion": 2, "mediaType": MEDIA_INDEX} if current is None else strict_json(current, what=what)
    entries = index.get("manifests", []) if isinstance(index, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise VerificationError(f"{what} is malformed: expected an OCI image index; nothing was changed")
    made = msgspec.to_builtins(release)
    others = [entry for entry in entries if entry != made]
    return canonical_json({**index, "manifests": sorted([*others, made], key=_order)})


def _order(entry: dict[str, Any]) -> tuple[str, str]:
    notes = entry.get("annotations")
    return str(notes.get(_REF_NAME, "")) if isinstance(notes, dict) else "", str(entry.get("digest"))
