"""Notes of what a load came to: they save a search, and never outlive what they say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import library as libraries
from kartifacts.build.closure import own_root
from kartifacts.errors import MissingKernel
from kartifacts.model.arch import parse_arch
from kartifacts.runtime import Kernel, Registry, host, recall
from kartifacts.store import Store
from kartifacts.testing import Mirror
from tests.conftest import Machine, Released

ASK: dict[str, Any] = {"op": "norm/rmsnorm", "device": "cpu", "dtype": "float32"}


class Place:
    """A machine that has loaded the op once from a mirror; its library of ops may be changed."""

    def __init__(self, machine: Machine, library: Path, settings: dict[str, Any]) -> None:
        self.machine = machine
        self.library = library
        self.settings = settings

    @property
    def notes(self) -> list[Path]:
        return sorted((self.machine.store / "v1" / "recall").glob("*"))

    def registry(self, **settings: Any) -> Registry:
        return self.machine.registry(**(self.settings | settings))

    def load(self, **settings: Any) -> Kernel:
        return self.registry(**settings).load(**ASK)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each op that is looked for."""
    found: list[str] = []
    request = Registry._request

    def noted(self: Registry, op: str, *rest: Any) -> Any:
        found.append(op)
        return request(self, op, *rest)

    monkeypatch.setattr(Registry, "_request", noted)
    return found


@pytest.fixture
def place(
    machine: Machine, released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[str]
) -> Place:
    root = own_root()
    assert root is not None
    copy = tmp_path / "library"
    shutil.copytree(root, copy)
    monkeypatch.setattr(libraries, "own_root", lambda: copy)
    monkeypatch.setattr(recall, "_TICK", 0)  # or nothing that was only just made could be noted
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    (tmp_path / "packages").mkdir()
    lock = tmp_path / "kartifacts.lock"
    shutil.copy(released.lock_file, lock)
    with Mirror(released.path) as mirror:
        made = Place(machine, copy, {"lock": lock, "mirrors": mirror.url, "jit": "never"})
        assert made.load().origin == mirror.url
    assert len(made.notes) == 1
    searches.clear()
    return made


def test_without_a_driver_no_device_means_the_cpu(
    place: Place, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "has_driver", lambda: False)
    assert place.registry().load("norm/rmsnorm", dtype="float32").arch.kind == "cpu"
    assert searches == []


