"""The index of wheels: lists what is there and nothing else, whoever writes it, in both of its spellings."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from kartifacts.errors import ConfigError, KartifactsError, PublishConflict
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Pin
from kartifacts.publish.wheel import Kernel, plan_wheels, write_wheel
from kartifacts.publish.wheel_index import write_index


def add_wheel(directory: Path, library: str = "tiny", version: str = "1.0", machine: int = 62) -> Path:
    content = b"\x7fELF\2\1\1" + bytes(9) + b"\3\0" + machine.to_bytes(2, "little") + library.encode()
    raw = directory.parent / f"{sha256(content)}.so"
    raw.write_bytes(content)
    pin = Pin(library=library, version=version, sha256=sha256(b"i"), size=1)
    kernels = [Kernel("norm/rmsnorm", "9.0a", raw, sha256(content), len(content), ".so", {})]
    directory.mkdir(exist_ok=True)
    return write_wheel(plan_wheels(pin, {}, kernels)[0], directory).path


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    add_wheel(tmp_path / "wheels")
    return tmp_path / "wheels"


class Links(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def listed(directory: Path) -> set[str]:
    """The wheels that the index lists: its two spellings agree, and all that they say is so."""
    simple = directory / "simple"
    projects = [entry["name"] for entry in json.loads((simple / "index.json").read_text())["projects"]]
    assert [link["href"] for link in Links(simple / "index.html").found] == [f"{name}/" for name in projects]
    assert sorted(page.parent.name for page in simple.glob("*/index.html")) == projects
    names = set()
    for project in projects:
        page: dict[str, Any] = json.loads((simple / project / "index.json").read_text())
        assert (page["meta"], page["name"]) == ({"api-version": "1.1"}, project)
        links = Links(simple / project / "index.html").found
        for entry, link in zip(page["files"], links, strict=True):
            wheel = (simple / project / unquote(entry["url"])).resolve()
            data, metadata = wheel.read_bytes(), Path(f"{wheel}.metadata").read_bytes()
            assert entry["hashes"] == {"sha256": hashlib.sha256(data).hexdigest()}
            assert (entry["size"], entry["filename"]) == (len(data), wheel.name)
            assert entry["core-metadata"] == {"sha256": sha256(metadata)}
            assert f"Requires-Python: {entry['requires-python']}\n".encode() in metadata
            assert urldefrag(str(link["href"])) == (entry["url"], f"sha256={entry['hashes']['sha256']}")
            assert link["data-requires-python"] == entry["requires-python"]
            assert link["data-core-metadata"] == f"sha256={sha256(metadata)}"
            names.add(wheel.name)
        assert page["versions"] == sorted(
            {name.split("-")[1] for name in names if name.startswith(project.replace("-", "_") + "-")}
        )
    return names


def state(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.rglob("*")}


def test_the_index_lists_every_project_version_and_platform(wheels: Path) -> None:
    for library, version, machine in (("tiny", "1.0", 183), ("tiny", "2.0+cu130", 62), ("other.lib", "1", 190)):
        add_wheel(wheels, library, version, machine)
    write_index(wheels)
    assert len(listed(wheels)) == 4
    assert listed(wheels) == {path.name for path in wheels.glob("*.whl")}


def test_an_index_that_is_right_is_not_written_again(wheels: Path) -> None:
    first = write_index(wheels)
    before = state(wheels)
    assert write_index(wheels) == first
    assert state(wheels) == before


def test_a_wheel_that_is_gone_is_listed_no_more(wheels: Path) -> None:
    gone = add_wheel(wheels, "gone")
    write_index(wheels)
    gone.unlink()
    write_index(wheels)
    assert listed(wheels) == {path.name for path in wheels.glob("*.whl")}
    assert not (wheels / "simple/kartifacts-gone").exists()


def test_other_bytes_under_a_listed_name_are_refused(wheels: Path) -> None:
    write_index(wheels)
    [wheel] = wheels.glob("*.whl")
    data = wheel.read_bytes()
    before = {path: path.read_bytes() for path in (wheels / "simple").rglob("*.*")}
    wheel.unlink()
    other = add_wheel(wheels.parent / "elsewhere", "tiny")
    wheel.write_bytes(other.read_bytes() + b"\0")
    with pytest.raises(PublishConflict, match=wheel.name):
        write_index(wheels)
    assert {path: path.read_bytes() for path in (wheels / "simple").rglob("*.*")} == before
    wheel.write_bytes(data)
    write_index(wheels)


def not_a_zip(path: Path) -> None:
    path.write_bytes(b"not a zip")


def without_metadata(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")


def with_a_name_twice(path: Path) -> None:  # of which one tool reads the first, and another the last
    import zipfile

    add_wheel(path.parent.parent / "whole", "twice").rename(path)
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(name, "Name: other\n")


def cut_short(path: Path) -> None:
    path.write_bytes(add_wheel(path.parent.parent / "whole", "cut").read_bytes()[:-30])


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("bad-1.0-py3-none-any.whl", not_a_zip),
        ("bad-1.0-py3-none-any.whl", without_metadata),
        ("bad-1.0-py3-none-any.whl", cut_short),
        ("bad-1.0-py3-none-any.whl", with_a_name_twice),
        ("bad-1.0-py3-none-any.whl", link_to_nothing),
        ("bad-1.0-py3-none-any.whl", Path.mkdir),
        ("bad.whl", not_a_zip),
        ("bad-one-py3-none-any.whl", not_a_zip),
    ],
)
def test_what_is_called_a_wheel_and_is_none_leaves_the_index_as_it_was(
    wheels: Path, name: str, make: Callable[[Path], object]
) -> None:
    write_index(wheels)
    before = listed(wheels)
    make(wheels / name)
    with pytest.raises(KartifactsError, match=name):
        write_index(wheels)
    assert listed(wheels) == before


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": [1]}', b'{"files": [{"filename": "x"}]}'])
def test_a_page_that_something_else_wrote_is_not_overwritten(wheels: Path, content: bytes) -> None:
    page = wheels / "simple/kartifacts-tiny/index.json"
    page.parent.mkdir(parents=True)
    page.write_bytes(content)
    with pytest.raises(KartifactsError):
        write_index(wheels)
    assert page.read_bytes() == content


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "nothing", tmp_path / "file"):
        with pytest.raises(ConfigError, match=path.name):
            write_index(path)


def test_of_jobs_that_add_wheels_at_once_none_is_lost(wheels: Path) -> None:
    code = "import sys; from pathlib import Path; from kartifacts.publish.wheel_index import write_index as w\n"
    code += "w(Path(sys.argv[1]))"
    running = []
    for number in range(6):
        add_wheel(wheels, f"job{number % 3}", machine=62 if number < 3 else 183)
        running.append(subprocess.Popen([sys.executable, "-c", code, str(wheels)]))
    assert [process.wait() for process in running] == [0] * 6
    assert listed(wheels) == {path.name for path in wheels.glob("*.whl")}
    assert len(listed(wheels)) == 7
