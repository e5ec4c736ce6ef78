"""Whom the store believes: a path that another user can change is refused, and the component is named."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.errors import StoreError
from kartifacts.files.trust import check_trusted, make_directory
from kartifacts.model.digest import Digest, sha256
from kartifacts.store import Store

CONTENT = b"a kernel"
DIGEST = sha256(CONTENT)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_parent_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    store = Store(shared / "below" / "store")
    store.put(DIGEST, CONTENT)
    shared.chmod(mode)
    with pytest.raises(StoreError) as caught:
        Store(store.root).find(DIGEST, len(CONTENT))
    assert repr(str(shared)) in caught.value.message
    with pytest.raises(StoreError, match="shared"):
        Store(shared / "elsewhere").put(DIGEST, CONTENT)
    assert not (shared / "elsewhere").exists()


def test_a_sticky_parent_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    store = Store(tmp_path / "store")
    store.put(DIGEST, CONTENT)
    assert Store(store.root).find(DIGEST, len(CONTENT)) is not None


def test_an_entry_that_others_may_write_is_not_used(store: Store) -> None:
    store.put(DIGEST, CONTENT).chmod(0o666)
    assert store.find(DIGEST, len(CONTENT)) is None


@pytest.mark.usefixtures("need_root")
def test_a_store_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    root = tmp_path / "store"
    Store(root).put(DIGEST, CONTENT)
    os.chown(root, 65534, 65534)
    with pytest.raises(StoreError, match="belongs to user 65534"):
        Store(root).find(DIGEST, len(CONTENT))


@pytest.mark.usefixtures("need_root")
def test_a_link_that_another_user_placed_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    os.lchown(link, 65534, 65534)
    with pytest.raises(StoreError, match=r"link.*belongs to user 65534"):
        Store(link).put(DIGEST, CONTENT)


def test_links_of_ones_own_are_followed_and_what_they_lead_to_is_looked_at(tmp_path: Path) -> None:
    real = tmp_path / "disk" / "real"
    real.mkdir(parents=True)
    (tmp_path / "a").mkdir()
    link = tmp_path / "a" / "link"
    link.symlink_to("../disk/./real")
    check_trusted(link / "store")
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(StoreError, match="disk"):
        check_trusted(link / "store")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_we_make_ourselves_can_be_trusted_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = Store(tmp_path / "cache" / "kartifacts" / "store")  # where not even the cache is there yet
        store.put(DIGEST, CONTENT)
        with store.lock("job") as held, store.partial(Digest("0" * 64), 10):
            assert held
        make_directory(tmp_path / "other" / "workspace")
    finally:
        os.umask(before)
    assert Store(store.root).find(DIGEST, len(CONTENT)) is not None
    check_trusted(tmp_path / "other" / "workspace")
    for path in (*(tmp_path / "cache").rglob("*"), *(tmp_path / "other").rglob("*")):
        assert not path.stat().st_mode & 0o022, path


@pytest.mark.parametrize("mode", [0o1777, 0o1775, 0o777])
def test_a_place_into_which_others_can_put_something_is_refused_even_if_sticky(tmp_path: Path, mode: int) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace").chmod(mode)
    (tmp_path / "link").symlink_to("workspace")
    for path in (tmp_path / "workspace", tmp_path / "link"):
        with pytest.raises(StoreError, match="workspace' may be written by other users") as caught:
            check_trusted(path, setting="KARTIFACTS_WORKSPACE")
        assert "KARTIFACTS_WORKSPACE" in (caught.value.hint or "")


@pytest.mark.parametrize("file", ["/dev/null", "/proc/version"])
def test_a_file_on_the_way_is_no_matter_of_trust(file: str) -> None:
    check_trusted(Path(file) / "below" / "store")
    assert Store(Path(file) / "store").find(DIGEST, 1) is None
    with pytest.raises(StoreError, match=r"cannot make .*Not a directory"):
        Store(Path(file) / "store").put(DIGEST, CONTENT)


def test_a_loop_of_links_is_an_error_and_no_hang(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StoreError, match="symbolic links"):
        check_trusted(tmp_path / "a" / "store")


@pytest.mark.usefixtures("need_root")
@pytest.mark.parametrize(("group", "fits"), [(1, True), (2, False)])
def test_a_group_that_is_the_users_own_may_write(
    open_path: Path, run: Callable[..., subprocess.Popen[str]], group: int, fits: bool
) -> None:
    daemon, others = pwd.getpwuid(1), grp.getgrgid(group)
    if (daemon.pw_name, daemon.pw_gid) != ("daemon", 1) or others.gr_mem:
        pytest.skip("needs the user daemon with a group of its own")
    cache = open_path / "cache"
    cache.mkdir()
    os.chown(cache, 1, group)
    cache.chmod(0o775)
    code = (
        "import sys, grp, pwd\nfrom pathlib import Path\nfrom kartifacts.store import Store\n"
        f"print(Store(Path(sys.argv[1])).put({DIGEST!r}, {CONTENT!r}))"
    )
    out, err = run(code, cache / "store", user=1).communicate()
    assert ("StoreError" not in err) == fits, err
    assert out.strip().endswith(DIGEST) == fits