def test_a_kernel_that_was_brought_is_found_again_without_a_search(place: Place, searches: list[str]) -> None:
    before = {path: path.stat() for path in place.machine.store.rglob("*")}
    kernel = place.load()
    assert searches == []
    assert (kernel.uri, kernel.origin) == ("norm/rmsnorm?dtype=float32", "store")
    assert callable(kernel.rmsnorm)
    after = {path: path.stat() for path in place.machine.store.rglob("*")}
    assert {path: (found.st_mtime_ns, found.st_ino) for path, found in before.items()} == {
        path: (found.st_mtime_ns, found.st_ino) for path, found in after.items()
    }


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Change a file so that nobody sees it by size or time."""
    was = path.stat()
    text = change(path.read_text())
    assert text != path.read_text()
    assert len(text.encode()) == was.st_size
    path.write_text(text)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def edit_source(place: Place) -> None:
    rewrite(place.library / "norm" / "rmsnorm_cpu.cpp", lambda text: text.replace("a", "b", 1))


def edit_header(place: Place) -> None:
    rewrite(next(place.library.glob("norm/rmsnorm.h")), lambda text: text.replace("e", "f", 1))


def edit_declaration(place: Place) -> None:
    rewrite(place.library / "norm" / "op.toml", lambda text: text.replace("a", "b", 1))


def add_a_family(place: Place) -> None:
    shutil.copytree(place.library / "norm", place.library / "other")


def change_the_lock(place: Place) -> None:
    rewrite(place.settings["lock"], lambda text: text.replace('"1.0"', '"1.1"', 1))


def install_something(place: Place) -> None:
    (place.library.parent / "packages" / "another-1.0.dist-info").mkdir()


def damage_the_kernel(place: Place) -> None:
    kernel = Path(json.loads(place.notes[0].read_bytes())["path"])
    content = bytearray(kernel.read_bytes())
    content[len(content) // 2] ^= 1
    damaged = kernel.with_name("damaged")
    damaged.write_bytes(content)
    damaged.chmod(0o444)
    damaged.replace(kernel)  # another file, since this process has the first one mapped


def let_others_write_the_kernel(place: Place) -> None:
    Path(json.loads(place.notes[0].read_bytes())["path"]).chmod(0o666)


def remove_the_kernel(place: Place) -> None:
    Path(json.loads(place.notes[0].read_bytes())["path"]).unlink()


@pytest.mark.parametrize(
    "change",
    [
        edit_source,
        edit_header,
        edit_declaration,
        add_a_family,
        change_the_lock,
        install_something,
        damage_the_kernel,
        let_others_write_the_kernel,
        remove_the_kernel,
    ],
)
def test_a_note_is_never_believed_after_something_changed(
    place: Place, searches: list[str], change: Callable[[Place], None]
) -> None:
    change(place)
    try:
        place.load()
    except Exception:  # noqa: BLE001  whatever the search now says is its own affair
        assert searches
    assert searches == ["norm/rmsnorm"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"watched": 5}',
        b'{"watched": [5], "path": "/", "arch": "9.0", "exports": [], "uri": "x", "refusals": []}',
        b'{"watched": [], "path": 5, "arch": "9.0", "exports": [], "uri": "x", "refusals": []}',
        b'{"watched": [], "path": "/etc/passwd", "arch": "nonsense", "exports": [], "uri": "x", "refusals": []}',
        b'{"watched": [], "path": "\\u0000", "arch": "9.0", "exports": [], "uri": "x", "refusals": []}',
        b'{"watched": [], "path": "/etc/passwd", "arch": "9.0", "exports": 5, "uri": "x", "refusals": []}',
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_note_that_says_nothing_sensible_is_none(place: Place, searches: list[str], content: bytes) -> None:
    place.notes[0].write_bytes(content)
    assert place.load().origin == "store"
    assert searches == ["norm/rmsnorm"]


@pytest.mark.parametrize("kind", ["writable", "a link", "a pipe", "a directory", "elsewhere"])
def test_a_note_that_another_could_have_written_is_none(place: Place, searches: list[str], kind: str) -> None:
    (note,) = place.notes
    content = note.read_bytes()
    if kind == "writable":
        note.chmod(0o666)
    elif kind == "elsewhere":
        said = json.loads(content)
        note.write_text(json.dumps({**said, "path": "/dev/shm/x.so", "watched": []}))
    else:
        note.unlink()
        if kind == "a link":
            (note.parent.parent / "planted").write_bytes(content)
            note.symlink_to(note.parent.parent / "planted")
        elif kind == "a pipe":
            os.mkfifo(note)
        else:
            note.mkdir()
    assert place.load().origin == "store"
    assert searches == ["norm/rmsnorm"]


@pytest.mark.parametrize("how", ["a directory of kernels", "no verification", "a driver", "another library"])
def test_what_a_note_cannot_watch_is_always_looked_for(
    place: Place, searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "a directory of kernels":
        place.load(path=tmp_path / "packages")
    elif how == "no verification":
        place.load(verify="off")
    elif how == "another library":
        place.machine.registry(libraries=[place.library], **place.settings).load(**ASK)
    else:
        monkeypatch.setattr(host, "has_driver", lambda: True)
        place.registry().load("norm/rmsnorm", dtype="float32")
    assert searches == ["norm/rmsnorm"]


def test_a_remembered_kernel_that_does_not_load_here_is_looked_for(
    place: Place, searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tvm_ffi

    real, calls = tvm_ffi.load_module, []

    def once(path: str) -> Any:
        calls.append(path)
        if len(calls) == 1:
            raise RuntimeError("another libstdc++ is in this process")
        return real(path)

    monkeypatch.setattr(tvm_ffi, "load_module", once)
    assert place.load().origin == "store"
    assert searches == ["norm/rmsnorm"]
    assert place.notes == []


def touch_everything(place: Place) -> None:
    for path in (place.settings["lock"], *place.library.rglob("*"), *place.machine.store.rglob("*")):
        os.utime(path)


def copy_the_store(place: Place) -> None:
    """As the layers of an image are: other inodes and times, the same bytes."""
    copy = place.machine.store.with_name("copy")
    shutil.copytree(place.machine.store, copy)
    shutil.rmtree(place.machine.store)
    copy.rename(place.machine.store)


def write_the_lock_again(place: Place) -> None:
    place.settings["lock"].write_bytes(place.settings["lock"].read_bytes())


def copy_the_library(place: Place) -> None:
    copy = place.library.with_name("copy")
    shutil.copytree(place.library, copy)
    shutil.rmtree(place.library)
    copy.rename(place.library)


@pytest.mark.parametrize("change", [touch_everything, copy_the_store, write_the_lock_again, copy_the_library])
def test_a_note_holds_as_long_as_the_bytes_do(
    place: Place, searches: list[str], change: Callable[[Place], None]
) -> None:
    change(place)
    assert place.load().origin == "store"
    assert searches == []


def test_a_search_in_a_warm_store_writes_no_note(place: Place, searches: list[str]) -> None:
    shutil.rmtree(place.notes[0].parent)
    assert place.load().origin == "store"
    assert searches == ["norm/rmsnorm"]
    assert place.notes == []


def test_a_prefetched_kernel_needs_no_search_and_no_write(
    machine: Machine, released: Released, searches: list[str]
) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "jit": "never"}
        assert machine.cli("fetch", "--ops", "norm", **settings).code == 0
    before = {path: path.stat().st_mtime_ns for path in machine.store.rglob("*")}
    for dtype in ("float32", "bfloat16"):
        kernel = machine.registry(**settings).load("norm/rmsnorm", device="cpu", dtype=dtype)
        assert (kernel.origin, kernel.arch) == ("store", released.best)
    assert searches == []
    assert {path: path.stat().st_mtime_ns for path in machine.store.rglob("*")} == before


def test_a_better_kernel_that_is_fetched_later_replaces_the_note(machine: Machine, released: Released) -> None:
    (other,) = (arch for arch in released.archs if arch != released.best)
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url, "jit": "never"}
        for arch in (other, released.best):
            assert machine.cli("fetch", "--archs", str(arch), **settings).code == 0
            assert machine.registry(**settings).load(**ASK).arch == arch


def test_gc_removes_notes_with_their_kernels_and_no_others(place: Place) -> None:
    (note,) = place.notes
    (note.parent / "nonsense.json").write_text("[")
    kernel = Path(json.loads(note.read_bytes())["path"])
    store = Store(place.machine.store)
    assert str(note) not in store.gc({kernel.stem}, dry_run=True).removed
    store.gc({kernel.stem})
    assert place.notes == [note]
    assert str(note) in store.gc(set()).removed
    assert place.notes == []


@pytest.mark.parametrize(
    "change", [edit_source, edit_declaration, add_a_family, change_the_lock], ids=lambda f: f.__name__
)
def test_what_changes_while_a_kernel_is_brought_leaves_no_note(
    place: Place, monkeypatch: pytest.MonkeyPatch, released: Released, change: Callable[[Place], None]
) -> None:
    shutil.rmtree(place.machine.store)
    found = Registry._found

    def slowly(self: Registry, *rest: Any) -> Any:
        answer = found(self, *rest)
        change(place)
        return answer

    monkeypatch.setattr(Registry, "_found", slowly)
    with Mirror(released.path) as mirror:
        assert place.load(mirrors=mirror.url).origin == mirror.url
    assert place.notes == []


def test_a_header_that_comes_before_another_is_seen(place: Place, searches: list[str]) -> None:
    (place.library / "norm" / "kart").mkdir()
    shutil.rmtree(place.machine.store / "v1" / "recall")
    place.registry().remember("norm/rmsnorm?dtype=float32", host.cpu())
    assert len(place.notes) == 1
    place.load()
    assert searches == []
    (place.library / "norm" / "kart" / "scalar.h").write_text("#define OTHER\n")
    with pytest.raises(MissingKernel):
        place.load()
    assert searches == ["norm/rmsnorm"]


def test_an_editable_install_that_points_elsewhere_is_another_installation(place: Place, searches: list[str]) -> None:
    (place.library.parent / "packages" / "__editable__.lib-1.0.pth").write_text("/another/place\n")
    place.load()
    assert searches == ["norm/rmsnorm"]


def test_who_asks_for_other_flags_is_answered_by_no_note_and_no_mirror(machine: Machine, released: Released) -> None:
    with Mirror(released.path) as mirror:
        settings: dict[str, Any] = {"lock": released.lock_file, "mirrors": mirror.url}
        assert machine.registry(**settings).load(**ASK).origin == mirror.url  # leaves a note
        asked = len(mirror.requests)
        assert machine.registry(debug=1, **settings).load(**ASK).origin == "jit"
        assert machine.registry(debug=1, **settings).load(**ASK).origin == "built here before"
        assert len(mirror.requests) == asked
        assert machine.registry(**settings).load(**ASK).origin == "store"


def test_a_note_about_a_gpu_is_for_one_version_of_its_driver(
    machine: Machine, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home may be mounted by nodes whose drivers are not equally new."""
    settings = machine.settings(lock=released.lock_file)
    notes: dict[str, set[str]] = {"9.0": set(), "cpu:x86-64": set()}
    for version in ((12, 4), (13, 0), None):
        monkeypatch.setattr(host, "driver", lambda version=version: version)
        for arch, seen in notes.items():
            asked = recall.question(settings, "norm/rmsnorm", parse_arch(arch), {"dtype": "float32"})
            assert asked is not None
            seen.add(asked.note)
    assert {arch: len(seen) for arch, seen in notes.items()} == {"9.0": 3, "cpu:x86-64": 1}
