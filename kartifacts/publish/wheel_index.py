"""Keeps the index of a directory of wheels: PEP 503 pages and their PEP 691 twins, listing exactly what is there.

    <directory>/<wheel>.whl                              put there by whoever; never changed here
    <directory>/<wheel>.whl.metadata                     its METADATA (PEP 658), so that a resolver need not open it
    <directory>/simple/index.{html,json}                 the projects
    <directory>/simple/<project>/index.{html,json}       the files of one, with sha256, size and Requires-Python

Whoever adds a wheel makes the index anew from what is there, one at a time: so of two jobs none is lost.
"""

from __future__ import annotations

import html
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.parser import BytesParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from kartifacts.errors import ConfigError, PublishConflict, StoreError, VerificationError
from kartifacts.model.digest import canonical_json, sha256, strict_json
from kartifacts.publish import files

SIMPLE = "simple"
_MAX_METADATA = 1 << 20  # bytes
_MAX_PAGE = 64 << 20  # bytes


class Listed(NamedTuple):
    """One wheel of the index."""

    project: str
    version: str
    file_name: str
    sha256: str
    size: int
    requires_python: str
    metadata: bytes


def write_index(directory: Path) -> list[Listed]:
    """Make the index of the wheels in `directory` say what is there now; changes nothing if it does already.

    Raises:
        ConfigError: there is no such directory.
        VerificationError: something there is called a wheel and is none; the index stays as it was.
        PublishConflict: a wheel has other bytes than the index says; the index stays as it was.
        StoreError: it cannot be read or written.
    """
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is not a directory")
    root = directory / SIMPLE
    listed: list[Listed] = []

    def made(_: bytes | None) -> bytes:
        # Here, where no other writer is, so that the last to come lists what all before it have put there.
        listed.extend(_read(path) for path in sorted(directory.glob("[!.]*.whl")))
        projects = {each.project: [other for other in listed if other.project == each.project] for each in listed}
        _refuse_changed(root, projects)
        for each in listed:
            _put(directory / f"{each.file_name}.metadata", each.metadata)
        for project, members in projects.items():
            _put(root / project / "index.json", _project_json(project, members))
            _put(root / project / "index.html", _project_html(project, members))
        for gone in set(_projects(root)) - set(projects):
            for name in ("index.json", "index.html"):
                (root / gone / name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are in it
                (root / gone).rmdir()
        return canonical_json(
            {"meta": {"api-version": "1.1"}, "projects": [{"name": name} for name in sorted(projects)]}
        )

    def page(_: bytes | None) -> bytes:  # of what another writer may have made of it by now
        content: Any = strict_json((root / "index.json").read_bytes(), what=str(root / "index.json"))
        names = [entry["name"] for entry in content["projects"]]
        return _page("Simple index", [(f"{name}/", {}, name) for name in names])

    try:
        files.update(root / "index.json", made)
        files.update(root / "index.html", page)
    except OSError as error:
        raise StoreError(f"cannot write the index in {str(directory)!r}: {error.strerror or error}") from error
    return listed


def _read(path: Path) -> Listed:
    """What the index says of a wheel, from its name, its bytes and its METADATA."""
    try:
        project, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if _is_metadata(info.filename)]
            if len(found) != 1:  # of two with one name, one tool would read the first and another the last
                raise ValueError(f"it has {len(found)} files METADATA, and one is expected")
            [member] = found
            if member.file_size > _MAX_METADATA:
                raise ValueError(f"its METADATA has {member.file_size} bytes")
            metadata = archive.read(member)
        digest, size = files.digest(path)
    except OSError as error:
        raise StoreError(
            f"cannot read {str(path)!r}: {error.strerror or error}; the index was left as it was"
        ) from error
    except (InvalidWheelFilename, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError) as error:
        reason = str(error) or type(error).__name__
        raise VerificationError(
            f"{str(path)!r} is not a wheel: {reason[:200]}; the index was left as it was", source=str(path)
        ) from error
    headers = BytesParser().parsebytes(metadata, headersonly=True)
    return Listed(project, str(version), path.name, digest, size, headers.get("Requires-Python", ""), metadata)


def _is_metadata(name: str) -> bool:
    return name.endswith(".dist-info/METADATA") and name.count("/") == 1


def _refuse_changed(root: Path, projects: Mapping[str, Iterable[Listed]]) -> None:
    for project, members in projects.items():
        known = _known(root / project / "index.json")
        for each in members:
            if known.get(each.file_name, each.sha256) != each.sha256:
                raise PublishConflict(
                    f"{each.file_name} has other bytes than when it was indexed: sha256 {each.sha256}, "
                    f"was {known[each.file_name]}; the index was left as it was",
                    hint="a file name never changes its bytes: put the first file back, or change this one's version",
                )


def _known(page: Path) -> dict[str, str]:
    """File name → sha256, as an index says that is there."""
    try:
        with open(page, "rb") as file:
            data = file.read(_MAX_PAGE)
    except FileNotFoundError:
        return {}
    content: Any = strict_json(data, what=str(page))
    try:
        return {str(entry["filename"]): str(entry["hashes"]["sha256"]) for entry in content["files"]}
    except (KeyError, TypeError) as error:
        raise VerificationError(
            f"{str(page)!r} is not a page of an index", source=str(page), hint="remove it if nothing else wrote it"
        ) from error


def _projects(root: Path) -> list[str]:
    return [page.parent.name for page in root.glob("*/index.json")]


# -- pages -------------------------------------------------------------------------------------------------------------


def _project_json(project: str, members: Iterable[Listed]) -> bytes:
    members = list(members)
    entries = []
    for each in members:
        entry: dict[str, Any] = {
            "filename": each.file_name,
            "url": _url(each),
            "hashes": {"sha256": each.sha256},
            "size": each.size,
            "core-metadata": {"sha256": sha256(each.metadata)},
        }
        if each.requires_python:
            entry["requires-python"] = each.requires_python
        entries.append(entry)
    versions = sorted({each.version for each in members})
    return canonical_json({"meta": {"api-version": "1.1"}, "name": project, "versions": versions, "files": entries})


def _project_html(project: str, members: Iterable[Listed]) -> bytes:
    links: list[tuple[str, Mapping[str, str], str]] = []
    for each in members:
        attributes = {"data-core-metadata": f"sha256={sha256(each.metadata)}"}
        if each.requires_python:
            attributes["data-requires-python"] = each.requires_python
        links.append((f"{_url(each)}#sha256={each.sha256}", attributes, each.file_name))
    return _page(f"Links for {project}", links)


def _page(title: str, links: Iterable[tuple[str, Mapping[str, str], str]]) -> bytes:
    rows = []
    for target, attributes, text in links:
        given = "".join(f' {name}="{html.escape(value)}"' for name, value in {"href": target, **attributes}.items())
        rows.append(f"<a{given}>{html.escape(text)}</a><br>\n")
    head = f'<meta name="pypi:repository-version" content="1.1"><title>{html.escape(title)}</title>'
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{''.join(rows)}</body></html>\n".encode()


def _url(each: Listed) -> str:
    return f"../../{quote(each.file_name)}"


def _put(path: Path, content: bytes) -> None:
    files.update(path, lambda _: content)
