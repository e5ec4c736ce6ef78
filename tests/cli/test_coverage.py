"""What a release covers is told by its content, and what a run missed comes back as entries for the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build.elf import inspect
from kartifacts.diagnostics import missed
from kartifacts.errors import MissingKernel
from kartifacts.model.arch import parse_arch
from kartifacts.publish.plan import read_plan
from kartifacts.runtime import host
from tests.conftest import Answer, Content, Machine, MakeRelease, Released

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MISSED = 12
PLAN = """
schema = 2
library = "kartifacts"

[[build]]
name = "cpu"
machine = "x86_64"
archs = ["cpu:x86-64-v3"]
ops = ["norm", "activation/silu_and_mul"]

[[build]]
name = "cuda"
machine = "x86_64"
cuda = "13.0"
builder = "x"
archs = ["8.0", "9.0a"]
shards = 3

[[build]]
name = "cuda-old"
machine = "x86_64"
cuda = "12.4"
archs = ["8.0"]

[[build]]
name = "cuda-arm"
machine = "aarch64"
cuda = "13.0"
archs = ["9.0a"]

[[exempt]]
uri = "rope/*"
archs = ["8.0", "9.0a"]
reason = "not written yet"
"""


def message(uri: str, arch: str) -> str:
    return f"no usable kernel for {uri} on {arch}, and compiling it is refused: KARTIFACTS_JIT=never"


def note(uri: str, arch: str, **more: Any) -> str:
    return json.dumps({"missing": uri, "arch": arch, "machine": "x86_64", **more})


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "release.toml"
    path.write_text(PLAN)
    return path


Ask = Callable[..., Answer]


@pytest.fixture
def ask(machine: Machine, tmp_path: Path) -> Ask:
    """Asks about a log with these lines."""

    def about(*lines: str, more: tuple[object, ...] = ()) -> Answer:
        log = tmp_path / "log"
        log.write_text("\n".join(lines) + "\n")
        return machine.cli("coverage", "--from", log, *more)

    return about


def changed(plan: Path, said: str) -> Path:
    """The plan with the entries that were printed in place of its own."""
    content, printed = tomllib.loads(plan.read_text()), tomllib.loads(said)
    builds = {build["name"]: build for build in content["build"]}
    builds |= {build["name"]: build for build in printed.get("build", [])}
    exempt = {entry["uri"]: entry for entry in content["exempt"]} | {
        entry["uri"]: entry for entry in printed.get("exempt", [])
    }
    lines = ["schema = 2", 'library = "kartifacts"']
    for table, entries in (("build", builds.values()), ("exempt", exempt.values())):
        for entry in entries:
            lines += [f"[[{table}]]", *(f"{name} = {json.dumps(value)}" for name, value in entry.items())]
    new = plan.with_name("changed.toml")
    new.write_text("\n".join(lines))
    return new


# -- logs --------------------------------------------------------------------------------------------------------------


def test_a_log_in_which_nothing_was_missing_is_told_by_the_exit_code(ask: Ask, plan: Path) -> None:
    for text in ("", "12 passed in 1.2s", "{}", '{"missing": 3}', "\x00\xff", "no usable kernel for"):
        answer = ask(text, more=("--plan", plan))
        assert (answer.code, answer.err) == (0, "")
        assert tomllib.loads(answer.out) == {}


def test_what_a_plan_lacks_is_printed_as_entries_that_make_it_complete(ask: Ask, plan: Path) -> None:
    lines = [
        message("norm/rmsnorm?dtype=float32", "12.0f"),
        message("norm/rmsnorm?dtype=float16", "12.0f"),
        message("norm/rmsnorm?dtype=float16", "12.0f"),
        message("activation/gelu_tanh_and_mul?dtype=float32", "cpu:x86-64-v4"),
        note("rope/rope?dtype=float32", "9.0a"),
        note("norm/rmsnorm?dtype=float32", "cpu:aarch64", machine="aarch64"),
    ]
    answer = ask(*lines, more=("--plan", plan))
    assert answer.code == MISSED
    printed = tomllib.loads(answer.out)
    builds = {build["name"]: build for build in printed["build"]}
    assert builds["cuda"] == {
        "name": "cuda",
        "machine": "x86_64",
        "cuda": "13.0",
        "builder": "x",
        "shards": 3,
        "archs": ["8.0", "9.0a", "12.0f"],
    }
    # The log does not say where 12.0f was missing; and of this machine's builds it is the only one.
    assert builds["cuda-arm"]["archs"] == ["9.0a", "12.0f", "cpu:aarch64"]
    assert builds["cpu"]["archs"] == ["cpu:x86-64-v3"]  # which runs there
    assert builds["cpu"]["ops"] == ["norm", "activation/silu_and_mul", "activation/gelu_tanh_and_mul"]
    assert "cuda-old" not in builds  # CUDA 12.4 cannot make it
    assert printed["exempt"] == [{"uri": "rope/*", "archs": ["8.0"], "reason": "not written yet"}]
    assert "norm/rmsnorm?dtype=float16 for 12.0f: 2 times" in answer.out

    complete = changed(plan, answer.out)
    read_plan(complete)
    again = ask(*lines, more=("--plan", complete, "--json"))
    assert (again.code, again.data["build"], again.data["exempt"]) == (MISSED, [], [])
    assert len(again.data["promised"]) == len(again.data["missed"]) == 5  # now it is the release that lacks them


@pytest.mark.parametrize(
    ("arch", "where", "entries"),
    [
        ("9.0a", "x86_64", []),  # promised
        ("9.0a", "aarch64", []),
        ("8.6", "x86_64", []),  # code for 8.0 runs there
        ("10.0a", "x86_64", ["cuda"]),
        ("10.0a", "aarch64", ["cuda-arm"]),
        ("8.0", "aarch64", ["cuda-arm"]),
        ("7.5", "x86_64", ["cuda", "cuda-old"]),
        ("gfx942", "x86_64", ["hip"]),
    ],
)
def test_an_arch_goes_to_each_build_that_can_make_it_where_it_was_missing(
    ask: Ask, plan: Path, arch: str, where: str, entries: list[str]
) -> None:
    answer = ask(note("norm/rmsnorm?dtype=float32", arch, machine=where), more=("--plan", plan, "--json"))
    assert [entry["name"].partition("-x86")[0] for entry in answer.data["build"]] == entries
    assert all(entry["archs_added"] == [arch] for entry in answer.data["build"])
    assert bool(answer.data["promised"]) is (entries == [])


def test_an_exemption_is_lifted_only_if_it_alone_stands_in_the_way(ask: Ask, plan: Path) -> None:
    assert ask(note("rope/x", "8.0"), more=("--plan", plan, "--json")).data["exempt"] == [
        {"uri": "rope/*", "archs": ["9.0a"]}
    ]
    assert ask(note("rope/x", "10.0a"), more=("--plan", plan, "--json")).data["exempt"] == []
    assert ask(note("norm/x", "8.0"), more=("--plan", plan, "--json")).data["exempt"] == []


def test_a_plan_of_one_list_gets_the_whole_list(ask: Ask, tmp_path: Path) -> None:
    plan = tmp_path / "old.toml"
    plan.write_text('schema = 1\nlibrary = "kartifacts"\narchs = ["9.0a", "cpu:x86-64-v3"]\n')
    answer = ask(message("norm/rmsnorm", "12.0f"), message("norm/rmsnorm", "cpu:aarch64"), more=("--plan", plan))
    assert tomllib.loads(answer.out) == {"archs": ["9.0a", "cpu:x86-64-v3", "12.0f", "cpu:aarch64"]}


def test_without_a_plan_the_entries_are_new(ask: Ask) -> None:
    answer = ask(message("norm/rmsnorm", "12.0f"), message("rope/rope", "9.0a"), message("norm/rmsnorm", "cpu:aarch64"))
    assert tomllib.loads(answer.out)["build"] == [
        {"name": "cpu-aarch64", "machine": "aarch64", "archs": ["cpu:aarch64"], "ops": ["norm/rmsnorm"]},
        {"name": "cuda", "archs": ["12.0f", "9.0a"], "ops": ["norm/rmsnorm", "rope/rope"]},
    ]


@pytest.mark.parametrize(
    "shown",
    [
        "{}",
        "E       kartifacts.errors.MissingKernel: {}",
        "\x1b[1m\x1b[31mE       kartifacts.errors.MissingKernel: {}\x1b[0m",
        "2026-01-01T00:00:00.000Z [gw3] MissingKernel('{}')",
        'MissingKernel("{}")\r',
        '  "message": "{}",',
        "ERROR serve:12 worker 3 died: {}; retrying",
    ],
)
def test_the_message_is_found_wherever_a_program_shows_it(ask: Ask, shown: str) -> None:
    answer = ask("before", shown.format(message("norm/rmsnorm?dtype=bfloat16", "9.0a")), more=("--json",))
    [row] = answer.data["missed"]
    assert (row["uri"], row["arch"], row["times"]) == ("norm/rmsnorm?dtype=bfloat16", "9.0a", 1)


UNREADABLE = {
    "cut early": note("norm/rmsnorm", "9.0a")[:20],
    "cut late": note("norm/rmsnorm", "9.0a")[:-1],
    "no such arch": note("norm/rmsnorm", "9.0q"),
    "no arch": note("norm/rmsnorm", ""),
    "TOML": note('norm/rm"\n[[build]]\nx', "9.0a"),
    "another place": note("norm/../x\x1b[2J", "9.0a"),
    "garbage": note("norm/rmsnorm", "9.0a")[:30] + "\0\ufffd" * 50,
    "after a time": f"2026-01-01 {note('norm/rmsnorm', '9.0a')[:40]}",
    "a message": message("norm/rmsnorm", "sm_nothing"),
}


@pytest.mark.parametrize("bad", UNREADABLE.values(), ids=UNREADABLE)
def test_a_record_that_cannot_be_read_is_no_sign_that_nothing_was_missing(
    ask: Ask, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    alone = ask(bad)
    assert (alone.code, alone.out) == (MISSED, "# what was missing cannot be read\n")
    assert "this record of something that was missing cannot be read: " in caplog.text
    assert "\x1b" not in caplog.text
    answer = ask(bad, note("norm/rmsnorm", "9.0a"), more=("--json",))
    assert [row["times"] for row in answer.data["missed"]] == [1]
    assert len(answer.data["unread"]) == 1


def test_lines_that_are_not_ours_are_passed_over(ask: Ask) -> None:
    others = [
        json.dumps({"missing": ["norm/rmsnorm"], "arch": "9.0a"}),
        json.dumps({"missing": "file.txt", "level": "error"}),
        "[" * 100_000,
        '{"missing": ' + "[" * 100_000,
    ]
    assert ask(*others).code == 0
    answer = ask(*others, note("norm/rmsnorm", "9.0a"), more=("--json",))
    assert [row["times"] for row in answer.data["missed"]] == [1]
    assert answer.data["unread"] == []


def test_several_logs_and_stdin_are_read_as_one(machine: Machine, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(note("norm/rmsnorm", "9.0a", pid=1, test="a.py::x", outcome="refused") + "\n")
    two.write_text(note("norm/rmsnorm", "9.0a", pid=2, test="b.py::y", outcome="compiled") + "\n")
    command = [
        sys.executable,
        "-m",
        "kartifacts",
        "coverage",
        "--from",
        str(one),
        "--from",
        "-",
        "--from",
        str(two),
        "--json",
    ]
    done = subprocess.run(
        command, input=f"{message('norm/rmsnorm', '9.0a')}\n".encode(), env=machine.environ({}), cwd=machine.home,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == MISSED, done.stderr
    [row] = json.loads(done.stdout)["missed"]
    assert row == {
        "uri": "norm/rmsnorm",
        "arch": "9.0a",
        "times": 3,
        "compiled": 1,
        "pids": [1, 2],
        "tests": ["a.py::x", "b.py::y"],
        "machines": ["x86_64"],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--from LOG"]),
        (["x", "--from", "y"], ["--from LOG"]),
        (["--from", "nowhere.log"], ["nowhere.log", "No such file"]),
        (["--from", "."], ["'.'", "directory"]),
        (["--from", "-", "--library", "x"], ["--library"]),
        (["x", "--plan", "p"], ["--plan"]),
        (["--from", "-", "--plan", "nowhere.toml"], ["nowhere.toml"]),
        (["nowhere"], ["no file or directory 'nowhere'"]),
        (["/dev/null", "--library", "x"], ["'/dev/null' is no repository directory"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_question_is_answered_with_what_is_wrong(
    machine: Machine, arguments: list[str], words: list[str]
) -> None:
    answer = machine.run_cli("coverage", *arguments)
    assert answer.code == 2, answer.err
    for word in words:
        assert word in answer.err


def test_what_a_real_run_of_pytest_missed_comes_back_by_both_ways(machine: Machine, tiny: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_ops.py").write_text(
        "import pathlib, kartifacts\n"
        f"registry = kartifacts.Registry(libraries=[pathlib.Path({str(tiny)!r})])\n"
        "def test_one():\n    registry.load('demo/answer', device='cpu', size=1)\n"
        "def test_two():\n    registry.load('demo/answer', device='cpu', size=1000)\n"
        "def test_three():\n    registry.load('demo/answer', device='cpu', size=1)\n"
    )
    log, misses = tmp_path / "output", tmp_path / "misses"
    environ = machine.environ({"jit": "never", "misses": misses})
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=yes", "-q", str(suite), "-k"]
    parts = [  # at once, as of a suite that is divided
        subprocess.Popen([*command, which], env=environ, cwd=suite, stdout=subprocess.PIPE)
        for which in ("one", "two or three")
    ]
    log.write_bytes(b"".join(part.communicate()[0] for part in parts))
    assert [part.returncode for part in parts] == [1, 1]
    rows = {}
    for source in (log, misses):
        answer = machine.cli("coverage", "--from", source, "--json")
        assert answer.code == MISSED
        rows[source] = {
            (row["uri"], row["arch"]): {test.rpartition("::")[2] for test in row["tests"]}
            for row in answer.data["missed"]
        }
    arch = str(host.cpu())
    assert rows[log] == rows[misses]
    assert rows[log] == {
        ("demo/answer?size=1", arch): {"test_one", "test_three"},
        ("demo/answer?size=1000", arch): {"test_two"},
    }
    entries = machine.cli("coverage", "--from", misses).out
    (tmp_path / "plan.toml").write_text(f'schema = 2\nlibrary = "tiny"\n\n{entries}')
    answer = machine.cli("plan", tmp_path / "plan.toml", "--json")
    assert answer.code == 0, answer.err
    [build] = read_plan(tmp_path / "plan.toml").builds
    assert (build.archs, build.ops, build.machine) == ([arch], ["demo/answer"], os.uname().machine)


def test_the_error_and_the_log_of_the_jit_are_what_is_looked_for(
    machine: Machine, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(MissingKernel) as caught:
        machine.registry(libraries=[tiny], jit="never").load("demo/answer", device="cpu", size=1)
    with caplog.at_level("INFO"):
        machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=1)
    for text, compiled in ((str(caught.value), 0), (caplog.text, 1)):
        [row] = missed.read(text.splitlines()).missed
        assert (row.uri, row.arch, row.compiled) == ("demo/answer?size=1", host.cpu(), compiled)


# -- contents ----------------------------------------------------------------------------------------------------------


def test_the_coverage_of_a_release_is_that_of_its_files(machine: Machine, released: Released, tmp_path: Path) -> None:
    answer = machine.cli("coverage", released.path, "--json")
    assert answer.code == 0, answer.err
    out = tmp_path / "out"
    archs = " ".join(map(str, released.archs))
    fetched = machine.cli("fetch", "--archs", archs, "--out", out, path=released.path, lock=released.lock_file)
    assert fetched.code == 0, fetched.err
    found: dict[str, set[str]] = {}
    for path in out.rglob("*.so"):
        family, _, name = path.relative_to(out).as_posix().partition("/")[2].rpartition("/")
        op, _, axes = name.removesuffix(".so").partition("@")
        uri = f"{family}/{op}" + (f"?{axes.replace(',', '&')}" if axes else "")
        found.setdefault(uri, set()).add(inspect(path).machine)
    assert found
    assert {uri: set(row["archs"]) for uri, row in answer.data["coverage"].items()} == found
    assert {arch for row in answer.data["coverage"].values() for arch in row["said"]} == set(map(str, released.archs))
    text = machine.cli("coverage", released.path).out
    assert {" ".join(line.split()[1:]) for line in text.splitlines()} == {" ".join(sorted(map(str, released.archs)))}


@pytest.mark.nvrtc
def test_the_coverage_of_device_code_is_what_binutils_find_in_the_files(machine: Machine, tmp_path: Path) -> None:
    """A release claimed a GPU by what its compiler could do, and the first call on that GPU failed."""
    archs, out, lock = ["7.5", "9.0a", "10.0f"], tmp_path / "out", tmp_path / "lock"
    options = ("--archs", " ".join(archs), "--ops", "silu_and_mul", "--out", out, "--lock", lock)
    built = machine.cli("build", *options)
    assert built.code == 0, built.err
    files = tmp_path / "files"
    assert machine.cli("fetch", "--archs", " ".join(archs), "--out", files, path=out, lock=lock).code == 0
    found: dict[str, set[str]] = {}
    for path in files.rglob("*.so"):
        dtype = path.stem.rpartition("=")[2]
        found.setdefault(f"activation/silu_and_mul?dtype={dtype}", set()).add(_arch_of_image(path, tmp_path / "image"))
    assert found.keys() == {f"activation/silu_and_mul?dtype={dtype}" for dtype in ("float16", "bfloat16", "float32")}
    answer = machine.cli("coverage", out, "--json")
    assert answer.code == 0, answer.err
    assert {uri: set(row["archs"]) for uri, row in answer.data["coverage"].items()} == found
    assert all(archs == {"7.5", "9.0a", "10.0f"} for archs in found.values())


def _arch_of_image(path: Path, image: Path) -> str:
    """For which GPU the image in a kernel is, by its ELF header and by what its compiler wrote down of the command."""
    subprocess.run(["objcopy", "--dump-section", f".kart.image={image}", path, os.devnull], check=True)
    header = subprocess.run(["readelf", "-h", image], check=True, capture_output=True, text=True).stdout
    match = re.search(r"Flags:\s+0x([0-9a-f]+)", header)
    assert match is not None
    flags = int(match[1], 16)
    number = str(flags >> 8 & 0xFF if flags >> 24 == 6 else flags & 0xFF)
    (named,) = {text.decode() for text in re.findall(rb"\bsm_(\d+[af]?)", image.read_bytes())} or {number}
    assert named.rstrip("af") == number
    return f"{number[:-1]}.{number[-1]}{named.removeprefix(number)}"


def test_a_built_file_tells_its_functions_and_archs(machine: Machine, tiny: Path) -> None:
    kernel = machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=1)
    answer = machine.cli("coverage", kernel.path, "--json")
    assert answer.code == 0, answer.err
    [machine_name] = answer.data["coverage"]["answer"]["archs"]
    assert machine_name == inspect(kernel.path).machine
    assert machine.cli("coverage", kernel.path).out == f"answer  {machine_name}\n"


def test_what_is_there_and_no_file_is_not_said_to_be_missing(machine: Machine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (str(tmp_path / "pipe"), "/dev/zero"):
        answer = machine.cli("coverage", place)
        assert answer.code != 0
        assert f"cannot read '{place}': " in answer.err
        assert "no such" not in answer.err.lower()


def test_a_library_that_a_repository_lacks_is_not_covered(machine: Machine, released: Released) -> None:
    answer = machine.cli("coverage", released.path, "--library", "nope")
    assert (answer.code, answer.out) == (2, "")
    assert "holds no nope" in answer.err


def test_a_file_that_is_no_kernel_is_damage_and_not_coverage(machine: Machine, tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"text\n" * 100):
        path = tmp_path / "file.so"
        path.write_bytes(content)
        answer = machine.cli("coverage", path)
        assert answer.code == 5
        assert "file.so" in answer.err


@pytest.mark.parametrize("said", ["9.0a", "cpu:aarch64", "gfx942"])
def test_a_release_that_says_other_archs_than_its_content_has_is_found_out(
    machine: Machine, make_release: MakeRelease, tiny: Path, said: str
) -> None:
    kernel = machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=1)
    if parse_arch(said).name == inspect(kernel.path).machine:
        said = "cpu:x86-64"
    notes: dict[str, Any] = {"family": "closed", "library": "closed", "op_digest": "", "exports": ("answer",)}
    made = make_release(Content(said, {"closed/x": kernel.path.read_bytes()}, **notes))
    answer = machine.cli("coverage", made.path, "--json")
    assert answer.code == 5
    assert answer.data["problems"] == [f"closed/x for {said}: its content is for {inspect(kernel.path).machine}"]
