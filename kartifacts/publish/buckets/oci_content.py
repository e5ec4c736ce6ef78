"""What paths, manifests and indexes say: digests, names, parts, subjects, times."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from kartifacts.errors import VerificationError
from kartifacts.model.digest import Digest, canonical_json, parse_digest, sha256, strict_json
from kartifacts.model.layout import OCI_INDEX
from kartifacts.model.manifest import MEDIA_INDEX, MEDIA_MANIFEST, Descriptor
from kartifacts.publish.buckets import checked
from kartifacts.remote.registry import CREATED

_REF_NAME = "org.opencontainers.image.ref.name"
_BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # files of ours have tags that begin with '_'


def named(index: bytes) -> list[tuple[str, Digest]]:
    """Tag and digest of all that an index.json gives a name; what is malformed has none."""
    found = []
    try:
        content = strict_json(index, what=OCI_INDEX)
        for entry in content["manifests"]:
            tag = entry["annotations"].get(_REF_NAME) if entry.get("annotations") else None
            if isinstance(tag, str) and _TAG.fullmatch(tag):
                found.append((tag, parse_digest(entry["digest"])))
    except (VerificationError, LookupError, TypeError, AttributeError):
        return []  # whoever made it has looked at it; here nothing hangs on it
    return found


def subject_of(manifest: bytes) -> Digest | None:
    """The digest of what a manifest refers to; None if it refers to nothing."""
    content = strict_json(manifest, what="a manifest")
    subject = content.get("subject") if isinstance(content, dict) else None
    if not isinstance(subject, dict):
        return None
    return parse_digest(str(subject.get("digest")), what="the subject of a manifest")


def with_referrer(index: bytes | None, manifest: bytes, where: str) -> bytes:
    """The list of referrers `index` with `manifest` in it, as the OCI distribution specification has it.

    Raises:
        VerificationError: there is something else.
    """
    found: Any = {"schemaVersion": 2, "mediaType": MEDIA_INDEX} if index is None else strict_json(index, what=where)
    entries = found.get("manifests", []) if isinstance(found, dict) and found.get("mediaType") == MEDIA_INDEX else None
    if not isinstance(entries, list):
        raise VerificationError(f"{where} is not an OCI image index; nothing was changed")
    digest = f"sha256:{sha256(manifest)}"
    if index is not None and any(isinstance(entry, dict) and entry.get("digest") == digest for entry in entries):
        return index
    content = strict_json(manifest, what="a manifest")
    config = content.get("config")
    kind = content.get("artifactType") or (config.get("mediaType") if isinstance(config, dict) else None)
    entry = {"mediaType": MEDIA_MANIFEST, "digest": digest, "size": len(manifest), "artifactType": kind}
    if content.get("annotations"):
        entry["annotations"] = content["annotations"]
    return canonical_json({**found, "manifests": [*entries, entry]})


def blob_digest(path: str) -> Digest | None:
    found = _BLOB.fullmatch(checked(path))
    return Digest(found[1]) if found else None


def written_at(layer: Descriptor) -> float:
    """When a file was written, by the clock of who wrote it: registries do not say."""
    try:
        return datetime.fromisoformat(layer.annotations[CREATED]).timestamp()
    except (KeyError, ValueError):
        return 0.0
