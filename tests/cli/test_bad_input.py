"""Whatever is wrong with a command, the user reads one useful sentence, sees its exit code, and never a traceback."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts import config
from kartifacts.build.library import Library
from kartifacts.cli import flows, main
from kartifacts.cli.asking import parse_axes
from kartifacts.files.directories import check_place
from kartifacts.runtime import Registry, load
from kartifacts.testing import Mirror, faults
from tests.conftest import CPU_ARCHS, Answer, Compiler, Machine, Released

CPU = CPU_ARCHS.split()[0]
DEAD = "http://127.0.0.1:9"


def refused(answer: Answer, code: int, *words: str) -> None:
    """One sentence on stderr, with the words; nothing on stdout."""
    assert answer.code == code, answer.err
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    sentence = answer.err.splitlines()[0]
    assert 15 < len(sentence) < 500, sentence
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err, answer.err


def refused_as_json(answer: Answer, code: int, *words: str) -> None:
    """The same facts as one JSON object on stdout, and still for people on stderr."""
    assert answer.code == code, answer.err
    data = answer.data
    assert data["exit_code"] == code
    assert data["error"]
    assert answer.err.startswith(f"error: {data['message']}".splitlines()[0])
    for word in words:
        assert word in json.dumps(data, ensure_ascii=False) or word in answer.err, answer.out
    assert all(set(row) == {"place", "reason"} for row in data["refusals"])


NOWHERE = "/nowhere/at-all"

CASES: list[tuple[str, list[str], dict[str, Any], int, list[str]]] = [
    ("no such command", ["biuld"], {}, 2, ["biuld", "--help"]),
    ("no such option", ["fetch", "--arhcs", "9.0"], {}, 2, ["--arhcs", "kartifacts fetch --help"]),
    ("too many arguments", ["doctor", "more"], {}, 2, ["more"]),
    ("no out", ["build", "--archs", CPU], {}, 2, ["--out"]),
    ("no archs", ["build", "--out", "o"], {}, 2, ["no architectures given", "KARTIFACTS_ARCHS"]),
    ("empty archs", ["build", "--out", "o", "--archs", ""], {}, 2, ["no architectures given"]),
    ("archs of separators", ["build", "--out", "o", "--archs", " ,; "], {}, 2, ["arch list is empty"]),
    ("wrong arch", ["build", "--out", "o", "--archs", f"{CPU} 9.0z"], {}, 2, ["'9.0z'", "9.0a"]),
    ("wrong arch name", ["build", "--out", "o", "--archs", "hoper"], {}, 2, ["'hoper'"]),
    ("wrong CPU level", ["build", "--out", "o", "--archs", "cpu:x86-64-v9"], {}, 2, ["cpu:x86-64-v9"]),
    ("wrong arch in the environment", ["build", "--out", "o"], {"archs": "sm_1"}, 2, ["sm_1"]),
    ("arch no op has", ["build", "--out", "o", "--archs", "gfx942"], {}, 2, ["gfx942", "declared for cpu, cuda only"]),
    ("arch below every op", ["build", "--out", "o", "--archs", "7.0"], {}, 2, ["7.0", "needs 7.5 or later"]),
    ("one arch of two", ["build", "--out", "o", "--archs", f"{CPU} 7.0"], {}, 2, ["7.0", "needs 7.5 or later"]),
    ("foreign CPU", ["build", "--out", "o", "--archs", "cpu:aarch64 cpu:x86-64"], {}, 2, ["makes code for"]),
    ("wrong op", ["build", "--out", "o", "--archs", CPU, "--ops", "norm/rmsnrom"], {}, 2, ["rmsnrom", "norm/rmsnorm"]),
    ("wrong family", ["build", "--out", "o", "--archs", CPU, "--ops", "nrom"], {}, 2, ["nrom"]),
    ("wrong library", ["build", "--out", "o", "--archs", CPU, "--library", "mine"], {}, 2, ["'mine'", "doctor"]),
    ("wrong version", ["build", "--out", "o", "--archs", CPU, "--release-version", "../1"], {}, 2, ["'../1'"]),
    ("out is a file", ["build", "--out", "{file}", "--archs", CPU], {}, 2, ["{file}"]),
    ("lock is a directory", ["build", "--out", "o", "--archs", CPU, "--lock", "{home}"], {}, 2, ["{home}"]),
    ("lock is malformed", ["build", "--out", "o", "--archs", CPU, "--lock", "{file}"], {}, 5, ["{file}"]),
    ("no compiler", ["build", "--out", "o", "--archs", CPU], {"PATH": ""}, 7, ["g++", "clang++", "KARTIFACTS_CXX"]),
    ("a compiler that is none", ["build", "--out", "o", "--archs", CPU], {"cxx": "/bin/false"}, 7, ["/bin/false"]),
    ("no workspace", ["build", "--out", "o", "--archs", CPU], {"workspace": "/dev/null/x"}, 9, ["/dev/null/x"]),
    ("jobs", ["build", "--out", "o", "--archs", CPU], {"jobs": "many"}, 2, ["KARTIFACTS_JOBS", "'many'"]),
    ("MAX_JOBS", ["build", "--out", "o", "--archs", CPU], {"MAX_JOBS": "abc"}, 2, ["MAX_JOBS", "'abc'"]),
    ("import nothing", ["import", "checksums", NOWHERE, "--out", "o", "--library", "l", "--release-version", "1"], {},
     2, [NOWHERE]),
    ("publish nothing", ["publish", "dir:b", "--from", NOWHERE], {}, 2, [NOWHERE, "not a repository"]),
    ("publish to nowhere", ["publish", "b", "--from", "{repository}"], {}, 2, ["'b'", "dir:PATH"]),
    ("publish to a scheme", ["publish", "gs://b", "--from", "{repository}"], {}, 2, ["'gs://b'", "dir:PATH"]),
    ("publish to a file", ["publish", "dir:{file}", "--from", "{repository}"], {}, 4, ["{file}"]),
    ("publish to S3 at nowhere", ["publish", "s3://bucket?endpoint=", "--from", "{repository}"], {}, 2,
     ["endpoint= says nothing"]),
    ("publish to S3 at a slash", ["publish", "s3://bucket?endpoint=/", "--from", "{repository}"], {}, 2, ["http://"]),
    ("publish to no region", ["publish", "s3://bucket?region=", "--from", "{repository}"], {}, 2,
     ["region= says nothing"]),
    ("publish to no bucket", ["publish", "s3://", "--from", "{repository}"], {}, 2, ["'s3://'"]),
    ("sync from S3 at nowhere", ["fetch"], {"lock": "{lock}", "mirrors": "s3://bucket?endpoint="}, 2,
     ["endpoint= says nothing"]),
    ("publish no version", ["publish", "dir:b", "--from", "{repository}", "--release-version", "7"], {}, 2, ["1.0"]),
    ("lock nothing", ["lock", NOWHERE, "--out", "l"], {}, 2, [NOWHERE]),
    ("lock into a directory", ["lock", "{repository}", "--out", "{home}"], {}, 2, ["{home}"]),
    ("lock into what is no lock", ["lock", "{repository}", "--out", "{file}"], {}, 5, ["{file}"]),
    ("lock another library", ["lock", "{repository}", "--out", "l", "--library", "mine"], {}, 2, ["mine"]),
    ("fetch without lock", ["fetch"], {}, 2, ["no release is pinned", "KARTIFACTS_LOCK"]),
    ("status without lock", ["status"], {}, 2, ["no release is pinned"]),
    ("list without lock", ["list"], {}, 2, ["no release is pinned"]),
    ("gc without lock", ["gc"], {}, 2, ["no release is pinned"]),
    ("missing lock", ["fetch"], {"lock": f"{NOWHERE}.lock"}, 2, [f"{NOWHERE}.lock", "kartifacts lock"]),
    ("malformed lock", ["fetch"], {"lock": "{file}"}, 5, ["{file}"]),
    ("no mirror", ["fetch"], {"lock": "{lock}"}, 3, ["release kartifacts 1.0", "mirrors: none is set"]),
    ("missing mirror", ["fetch"], {"lock": "{lock}", "mirrors": DEAD}, 3, [DEAD, "Connection refused"]),
    ("mirror of another", ["fetch"], {"lock": "{lock}", "mirrors": "file:///nowhere"}, 3, ["file:///nowhere"]),
    ("mirror that is no URL", ["fetch"], {"lock": "{lock}", "mirrors": "mirror.example"}, 2, ["KARTIFACTS_MIRRORS"]),
    ("fetch offline", ["fetch"], {"lock": "{lock}", "mirrors": DEAD, "offline": 1}, 3, ["KARTIFACTS_OFFLINE is set"]),
    ("fetch a library", ["fetch", "--library", "mine"], {"lock": "{lock}"}, 2, ["'mine'", "kartifacts"]),
    ("store is a file", ["fetch"], {"lock": "{lock}", "store": "{file}", "mirrors": "{url}"}, 9, ["{file}"]),
    ("gc of less than nothing", ["gc", "--max-bytes", "-1"], {"lock": "{lock}"}, 2, ["--max-bytes"]),
    ("gc of digits of others", ["gc", "--max-bytes", "٣"], {"lock": "{lock}"}, 2, ["--max-bytes"]),
    ("settings of digits of others", ["config"], {"retries": "٣"}, 2, ["KARTIFACTS_RETRIES"]),
    ("seconds of digits of others", ["config"], {"connect_timeout": "٣"}, 2, ["KARTIFACTS_CONNECT_TIMEOUT"]),
    ("library named as a device", ["import", "checksums", "{home}", "--out", "o", "--library", "con",
     "--release-version", "1"], {}, 2, ["'con'", "Windows"]),
    ("gc of a word", ["gc", "--max-bytes", "lots"], {"lock": "{lock}"}, 2, ["--max-bytes", "lots"]),
    ("verify nothing", ["verify", NOWHERE], {}, 2, [NOWHERE]),
    ("explain an unknown op", ["explain", "norm/rmsnrom"], {}, 2, ["norm/rmsnrom", "norm/rmsnorm"]),
    ("explain without axes", ["explain", "rmsnorm"], {}, 2, ["dtype", "bfloat16"]),
    ("explain an unknown axis", ["explain", "rmsnorm", "dtyp=float32"], {}, 2, ["'dtyp'", "dtype"]),
    ("explain a wrong value", ["explain", "rmsnorm", "dtype=float8"], {}, 2, ["float8", "float16"]),
    ("explain an axis named device", ["explain", "rmsnorm", "device=cuda"], {}, 2, ["no op has an axis 'device'"]),
    ("explain an axis named op", ["explain", "rmsnorm", "op=x", "dtype=float32"], {}, 2, ["no op has an axis 'op'"]),
    ("explain an axis named self", ["explain", "rmsnorm", "self=x"], {}, 2, ["no op has an axis 'self'"]),
    ("explain-key of device", ["explain-key", "rmsnorm", "device=x", "--arch", CPU], {}, 2, ["no op has an axis"]),
    ("explain a word", ["explain", "rmsnorm", "float32"], {}, 2, ["'float32'", "name=value"]),
    ("explain an axis twice", ["explain", "rmsnorm", "dtype=float32", "dtype=float16"], {}, 2, ["once"]),
    ("explain a device", ["explain", "rmsnorm", "dtype=float32", "--device", "tpu"], {}, 2, ["'tpu'", "cuda:N"]),
    ("explain a GPU", ["explain", "rmsnorm", "dtype=float32", "--device", "cuda:77"], {}, 2, ["no GPU 77"]),
    ("explain-key without arch", ["explain-key", "rmsnorm", "dtype=float32"], {}, 2, ["--arch"]),
    ("explain-key of two", ["explain-key", "rmsnorm", "dtype=float32", "--arch", "8.0 9.0"], {}, 2, ["2 archs"]),
    ("explain-key of none", ["explain-key", "rmsnorm", "dtype=float32", "--arch", "6.0"], {}, 2, ["6.0", "7.5"]),
    ("unknown variable", ["config"], {"mirors": DEAD}, 2, ["KARTIFACTS_MIRORS", "KARTIFACTS_MIRRORS"]),
    ("bad switch", ["config"], {"offline": "maybe"}, 2, ["KARTIFACTS_OFFLINE", "'maybe'"]),
    ("missing config", ["config"], {"config": f"{NOWHERE}.toml"}, 2, [f"{NOWHERE}.toml"]),
    ("bad config", ["config"], {"config": "{file}"}, 2, ["{file}", "TOML"]),
    ("demo in a full directory", ["demo", "--keep", "{home}"], {}, 2, ["{home}", "not empty"]),
    ("demo without a compiler", ["demo"], {"PATH": ""}, 7, ["g++"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "words"),
    [pytest.param(*case[1:], id=case[0]) for case in CASES],
)
def test_what_is_wrong_is_said_in_one_sentence_as_text_and_as_json(
    machine: Machine,
    released: Released,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    settings: dict[str, Any],
    code: int,
    words: list[str],
) -> None:
    monkeypatch.chdir(machine.home)
    (machine.home / "file").write_text("= nothing that anybody could read")
    places = {
        "{file}": machine.home / "file",
        "{home}": machine.home,
        "{repository}": released.path,
        "{lock}": released.lock_file,
        "{url}": f"file://{released.path}",
    }

    def filled(value: Any) -> Any:
        for name, place in places.items():
            value = value.replace(name, str(place)) if isinstance(value, str) else value
        return value

    settings = {name: filled(value) for name, value in settings.items()}
    arguments, words = [filled(word) for word in arguments], [filled(word) for word in words]
    refused(machine.cli(*arguments, **settings), code, *words)
    refused_as_json(machine.cli(*arguments, "--json", **settings), code, *words)
    assert not [name for name in ("o", "l") if (machine.home / name).exists()]  # and nothing was left behind


@pytest.mark.parametrize("name", ["no such command", "wrong arch", "missing lock", "missing mirror", "no compiler"])
def test_the_same_holds_for_the_program_that_users_start(machine: Machine, released: Released, name: str) -> None:
    [(_, arguments, settings, code, words)] = [case for case in CASES if case[0] == name]
    settings = {key: str(value).replace("{lock}", str(released.lock_file)) for key, value in settings.items()}
    answer = machine.run_cli(*arguments, **settings)
    assert (answer.code, answer.out) == (code, "")
    assert "Traceback" not in answer.err
    assert any(line.startswith("error: ") for line in answer.err.splitlines())
    for word in words:
        assert word in answer.err


# -- bytes that are not what was pinned --------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "code"), [(flip, 5), (truncate, 5), (remove, 3)], ids=["flipped", "truncated", "missing"]
)
@pytest.mark.parametrize("place", ["http", "file"])
def test_one_damaged_pack_fails_the_fetch_and_is_named_while_the_rest_is_kept(
    machine: Machine, released: Released, tmp_path: Path, damage: Callable[[Path], None], code: int, place: str
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(released.path, repository)
    pack = max((repository / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    damage(pack)
    with Mirror(repository) as mirror:
        url = mirror.url if place == "http" else f"file://{repository}"
        settings = {"lock": released.lock_file, "mirrors": url, "retries": 0}
        answer = machine.run_cli("fetch", **settings)
        assert (answer.code, answer.out) == (code, "")
        assert "Traceback" not in answer.err
        assert pack.name in answer.err
        assert "?dtype=" in answer.err
        status = machine.cli("status", "--json", **settings).data
        lacking = [row for row in status["bundles"] if row["present"] != row["kernels"]]
        assert len(lacking) == 1  # all other bundles are here
        as_json = machine.cli("fetch", "--json", **settings)
        assert (as_json.code, as_json.data["exit_code"]) == (code, code)
        assert pack.name in json.dumps(as_json.data)
    shutil.copy(released.path / "blobs/sha256" / pack.name, pack)
    settings["mirrors"] = f"file://{repository}"
    mended = machine.cli("fetch", "--json", **settings)
    assert mended.data["fetched"] == lacking[0]["kernels"]


def test_several_damaged_packs_are_all_named(machine: Machine, released: Released, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(released.path, repository)
    packs = sorted((repository / "blobs/sha256").iterdir(), key=lambda path: -path.stat().st_size)[:2]
    for pack in packs:
        remove(pack)
    answer = machine.cli("fetch", lock=released.lock_file, mirrors=f"file://{repository}")
    refused(answer, 3, *(pack.name for pack in packs))


def test_a_login_page_in_place_of_a_release_is_called_that(machine: Machine, released: Released) -> None:
    with Mirror(released.path) as mirror:
        mirror.order(faults.html())
        answer = machine.cli("fetch", lock=released.lock_file, mirrors=mirror.url, retries=0)
    assert answer.code == 5
    assert "text/html" in answer.err
    assert released.lock.releases[0].sha256 in answer.err


@pytest.mark.parametrize("damage", [flip, truncate, remove], ids=["flipped", "truncated", "missing"])
def test_a_damaged_repository_is_neither_published_nor_pinned(
    machine: Machine, released: Released, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    repository, bucket, lock = tmp_path / "repository", tmp_path / "bucket", tmp_path / "new.lock"
    shutil.copytree(released.path, repository)
    pack = max((repository / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    damage(pack)
    for arguments in (("publish", f"dir:{bucket}", "--from", repository), ("lock", repository, "--out", lock)):
        refused(machine.cli(*arguments), 5, pack.name)
    assert not bucket.exists()
    assert not lock.exists()


# -- what stands in the way --------------------------------------------------------------------------------------------


def test_another_content_under_the_same_version_is_a_conflict_and_changes_nothing(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    out, lock = tmp_path / "out", tmp_path / "kartifacts.lock"
    shutil.copytree(released.path, out)
    shutil.copy(released.lock_file, lock)
    arguments = ("build", "--archs", CPU, "--ops", "silu_and_mul", "--out", out, "--lock", lock)
    refused(machine.cli(*arguments, "--release-version", "1.0", progress="off"), 10, "1.0", "under another")
    assert machine.cli("verify", out).code == 0
    assert lock.read_bytes() == released.lock_file.read_bytes()
    assert machine.cli(*arguments, "--release-version", "1.1").code == 0  # beside it, there is room
    refused(machine.cli("publish", f"dir:{out}", "--from", out, "--release-version", "9"), 2, "1.0", "1.1")


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_a_build_that_cannot_make_one_promised_kernel_lists_it_and_leaves_no_release(
    machine: Machine, tmp_path: Path, op: str
) -> None:
    broken, out, lock = tmp_path / "g++", tmp_path / "out", tmp_path / "kartifacts.lock"
    broken.write_text(
        f'#!/bin/sh\ncase "$*" in *"-c norm/{op}_cpu.cpp"*"KART_DTYPE=2"*|*"KART_DTYPE=2"*"-c norm/{op}_cpu.cpp"*)\n'
        f'echo "norm/{op}_cpu.cpp:7:1: error: no such luck" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    broken.chmod(0o755)
    arguments = ("build", "--archs", CPU, "--ops", "norm/layernorm,rmsnorm", "--out", out, "--lock", lock)
    answer = machine.cli(*arguments, cxx=broken, progress="off")
    refused(answer, 6, f"norm/{op}?dtype=bfloat16 for {CPU}: promised and not built", "no such luck", "full log")
    as_json = machine.cli(*arguments, "--json", cxx=broken, progress="off")
    assert {"place": f"norm/{op}?dtype=bfloat16 for {CPU}", "reason": "promised and not built"} in as_json.data[
        "refusals"
    ]
    assert Path(as_json.data["log"]).is_file()
    assert f"norm/{op}_cpu.cpp" in as_json.data["command"]
    assert not out.exists()
    assert not lock.exists()
    mended = machine.cli(*arguments, "--json")
    assert mended.code == 0
    assert len(mended.data["kernels"]) == 6


def test_an_unsupported_pair_of_op_and_arch_is_said_to_be_skipped(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library where one op exists for the CPU and the other does not."""
    import kartifacts.build.library as library

    root = tmp_path / "kernels"
    shutil.copytree(Path(library.__file__).parents[2] / "kernels", root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(root / "norm")
    toml = root / "activation/op.toml"
    text = toml.read_text()
    start = text.index("[op.device.cpu]")
    toml.write_text(text[:start] + text[text.index("[op.device.cuda]") :])  # of the first op only
    monkeypatch.setattr(library, "own_root", lambda: root)
    arguments = ("build", "--archs", CPU, "--ops", "activation", "--out")
    answer = machine.cli(*arguments, tmp_path / "out")
    refused(answer, 2, "activation/silu_and_mul", "declared for cuda only")
    assert not (tmp_path / "out").exists()
    answer = machine.cli("build", "--archs", CPU, "--out", tmp_path / "out")  # not asked for by name
    assert answer.code == 0
    assert f"skipped: activation/silu_and_mul for {CPU}: the op is declared for cuda only" in answer.out


# -- fetching what is not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--archs", "12.0"], ["12.0"]),
        (["--archs", f"{CPU} 12.0"], ["12.0"]),
        (["--ops", "norm,nrom"], ["'nrom'"]),
        (["--ops", "rms"], ["'rms'"]),
        (["--path", "norm/rmsnorm?dtype=float64"], ["norm/rmsnorm?dtype=float64"]),
        (["--path", "norm/rmsnorm?dtype=float32", "--path", "x"], ["'x'"]),
        (["--archs", "9.0q"], ["'9.0q'"]),
    ],
)
def test_one_wrong_word_among_right_ones_fails_a_fetch(
    machine: Machine, released: Released, options: list[str], words: list[str]
) -> None:
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    answer = machine.cli("fetch", *options, **settings)
    refused(answer, 2 if "9.0q" in options else 3, *words)
    assert not list(machine.store.rglob("*.so"))


