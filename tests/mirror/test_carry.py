"""Across an air gap: what is written, what is refused on the other side, what its readers see wherever it is cut."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kartifacts.config import Settings
from kartifacts.errors import ConfigError, KartifactsError, SourceError, StoreError, VerificationError
from kartifacts.mirror.archive import open_archive
from kartifacts.mirror.carry import export, import_, listing, read_listing
from kartifacts.mirror.filters import Filter, encode_filter
from kartifacts.mirror.pull import Trust
from kartifacts.mirror.verify import verify
from kartifacts.model.digest import sha256
from kartifacts.model.layout import metadata_path
from kartifacts.model.manifest import Lock
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository
from kartifacts.sources.directory import DirectorySource
from tests.mirror.conftest import CutBucket, Origin

Snapshot = Callable[[Path], dict[str, bytes]]
Do = Callable[..., Any]


class Sites:
    """The open side and the closed side, which share nothing but what is carried, and have stores of their own."""

    def __init__(self, origin: Origin, base: Path, trust: Trust) -> None:
        self.origin = origin
        self.base = base
        self.trust = trust
        self.closed = base / "closed"

    def settings(self, name: str) -> Settings:
        return Settings(
            store=self.base / name / "store", workspace=self.base / name / "work", download_threads=1, retries=0
        )

    def export(self, name: str = "carried.tar", *, since: bool = False, **chosen: Any) -> Path:
        target = self.base / name
        held = None
        if since:
            (self.base / "listing").write_text(listing(DirectoryBucket(self.closed)))
            held = read_listing(self.base / "listing")
        export(self.origin.source, target, self.trust, Filter(**chosen), self.settings("open"), since=held)
        return target

    def bring(
        self, archive: Path, bucket: DirectoryBucket | None = None, *, settings: str = "closed side", **chosen: Any
    ) -> Any:
        into, refilter = bucket or DirectoryBucket(self.closed), chosen.pop("refilter", False)
        wanted = Filter(**chosen) if chosen else None
        return import_(archive, into, self.trust, self.settings(settings), chosen=wanted, refilter=refilter)

    def versions(self, root: Path | None = None) -> set[str]:
        """What its readers find, after every byte of it was looked at."""
        report = verify(DirectoryBucket(root or self.closed), self.trust, None, self.settings("reader"))
        assert not report.faults
        return {release.pin.version for release in report.contents.releases}


@pytest.fixture
def sites(origin: Origin, tmp_path: Path) -> Sites:
    return Sites(origin, tmp_path, origin.airgap)


@pytest.fixture
def few(small: Origin, tmp_path: Path) -> Sites:
    """Nothing is there before its first release, which is of one bundle."""
    origin = Origin(tmp_path / "few", small.keyring, small.make)
    origin.release()
    return Sites(origin, tmp_path, origin.airgap)


# -- what is carried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["carried.tar", "carried"])
def test_a_release_crosses_the_gap(sites: Sites, snapshot: Snapshot, name: str) -> None:
    sites.bring(sites.export(name))
    assert sites.versions() == {"1.0"}
    verify_repository(sites.closed, deep=True).check("the closed side")
    there = snapshot(sites.origin.path)
    for path, content in snapshot(sites.closed).items():
        assert path == "mirror.json" or there[path] == content


def test_only_the_view_of_its_readers_is_carried(sites: Sites) -> None:
    assert not [name for name in open_archive(sites.export()).members if name.startswith("metadata/")]


def test_equal_input_gives_an_equal_file(sites: Sites) -> None:
    first = sites.export("a.tar").read_bytes()
    assert sites.export("b.tar").read_bytes() == first
    with tarfile.open(sites.base / "a.tar") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    for member in members:
        facts = (member.mtime, member.uid, member.gid, member.uname, member.gname, member.mode, member.isreg())
        assert facts == (0, 0, 0, "", "", 0o644, True)


def test_a_directory_and_a_file_hold_the_same(sites: Sites, snapshot: Snapshot) -> None:
    with tarfile.open(sites.export("a.tar")) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert found == snapshot(sites.export("a"))


def test_what_is_exported_as_a_directory_is_a_mirror_as_it_is(sites: Sites) -> None:
    assert sites.versions(sites.export("carried")) == {"1.0"}


def test_a_later_release_carries_only_what_the_other_side_lacks(sites: Sites) -> None:
    sites.bring(sites.export())
    sites.origin.release("2.0", content=1)
    whole, rest = sites.export("whole.tar"), sites.export("rest.tar", since=True)
    held = read_listing(sites.base / "listing")
    assert set(open_archive(rest).members) == set(open_archive(whole).members) - set(held)
    _, done = sites.bring(rest)
    assert done.changed
    assert sites.versions() == {"1.0", "2.0"}


def test_long_names_are_carried(sites: Sites, keyring: Any) -> None:
    """Longer than the 255 characters that a plain tar header has room for."""
    version = "1." + "0" * 126
    sites.origin.release(version)
    archive = sites.export(versions=(version,))
    assert max(map(len, open_archive(archive).members)) > 200
    sites.bring(archive, versions=(version,))
    assert sites.versions() == {version}


def test_only_what_was_chosen_is_carried_and_promised(sites: Sites) -> None:
    sites.origin.release("2.0", content=1)
    sites.bring(sites.export(versions=("2.0",), archs=("9.0",)), versions=("2.0",), archs=("9.0",))
    assert sites.versions() == {"2.0"}
    assert verify(DirectoryBucket(sites.closed), sites.trust, Filter(), sites.settings("reader")).faults


def test_what_a_lock_pins_crosses_without_metadata(make_repository: Do, settings: Settings, tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    trust = Trust(lock=Lock(version=1, releases=Repository(source).pins()))
    export(DirectorySource(source), tmp_path / "x.tar", trust, Filter(), settings)
    bucket = DirectoryBucket(tmp_path / "closed")
    import_(tmp_path / "x.tar", bucket, trust, settings)
    verify_repository(bucket.root, deep=True).check("the closed side")
    assert not verify(bucket, trust, None, settings).faults


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(sites: Sites, archive: Path, snapshot: Snapshot, kind: type[KartifactsError] = VerificationError) -> str:
    """Import it; readers must see what they saw before, and only blobs that are right may have come."""
    before, sound = snapshot(sites.closed), snapshot(sites.origin.path)
    with pytest.raises(kind) as caught:
        sites.bring(archive, settings=f"refused {len(list(sites.base.iterdir()))}")
    after = snapshot(sites.closed)
    assert {path: after.get(path) for path in before} == before
    assert all(path.startswith("blobs/") and sound[path] == after[path] for path in set(after) - set(before))
    return str(caught.value)


def members(archive: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(archive) as tar:
        for info in tar:
            yield info, tar.extractfile(info).read()  # type: ignore[union-attr]


def packed(path: Path, rows: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in rows:
            tar.addfile(info, io.BytesIO(content))
    return path


def test_any_flipped_byte_is_refused_or_of_no_effect(few: Sites, snapshot: Snapshot) -> None:
    """Of a header and of the content of each member, and of the padding."""
    few.bring(few.export())
    shutil.copytree(few.closed, few.base / "before")
    few.origin.release("2.0", content=1)
    archive = few.export("next.tar", since=True)
    few.bring(archive)
    complete = snapshot(few.closed)
    data = archive.read_bytes()
    places = {at for start in range(0, len(data), 512) for at in (start, start + 100, start + 156, start + 511)}
    accepted = 0
    for at in sorted(places)[::7]:
        shutil.rmtree(few.closed)
        shutil.copytree(few.base / "before", few.closed)
        (few.base / "flipped.tar").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            few.bring(few.base / "flipped.tar", settings="flipped")
        except (VerificationError, SourceError):
            assert few.versions() == {"1.0"}
        else:
            accepted += 1
            assert snapshot(few.closed) == complete, at
    assert accepted < len(places) / 7 / 4, "only padding between members is of no account"


def test_every_kind_of_member_is_checked(few: Sites, snapshot: Snapshot) -> None:
    """Each member changed, left out, doubled, cut, grown."""
    rows = list(members(few.export()))
    few.closed.mkdir()
    for number, (info, content) in enumerate(rows):
        others = rows[:number], rows[number + 1 :]
        changed = {
            "flipped": (content[:-1] + bytes([content[-1] ^ 1]),),
            "cut": (content[:-1],),
            "grown": (content + b"x",),
            "empty": (b"",),
            "doubled": (content, content),
            "left out": (),
        }
        for what, contents in changed.items():
            if what == "left out" and info.name in ("index.json", "oci-layout"):
                continue  # made anew on the other side
            made = []
            for each in contents:
                other = tarfile.TarInfo(info.name)
                other.size = len(each)
                made.append((other, each))
            archive = packed(few.base / "changed.tar", [*others[0], *made, *others[1]])
            refused(few, archive, snapshot)
            shutil.rmtree(few.closed)  # or blobs that are right would stay, and could be left out the next time
            few.closed.mkdir()


NAMES = [
    "../x",
    "/etc/passwd",
    "blobs/sha256/../../x",
    "./index.json",
    "blobs//sha256/" + "0" * 64,
    "blobs/sha256/" + "0" * 63,
    "blobs/sha256/" + "A" * 64,
    "blobs/md5/" + "0" * 32,
    "blobs/sha256/.partial-x",
    "targets/demo/1.0/" + "0" * 64 + ".exe",
    "targets/a..b/1.0/" + "0" * 64 + ".index.json",
    "targets/con/1.0/" + "0" * 64 + ".index.json",
    "metadata/0.root.json",
    "metadata/01.root.json",
    "metadata/1.root.json.bak",
    "metadata/timestamp.json/x",
    "airgap/1.../etc.json",
    "gc/tombstones.json",
    "kartifacts.lock",
    "index.json\n",
    "mirror.json ",
    "C:\\x",
    "blobs\\sha256\\" + "0" * 64,
    "x" * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_of_the_layout_is_refused(sites: Sites, snapshot: Snapshot, name: str) -> None:
    rows = list(members(sites.export()))
    info = tarfile.TarInfo(name)
    info.size = 1
    refused(sites, packed(sites.base / "named.tar", [*rows, (info, b"x")]), snapshot)
    assert not list(sites.base.glob("**/passwd"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
             tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE, b"Z"]
)  # fmt: skip
def test_what_is_no_plain_file_is_refused(sites: Sites, snapshot: Snapshot, kind: bytes) -> None:
    data = sites.export().read_bytes()
    info = tarfile.TarInfo("index.json")
    info.type, info.linkname = kind, "mirror.json"
    (sites.base / "odd.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + data)
    assert "no regular file" in refused(sites, sites.base / "odd.tar", snapshot)


def test_sizes_beyond_bounds_are_refused_before_anything_is_read(sites: Sites, snapshot: Snapshot) -> None:
    data = sites.export().read_bytes()
    for name, size in (
        ("mirror.json", 1 << 30),
        ("blobs/sha256/" + "0" * 64, 1 << 40),
        ("airgap/9.snapshot.json", 1 << 33),
        ("mirror.json", -1),
    ):
        info = tarfile.TarInfo(name)
        info.size = size
        (sites.base / "large.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + data)
        refused(sites, sites.base / "large.tar", snapshot)


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 700, -1, -513, -1024, -1025, -5000])
def test_a_file_that_is_cut_off_is_refused(sites: Sites, snapshot: Snapshot, cut: int) -> None:
    data = sites.export().read_bytes()
    (sites.base / "cut.tar").write_bytes(data[:cut])
    refused(sites, sites.base / "cut.tar", snapshot)


def test_what_follows_the_end_is_refused(sites: Sites, snapshot: Snapshot) -> None:
    data = sites.export().read_bytes()
    (sites.base / "long.tar").write_bytes(data + data)
    assert "goes on after its end" in refused(sites, sites.base / "long.tar", snapshot)
    (sites.base / "padded.tar").write_bytes(data + bytes(10240))  # as on a tape
    sites.bring(sites.base / "padded.tar")


@pytest.mark.parametrize("content", [b"", b"x", b"\x1f\x8b" + bytes(600), bytes(511), b"PK\x03\x04" + bytes(2000)])
def test_what_is_no_tar_file_is_refused(sites: Sites, snapshot: Snapshot, content: bytes) -> None:
    (sites.base / "other.tar").write_bytes(content)
    refused(sites, sites.base / "other.tar", snapshot)


def test_an_archive_of_nothing_is_refused(sites: Sites, snapshot: Snapshot) -> None:
    (sites.base / "empty.tar").write_bytes(bytes(1024))
    refused(sites, sites.base / "empty.tar", snapshot)
    (sites.base / "empty").mkdir()
    refused(sites, sites.base / "empty", snapshot)
    refused(sites, sites.base / "absent", snapshot, ConfigError)


@pytest.mark.parametrize("what", ["link", "link to a directory", "pipe", "extra", "damaged"])
def test_a_directory_is_looked_at_as_closely(sites: Sites, snapshot: Snapshot, what: str) -> None:
    carried = sites.export("carried")
    victim = min((carried / "blobs/sha256").iterdir())
    if what == "extra":
        (carried / "README").write_text("hello")
    elif what == "damaged":
        victim.write_bytes(victim.read_bytes()[:-1] + b"\0")
    elif what == "link to a directory":
        (carried / "blobs").rename(sites.base / "elsewhere")
        (carried / "blobs").symlink_to(sites.base / "elsewhere")
    else:
        victim.rename(sites.base / "moved")
        if what == "link":
            victim.symlink_to(sites.base / "moved")
        else:
            os.mkfifo(victim)
    refused(sites, carried, snapshot)


def test_what_nothing_needs_is_refused(sites: Sites, snapshot: Snapshot) -> None:
    """A blob under its right name, too: what came with it cannot be told from what was smuggled in."""
    rows = list(members(sites.export()))
    info = tarfile.TarInfo(f"blobs/sha256/{sha256(b'x')}")
    info.size = 1
    assert "which nothing" in refused(sites, packed(sites.base / "more.tar", [*rows, (info, b"x")]), snapshot)


def test_the_other_view_does_not_come_without_its_root(sites: Sites, snapshot: Snapshot) -> None:
    sites.trust = sites.origin.trust
    archive = sites.export()
    sites.trust = sites.origin.airgap
    assert "--root of that view" in refused(sites, archive, snapshot)
    sites.trust = sites.origin.trust
    sites.bring(archive)
    assert sites.versions() == {"1.0"}


# -- who decides what the mirror holds ---------------------------------------------------------------------------------


def narrowed(archive: Path, said: Filter, without: set[str]) -> Path:
    """What anybody who carries an archive can make of it without a key."""
    rows = []
    for info, content in members(archive):
        if info.name == "mirror.json":
            content = encode_filter(said)
            info.size = len(content)
        if info.name not in without:
            rows.append((info, content))
    return packed(archive.parent / "narrowed.tar", rows)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "said",
    [Filter(versions=("1.0",)), Filter(archs=("9.0",)), Filter(libraries=("demo",), versions=("1.0",)), Filter()],
)
def test_whoever_carries_an_archive_does_not_decide_what_the_mirror_holds(
    sites: Sites, snapshot: Snapshot, said: Filter, known: bool
) -> None:
    """With the blobs of the newest release taken out, and a filter that would have it so."""
    old = set(open_archive(sites.export("old.tar")).members)
    if known:
        sites.bring(sites.base / "old.tar")
    else:
        sites.closed.mkdir()
    sites.origin.release("2.0", content=1)
    new = sites.export("new.tar")
    evil = narrowed(new, said, {name for name in open_archive(new).members if name[:4] in ("blob", "targ")} - old)
    told = refused(sites, evil, snapshot)
    assert "together lack" in told
    assert str(said) in told or said == Filter()
    sites.bring(new)
    assert sites.versions() == {"1.0", "2.0"}


def test_a_part_is_brought_in_by_whoever_asks_for_it(sites: Sites, snapshot: Snapshot) -> None:
    sites.origin.release("2.0", content=1)
    part = sites.export("part.tar", versions=("2.0",))
    sites.closed.mkdir()
    assert "--release-version 2.0" in refused(sites, part, snapshot)
    sites.bring(part, versions=("2.0",))
    sites.bring(part)  # it is what the mirror holds by now
    assert sites.versions() == {"2.0"}
    whole = sites.export("whole.tar")
    assert "--change-filter" in refused(sites, whole, snapshot)
    sites.bring(whole, refilter=True)
    assert sites.versions() == {"1.0", "2.0"}
    with pytest.raises(ConfigError, match="would hold less"):
        sites.bring(part, versions=("2.0",))
    assert sites.versions() == {"1.0", "2.0"}
    sites.bring(part, versions=("2.0",), refilter=True)
    assert sites.versions() == {"2.0"}


# -- older, and lost ---------------------------------------------------------------------------------------------------


def test_an_older_archive_does_not_lead_the_site_back(sites: Sites, snapshot: Snapshot) -> None:
    old = sites.export("old.tar")
    sites.origin.release("2.0", content=1)
    sites.bring(sites.export("new.tar"))
    assert "is older than what" in refused(sites, old, snapshot)


def test_an_older_archive_brings_back_blobs_that_were_lost(sites: Sites, snapshot: Snapshot) -> None:
    old = sites.export("old.tar")
    sites.origin.release("2.0", content=1)
    sites.bring(sites.export("new.tar"))
    before = snapshot(sites.closed)
    lost = sorted(name for name in open_archive(old).members if name.startswith("blobs/"))
    for name in lost[::5]:
        (sites.closed / name).unlink()
    _, done = sites.bring(old)
    assert (done.changed, done.blobs) == (False, len(lost[::5]))
    assert snapshot(sites.closed) == before


def test_the_same_archive_again_changes_nothing(sites: Sites, snapshot: Snapshot) -> None:
    archive = sites.export()
    sites.bring(archive)
    before = snapshot(sites.closed)
    _, done = sites.bring(archive)
    assert (done.changed, done.blobs) == (False, 0)
    assert snapshot(sites.closed) == before


def test_a_difference_does_not_fit_a_site_that_lacks_the_rest(sites: Sites, snapshot: Snapshot) -> None:
    sites.bring(sites.export())
    sites.origin.release("2.0", content=1)
    rest = sites.export("rest.tar", since=True)
    blob = sorted((sites.closed / "blobs/sha256").iterdir())[3]
    blob.unlink()
    assert "together lack" in refused(sites, rest, snapshot)


def test_metadata_that_expired_is_not_brought_in(few: Sites, snapshot: Snapshot) -> None:
    """By the clock of the closed side, 401 days later."""
    if shutil.which("faketime") is None:
        pytest.skip("the faketime program is not installed")
    archive = few.export()
    root = few.base / "root.json"
    root.write_bytes(few.origin.root("airgap"))
    program = [sys.executable, "-m", "kartifacts", "mirror", "import"]
    command = [*program, str(archive), f"dir:{few.closed}", "--root", str(root)]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(few.base), "KARTIFACTS_STORE": str(few.base / "late store")}
    done = subprocess.run(
        ["faketime", "-f", "+401d", *command], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 11, done.stderr
    assert not (few.closed / "airgap").exists()


# -- cut anywhere ------------------------------------------------------------------------------------------------------


def test_an_import_that_is_cut_leaves_the_old_state_or_the_new_and_can_go_on(few: Sites, snapshot: Snapshot) -> None:
    few.bring(few.export())
    shutil.copytree(few.closed, few.base / "before")
    few.origin.release("2.0", content=1)
    archive = few.export("next.tar", since=True)
    counting = CutBucket(few.closed)
    few.bring(archive, counting)
    complete, steps = snapshot(few.closed), len(counting.written)
    assert steps > 10
    seen = set()
    for step in range(steps):
        root = few.base / f"cut{step}"
        shutil.copytree(few.base / "before", root)
        with pytest.raises(SourceError, match="connection lost"):
            few.bring(archive, CutBucket(root, writes=step, last_takes_effect=False))
        found = few.versions(root)
        assert found in ({"1.0"}, {"1.0", "2.0"})
        seen.add(frozenset(found))
        shutil.rmtree(root / "gc", ignore_errors=True)
        few.bring(archive, DirectoryBucket(root))
        assert snapshot(root) == complete
        shutil.rmtree(root)
    assert len(seen) == 2


# -- listings ----------------------------------------------------------------------------------------------------------


def test_a_listing_is_of_what_never_changes(sites: Sites, tmp_path: Path) -> None:
    sites.bring(sites.export())
    (sites.closed / "blobs/sha256/.partial-x").write_text("left over")
    (sites.closed / "blobs/README").write_text("somebody's")
    (tmp_path / "listing").write_text(listing(DirectoryBucket(sites.closed)))
    held = read_listing(tmp_path / "listing")
    assert set(held) == {
        path.relative_to(sites.closed).as_posix()
        for directory in ("airgap", "blobs", "targets")
        for path in (sites.closed / directory).rglob("*.json" if directory != "blobs" else "[0-9a-f]" * 64)
        if path.name != "timestamp.json"
    }
    assert all((sites.closed / path).stat().st_size == size for path, size in held.items())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"kartifacts listing 2\n",
        b"kartifacts listing 1",
        b"kartifacts listing 1\n5 ../x\n",
        b"kartifacts listing 1\n-5 index.json\n",
        b"kartifacts listing 1\n5 index.json",
        b"kartifacts listing 1\n\xff\n",
        b"kartifacts listing 1\n99999999999999999999 index.json\n",
        b"kartifacts listing 1\n\xd9\xa3 index.json\n",
    ],
)
def test_a_listing_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "listing").write_bytes(content)
    with pytest.raises(VerificationError):
        read_listing(tmp_path / "listing")


def test_a_place_that_holds_nothing_has_no_listing(tmp_path: Path) -> None:
    """As one whose name is misspelt."""
    with pytest.raises(SourceError, match="no part of a repository"):
        listing(DirectoryBucket(tmp_path / "typo"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no part of a repository"):
        listing(DirectoryBucket(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["full.tar", "new", "empty"])
def test_a_disk_that_is_full_is_the_same_fault_for_files_and_directories(sites: Sites, name: str) -> None:
    """By the limit that the system keeps for the size of a file: the largest member does not fit."""
    if name == "empty":
        (sites.base / name).mkdir()
    largest = max(path.stat().st_size for path in (sites.origin.path / "blobs/sha256").iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot write"):
            sites.export(name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    left = {path.name for path in sites.base.iterdir() if path.name == name or "partial" in path.name}
    assert left == ({"empty"} if name == "empty" else set())
    assert name != "empty" or not list((sites.base / name).iterdir())
    sites.export(name)


def test_a_file_is_not_written_over_a_directory(sites: Sites) -> None:
    (sites.base / "x.tar").mkdir()
    with pytest.raises(ConfigError, match="is a directory"):
        sites.export("x.tar")


def test_a_directory_that_holds_something_is_not_written_into(sites: Sites) -> None:
    (sites.base / "full").mkdir()
    (sites.base / "full" / "x").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        sites.export("full")


def test_an_export_that_fails_leaves_no_file(sites: Sites) -> None:
    victim = max((sites.origin.path / "blobs/sha256").iterdir())
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(VerificationError):
        sites.export()
    assert [path.name for path in sites.base.iterdir() if "carried" in path.name or "partial" in path.name] == []


def test_the_snapshot_that_is_carried_is_whole(sites: Sites) -> None:
    assert (sites.export("carried") / metadata_path("airgap", "timestamp.json")).exists()
