"""Brings blobs into a repository of a registry: mounted from another, at once, or in chunks that can be resumed."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO
from urllib.parse import parse_qsl, urlencode

from kartifacts.errors import SourceError, VerificationError
from kartifacts.model.digest import Digest
from kartifacts.remote.addresses import Address, redirected
from kartifacts.remote.registry import Registry
from kartifacts.remote.tries import persist
from kartifacts.remote.writer import Refused, Reply, Writer

log = logging.getLogger(__name__)

CHUNK = 16 << 20  # bytes sent at a time
_BINARY = {"Content-Type": "application/octet-stream"}


class Uploads:
    """Uploads to one repository.

    Args:
        retries: further tries after a fault; of a chunk that has arrived they count anew.
    """

    def __init__(self, registry: Registry, writer: Writer, *, retries: int, chunk: int = CHUNK) -> None:
        self._registry = registry
        self._name = registry.name
        self._writer = writer
        self._retries = retries
        self._chunk = chunk

    def send(self, digest: Digest, file: BinaryIO, size: int) -> None:
        """Send the `size` bytes of `file`, whose sha256 is `digest`.

        Raises:
            SourceError: it did not work; `permanent` where another try would end alike.
            VerificationError: the registry says that it got other bytes.
        """
        tried, wrong = False, 0

        def once() -> None:
            nonlocal tried, wrong
            if tried and length_of(self._writer, self._registry.blob(digest)) == size:
                return  # the answer was lost, not the bytes
            tried = True
            place = self._begin(digest)
            if place is None:
                return
            try:
                self._fill(place, digest, file, size)
            except Refused as error:
                if error.code == "DIGEST_INVALID":
                    wrong += 1
                    if wrong == 2:  # once may be a chunk of which nobody knows how much arrived
                        raise self._other_bytes(digest, error) from error
                elif not error.missing:
                    raise
                raise SourceError(error.message) from error  # begin anew

        persist(once, retries=max(self._retries, 1))

    def probe(self) -> None:
        """Prove that this login may write: an upload is begun, and given up."""

        def once() -> None:
            place = _location(self._writer.ask("POST", self._registry.at("blobs/uploads/"), hoped=(202,)))
            with suppress(SourceError):  # not everybody may, and the registry forgets it by itself
                self._writer.ask("DELETE", place, hoped=(200, 202, 204))

        persist(once, retries=self._retries)

    def _begin(self, digest: Digest) -> Address | None:
        """Where to send a blob; None if the registry had it in another repository."""
        address = self._registry.at("blobs/uploads/")
        if self._registry.mount:
            address = _with(address, mount=f"sha256:{digest}", **{"from": self._registry.mount})
        reply = self._writer.ask("POST", address, hoped=(201, 202))
        if reply.status == 201 and self._registry.mount:
            log.info("sha256:%s was mounted from %s", digest, self._registry.mount)
            return None
        return _location(reply)

    def _fill(self, place: Address, digest: Digest, file: BinaryIO, size: int) -> None:
        body = b""
        if size <= self._chunk:
            body = _piece(file, 0, size)
        else:
            place = self._in_chunks(place, file, size)
        finish = _with(place, digest=f"sha256:{digest}")
        check_digest(self._writer.ask("PUT", finish, body=body, headers=_BINARY, hoped=(201, 204)), digest, self._name)

    def _in_chunks(self, place: Address, file: BinaryIO, size: int) -> Address:
        """Send a large blob; gives the address at which it is to be finished."""
        at, unsure = 0, False

        def step() -> None:
            nonlocal at, place, unsure
            if unsure:
                reply = self._writer.ask("GET", place, hoped=(200, 204))
                at, place = _received(reply, 0, size), _location(reply)
                if at == size:
                    return
            unsure = True
            piece = _piece(file, at, min(self._chunk, size - at))
            headers = {**_BINARY, "Content-Range": f"{at}-{at + len(piece) - 1}"}
            try:
                reply = self._writer.ask("PATCH", place, body=piece, headers=headers, hoped=(202, 204))
            except Refused as error:
                if error.status != 416:
                    raise
                raise SourceError(error.message) from error  # it goes on elsewhere: ask where
            at, place, unsure = _received(reply, at + len(piece), size), _location(reply), False

        while at < size:
            persist(step, retries=self._retries)
        return place

    def _other_bytes(self, digest: Digest, error: Refused) -> VerificationError:
        return VerificationError(
            f"{self._name} got other bytes than those of sha256:{digest}: {error.message}",
            source=self._name,
            expected=f"sha256:{digest}",
            hint="something in between changes uploads, or the file was changed while it was read",
        )


def check_digest(reply: Reply, digest: Digest, where: str) -> None:
    """Check that a registry has stored what was sent, as far as it says."""
    said = reply.headers.get("Docker-Content-Digest", "")
    if said.startswith("sha256:") and said != f"sha256:{digest}":
        raise VerificationError(
            f"{where} stored other bytes than were sent", source=where, expected=f"sha256:{digest}", actual=said[:100]
        )


def length_of(writer: Writer, address: Address) -> int | None:
    """Bytes of a blob or manifest; None if it is not there."""
    reply = writer.ask("HEAD", address, hoped=(200, 404))
    if reply.status == 404:
        return None
    text = reply.headers.get("Content-Length", "")
    if not re.fullmatch(r"\d{1,18}", text):
        raise SourceError(f"{address.url} answered HEAD without a length: {text[:50]!r}", permanent=True)
    return int(text)


def _location(reply: Reply) -> Address:
    """Where an upload goes on."""
    text = reply.headers.get("Location", "")
    if not text:
        raise SourceError(f"{reply.address.url} answered {reply.status} without a Location", permanent=True)
    try:
        place = redirected(reply.address, text)
    except SourceError as error:
        hint = "the registry does not know that it is reached by https: let the proxy before it send X-Forwarded-Proto"
        raise SourceError(error.message, permanent=True, hint=hint) from error
    if place.origin != reply.address.origin:
        log.debug("an upload goes on at another origin, which gets no login: %s", place.authority)
    return place


def _received(reply: Reply, otherwise: int, size: int) -> int:
    """How far an upload has come, by its Range header."""
    text = reply.headers.get("Range", "")
    found = re.fullmatch(r"(?:bytes=)?0-(\d{1,18})", text.strip())
    if not found:
        return otherwise
    # Of an empty upload docker-registry says 0-0 too; if it was one byte after all, the digest tells.
    count = 0 if found[1] == "0" else int(found[1]) + 1
    if count > size:
        raise SourceError(f"{reply.address.url} says that {count} bytes of {size} have arrived")
    return count


def _with(address: Address, **parameters: str) -> Address:
    path, _, query = address.target.partition("?")
    return replace(
        address, target=f"{path}?{urlencode([*parse_qsl(query, keep_blank_values=True), *parameters.items()])}"
    )


def _piece(file: BinaryIO, start: int, length: int) -> bytes:
    try:
        file.seek(start)
        piece = file.read(length)
    except OSError as error:
        raise SourceError(f"cannot read {getattr(file, 'name', 'bytes')!r}: {error}", permanent=True) from error
    if len(piece) != length:
        raise SourceError(f"{getattr(file, 'name', 'bytes')!r} ended early: it was changed meanwhile", permanent=True)
    return piece
