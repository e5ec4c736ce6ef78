"""Names things in an OCI registry: addresses of repositories, and the tags and manifests under which files lie there.

Blobs and manifests of a repository keep their digests.  Any other file of `model.layout` is an artifact of one layer
under a tag that is made of its path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import Digest, canonical_json, parse_digest, strict_json
from kartifacts.model.manifest import MEDIA_INDEX, MEDIA_MANIFEST, Descriptor
from kartifacts.remote.addresses import Address, parse, shown

ARTIFACT_FILE = "application/vnd.kartifacts.file.v1"
MEDIA_EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
TITLE = "org.opencontainers.image.title"  # the name that `oras pull` gives a layer
CREATED = "org.opencontainers.image.created"
ACCEPT = f"{MEDIA_MANIFEST}, {MEDIA_INDEX}, */*"  # for whatever is named by digest or by a tag of ours
MAX_FILE_MANIFEST = 64 << 10

_REPOSITORY = re.compile(r"(?=.{1,255}$)[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")
_SCHEMES = {"oci": "https", "oci+http": "http"}
_HUB = "docker.io"
_MAX_TAG = 128
_MANIFEST = {
    "schemaVersion": 2,
    "mediaType": MEDIA_MANIFEST,
    "config": {"mediaType": MEDIA_EMPTY, "digest": f"sha256:{sha256(EMPTY).hexdigest()}", "size": len(EMPTY)},
}


@dataclass(frozen=True)
class Registry:
    """One repository of a registry."""

    root: Address  # of the registry, with the login that stands in the text
    repository: str
    mount: str = ""  # another repository there that may hold the same blobs
    single_writer: bool = False  # somebody vouches that nobody else writes there meanwhile
    name: str = ""  # for messages, without credentials

    def at(self, rest: str) -> Address:
        """The address of ``blobs/…``, ``manifests/…`` and the like."""
        return Address(*self.root.origin, f"/v2/{self.repository}/{rest}", self.root.login)

    def blob(self, digest: Digest) -> Address:
        return self.at(f"blobs/sha256:{digest}")

    def manifest(self, reference: str) -> Address:
        """Of a tag or of ``sha256:<hex>``."""
        return self.at(f"manifests/{reference}")


def parse_registry(text: str) -> Registry:
    """Take ``oci://host[:port]/name`` apart; ``oci+http://`` is without TLS.

    Those who write may add ``?mount=name`` and ``single-writer=1``.

    Raises:
        ConfigError: it is no such text.
    """
    scheme, _, rest = text.partition("://")
    rest, _, query = rest.partition("?")
    place, _, repository = rest.rstrip("/").partition("/")
    try:
        if scheme not in _SCHEMES:
            raise ValueError("it does not begin with oci:// or oci+http://")
        root = parse(f"{_SCHEMES[scheme]}://{place}/")
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        mount, alone = options.pop("mount", None), options.pop("single-writer", "0")
        if options or alone not in ("0", "1"):
            raise ValueError("after '?' stand mount=NAME and single-writer=1, and nothing else")
        for found in (repository, *([] if mount is None else [mount])):
            if not _REPOSITORY.fullmatch(found):
                raise ValueError(
                    f"a registry cannot hold a repository {found[:100]!r}; "
                    "expected lower-case letters and digits, single '.', '_' or '-' between them, and '/'"
                )
    except ValueError as error:
        raise ConfigError(f"not a repository of a registry: {shown(text)!r}: {error}") from error
    if root.host == _HUB:  # its API answers elsewhere
        root = Address(root.scheme, "registry-1.docker.io", root.port, root.target, root.login)
    return Registry(root, repository, mount or "", alone == "1", f"{scheme}://{root.authority}/{repository}")


# -- tags --------------------------------------------------------------------------------------------------------------
#
# No other tag begins so: those of releases do with a letter or digit, of lists of referrers with 'sha256-'.


def tag_of(path: str) -> str:
    """The tag under which a file lies; no two paths have the same."""
    tag = "_" + path.replace("_", "__").replace("/", "_.").replace("+", "_-")
    return tag if len(tag) <= _MAX_TAG else f"_-{sha256(path.encode()).hexdigest()}"  # no path begins with '+'


def path_of(tag: str) -> str | None:
    """The path of a file by its tag; "" if only its manifest tells; None if it is the tag of something else."""
    if not tag.startswith("_"):
        return None
    if tag.startswith("_-"):
        return ""
    return re.sub("_([_.-])", lambda found: {"_": "_", ".": "/", "-": "+"}[found[1]], tag[1:])


# -- the manifests of files --------------------------------------------------------------------------------------------


def file_manifest(path: str, digest: Digest, size: int, created: str) -> bytes:
    """The manifest of the file `path`, whose content is the blob `digest`."""
    return canonical_json(
        {
            **_MANIFEST,
            "artifactType": ARTIFACT_FILE,
            "layers": [
                {
                    "mediaType": ARTIFACT_FILE,
                    "digest": f"sha256:{digest}",
                    "size": size,
                    "annotations": {TITLE: path},
                }
            ],
            "annotations": {CREATED: created},
        }
    )


def file_layer(manifest: bytes, where: str, path: str = "") -> Descriptor:
    """What a file's manifest says about its content, and that it is the file `path`, if that is known.

    Raises:
        VerificationError: it is no such manifest.
    """
    content = strict_json(manifest, what=where)
    kind = content.get("artifactType") if isinstance(content, dict) else None
    layers = content.get("layers") if isinstance(content, dict) else None
    if kind != ARTIFACT_FILE or not isinstance(layers, list) or len(layers) != 1 or not isinstance(layers[0], dict):
        raise VerificationError(f"{where} is not the manifest of one file: its artifactType is {kind!r:.100}")
    layer: dict[str, Any] = layers[0]
    notes, size, digest = layer.get("annotations"), layer.get("size"), layer.get("digest")
    title = notes.get(TITLE) if isinstance(notes, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(digest, str):
        raise VerificationError(f"{where} is malformed: its layer has no size or no digest")
    if not isinstance(title, str) or path not in ("", title):
        raise VerificationError(f"{where} is the manifest of {title!r:.200}", expected=path, actual=str(title)[:200])
    created = content.get("annotations")
    return Descriptor(
        media_type=ARTIFACT_FILE,
        digest=f"sha256:{parse_digest(digest, what=where)}",
        size=size,
        annotations={
            TITLE: title,
            CREATED: str(created.get(CREATED, "")) if isinstance(created, dict) else "",
        },
    )


def manifest_type(content: bytes) -> str | None:
    """The media type under which a registry takes `content` as a manifest; None if it is none, so a blob."""
    if content.lstrip()[:1] != b"{":
        return None
    try:
        found = strict_json(content, what="a blob")
    except VerificationError:
        return None
    kind = found.get("mediaType") if isinstance(found, dict) and found.get("schemaVersion") == 2 else None
    return kind if kind in (MEDIA_MANIFEST, MEDIA_INDEX) else None
