"""A repository of an OCI registry as a bucket: blobs and manifests by digest, every other file as a small artifact.

A registry replaces what a tag points at for whoever asks last.  So there can be only one publisher at a time, who has
to say that he is alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlencode

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, PublishConflict, SourceError, VerificationError
from kartifacts.model.digest import Digest, digest_of, sha256, strict_json
from kartifacts.model.layout import OCI_INDEX
from kartifacts.model.manifest import MAX_INDEX, MAX_PACK, MEDIA_INDEX, MEDIA_MANIFEST, Descriptor
from kartifacts.publish.buckets import MAX_SMALL, Listed, Stamped, Unlisted, checked, raced
from kartifacts.publish.buckets.oci_content import blob_digest, named, subject_of, with_referrer, written_at
from kartifacts.publish.buckets.sent import Sent
from kartifacts.publish.buckets.uploads import CHUNK, Uploads, check_digest, length_of
from kartifacts.remote.addresses import Address, redirected
from kartifacts.remote.registry import (
    EMPTY,
    MAX_FILE_MANIFEST,
    TITLE,
    file_layer,
    file_manifest,
    manifest_type,
    parse_registry,
    path_of,
    tag_of,
)
from kartifacts.remote.tries import persist
from kartifacts.remote.writer import MAX_ANSWER, Refused, Reply, Writer

log = logging.getLogger(__name__)

_MAX_PAGES = 10_000


class _File(NamedTuple):
    """What is there under the tag of a path."""

    mark: str  # digest of the manifest
    layer: Descriptor


class OciBucket:
    """A repository behind ``oci://host[:port]/name[?mount=other/name&single-writer=1]``.

    Args:
        text: see `remote.registry.parse_registry`.
        single_writer: nobody else writes there meanwhile.
        chunk: bytes of a large blob that are sent at a time.
    """

    def __init__(self, text: str, settings: Settings, *, single_writer: bool = False, chunk: int = CHUNK) -> None:
        self._registry = parse_registry(text)
        self.name = self._registry.name
        self._single_writer = single_writer or self._registry.single_writer
        self._retries = settings.retries
        self._settings = settings
        self._chunk = chunk

    def __repr__(self) -> str:
        return f"OciBucket({self.name!r})"

    def preflight(self) -> None:
        self._uploads.probe()
        self._check_alone()
        log.warning("%s keeps no conditional writes, as no registry does: let nobody else write there", self.name)

    # -- objects that never change -------------------------------------------------------------------------------------

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        digest = blob_digest(path)
        if digest is None:
            return self._put_file(path, Sent(content))
        with Sent(content).open() as file:
            size = file.seek(0, 2)
            file.seek(0)
            manifest = file.read() if size <= MAX_INDEX else b""
            kind = manifest_type(manifest)
            if kind is not None:
                return self._put_image(path, digest, manifest, kind)
            if self._is_there(self._registry.blob(digest), path, digest, size):
                return "same"
            self._uploads.send(digest, file, size)
        return "created"

    def _put_image(self, path: str, digest: Digest, manifest: bytes, kind: str) -> Literal["created", "same"]:
        about = subject_of(manifest) if kind == MEDIA_MANIFEST else None
        there = self._is_there(self._manifest(digest), path, digest, len(manifest))
        if about is not None:
            self._put_referrer(manifest, about)  # also what is there: whoever sent it may not have come to list it
        elif not there:
            self._put_manifest(f"sha256:{digest}", manifest, kind)
        return "same" if there else "created"

    def _is_there(self, address: Address, path: str, digest: Digest, size: int) -> bool:
        if self._length(address) is None:
            return False
        if self.digest(path) != (digest, size):
            raise self._conflict(path)
        return True

    def copy_if_absent(self, source: str, path: str) -> Literal["created", "same"]:
        return self.put_if_absent(path, self.get(source))

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        address = self._content_address(path, limit)
        return self._ask("GET", address, limit=limit).content

    def digest(self, path: str) -> tuple[Digest, int]:
        address = self._content_address(path, MAX_PACK)

        def once() -> tuple[Digest, int]:
            with self._writer.stream(address, MAX_PACK) as pieces:
                return digest_of(pieces)

        return persist(once, retries=self._retries)

    def size(self, path: str) -> int | None:
        digest = blob_digest(path)
        if digest is None:
            found = self._file(path)
            return found.layer.size if found is not None else None
        size = self._length(self._registry.blob(digest))
        return size if size is not None else self._length(self._manifest(digest))

    # -- pointers ------------------------------------------------------------------------------------------------------

    def read(self, path: str) -> Stamped | None:
        found = self._file(path)
        if found is None:
            return None
        content = self._ask("GET", self._registry.blob(found.layer.sha256), limit=MAX_SMALL).content
        if sha256(content) != found.layer.sha256:
            raise VerificationError(
                f"{self.name} gives other bytes for {path!r} than its manifest names",
                source=self.name,
                expected=found.layer.digest,
                actual=f"sha256:{sha256(content)}",
            )
        return Stamped(content, found.mark)

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        self._check_alone()
        found = self._file(path)
        if (found.mark if found is not None else "") != (before.mark if before is not None else ""):
            raise raced(self, path)
        if path == OCI_INDEX:
            self._tag_images(content, before.content if before is not None else None)
        self._write_file(path, Sent(content))

    def _tag_images(self, index: bytes, before: bytes | None) -> None:
        """Give what index.json names the same name here, as a tag: a registry lists nothing else."""
        known = set(named(before)) if before is not None else set()
        for tag, digest in named(index):
            if (tag, digest) not in known:
                manifest = self._ask("GET", self._manifest(digest), limit=MAX_INDEX).content
                self._put_manifest(tag, manifest, manifest_type(manifest) or MEDIA_INDEX)

    # -- all of them ---------------------------------------------------------------------------------------------------

    def list(self, prefix: str) -> list[Listed]:
        below = checked(prefix) + "/"
        if below.startswith("blobs/"):
            raise Unlisted(
                f"{self.name} cannot list its blobs, as no registry can",
                permanent=True,
                hint="the registry's own collection of garbage removes blobs that no manifest names",
            )
        found = []
        for tag in self._tags():
            path = path_of(tag)
            if path is None or not (path == "" or path.startswith(below)):
                continue
            file = self._file_at(tag, path)
            if file is not None and file.layer.annotations[TITLE].startswith(below):
                found.append(Listed(file.layer.annotations[TITLE], file.layer.size, written_at(file.layer)))
        return sorted(found)

    def delete(self, path: str) -> None:
        digest = blob_digest(path)
        if digest is not None:
            for address in (self._registry.blob(digest), self._manifest(digest)):
                if self._length(address) is not None:
                    self._delete(address, path)
            return
        found = self._file(path)
        if found is not None:
            self._delete(self._registry.manifest(found.mark), path)

    def tidy(self) -> None:
        """A registry forgets uploads that were not finished by itself."""

    def refer(self, manifest: bytes) -> Digest:
        """Store an OCI manifest that has a `subject`, so that whoever asks for its referrers finds it.

        Its config and layers are there already.

        Raises:
            VerificationError: it has no subject.
        """
        about = subject_of(manifest)
        if about is None:
            raise VerificationError("a manifest without a subject refers to nothing")
        self._put_referrer(manifest, about)
        return sha256(manifest)

    def _put_referrer(self, manifest: bytes, about: Digest) -> None:
        reply = self._put_manifest(f"sha256:{sha256(manifest)}", manifest, MEDIA_MANIFEST)
        if "OCI-Subject" in reply.headers:
            return
        # A registry that lists no referrers: they stand in an index under a tag made of the digest.
        tag = f"sha256-{about}"
        listed = self._ask("GET", self._registry.manifest(tag), hoped=(200, 404), limit=MAX_INDEX)
        before = listed.content if listed.status == 200 else None
        after = with_referrer(before, manifest, f"the tag {tag} in {self.name}")
        if after != before:
            self._check_alone()
            self._put_manifest(tag, after, MEDIA_INDEX)

    # -- files under tags ----------------------------------------------------------------------------------------------

    def _put_file(self, path: str, sent: Sent) -> Literal["created", "same"]:
        if self._file(path) is not None:
            if self.digest(path) != sent.digest:
                raise self._conflict(path)
            return "same"
        self._write_file(path, sent)
        return "created"

    def _write_file(self, path: str, sent: Sent) -> None:
        digest, size = sent.digest
        for blob in (sent, Sent(EMPTY)):
            self._put_blob(blob)
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        manifest = file_manifest(path, digest, size, now)
        self._put_manifest(tag_of(path), manifest, MEDIA_MANIFEST)
        found = self._file(path)
        if found is None or found.mark != f"sha256:{sha256(manifest)}":
            raise raced(self, path)

    def _put_blob(self, sent: Sent) -> None:
        digest, size = sent.digest
        if self._length(self._registry.blob(digest)) is None:
            with sent.open() as file:
                self._uploads.send(digest, file, size)

    def _file(self, path: str) -> _File | None:
        return self._file_at(tag_of(checked(path)), path)

    def _file_at(self, tag: str, path: str) -> _File | None:
        reply = self._ask("GET", self._registry.manifest(tag), hoped=(200, 404), limit=MAX_FILE_MANIFEST)
        if reply.status == 404:
            return None
        where = f"the manifest of {path!r} in {self.name}" if path else f"the manifest {tag} in {self.name}"
        return _File(f"sha256:{sha256(reply.content)}", file_layer(reply.content, where, path))

    def _tags(self) -> Iterator[str]:
        """All tags of the repository, page by page."""
        address: Address | None = self._registry.at(f"tags/list?{urlencode({'n': 1000})}")
        for _ in range(_MAX_PAGES):
            if address is None:
                return
            reply = self._ask("GET", address, hoped=(200, 404), limit=MAX_SMALL)
            if reply.status == 404:  # nothing was ever written there
                return
            content = strict_json(reply.content, what=f"the list of tags of {self.name}")
            tags = content.get("tags") if isinstance(content, dict) else None
            if not isinstance(tags, list | None) or not all(isinstance(tag, str) for tag in tags or ()):
                raise VerificationError(f"{self.name} gives no list of tags")
            yield from tags or ()
            following = re.match(r'\s*<([^>]+)>\s*;.*\brel="?next"?', reply.headers.get("Link", ""))
            address = redirected(reply.address, following[1]) if following else None
        raise SourceError(f"the list of tags of {self.name} has no end", permanent=True)

    # -- requests ------------------------------------------------------------------------------------------------------

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self._registry, self._settings)

    @cached_property
    def _remover(self) -> Writer:
        """Asks for a token that not everybody who may write gets."""
        return Writer(self._registry, self._settings, "pull,push,delete")

    @cached_property
    def _uploads(self) -> Uploads:
        return Uploads(self._registry, self._writer, retries=self._retries, chunk=self._chunk)

    def _ask(self, method: str, address: Address, *, hoped: tuple[int, ...] = (200,), limit: int = MAX_ANSWER) -> Reply:
        return persist(lambda: self._writer.ask(method, address, hoped=hoped, limit=limit), retries=self._retries)

    def _manifest(self, digest: str) -> Address:
        return self._registry.manifest(f"sha256:{digest}")

    def _length(self, address: Address) -> int | None:
        return persist(lambda: length_of(self._writer, address), retries=self._retries)

    def _put_manifest(self, reference: str, manifest: bytes, kind: str) -> Reply:
        """Whatever came of an earlier try, the same bytes under the same name are the same state."""
        address = self._registry.manifest(reference)
        headers = {"Content-Type": kind}
        reply = persist(
            lambda: self._writer.ask("PUT", address, body=manifest, headers=headers, hoped=(201, 202)),
            retries=self._retries,
        )
        check_digest(reply, sha256(manifest), self.name)
        return reply

    def _content_address(self, path: str, limit: int) -> Address:
        """Where the bytes of an object are."""
        digest = blob_digest(path)
        if digest is None:
            found = self._file(path)
            if found is None:
                raise SourceError(f"{self.name} does not hold {path!r}", missing=True)
            if found.layer.size > limit:
                raise SourceError(
                    f"{path!r} in {self.name} has {found.layer.size} bytes; at most {limit} are read", permanent=True
                )
            return self._registry.blob(found.layer.sha256)
        address = self._registry.blob(digest)
        return address if self._length(address) is not None else self._manifest(digest)

    def _delete(self, address: Address, path: str) -> None:
        try:
            persist(lambda: self._remover.ask("DELETE", address, hoped=(200, 202, 204, 404)), retries=self._retries)
        except Refused as error:
            if error.status not in (400, 405):
                raise
            raise SourceError(
                f"{self.name} does not let {path!r} be removed: {error.message}",
                permanent=True,
                hint="docker-registry: storage.delete.enabled; elsewhere by the registry's own means",
            ) from error

    def _check_alone(self) -> None:
        if not self._single_writer:
            raise ConfigError(
                f"{self.name} does not keep conditional writes, as no registry does for tags; nothing was published",
                hint="two publishers at once would undo each other's work there: publish to another store and mirror "
                "it, or say --single-writer if nobody else ever writes there meanwhile",
            )

    def _conflict(self, path: str) -> PublishConflict:
        return PublishConflict(
            f"{self.name} already holds other bytes under {path!r}; they were left as they are",
            hint="a name never changes its content: publish under another version",
        )