def test_kernels_written_out_for_several_archs_do_not_overwrite_each_other(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    out = tmp_path / "out"
    answer = machine.cli("fetch", "--ops", "rmsnorm", "--out", out, "--json", **settings)
    assert answer.code == 0, answer.err
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert len(files) == answer.data["kernels"] == 3 * len(released.archs)
    assert {path.parts[0] for path in files} == {arch.slug for arch in released.archs}
    stored = {path.read_bytes() for path in machine.store.rglob("*.so")}
    assert {(out / path).read_bytes() for path in files} == stored


def test_a_directory_that_cannot_be_written_out_to_is_named(
    machine: Machine, released: Released, tmp_path: Path
) -> None:
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / released.archs[0].slug).write_text("in the way")
    refused(machine.cli("fetch", "--out", tmp_path / "out", **settings), 9, str(tmp_path / "out"))


# -- interruption and our own faults -----------------------------------------------------------------------------------


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interrupted_build_says_so_stops_its_compilers_and_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    slow, started = tmp_path / "g++", tmp_path / "started"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo $$ > {started}; exec sleep 300;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    arguments = ["build", "--archs", CPU, "--ops", "rmsnorm", "--out", str(tmp_path / "o")]
    command = [sys.executable, "-m", "kartifacts", *arguments]
    environ = machine.environ({"cxx": slow})
    with subprocess.Popen(
        command, env=environ, cwd=machine.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (started.exists() and started.read_text().strip()):
            assert process.poll() is None
            time.sleep(0.02)
        compiler = int(started.read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert not (tmp_path / "o").exists()
    deadline = time.monotonic() + 30
    while runs(compiler):  # it is told to end; when, is up to the system
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fault_of_our_own_is_a_sentence_too_and_its_traceback_is_for_who_asks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(config, "read", broken)
    answer = machine.cli("config")
    refused(answer, 1, "KeyError", "what nobody thought of", "-vv")
    assert machine.cli("config", "--json").data["exit_code"] == 1
    with caplog.at_level("DEBUG", logger="kartifacts"):
        machine.cli("config")
    assert any(record.exc_info for record in caplog.records)


def test_main_without_arguments_reads_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kartifacts", "--version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0


@pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x", "{file}/x", "{loop}/x", "{wrong}"])
@pytest.mark.parametrize("option", ["--out", "--lock", "--report", "--costs-out"])
def test_a_place_that_cannot_be_written_is_refused_before_any_compiler(
    machine: Machine, compiler: Compiler, tmp_path: Path, option: str, place: str
) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    wrong = tmp_path / "file" if option == "--out" else tmp_path  # a file for a directory, or the reverse
    where = place.format(file=tmp_path / "file", loop=tmp_path / "loop", wrong=wrong)
    options = {"--out": tmp_path / "out", option: where}
    command = ["build", "--archs", CPU, "--ops", "silu_and_mul"]
    answer = machine.cli(*command, *(word for pair in options.items() for word in pair), cxx=compiler.path)
    refused(answer, 2, where, option)
    assert compiler.starts == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["import", "merge", "wheel"])
def test_no_other_command_works_for_hours_and_writes_nowhere(
    machine: Machine, released: Released, tmp_path: Path, command: str
) -> None:
    line = {
        "import": ["import", "checksums", tmp_path, "--library", "l", "--release-version", "1"],
        "merge": ["merge", "--plan", tmp_path / "none.toml", "--from", tmp_path],
        "wheel": ["wheel", "--from", released.path],
    }[command]
    answer = machine.cli(*line, "--out", "/proc/x")
    refused(answer, 2)
    if command != "merge":  # which reads the plan before
        assert "--out '/proc/x'" in answer.err


def test_what_can_be_written_is_left_as_it_was_by_looking(tmp_path: Path) -> None:
    for path, directory in ((tmp_path / "a/b", True), (tmp_path / "a/c", False), (tmp_path, True)):
        check_place(path, "--out", directory=directory)
    assert list(tmp_path.iterdir()) == []


def test_no_name_of_an_axis_on_a_command_line_meets_a_name_of_our_own(machine: Machine) -> None:
    """Axes become keywords, beside the parameters of all that they are handed on to."""
    calls = (Registry.load, Registry.explain, load, flows.explain_key, parse_axes, Library.spec)
    for name in sorted({name for call in calls for name in inspect.signature(call).parameters}):
        for command in (["explain"], ["explain-key", "--arch", CPU]):
            answer = machine.cli(*command, "rmsnorm", f"{name}=x")
            refused(answer, 2, "axis", f"{name}")


def test_a_counting_compiler_is_not_started_by_bad_input(machine: Machine, compiler: Compiler) -> None:
    for name in ("wrong arch", "wrong op", "wrong version", "arch no op has", "lock is malformed"):
        [(_, arguments, settings, code, _)] = [case for case in CASES if case[0] == name]
        (machine.home / "bad").write_text("{")
        words = [word.replace("{file}", str(machine.home / "bad")) for word in arguments]
        assert machine.cli(*words, cxx=compiler.path, **settings).code == code
    assert compiler.starts == 0


def test_a_part_of_a_url_that_nobody_asks_for_is_not_repeated(machine: Machine) -> None:
    for url in ("http://a.example/#secret", "oci://a.example/b#secret", "http://a.example/?secret", "ftp://a#secret"):
        answer = machine.cli("config", mirrors=url)
        assert (answer.code, "secret" in answer.err) == (2, False), answer.err


def test_every_error_has_a_name_that_the_documentation_knows() -> None:
    """In JSON; the kinds that only some package knows go by the name of what they are a kind of."""
    from kartifacts import errors
    from kartifacts.cli import _kind

    def below(kind: type[errors.KartifactsError]) -> list[type[errors.KartifactsError]]:
        return [kind, *(child for each in kind.__subclasses__() for child in below(each))]

    for module in ("publish.buckets", "publish.lockfile", "publish.repository", "remote.s3", "remote.writer"):
        importlib.import_module(f"kartifacts.{module}")
    kinds = below(errors.KartifactsError)
    assert {"Unlisted", "Raced", "S3Error", "MissingBlob"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        named = vars(errors)[_kind(kind)]
        assert issubclass(kind, named)
        assert kind.exit_code == named.exit_code


def test_what_the_system_refuses_is_not_called_a_full_disk_of_the_answer(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kartifacts.cli import flows

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr(flows, "verify", refuse)
    answer = machine.cli("verify", "--json")
    assert answer.code == 1
    assert "cannot write the answer" not in answer.err
    assert "/some/file" in answer.data["message"]
