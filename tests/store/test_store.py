"""What the store promises about its entries, on real file systems."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.errors import StoreError, VerificationError
from kartifacts.model.digest import Digest, sha256
from kartifacts.store import Store
from tests.processes import state

CONTENT = b"a kernel" * 5000
DIGEST = sha256(CONTENT)
OTHER = b"another kernel"

Run = Callable[..., subprocess.Popen[str]]


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if not path.is_dir())


def test_an_entry_is_found_under_its_digest_and_suffix(store: Store) -> None:
    path = store.put(DIGEST, CONTENT, ".so")
    assert path == store.root / "v1" / "sha256" / DIGEST[:2] / f"{DIGEST}.so"
    assert store.find(DIGEST, len(CONTENT), ".so") == path
    assert path.read_bytes() == CONTENT
    assert store.find(DIGEST, len(CONTENT)) is None
    assert store.find(DIGEST, len(CONTENT) - 1, ".so") is None


def test_nobody_can_write_an_entry_whatever_the_umask(store: Store) -> None:
    before = os.umask(0)
    try:
        path = store.put(DIGEST, CONTENT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    for directory in path.relative_to(store.root).parents:
        assert not stat.S_IMODE((store.root / directory).stat().st_mode) & 0o022


def test_a_fresh_store_makes_no_directory_before_the_first_write(store: Store) -> None:
    assert store.find(DIGEST, 1) is None
    assert store.read(DIGEST, 1) is None
    assert list(store.entries()) == []
    assert store.verify().entries == 0
    assert store.gc(set()).removed == ()
    assert not store.root.exists()


def test_a_look_up_writes_nothing(store: Store) -> None:
    store.put(DIGEST, CONTENT)
    before = state(store.root)
    for _ in range(100):
        assert Store(store.root).find(DIGEST, len(CONTENT)) is not None
        assert store.read(DIGEST, len(CONTENT)) == CONTENT
        assert store.find(sha256(OTHER), len(OTHER)) is None
    assert state(store.root) == before


def test_a_flipped_byte_is_never_installed(store: Store) -> None:
    wrong = bytearray(CONTENT)
    wrong[1234] ^= 1
    with pytest.raises(VerificationError) as caught, store.writer(DIGEST, len(CONTENT)) as writer:
        writer.write(wrong)
    assert hashlib.sha256(wrong).hexdigest() in caught.value.message
    assert files(store.root) == []


def test_more_bytes_than_promised_are_refused_at_the_first(store: Store) -> None:
    with store.writer(DIGEST, len(CONTENT)) as writer:
        writer.write(CONTENT)
        with pytest.raises(VerificationError, match=f"more than {len(CONTENT)} bytes"):
            writer.write(b"!")


def test_a_short_entry_is_never_installed(store: Store) -> None:
    with (
        pytest.raises(VerificationError, match=f"expected {len(CONTENT)} bytes"),
        store.writer(DIGEST, len(CONTENT)) as writer,
    ):
        writer.write(CONTENT[:-1])
    assert files(store.root) == []


def test_a_writer_that_fails_leaves_nothing(store: Store) -> None:
    def fail_half_way() -> None:
        with store.writer(DIGEST, len(CONTENT)) as writer:
            writer.write(CONTENT[:100])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert files(store.root) == []


@pytest.mark.parametrize("signal", ["SIGINT", "SIGKILL"])
def test_an_interrupted_write_is_never_taken_for_an_entry(store: Store, run: Run, signal: str) -> None:
    code = """
import sys, signal, os
from pathlib import Path
from kartifacts.store import Store
with Store(Path(sys.argv[1])).writer(sys.argv[2], int(sys.argv[3])) as writer:
    writer.write(b"a kernel" * 2500)
    os.kill(os.getpid(), getattr(signal, sys.argv[4]))
"""
    process = run(code, store.root, DIGEST, len(CONTENT), signal)
    process.communicate()
    assert process.returncode != 0
    assert store.find(DIGEST, len(CONTENT)) is None
    assert files(store.root) == []
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT


def test_an_entry_that_is_there_is_kept_by_whoever_comes_second(store: Store) -> None:
    with store.writer(DIGEST, len(CONTENT)) as slow:
        slow.write(CONTENT)
        first = store.put(DIGEST, CONTENT).stat()
    assert store.path(DIGEST).stat().st_ino == first.st_ino
    assert len(files(store.root)) == 1


def test_readers_never_see_a_wrong_byte_while_writers_republish(store: Store, run: Run) -> None:
    content = os.urandom(3_000_000)
    digest = sha256(content)
    (store.root.parent / "content").write_bytes(content)
    code = """
import sys
from pathlib import Path
from kartifacts.store import Store
store, content = Store(Path(sys.argv[1])), Path(sys.argv[3]).read_bytes()
sys.stdin.readline()
for _ in range(15):
    with store.writer(sys.argv[2], len(content)) as writer:
        for at in range(0, len(content), 100_000):
            writer.write(content[at : at + 100_000])
