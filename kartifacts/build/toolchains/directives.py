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
_HAS = rb"_has_(?:include|include_next|embed)(?:__)?"
_WORDS = b"include", b"import", b"embed"  # nothing behind the last of these matters
_NUMBER = rb"(?<=[0-9])(?<![\w.][0-9])[\w.]*(?:'[\w.]+)+"
# Each begins with one of a few characters, which makes the search ten times as fast; a text without an end lasts until
# the end of its line, as compilers have it.
_MARKS = re.compile(
    rb"""["'/R0-9#%_](?:"""
    rb"(?<=/)(?:/[^\n]*|\*.*?(?:\*/|\Z))"
    rb'|(?<=")(?:\\[^\n]|[^"\\\n])*"?'
    rb"|(?<=')(?:\\[^\n]|[^'\\\n])*'?"
    rb'|(?<=R)(?:(?<!\wR)|(?<=\bu8R)|(?<=\b[uUL]R))"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z)'
    rb"|" + _NUMBER +
    rb"|(?<=[#%]):?" + _BLANK + rb"(?:" + _NAMED + rb")" + _BLANK + rb"<[^>\n]*>"
    rb"|(?<=_)(?<!\w_)" + _HAS + _BLANK + rb"\(" + _BLANK + rb"<[^>\n]*>"
    rb")",
    re.DOTALL,
)  # fmt: skip
_INCLUDED = re.compile(
    rb"^" + _BLANK + rb"(?:#|%:|\?\?=)" + _BLANK + rb"(" + _NAMED + rb")\b" + _BLANK +
    rb'(?:"([^"\n]+)"|<([^>\n]+)>|(\S[^\n]*))', re.MULTILINE,
)  # fmt: skip
# What defines such a macro for a compiler that has none, and what stands in a text, asks for nothing.
_ASKED = re.compile(
    rb"^" + _BLANK + rb"(?:#|%:)" + _BLANK + rb"define[ \t]+_" + _HAS + rb"\([^\n)]*\)"
    rb'|"(?:\\[^\n]|[^"\\\n])*"?'
    rb"|\b__has_(include|include_next|embed)(?:__)?" + _BLANK + rb"\(" + _BLANK +
    rb'(?:"([^"\n]+)"|<([^>\n]+)>|([^\n)]*))', re.MULTILINE,
)  # fmt: skip
_CLOCK = re.compile(rb"\b__(?:DATE|TIME|TIMESTAMP)__\b")
_ASSEMBLER = re.compile(rb'\.(incbin)\b|(?:(?<![\w)\]])|(?<=\\[nt]))\.(include)(?:\s|\\[tn])*\\*"[\w./]')


def wanted(text: bytes) -> Iterator[Wanted]:
    """Every file that `text` includes, embeds or asks for; what stands in a comment or a text does not count."""
    text = _spliced(text)
    last = max(map(text.rfind, _WORDS))
    end = text.find(b"\n", last) + 1 or len(text)
    if b"/*" in text[last:end]:  # the line goes on behind it
        end = len(text)
    plain = _MARKS.sub(_directive, text[:end]) if last >= 0 else b""
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
        code = _MARKS.sub(_lines, text)
        if found := _CLOCK.search(code):
            return found[0].decode(), code.count(b"\n", 0, found.start()) + 1
    return None


def assembler(text: bytes) -> str | None:
    """A directive of the assembler in `text` that reads a file; None if there is none."""
    text = _spliced(text)
    if b".incbin" in text or b".include" in text:
        found = _ASSEMBLER.search(_MARKS.sub(_no_comment, text))
        if found:
            return f".{(found[1] or found[2]).decode()}"
    return None


def _no_comment(found: re.Match[bytes]) -> bytes:
    return b" " if found[0].startswith(b"/") else found[0]


def _directive(found: re.Match[bytes]) -> bytes:
    """What a directive may be made of: no comment, and no text over several lines, which begins with R."""
    return b" " if found[0].startswith((b"/", b"R")) else found[0]


def _lines(found: re.Match[bytes]) -> bytes:
    """Nothing but as many lines."""
    return b" " + b"\n" * found[0].count(b"\n")


def _spliced(text: bytes) -> bytes:
    return _SPLICE.sub(b"", text.removeprefix(_BOM))
