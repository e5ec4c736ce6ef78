"""Reads in a source of C++ or CUDA which files it asks its preprocessor for, as text alone.

No condition is looked at and no macro expanded: more may be found than a compiler reads.  A worker imports this too, so
nothing but the standard library is here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


class Wanted:
    """A file that a source names.

    Attributes:
        name: of the file, or if it is not `plain` a macro, or whatever else stands there.
        quoted: it is looked for beside the source first.
        further: by `_next`: whichever comes after the source itself, in the order of the directories.
        asked: by `__has_include` and the like: only whether it is there.
    """

    def __init__(self, how: bytes, quoted: bytes, angled: bytes, other: bytes, *, asked: bool) -> None:
        self.name = quoted or angled or other.strip()
        self.plain = bool(quoted or angled)
        self.quoted = bool(quoted)
        self.further = how == b"include_next"
        self.asked = asked


_BOM = b"\xef\xbb\xbf"
_SPLICE = re.compile(rb"\\\r?\n")
_BLANK = rb"[ \t\v\f]*"
_NAMED = rb"include|include_next|__include_macros|import|embed"
_ASKING = rb"__has_(include|include_next|embed)(?:__)?"
_RAW = rb'(?<!\w)(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
# One without an end lasts until the end of its line, as compilers have it.
_LITERAL = rb'"(?:\\[^\n]|[^"\\\n])*"?' + rb"|'(?:\\[^\n]|[^'\\\n])*'?" + rb"|(?<!\w)\d(?:'?[\w.])*"
_COMMENT = rb"//[^\n]*|/\*.*?(?:\*/|\Z)"
_CLOCK = rb"\b__(?:DATE|TIME|TIMESTAMP)__\b"
_HEADER = rb"\b(?:" + _NAMED + rb"|" + _ASKING.replace(b"(", b"(?:", 1) + _BLANK + rb"\()" + _BLANK + rb"<[^>\n]*>"

_KEPT = re.compile(rb"(?P<raw>" + _RAW + rb")|(?P<kept>" + _LITERAL + rb"|" + _HEADER + rb")|" + _COMMENT, re.DOTALL)
_INCLUDED = re.compile(
    rb"^" + _BLANK + rb"(?:#|%:|\?\?=)" + _BLANK + rb"(" + _NAMED + rb")\b" + _BLANK +
    rb'(?:"([^"\n]+)"|<([^>\n]+)>|(\S[^\n]*))', re.MULTILINE,
)  # fmt: skip
# What defines such a macro for a compiler that has none, and what stands in a text, asks for nothing.
_ASKED = re.compile(
    rb"^" + _BLANK + rb"(?:#|%:)" + _BLANK + rb"define[ \t]+" + _ASKING.replace(b"(", b"(?:", 1) + rb"\([^\n)]*\)|" +
    _LITERAL + rb"|\b" + _ASKING + _BLANK + rb"\(" + _BLANK + rb'(?:"([^"\n]+)"|<([^>\n]+)>|([^\n)]*))', re.MULTILINE,
)  # fmt: skip
_CLOCKS = re.compile(_RAW + rb"|" + _LITERAL + rb"|" + _COMMENT + rb"|(?P<clock>" + _CLOCK + rb")", re.DOTALL)
_ASSEMBLER = re.compile(rb"\.(incbin)\b|\.(include)(?:\s|\\[tn])*\\*\"")


def wanted(text: bytes) -> Iterator[Wanted]:
    """Every file that `text` includes, embeds or asks for; what stands in a comment or a text does not count."""
    plain = _KEPT.sub(rb"\g<kept> ", _spliced(text))
    for found in _INCLUDED.findall(plain):
        yield Wanted(*found, asked=False)
    if b"__has_" in plain:
        for found in _ASKED.findall(plain):
            if found[0]:
                yield Wanted(*found, asked=True)


def clock(text: bytes) -> tuple[str, int] | None:
    """The first macro in `text` that tells when it is compiled, and its line; None if there is none."""
    text = _spliced(text)
    if b"__TIME" in text or b"__DATE__" in text:
        for found in _CLOCKS.finditer(text):
            if found["clock"]:
                return found["clock"].decode(), text.count(b"\n", 0, found.start()) + 1
    return None


def assembler(text: bytes) -> str | None:
    """A directive of the assembler in `text` that reads a file; None if there is none."""
    if b".incbin" in text or b".include" in text:
        found = _ASSEMBLER.search(_KEPT.sub(rb"\g<raw>\g<kept> ", _spliced(text)))
        if found:
            return f".{(found[1] or found[2]).decode()}"
    return None


def _spliced(text: bytes) -> bytes:
    return _SPLICE.sub(b"", text.removeprefix(_BOM))