"""
    writers = [run(code, store.root, digest, store.root.parent / "content") for _ in range(4)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = 0
    while any(writer.poll() is None for writer in writers):
        path = store.find(digest, len(content))
        if path is not None:
            seen += 1
            assert sha256(path.read_bytes()) == digest
    for writer in writers:
        assert writer.returncode == 0, writer.communicate()
    assert seen
    assert len(files(store.root)) == 1


def test_a_damaged_entry_is_moved_away_and_whoever_mapped_it_keeps_it(store: Store) -> None:
    path = store.put(DIGEST, CONTENT)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:4096])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert store.find(DIGEST, len(CONTENT)) is None
        store.put(DIGEST, CONTENT)
        assert mapped[:] == CONTENT[:4096]
    assert path.read_bytes() == CONTENT
    (away,) = (store.root / "v1" / "quarantine").iterdir()
    assert away.read_bytes() == CONTENT[:4096]


def test_a_link_planted_under_an_entrys_name_is_not_followed(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(CONTENT)
    path = store.put(DIGEST, CONTENT)
    path.unlink()
    path.symlink_to(target)
    assert store.find(DIGEST, len(CONTENT)) is None
    store.put(DIGEST, CONTENT)
    assert not path.is_symlink()
    assert target.read_bytes() == CONTENT


def test_a_small_entry_that_was_damaged_is_not_given_out(store: Store) -> None:
    path = store.put(DIGEST, CONTENT)
    path.chmod(0o644)
    path.write_bytes(b"?" * len(CONTENT))
    path.chmod(0o444)
    assert store.read(DIGEST, len(CONTENT)) is None
    assert not path.exists()


# -- places that cannot be written -------------------------------------------------------------------------------------


def test_a_full_disk_is_a_typed_error_and_damages_nothing(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    store.put(DIGEST, CONTENT)
    large = os.urandom(2 << 20)
    started = time.monotonic()
    with pytest.raises(StoreError) as caught, store.writer(sha256(large), len(large)) as writer:
        writer.write(large)
    assert time.monotonic() - started < 2
    assert str(store.root) in caught.value.message
    assert "need" in caught.value.message
    assert "free" in caught.value.message
    assert "KARTIFACTS_STORE" in (caught.value.hint or "")
    assert files(store.root) == [store.path(DIGEST)]
    assert store.path(DIGEST).read_bytes() == CONTENT


def test_a_full_disk_fails_a_partial_in_the_same_way_and_keeps_nothing(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    with pytest.raises(StoreError, match="need 4194304 bytes"), store.partial(DIGEST, 4 << 20) as partial:
        partial.write(bytes(4 << 20))
    assert files(store.root) == []


def test_a_read_only_file_system_serves_what_it_holds(
    store: Store, mount: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path = store.put(DIGEST, CONTENT)
    mount(store.root, "--bind", "-o", "ro", str(store.root))
    store = Store(store.root)
    assert store.find(DIGEST, len(CONTENT)) == path
    assert store.read(DIGEST, len(CONTENT)) == CONTENT
    with store.lock("anything") as held:
        assert not held
    with store.slot(2):
        pass
    assert not caplog.records
    assert store.verify().damaged == ()
    with pytest.raises(StoreError) as caught:
        store.put(sha256(OTHER), OTHER)
    assert "KARTIFACTS_STORE" in (caught.value.hint or "")


@pytest.mark.usefixtures("need_root")
def test_a_store_that_only_root_may_write_serves_other_users(open_path: Path, run: Run) -> None:
    store = Store(open_path / "store")
    path = store.put(DIGEST, CONTENT)
    code = """
import sys
from pathlib import Path
from kartifacts.errors import StoreError
from kartifacts.store import Store
store = Store(Path(sys.argv[1]))
print(store.find(sys.argv[2], int(sys.argv[3])))
with store.lock("anything") as held:
    print(held)
try:
    store.put("0" * 64, b"")
except StoreError as error:
    print(error.hint)
"""
    out, err = run(code, store.root, DIGEST, len(CONTENT), user=65534).communicate()
    assert out.splitlines()[:2] == [str(path), "False"], err
    assert "KARTIFACTS_STORE" in out


def test_an_entry_is_linked_within_one_mount_even_if_the_stores_directories_are_several(
    store: Store, mount: Callable[..., None]
) -> None:
    store.path(DIGEST).parent.mkdir(parents=True)
    for name in ("sha256", "tmp"):
        (store.root / "v1" / name).mkdir(exist_ok=True)
        mount(store.root / "v1" / name, "-t", "tmpfs", "-o", "mode=755", "tmpfs")
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT


@pytest.mark.parametrize("links", [True, False])
def test_a_file_system_without_nameless_files_or_hard_links_will_do(
    store: Store, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    real_open, real_link = os.open, os.link

    def without_tmpfile(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real_open(path, flags, *rest, **named)

    def without_links(*arguments: Any, **named: Any) -> None:
        if not links:
            raise PermissionError(errno.EPERM, "not permitted")
        real_link(*arguments, **named)

    monkeypatch.setattr(os, "open", without_tmpfile)
    monkeypatch.setattr(os, "link", without_links)
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT
    inode = store.path(DIGEST).stat().st_ino
    store.put(DIGEST, CONTENT)
    assert store.path(DIGEST).stat().st_ino == inode
    with pytest.raises(VerificationError), store.writer(sha256(OTHER), 5) as writer:
        writer.write(b"wrong")
    assert files(store.root) == [store.path(DIGEST)]


def test_a_store_that_was_removed_under_a_running_process_is_made_again(store: Store) -> None:
    subprocess.run(["rm", "-rf", store.put(DIGEST, CONTENT).parents[2]], check=True)
    assert store.put(DIGEST, CONTENT).read_bytes() == CONTENT


def test_a_file_in_the_stores_place_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a directory")
    store = Store(tmp_path / "store")
    assert store.find(DIGEST, 1) is None
    with pytest.raises(StoreError, match="store"):
        store.put(DIGEST, CONTENT)


def test_a_digest_that_is_longer_than_its_data_is_not_an_entry(store: Store) -> None:
    path = store.put(DIGEST, CONTENT, ".so")
    (path.parent / "README").write_text("hello")
    (path.parent / ("0" * 64)).write_text("in the wrong directory")
    assert [(entry.digest, entry.suffix, entry.size) for entry in store.entries()] == [
        (Digest(DIGEST), ".so", len(CONTENT))
    ]
