"""Names in a repository; publisher and reader agree here and nowhere else.

oci-layout                                             this is an OCI image layout
index.json                                             its entry for skopeo, oras, crane; our client never trusts it
blobs/sha256/<hex>                                     packs, kernel tables, bundle manifests, release indexes
targets/<library>/<version>/<sha256>.index.json        a release, by name; one file, and it never changes
targets/<library>/<version>/<sha256>.provenance.json   what was signed about how it was built
metadata/{N.root,N.targets,N.<library>,N.snapshot}.json, metadata/timestamp.json   TUF, the view of who is online
airgap/...                                             the same targets bytes under a root with long expiry

Only index.json and the timestamp.json of both views are ever replaced; by the latter a release becomes public.

In stores and bundle wheels kernels lie as files of their own, and a bundle wheel brings its pin:

v1/sha256/<2 hex>/<hex><suffix>                        a kernel that is used in place
v1/recall/<hex>.json                                   in a store only: what a load came to
kartifacts.lock                                        the release that a bundle wheel was made of
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import Digest

OCI_LAYOUT = "oci-layout"
OCI_LAYOUT_CONTENT = b'{"imageLayoutVersion":"1.0.0"}'
OCI_INDEX = "index.json"
NOTES = "v1/recall"
BUNDLE_LOCK = "kartifacts.lock"
BUNDLE_GROUP = "kartifacts.bundles"
"""Entry point group of installed bundle wheels; the value names the package whose directory holds the bundle."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9._+-]{0,126}[a-z0-9])?")
_SEGMENT = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._+-]{0,253}[A-Za-z0-9_+-])?")
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,12}")
_PATH = re.compile(rf"{_SEGMENT.pattern}(/{_SEGMENT.pattern})*")
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_DEVICE_IN_PATH = re.compile(rf"(?:^|/)(?:{_DEVICE.pattern})(?:/|$)", re.IGNORECASE)
MAX_PATH = 1024


def blob_path(digest: Digest) -> str:
    return f"blobs/sha256/{digest}"


def loose_path(digest: Digest, suffix: str) -> str:
    return f"v1/sha256/{digest[:2]}/{digest}{suffix}"


View = Literal["online", "airgap"]
"""One repository is signed twice: for readers who ask it daily, and for those who carry it across."""

VIEWS: tuple[View, ...] = ("online", "airgap")
_DIRECTORIES: dict[View, str] = {"online": "metadata", "airgap": "airgap"}
TIMESTAMP = "timestamp.json"


def metadata_path(view: View, name: str) -> str:
    """Where the metadata file `name` (``3.snapshot.json``, ``timestamp.json``) of a view lies."""
    return f"{_DIRECTORIES[view]}/{name}"


def target_name(library: str, version: str, kind: str = "index") -> str:
    """The name under which TUF metadata lists a release (``index``), or what was signed about it (``provenance``)."""
    return f"{check_name(library, 'library')}/{check_name(version, 'version')}/{kind}.json"


def target_path(library: str, version: str, digest: Digest, kind: str = "index") -> str:
    """Where that target lies: TUF's consistent snapshots put the digest before the last part of the name."""
    return f"{release_directory(library, version)}/{digest}.{kind}.json"


def release_directory(library: str, version: str) -> str:
    return f"targets/{check_name(library, 'library')}/{check_name(version, 'version')}"


def release_path(library: str, version: str, digest: Digest) -> str:
    return target_path(library, version, digest)


def check_name(text: str, what: str) -> str:
    """Give back `text` if it may name a library, version, family or op; else `ConfigError`."""
    if _DEVICE.fullmatch(text):
        raise ConfigError(f"bad {what} name {text[:150]!r}: that is a device of Windows, and no file there")
    if not _NAME.fullmatch(text) or ".." in text:
        raise ConfigError(
            f"bad {what} name {text[:150]!r}: expected lower-case letters, digits and . _ + - "
            "between them, at most 128 characters"
        )
    return text


def check_path(text: str, *, what: str = "a kernel path") -> str:
    """Give back `text` if it is a safe relative path of a published file; else `VerificationError`.

    Upper case is allowed, since the trees that users import have it; `..`, absolute paths, empty segments, control
    characters, Windows device names and anything outside ASCII are not.
    """
    if len(text) > MAX_PATH or ".." in text or not _PATH.fullmatch(text) or _DEVICE_IN_PATH.search(text):
        raise VerificationError(f"{what} is not a safe relative path: {text[:150]!r}")
    return text


def are_paths(texts: Sequence[str]) -> bool:
    """Whether `check_path` allows all of them; a fraction of its time for each, for the tables that hold very many."""
    joined = "/".join(texts)
    return (
        max(map(len, texts), default=0) <= MAX_PATH
        and ".." not in joined
        and (not texts or _PATH.fullmatch(joined) is not None)
        and _DEVICE_IN_PATH.search(joined) is None
    )


def suffix_of(path: str) -> str:
    """The last suffix (``.so``, ``.cubin``) if it is plain, else nothing.

    The store keeps it because a loader may choose by suffix.
    """
    name = path.rpartition("/")[2]
    dot = name.rfind(".")
    suffix = name[dot:] if dot > 0 else ""
    return suffix if _SUFFIX.fullmatch(suffix) else ""
