"""Reads what a mirror answers: a status or a header becomes a fact about the blob, or a typed error."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.message import Message

from kartifacts.errors import SourceError, VerificationError

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_THROTTLED = 1.0  # seconds to wait where a mirror says that there were too many requests, but not for how long


class NoConnection(SourceError):
    """There is no connection to be had: the mirror is switched off, out of reach, or not who it should be."""


def check_status(status: int, headers: Message, place: str, *, size: int) -> None:
    """Let 200 and 206 pass.

    Raises:
        SourceError: `missing`, `permanent` or worth another try, as the status says.
        VerificationError: the range lies outside what the mirror holds under this name.
    """
    if status in (200, 206):
        return
    where = f"{place} answered {status}"
    if status in (404, 410):
        raise SourceError(where, missing=True)
    if status in (401, 403, 407):
        raise SourceError(
            where,
            denied=status == 403,
            permanent=True,
            hint="the proxy wants credentials: put them into HTTPS_PROXY or HTTP_PROXY"
            if status == 407
            else "the mirror wants other credentials: put them into the mirror's URL or into ~/.netrc",
        )
    if status == 416:
        raise wrong_content(f"{where} to a range of {size} bytes", size, headers.get("Content-Range", "less"), place)
    if status in TRANSIENT:
        pause = asked_pause(headers)
        if pause is None and status == 429:
            pause = _THROTTLED
        limited = "" if pause is None else f": it limits the rate and asks for a pause of {pause:.0f} s"
        raise SourceError(where + limited, retry_after=pause)
    raise SourceError(f"{where}, which is not an answer to GET", permanent=True)


def asked_pause(headers: Mapping[str, str] | Message) -> float | None:
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
    used_up = (item for item in headers.get("RateLimit", "").split(",") if re.search(r";\s*r=0\b", item))
    return max((float(t[1]) for item in used_up if (t := re.search(r";\s*t=(\d{1,9})\b", item))), default=None)


def check_range(headers: Message, place: str, *, start: int, end: int, size: int) -> None:
    """Check that a 206 begins where it was asked to, within a blob of the right size."""
    text = headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", text.strip())
    if not found:
        raise SourceError(f"{place} answered 206 with the Content-Range {text[:100]!r}", permanent=True)
    first, last, total = int(found[1]), int(found[2]), found[3]
    if total not in ("*", str(size)):
        raise wrong_content(f"{place} holds {total} bytes", size, f"{total} bytes", place)
    if first != start or not first <= last < end:
        raise SourceError(f"{place} answered bytes {first}-{last} to {start}-{end - 1}", permanent=True)
    length = _length(headers, place)
    if length not in (None, last - first + 1):
        raise SourceError(f"{place} announced {length} bytes for bytes {first}-{last}", permanent=True)


def check_whole(headers: Message, place: str, *, size: int) -> None:
    """Check that a 200 does not already say that it is something else.  A missing length says nothing."""
    length = _length(headers, place)
    if length in (None, size) or headers.get("Content-Encoding"):
        return
    kind = headers.get("Content-Type", "")[:80]
    raise wrong_content(f"{place} answered 200 with {length} bytes of {kind!r}", size, f"{length} bytes", place)


def _length(headers: Message, place: str) -> int | None:
    """The length that is announced; None if there is none, or one that is no number, as for a body in chunks."""
    texts = {text.strip() for text in headers.get_all("Content-Length", [])}
    if len(texts) > 1:
        raise SourceError(f"{place} announced several lengths: {sorted(texts)[:3]!r}"[:500], permanent=True)
    text = texts.pop() if texts and "Transfer-Encoding" not in headers else ""
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def wrong_content(message: str, size: int, actual: str, place: str) -> VerificationError:
    return VerificationError(
        f"{message}, expected {size} bytes",
        source=place,
        expected=f"{size} bytes",
        actual=actual[:100],
        hint="this is not the artifact: a login page, a redirect to somewhere else, or a damaged mirror",
    )


def innermost(error: BaseException) -> str:
    """The shortest true reason of a chain of wrapped exceptions, without the addresses that they print."""
    import http.client

    reason: BaseException | None = error
    text = ""
    for _ in range(10):
        if reason is None:
            break
        if isinstance(reason, (OSError, http.client.HTTPException)):
            text = getattr(reason, "strerror", None) or str(reason)[:200] or type(reason).__name__
        reason = reason.__cause__ or reason.__context__
    return text or type(error).__name__
