"""An S3 bucket: names are created by If-None-Match, pointers swapped by If-Match, and what is unknown is read back.

Every write leaves a mark of its own, by which a writer that got no clear answer tells its own from that of another.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from kartifacts.config import Settings
from kartifacts.errors import SourceError
from kartifacts.model.digest import Digest, digest_of
from kartifacts.publish.buckets import MAX_SMALL, Listed, Stamped, checked, preflight, raced, taken
from kartifacts.publish.buckets.preflight import Unsupported
from kartifacts.publish.buckets.s3_requests import Found, Requests
from kartifacts.publish.buckets.sent import Sent, holds_digest
from kartifacts.remote.s3 import S3Error, place
from kartifacts.remote.tries import persist

log = logging.getLogger(__name__)

MAX_SINGLE = 64 << 20  # bytes of a blob that is sent by one request
_TAKEN = (409, 412)  # another writer was first, or is at it
_UNKNOWN_TO_IT = (405, 501)  # that there are conditions, or copies
_UPLOADS = 4  # parts at a time
_ABANDONED = 86_400.0  # seconds after which nobody goes on with an upload

_T = TypeVar("_T")
_Outcome = Literal["created", "same"]


class S3Bucket:
    """A bucket behind an ``s3://`` text.

    Args:
        text: see `kartifacts.publish.buckets.open_bucket`.
        single_writer: nobody else writes there, so that conditions may be left out where the store keeps none.
    """

    def __init__(self, text: str, settings: Settings, *, single_writer: bool = False) -> None:
        self._place = place(text)
        self._retries = settings.retries
        self._requests = Requests(self._place, settings)
        self._single_writer = single_writer or self._place.single_writer
        self._conditional = not self._single_writer  # until the preflight has seen that conditions are kept
        self._bare = False  # whether this store compares If-Match with the quotes on, as Ceph does
        self.name = self._place.name

    def __repr__(self) -> str:
        return f"S3Bucket({self.name!r})"

    def preflight(self) -> None:
        self._conditional = True
        self._conditional = preflight.check(self, self._put_plainly, single_writer=self._single_writer)

    def _put_plainly(self, path: str) -> None:
        self._persist(lambda: self._requests.put(path, Sent(b"1"), uuid.uuid4().hex, {}))

    def put_if_absent(self, path: str, content: bytes | Path) -> _Outcome:
        sent, write = Sent(content), uuid.uuid4().hex
        # Most of what is named by its digest is there already, and no race decides what it holds.
        if holds_digest(checked(path)) or not self._conditional:
            found = self._head(path)
            if found is not None:
                return self._same(path, sent, found)

        def attempt() -> _Outcome:
            try:
                self._write(path, sent, write, {"IfNoneMatch": "*"} if self._conditional else {})
            except S3Error as error:
                if error.permanent and error.status not in _TAKEN:
                    raise
                found = self._head(path)
                if found is None:
                    raise _again(error) from error
                if found.write != write:
                    return self._same(path, sent, found)
                log.info("%s, but it did take effect", error.message)
            return "created"

        return self._persist(attempt)

    def copy_if_absent(self, source: str, path: str) -> _Outcome:
        there, found = self._head(source), self._head(path)
        if there is None:
            raise S3Error(f"cannot copy {source!r} in {self.name}, which is not there", missing=True)
        outcome: _Outcome = "same" if found is not None else "created"
        if found is None:
            try:
                self._persist(lambda: self._requests.copy(source, path, uuid.uuid4().hex))
            except S3Error as error:
                if error.status not in _UNKNOWN_TO_IT:
                    raise
                return self.put_if_absent(path, self.get(source))
            found = self._head(path)
        if (found is None or found[:2] != there[:2]) and self.digest(path) != self.digest(source):
            raise taken(self, path)
        return outcome

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        return self._persist(lambda: self._requests.get(checked(path), limit))[0]

    def digest(self, path: str) -> tuple[Digest, int]:
        return self._persist(lambda: digest_of(self._requests.pieces(checked(path))))

    def size(self, path: str) -> int | None:
        found = self._head(path)
        return None if found is None else found.size

    def read(self, path: str) -> Stamped | None:
        state = self._state(path)
        return None if state is None else Stamped(state[0], state[1].etag)

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        sent, write = Sent(content), uuid.uuid4().hex

        def attempt() -> None:
            if not self._conditional and self.read(path) != before:
                raise raced(self, path)
            try:
                self._write(path, sent, write, self._only_if(before))
            except S3Error as error:
                if error.permanent and error.status not in (404, *_TAKEN):
                    raise
                state = self._state(path)
                if state is not None and state[1].write == write:
                    log.info("%s, but it did take effect", error.message)
                    return
                if (None if state is None else state[1].etag) != (None if before is None else before.mark):
                    raise raced(self, path) from error
                if error.status == 412 and before is not None:
                    if self._bare:
                        raise
                    self._bare = True  # as nobody has changed it, what was refused is how it was asked
                raise _again(error) from error

        self._persist(attempt)

    def list(self, prefix: str) -> list[Listed]:
        below = self._place.key(checked(prefix)) + "/"
        found: list[Listed] = []
        token: str | None = ""
        while token is not None:
            entries, following = self._persist(partial(self._requests.page, below, token))
            found += entries
            token = following if following not in ("", token) else None
        # Consoles make objects that end in a slash, for folders.
        return sorted(
            entry._replace(path=self._place.path(entry.path)) for entry in found if not entry.path.endswith("/")
        )

    def delete(self, path: str) -> None:
        self._persist(lambda: self._requests.delete(checked(path)))

    def tidy(self) -> None:
        """Abort uploads in parts that were begun more than a day ago."""
        try:
            for upload in self._persist(lambda: self._requests.uploads(self._place.key("blobs/"))):
                if time.time() - upload.begun > _ABANDONED:
                    self._requests.abort(upload.key, upload.number)
        except S3Error as error:
            if not error.permanent:
                raise
            log.debug("uploads that were left behind stay: %s", error.message)  # a publisher need not be allowed to

    def _write(self, path: str, sent: Sent, write: str, condition: dict[str, str]) -> None:
        try:
            if sent.size > MAX_SINGLE and holds_digest(path):
                self._write_parts(path, sent, write, condition)
            else:
                self._requests.put(checked(path), sent, write, condition)
        except S3Error as error:
            if condition and error.status in _UNKNOWN_TO_IT:
                raise Unsupported(error.message, permanent=True) from error
            raise

    def _write_parts(self, path: str, sent: Sent, write: str, condition: dict[str, str]) -> None:
        """For names that hold the digest: not every store that keeps conditions does so here."""
        upload = self._requests.begin(path, write)

        def send(number: int) -> dict[str, object]:
            return self._persist(lambda: self._requests.put_part(path, upload, number, sent))

        try:
            with ThreadPoolExecutor(_UPLOADS) as pool:
                parts = list(pool.map(send, range(1, sent.parts + 1)))
            self._requests.complete(path, upload, parts, condition)
        except BaseException:
            with suppress(SourceError):
                self._requests.abort(self._place.key(path), upload)
            raise

    def _only_if(self, before: Stamped | None) -> dict[str, str]:
        if not self._conditional:
            return {}
        if before is None:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": before.mark if self._bare else f'"{before.mark}"'}

    def _same(self, path: str, sent: Sent, found: Found) -> Literal["same"]:
        # The ETag spares reading back a blob of gigabytes on each publish; one that is none tells nothing.
        if found.size == sent.size and (found.etag in sent.etags or self.digest(path) == sent.digest):
            return "same"
        raise taken(self, path)

    def _head(self, path: str) -> Found | None:
        return self._persist(lambda: self._requests.head(checked(path)))

    def _state(self, path: str) -> tuple[bytes, Found] | None:
        try:
            return self._persist(lambda: self._requests.get(checked(path), MAX_SMALL))
        except S3Error as error:
            if error.missing:
                return None
            raise

    def _persist(self, act: Callable[[], _T]) -> _T:
        return persist(act, retries=self._retries)


def _again(error: S3Error) -> S3Error:
    """The same, worth another try: a conflict whose other side is gone, or an outcome that was not known."""
    return S3Error(error.message, status=error.status, code=error.code, retry_after=error.retry_after, hint=error.hint)
