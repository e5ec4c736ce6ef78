"""A directory is the same by each of its spellings, for every command that takes a bucket, a repository or a mirror."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import ConfigError
from kartifacts.files.directories import directory_in
from kartifacts.publish.buckets import open_bucket
from kartifacts.sources import from_settings
from kartifacts.testing import TinyRepository, tiny_repository
from tests.conftest import Machine

SPELLINGS: list[Callable[[Path], str]] = [str, lambda path: f"dir:{path}", lambda path: path.as_uri()]


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRepository:
    return tiny_repository(tmp_path / "the repository", {"a.so": b"a" * 5000})


@pytest.mark.parametrize("spelt", SPELLINGS)
def test_every_spelling_is_read_and_written(
    machine: Machine, tiny: TinyRepository, tmp_path: Path, spelt: Callable[[Path], str]
) -> None:
    repository, bucket, lock = spelt(tiny.path), tmp_path / "bucket", tmp_path / "kartifacts.lock"
    for command in (
        ("publish", spelt(bucket), "--from", repository, "--lock", lock),
        ("lock", repository, "--out", tmp_path / "other.lock"),
        ("verify", repository),
        ("mirror", "pull", repository, spelt(tmp_path / "mirror"), "--lock", lock),
        ("mirror", "verify", spelt(tmp_path / "mirror"), "--lock", lock),
        ("mirror", "list", spelt(bucket)),
        ("mirror", "export", spelt(bucket), tmp_path / "carried.tar", "--lock", lock),
        ("mirror", "import", tmp_path / "carried.tar", spelt(tmp_path / "imported"), "--lock", lock),
    ):
        answer = machine.cli(*command)
        assert answer.code == 0, answer.err
    for made in ("bucket", "mirror", "imported"):
        assert (tmp_path / made / "blobs").is_dir()


@pytest.mark.parametrize("spelt", SPELLINGS)
def test_a_mirror_is_a_directory_by_each_spelling(
    machine: Machine, make_mirror: Path, spelt: Callable[[Path], str]
) -> None:
    [source] = from_settings(config.read({"KARTIFACTS_MIRRORS": spelt(make_mirror), "KARTIFACTS_OFFLINE": "1"}))
    assert source.document("here", 100) == b"yes"


@pytest.fixture
def make_mirror(tmp_path: Path) -> Path:
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror/here").write_text("yes")
    return tmp_path / "mirror"


def test_a_plain_word_is_a_directory_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert directory_in("out") == Path("out")
    assert directory_in("./new") == Path("new")
    with pytest.raises(ConfigError, match="names no bucket") as caught:
        open_bucket("new", Settings())
    assert "dir:new" in str(caught.value)


@pytest.mark.parametrize("text", ["", "dir:", "s3:out", "ftp://h/x", "dri:/srv/x", "file://elsewhere/x", "https:x"])
def test_what_names_no_directory_makes_none(text: str) -> None:
    with pytest.raises(ConfigError):
        open_bucket(text, Settings())


@pytest.mark.parametrize("command", ["publish {new} --from {s3}", "verify {s3}", "lock {s3} --out {new}.lock"])
def test_a_command_that_reads_a_directory_says_so_of_anything_else(
    machine: Machine, tmp_path: Path, command: str
) -> None:
    words = [word.format(new=f"{tmp_path}/new", s3="s3://user:secret@kernels/v1") for word in command.split()]
    answer = machine.cli(*words)
    assert answer.code == ConfigError.exit_code
    assert "kartifacts mirror pull" in answer.err
    assert "secret" not in answer.err


@pytest.mark.parametrize("text", ["srv/mirror", "./mirror", "mirror"])
def test_a_relative_mirror_is_told_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        config.read({"KARTIFACTS_MIRRORS": text})
