"""Every command that works: data on stdout and nothing on stderr, as text and as one JSON object."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kartifacts import __version__
from kartifacts.cli import _COMMANDS, _root
from tests.conftest import CPU_ARCHS, Answer, Machine, Released, declared
from tests.sites import Site


@pytest.fixture
def ready(machine: Machine, released: Released) -> dict[str, Any]:
    """Settings of a machine that has fetched the release."""
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    assert machine.cli("fetch", **settings).code == 0
    return settings


def both(machine: Machine, *arguments: object, **settings: Any) -> tuple[str, Any]:
    """What a command says as text and as JSON."""
    text, as_json = machine.cli(*arguments, **settings), machine.cli(*arguments, "--json", **settings)
    for answer in (text, as_json):
        assert answer.code == 0
        assert re.fullmatch(r"(building \d+ kernels: \d+ steps, jobs=\d+ \(.+\)\n)?", answer.err)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text.out)
    assert isinstance(as_json.data, dict)
    return text.out, as_json.data


def _commands(*path: str) -> Iterator[tuple[str, ...]]:
    """All commands, those in groups too."""
    found: click.Command = _root
    for name in path:
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None
        found = inner
    if not isinstance(found, click.Group):
        yield path
        return
    for name in found.list_commands(click.Context(found)):
        yield from _commands(*path, name)


COMMANDS = list(_commands())


@pytest.mark.parametrize("command", [(), *((name,) for name in _COMMANDS), *COMMANDS])
def test_every_command_explains_itself(machine: Machine, command: tuple[str, ...]) -> None:
    for option in ("--help", "-h"):
        answer = machine.cli(*command, option)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"Usage: {' '.join(('kartifacts', *command))}")


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if each != ("keys", "root")]
)  # it prints a file as it is
def test_every_command_can_print_json(machine: Machine, command: tuple[str, ...]) -> None:
    assert "--json" in machine.cli(*command, "--help").out


def test_no_command_at_all_shows_the_help_and_fails(machine: Machine) -> None:
    answer = machine.run_cli()
    assert answer.code == 2
    assert "Commands:" in answer.err + answer.out
    assert "Traceback" not in answer.err


def test_the_version_is_that_of_the_package(machine: Machine) -> None:
    assert machine.run_cli("--version").out.split()[-1] == __version__


def test_build_reports_each_kernel_the_jobs_and_the_pin(machine: Machine, tmp_path: Path) -> None:
    out, lock = tmp_path / "out", tmp_path / "kartifacts.lock"
    arguments = ("build", "--ops", "silu_and_mul", "--out", out, "--lock", lock)
    settings = {"archs": CPU_ARCHS.split()[0]}  # from the environment this time
    text, data = both(machine, *arguments, **settings)
    assert re.search(r"^jobs: \d+ \(.+\)$", text, re.MULTILINE)
    uris = [f"activation/silu_and_mul?dtype={dtype}" for dtype in ("bfloat16", "float16", "float32")]
    assert sorted(row["uri"] for row in data["kernels"]) == uris
    for uri in uris:
        assert f"built: {uri} for {settings['archs']}" in text
        assert data["coverage"][uri] == [settings["archs"]]
    assert data["pin"] == json.loads(lock.read_text())["releases"][0]
    assert data["pin"]["sha256"] in text
    assert data["kernels_reused"] == 3  # the second run compiled nothing
    assert {"jobs", "jobs_reason", "seconds", "bytes", "peak_memory", "compiled"} <= set(data)
    assert sum(row["bytes"] for row in data["kernels"]) == data["bytes"]


def test_publish_lock_and_verify_agree_on_the_pin(machine: Machine, released: Released, tmp_path: Path) -> None:
    bucket, lock = tmp_path / "bucket", tmp_path / "published.lock"
    text, data = both(machine, "publish", f"dir:{bucket}", "--from", released.path, "--lock", lock)
    [pin] = data["pins"]
    assert text.splitlines()[0] == f"published kartifacts 1.0: sha256:{pin['sha256']}"
    assert json.loads(lock.read_text())["releases"] == [pin]
    text, data = both(machine, "lock", bucket, "--out", tmp_path / "other.lock")
    assert data["pins"] == [pin]
    assert pin["sha256"] in text
    text, data = both(machine, "verify", bucket)
    assert (data["damaged"], data["missing"], data["place"]) == ([], [], str(bucket))
    assert data["checked"] >= len(declared()) * len(released.archs)
    assert text.strip() == f"{bucket}: {data['checked']} objects checked, 0 faults"


def test_fetch_says_what_was_fetched_and_what_was_there(machine: Machine, released: Released) -> None:
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    text, again = both(machine, "fetch", **settings)
    total = len(declared()) * len(released.archs)
    assert text.startswith(f"{total} kernels present: {total} fetched, 0 were there; ")
    assert (again["kernels"], again["present"], again["fetched"], again["requests"]) == (total, total, 0, 0)


def test_status_list_and_gc_describe_the_store(machine: Machine, released: Released, ready: dict[str, Any]) -> None:
    text, data = both(machine, "status", **ready)
    assert data["complete"]
    for row in data["bundles"]:
        assert row["present"] == row["kernels"]
        assert f"{row['family']} for {row['arch']}: {row['kernels']} of {row['kernels']} present" in text
    text, data = both(machine, "list", "--ops", "norm/layernorm", **ready)
    assert len(data["kernels"]) == 3 * len(released.archs)
    for row in data["kernels"]:
        assert row["uri"].startswith("norm/layernorm?dtype=")
        assert Path(row["place"]).stat().st_size == row["size"]
        assert row["place"] in text
    stray = machine.store / "v1/sha256/aa"
    stray.mkdir(exist_ok=True)
    stray = stray / ("aa" * 32)
    stray.write_bytes(b"what no pin reaches")
    stray.chmod(0o444)
    text, data = both(machine, "gc", "--dry-run", **ready)
    assert (data["removed"], data["dry_run"], stray.exists()) == ([str(stray)], True, True)
    assert text.startswith("would remove 1 entries")
    answer = machine.cli("gc", **ready)
    assert (answer.code, stray.exists()) == (0, False)
    assert machine.cli("status", "--json", **ready).data["complete"]
    assert both(machine, "verify", **ready)[1]["missing"] == []


def test_status_is_not_complete_where_nothing_is_here_or_nothing_fits(
    machine: Machine, released: Released, ready: dict[str, Any]
) -> None:
    assert not both(machine, "status", "--archs", "12.0", **ready)[1]["complete"]
    for path in machine.store.rglob("*.so"):
        path.unlink()
    text, data = both(machine, "status", **ready)
    assert not data["complete"]
    assert " 0 of " in text


def test_explain_and_explain_key_answer_for_one_specialisation(
    machine: Machine, released: Released, ready: dict[str, Any]
) -> None:
    text, data = both(machine, "explain", "norm/rmsnorm", "dtype=bfloat16", "--device", "cpu", **ready)
    assert data["op"] == "norm/rmsnorm"
    assert any(" fits: present, from store" in row["reason"] for row in data["places"])
    assert text.splitlines() == [f"{row['place']}: {row['reason']}" for row in data["places"]]
    arch = str(released.best)
    text, data = both(machine, "explain-key", "rmsnorm", "dtype=bfloat16", "--arch", arch)
    assert data["uri"] == "norm/rmsnorm?dtype=bfloat16"
    assert data["op_digest"] in text
    assert data["key"] in text
    assert data["parts"]["arch"] == arch
    assert "norm/rmsnorm_cpu.cpp" in data["parts"]["sources"]


def test_explain_key_without_a_compiler_still_gives_what_needs_none(machine: Machine, released: Released) -> None:
    arguments = ("explain-key", "rmsnorm", "dtype=bfloat16", "--arch", released.best)
    with_compiler = machine.cli(*arguments, "--json").data
    text, data = both(machine, *arguments, PATH="")
    assert (data["op_digest"], data["key"]) == (with_compiler["op_digest"], None)
    assert "unknown: no host C++ compiler" in text


def test_config_names_the_origin_of_each_setting_and_no_secret(machine: Machine) -> None:
    settings = {"mirrors": "https://user:secret@mirror.example/k", "jobs": 3}
    text, data = both(machine, "config", **settings)
    rows = data["settings"]
    assert rows["jobs"] == {"value": "3", "origin": "environment KARTIFACTS_JOBS"}
    assert rows["jit"] == {"value": "auto", "origin": "default"}
    assert "secret" not in text + json.dumps(data)
    assert "mirror.example" in text


def test_doctor_finds_a_sound_machine_sound_and_names_what_is_not(
    machine: Machine, released: Released, ready: dict[str, Any]
) -> None:
    text, data = both(machine, "doctor", **ready)
    assert all(row["ok"] for row in data["findings"])
    ops = {uri.partition("?")[0] for kind in ("cpu", "cuda", "hip") for uri in declared(kind)}
    assert f"library: kartifacts: {len(ops)} ops" in text
    for bad, subject in (
        ({"lock": "/nowhere/x.lock"}, "lock"),
        ({"path": "/nowhere/kernels"}, "directory"),
        ({"store": "/dev/null/x"}, "store"),
        ({"MAX_JOBS": "abc"}, "jobs"),
        ({"MAX_JOBS": "0", "jobs": 2}, "jobs"),
        ({"cxx": "/nonexistent/gxx"}, "cxx"),
        ({"cxx": "/bin/true"}, "cxx"),
        ({"cxx_launcher": "nolauncher"}, "cxx"),
        ({"cxx_flags": "-c"}, "cxx"),
        ({"cuda_flags": "-c"}, "nvrtc"),
    ):
        answer = machine.cli("doctor", "--json", **{**ready, **bad})
        assert answer.code == 1
        found = [row["subject"] for row in answer.data["findings"] if not row["ok"]]
        assert subject in found
        assert set(found) - {subject} <= {"nvcc", "nvrtc"}  # which need a host compiler, and share its settings
        assert "BAD" in machine.cli("doctor", **{**ready, **bad}).out


def test_a_compiler_that_nobody_named_may_be_missing(machine: Machine) -> None:
    answer = machine.cli("doctor", "--json", PATH="", CUDA_HOME=None, CUDA_PATH=None)
    assert answer.code == 0, answer.out
    assert "no host C++ compiler" in next(row["text"] for row in answer.data["findings"] if row["subject"] == "cxx")


@pytest.mark.parametrize("damage", ["missing", "clock"])
def test_doctor_finds_what_is_wrong_with_the_sources_of_a_library(site: Site, damage: str) -> None:
    assert site.cli("well", "doctor").code == 0
    source = next(path for path in site.packages.rglob("answer_cpu.cpp"))
    if damage == "missing":
        source.unlink()
    else:
        source.write_text("const char* t = __TIME__;")
    answer = site.cli("ill", "doctor", "--json")
    assert answer.code == 1
    bad = [row["text"] for row in answer.data["findings"] if not row["ok"]]
    assert "answer_cpu.cpp" in bad[0]


def test_the_number_of_jobs_is_shown_with_the_variable_that_says_it(machine: Machine) -> None:
    for settings, value, origin in (
        ({"MAX_JOBS": "7"}, "7", "environment MAX_JOBS"),
        ({"MAX_JOBS": "7", "jobs": 3}, "3", "environment KARTIFACTS_JOBS"),
        ({}, "", "default"),
    ):
        assert machine.cli("config", "--json", **settings).data["settings"]["jobs"] == {
            "value": value,
            "origin": origin,
        }
    said = machine.cli("doctor", MAX_JOBS="7").out
    assert "jobs: 7 (environment MAX_JOBS)" in said


def test_verify_names_each_damage_and_fails(machine: Machine, released: Released, tmp_path: Path) -> None:
    shutil.copytree(released.path, tmp_path / "repository")
    blobs = sorted((tmp_path / "repository/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    blobs[-1].write_bytes(blobs[-1].read_bytes()[:-1])  # a truncated pack
    blobs[-2].unlink()
    answer = machine.cli("verify", tmp_path / "repository", "--json")
    assert answer.code == 5
    said = json.dumps(answer.data)
    assert blobs[-1].name in said
    assert blobs[-2].name in said
    assert re.fullmatch(r"error: \d+ damaged and \d+ missing in .*\n", answer.err)


def test_verify_of_the_store_names_what_is_damaged_and_what_is_missing(machine: Machine, ready: dict[str, Any]) -> None:
    kernels = sorted(machine.store.rglob("*.so"))
    kernels[0].chmod(0o644)
    kernels[0].write_bytes(kernels[0].read_bytes()[:-1] + b"!")
    kernels[1].unlink()
    answer = machine.cli("verify", "--json", **ready)
    assert answer.code == 5
    assert any(kernels[0].name in row for row in answer.data["damaged"])
    assert answer.data["missing"]
    fetched = machine.cli("fetch", **ready)  # the damaged one was moved away, so that it is fetched anew
    assert "2 fetched" in fetched.out
    assert machine.cli("verify", **ready).code == 0


def test_output_that_nobody_reads_to_the_end_leaves_no_traceback(machine: Machine, ready: dict[str, Any]) -> None:
    command = f"{sys.executable} -m kartifacts list --json | head -c 10 >/dev/null"
    done = subprocess.run(command, shell=True, env=machine.environ(ready), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_finds_no_room_is_an_error_and_no_traceback(machine: Machine, options: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kartifacts", "config", *options]
        done = subprocess.run(
            command, env=machine.environ({}), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write the answer: ")
    assert "Traceback" not in done.stderr


def test_a_password_in_a_mirror_s_url_is_never_shown(machine: Machine, released: Released) -> None:
    settings = {
        "lock": released.lock_file,
        "mirrors": "http://user:sekret@127.0.0.1:9 https://me:sekret@nowhere.invalid",
    }
    for arguments in (
        ("fetch",),
        ("fetch", "--json"),
        ("-vv", "fetch"),
        ("config",),
        ("doctor",),
        ("explain", "rmsnorm"),
    ):
        answer = machine.run_cli(*arguments, *(["dtype=float32"] if "explain" in arguments else []), **settings)
        assert "sekret" not in answer.out + answer.err
        assert "127.0.0.1:9" in answer.out + answer.err


def answer_is_plain(answer: Answer) -> bool:
    return "\x1b[" not in answer.out + answer.err


def test_nothing_is_coloured_or_drawn_where_there_is_no_terminal(machine: Machine, released: Released) -> None:
    settings = {"lock": released.lock_file, "mirrors": f"file://{released.path}"}
    fetched = machine.run_cli("fetch", **settings)
    assert (fetched.code, fetched.err) == (0, "")
    assert answer_is_plain(fetched)
