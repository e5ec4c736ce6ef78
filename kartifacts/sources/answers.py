"""Reads what a mirror answers: a status or a header becomes a fact about the blob, or a typed error."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from kartifacts.errors import SourceError, VerificationError

if TYPE_CHECKING:
    import requests

log = logging.getLogger(__name__)

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
REDIRECTS = frozenset({301, 302, 303, 307, 308})


def shown(url: str) -> str:
    """`url` for messages: no credentials, and no query, which may be a signature."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return repr(url.rpartition("@")[2].partition("?")[0][:200])
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "…" if parts.query else "", ""))[:500]


def check_status(status: int, headers: Mapping[str, str], url: str, *, size: int) -> None:
    """Let 200 and 206 pass.

    Raises:
        SourceError: `missing`, `permanent` or worth another try, as the status says.
        VerificationError: the range lies outside what the mirror holds under this name.
    """
    if status in (200, 206):
        return
    where = f"{shown(url)} answered {status}"
    if status in (404, 410):
        raise SourceError(where, missing=True)
    if status in (401, 403, 407):
        raise SourceError(
            where,
            permanent=True,
            hint="the mirror or a proxy wants other credentials: put them into the mirror's URL or into ~/.netrc",
        )
    if status == 416:
        raise wrong_content(f"{where} to a range of {size} bytes", size, headers.get("Content-Range", "less"), url)
    if status in TRANSIENT:
        raise SourceError(where, retry_after=asked_pause(headers))
    raise SourceError(f"{where}, which is not an answer to GET", permanent=True)


def asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that the mirror asks us to wait: Retry-After as a number or a date, or RateLimit's t."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}", text):
        return float(text)
    if text:
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    limit = re.search(r";\s*r=0\b.*?;\s*t=(\d{1,9})\b", headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None


def check_range(headers: Mapping[str, str], url: str, *, start: int, end: int, size: int) -> None:
    """Check that a 206 begins where it was asked to, within a blob of the right size."""
    text = headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", text.strip())
    if not found:
        raise SourceError(f"{shown(url)} answered 206 with the Content-Range {text[:100]!r}", permanent=True)
    first, last, total = int(found[1]), int(found[2]), found[3]
    if total not in ("*", str(size)):
        raise wrong_content(f"{shown(url)} holds {total} bytes", size, f"{total} bytes", url)
    if first != start or not first <= last < end:
        raise SourceError(f"{shown(url)} answered bytes {first}-{last} to {start}-{end - 1}", permanent=True)


def check_whole(headers: Mapping[str, str], url: str, *, size: int) -> None:
    """Check that a 200 does not already say that it is something else.  A missing length says nothing."""
    length = headers.get("Content-Length", "").strip()
    if headers.get("Content-Encoding") or not re.fullmatch(r"\d{1,18}", length) or int(length) == size:
        return
    kind = headers.get("Content-Type", "")[:80]
    raise wrong_content(f"{shown(url)} answered 200 with {length} bytes of {kind!r}", size, f"{length} bytes", url)


def wrong_content(message: str, size: int, actual: str, url: str) -> VerificationError:
    return VerificationError(
        f"{message}, expected {size} bytes",
        source=shown(url),
        expected=f"{size} bytes",
        actual=actual[:100],
        hint="this is not the artifact: a login page, a redirect to somewhere else, or a damaged mirror",
    )


def discard(response: requests.Response) -> None:
    """Let go of an answer; its connection stays open if so little is left of it that reading is cheaper."""
    import urllib3

    length = response.headers.get("Content-Length", "")
    if re.fullmatch(r"\d{1,5}", length):
        try:
            for _ in range(4):
                if not response.raw.read1(1 << 16, decode_content=False):
                    break
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            log.debug("the rest of an answer: %s", error)
    response.close()


def innermost(error: BaseException) -> str:
    """The shortest true reason of a chain of wrapped exceptions, without the addresses that they print."""
    import http.client

    reason: BaseException | None = error
    text = ""
    for _ in range(10):
        if reason is None:
            break
        if isinstance(reason, OSError) and reason.strerror:
            text = reason.strerror
        elif isinstance(reason, http.client.HTTPException):
            text = str(reason)[:200] or type(reason).__name__
        reason = reason.__cause__ or reason.__context__
    return text or type(error).__name__
