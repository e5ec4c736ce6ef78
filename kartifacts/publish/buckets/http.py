"""A server that takes a plain PUT as a bucket, like Artifactory or nginx: as safe as its conditional writes are.

Such servers give no listing that all of them have, so none is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from kartifacts.config import Settings
from kartifacts.model.digest import Digest, digest_of
from kartifacts.publish.buckets import MAX_SMALL, Listed, Stamped, Unlisted, checked, preflight, raced, taken
from kartifacts.publish.buckets.http_requests import Found, HttpError, Requests
from kartifacts.publish.buckets.preflight import Unsupported
from kartifacts.publish.buckets.sent import Sent, holds_digest
from kartifacts.remote.tries import persist

log = logging.getLogger(__name__)

_TAKEN = (409, 412)  # another writer was first
_DENIED = (403, *_TAKEN)  # 403: Artifactory, to who may create but not replace
_UNKNOWN_TO_IT = (405, 501)

_T = TypeVar("_T")
_Outcome = Literal["created", "same"]


class HttpBucket:
    """What lies below a URL.

    Args:
        text: the URL; a user and password in it are sent to that origin only and never shown; a password without a
            user is a bearer token.
        single_writer: nobody else writes there, so that conditions may be left out where the server keeps none.
    """

    def __init__(self, text: str, settings: Settings, *, single_writer: bool = False) -> None:
        self._requests = Requests(text, settings)
        self._retries = settings.retries
        self._single_writer = single_writer
        self._conditional = not single_writer  # until the preflight has seen that conditions are kept
        self.name = self._requests.name

    def __repr__(self) -> str:
        return f"HttpBucket({self.name!r})"

    def preflight(self) -> None:
        self._conditional = True
        self._conditional = preflight.check(self, self._put_plainly, single_writer=self._single_writer)

    def _put_plainly(self, path: str) -> None:
        self._persist(lambda: self._requests.put(path, Sent(b"1"), {}))

    def put_if_absent(self, path: str, content: bytes | Path) -> _Outcome:
        sent = Sent(content)
        if holds_digest(checked(path)) or not self._conditional:
            found = self._head(path)
            if found is not None:
                return self._same(path, sent, found)
        tried = False

        def attempt() -> _Outcome:
            nonlocal tried
            try:
                self._put(path, sent, {"If-None-Match": "*"} if self._conditional else {})
            except HttpError as error:
                if error.permanent and error.status not in _DENIED:
                    raise
                found = self._head(path)
                if found is None:
                    if error.status == 403:
                        raise
                    tried = True
                    raise _again(error) from error
                outcome = self._same(path, sent, found)
                # Of the bytes that were sent nobody can say who brought them; they were, once.
                return "created" if tried or not error.permanent else outcome
            return "created"

        return self._persist(attempt)

    def copy_if_absent(self, source: str, path: str) -> _Outcome:
        return self.put_if_absent(path, self.get(source))

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        return self._persist(lambda: self._requests.get(checked(path), limit))[0]

    def digest(self, path: str) -> tuple[Digest, int]:
        return self._persist(lambda: digest_of(self._requests.pieces(checked(path))))

    def size(self, path: str) -> int | None:
        found = self._head(path)
        return None if found is None else self.digest(path)[1] if found.size is None else found.size

    def read(self, path: str) -> Stamped | None:
        try:
            content, found = self._persist(lambda: self._requests.get(checked(path), MAX_SMALL))
        except HttpError as error:
            if error.missing:
                return None
            raise
        return Stamped(content, found.etag)

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        if self._conditional and before is not None and not before.mark:
            raise Unsupported(f"{self.name} gives no ETag, so nothing can be replaced safely there", permanent=True)
        sent = Sent(content)
        condition = {"If-None-Match": "*"} if before is None else {"If-Match": before.mark}
        unknown = False

        def attempt() -> None:
            nonlocal unknown
            if not self._conditional and self.read(path) != before:
                raise raced(self, path)
            try:
                self._put(path, sent, condition if self._conditional else {})
            except HttpError as error:
                if error.permanent and error.status not in (404, *_TAKEN):
                    raise
                unknown = unknown or not error.permanent
                state = self.read(path)
                if unknown and state is not None and state.content == content:
                    log.info("%s, but it did take effect", error.message)
                    return
                if state != before or error.permanent:
                    raise raced(self, path) from error
                raise

        self._persist(attempt)

    def list(self, prefix: str) -> list[Listed]:
        raise Unlisted(
            f"{self.name} cannot be asked what lies below {prefix!r}: there is no request for it that all servers know",
            permanent=True,
            hint="retention needs a listing: run it where the files lie, on dir:PATH",
        )

    def delete(self, path: str) -> None:
        self._persist(lambda: self._requests.delete(checked(path)))

    def tidy(self) -> None:
        """A server throws away by itself what was not sent whole."""

    def _put(self, path: str, sent: Sent, condition: dict[str, str]) -> None:
        try:
            self._requests.put(checked(path), sent, condition)
        except HttpError as error:
            if condition and error.status in _UNKNOWN_TO_IT:
                raise Unsupported(error.message, permanent=True) from error
            raise

    def _same(self, path: str, sent: Sent, found: Found) -> Literal["same"]:
        digest, size = sent.digest
        if found.size in (None, size) and (found.sha256 == digest or self.digest(path) == sent.digest):
            return "same"
        raise taken(self, path)

    def _head(self, path: str) -> Found | None:
        return self._persist(lambda: self._requests.head(checked(path)))

    def _persist(self, act: Callable[[], _T]) -> _T:
        return persist(act, retries=self._retries)


def _again(error: HttpError) -> HttpError:
    """The same, worth another try: a conflict whose other side is gone, or an outcome that was not known."""
    return HttpError(error.message, status=error.status, retry_after=error.retry_after, hint=error.hint)
