"""The identity of bytes: sha256, canonical JSON, and a JSON reader that refuses what has two readings."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NewType, NoReturn

from kartifacts.errors import VerificationError

Digest = NewType("Digest", str)
"""64 lower-case hex digits of a sha256; the type shows that a string went through `parse_digest` or `sha256`."""

_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def sha256(data: bytes | bytearray | memoryview) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def digest_of(pieces: Iterable[bytes]) -> tuple[Digest, int]:
    """sha256 and size of bytes that are not in memory as a whole."""
    hashed, size = hashlib.sha256(), 0
    for piece in pieces:
        hashed.update(piece)
        size += len(piece)
    return Digest(hashed.hexdigest()), size


def parse_digest(text: str, *, what: str = "") -> Digest:
    """Accept ``sha256:<hex>`` or ``<hex>``; anything else, another algorithm included, is a `VerificationError`.

    Args:
        what: where the text stands, for the message.
    """
    if _HEX.fullmatch(text):  # nearly always, and for every kernel of a table
        return Digest(text)
    bare = text.removeprefix("sha256:")
    if not _HEX.fullmatch(bare):
        place = f"{what} is malformed: " if what else ""
        raise VerificationError(f"{place}not a sha256 digest: expected 64 lower-case hex digits, got {text[:100]!r}")
    return Digest(bare)


def are_digests(texts: Sequence[str]) -> bool:
    """Whether all of them are plain digests; a tenth of the time of `parse_digest` for each."""
    joined = "".join(texts)
    try:
        return set(map(len, texts)) <= {64} and bytes.fromhex(joined).hex() == joined
    except ValueError:
        return False


def canonical_json(value: object) -> bytes:
    """Encode so that equal values give equal bytes: keys sorted, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def strict_json(data: bytes, *, what: str) -> Any:
    """Decode JSON, refusing duplicate keys, NaN and infinities, deep nesting and what is not UTF-8.

    Raises:
        VerificationError: naming `what` and the fault.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise VerificationError(f"{what} is malformed: the key {twice[:100]!r} stands twice")
        return made

    def no_constant(text: str) -> NoReturn:
        raise VerificationError(f"{what} is malformed: {text} is not JSON")

    def finite(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else no_constant(text[:100])

    try:
        # Given bytes, json would take UTF-16 and half characters too.
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite)
        _bound_depth(value, what)
        if _SURROGATE.search(data):
            canonical_json(value)  # fails on half a character, which no file name or message could hold
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"{what} is malformed: {error}") from error
    return value


def _bound_depth(value: Any, what: str) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise VerificationError(f"{what} is malformed: nested deeper than {_MAX_DEPTH} levels")
