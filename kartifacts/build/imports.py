"""Finds which modules a source in Python imports, by reading its text: the same on every version of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

# `from a.b import (c, d)` over several lines, and `import a.b as c, d`; what stands in a string is taken for one too.
_FROM = re.compile(rb"(?:^|[;:])[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n;#(]+)", re.MULTILINE)
_IMPORT = re.compile(rb"(?:^|[;:])[ \t]*import[ \t]+([^\n;#]+)", re.MULTILINE)
_AS = re.compile(rb"\s+as\s+\w+")


def modules(content: bytes) -> Iterator[str]:
    """Every module perhaps imported: of ``from a import b`` both ``a`` and ``a.b``, of ``from . import b`` ``.b``."""
    joined = content.replace(b"\\\r\n", b" ").replace(b"\\\n", b" ")
    found: dict[bytes, None] = {}
    for package, names in _FROM.findall(joined):
        plain = re.sub(rb"#[^\n]*", b"", names).strip(b"()")
        inside = package if package.endswith(b".") else package + b"."
        found[package] = None
        found.update(dict.fromkeys(inside + name for name in _names(plain) if name != b"*"))
    for names in _IMPORT.findall(joined):
        found.update(dict.fromkeys(_names(names)))
    for name in found:
        text = name.decode("utf-8", "replace")
        if all(part.isidentifier() for part in text.lstrip(".").split(".")):
            yield text


def _names(text: bytes) -> Iterator[bytes]:
    for name in _AS.sub(b"", text).split(b","):
        yield name.strip()


def files(module: str) -> Iterator[str]:
    """Where a module may lie below a directory of a path, and the packages around it."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        yield "/".join((*parts[:count], "__init__.py"))
    yield "/".join(parts) + ".py"
    yield "/".join((*parts, "__init__.py"))
