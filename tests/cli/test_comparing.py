"""`inspect` and `diff`: what was built, by its bytes, and why it is not what another build made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kartifacts.model.layout import blob_path
from tests.conftest import Answer
from tests.sites import ARCHS, Site

CPU = ARCHS[0]


def build(site: Site, machine: str, *options: object, archs: str = CPU, **settings: Any) -> Path:
    """The repository that a machine of its own makes of the library as it is now."""
    out = site.root / f"{machine}-out"
    command = ("build", "--library", "tinyops", "--archs", archs, "--out", out, *options)
    answer = site.cli(machine, *command, **settings)
    assert answer.code == 0, answer.err
    return out


def diff(site: Site, *arguments: object) -> Answer:
    return site.cli("reader", "diff", *arguments, PATH="/nonexistent")


def kernel_of(site: Site, machine: str) -> Path:
    """The first kernel in the workspace of a machine."""
    return min((site.machine(machine).workspace / "kernels").glob("*/*/kernel.so"))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# -- releases ----------------------------------------------------------------------------------------------------------


def test_two_builds_of_the_same_sources_are_the_same_and_the_exit_code_says_so(site: Site) -> None:
    same = diff(site, build(site, "one"), build(site, "two"))
    assert (same.code, same.out) == (0, "the same repositories\n")


def test_a_changed_source_is_named_before_what_it_did_to_the_kernels(site: Site) -> None:
    first = build(site, "one")
    change(site.library / "include/scale.h", "7L", "8L")
    answer = diff(site, first, build(site, "two"))
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert lines[:2] == ["release tinyops:", f"  bundle demo for {CPU}:"]
    assert re.fullmatch(r"    source include/scale\.h: [0-9a-f]{12} became [0-9a-f]{12}", lines[2])
    told = r"    demo/answer\?size=1: declaration or sources differ, as its key does: [0-9a-f]{12} became [0-9a-f]{12}"
    assert re.fullmatch(told, lines[3])
    assert re.fullmatch(r"      section \.text \(code\): \d+ of \d+ bytes differ, the first at byte \d+", lines[4])
    assert lines[-1] == "    bytes: explained for 1 of 2 kernels"
    assert answer.out.count("section .text") == 1
    assert diff(site, "--depth", "2", first, site.root / "two-out").out.count("section .text") == 2
    assert "section" not in diff(site, "--depth", "0", first, site.root / "two-out").out


def test_other_bytes_of_the_same_inputs_are_called_what_they_are(site: Site) -> None:
    """A compiler that does something else though it says the same of itself."""
    first = build(site, "one")
    site.compiler.first.write_text('set -- "$@" -O1 -Wl,-z,now')
    answer = diff(site, first, build(site, "two"), "--json")
    assert answer.code == 1
    assert answer.data["same"] is False
    wheres = [row["where"].rpartition(": ")[2] for row in answer.data["differences"]]
    rows = [row["text"] for row in answer.data["differences"] if row["where"].endswith("answer?size=1")]
    assert [re.sub(r"key \w{12}", "key", row) for row in rows] == [
        "other bytes under the same key: the build is not reproducible"
    ]
    assert "dynamic entries" in wheres


def test_another_version_of_a_compiler_is_named(site: Site) -> None:
    first = build(site, "one")
    site.compiler.first.write_text('[ "$1" = --version ] && echo "g++ (Elsewhere) 99.1.0" && exit 0')
    said = diff(site, first, build(site, "two")).out
    assert re.search(r"toolchain:\n +version: gcc .* became gcc \(Elsewhere\) 99\.1\.0\n", said)
    assert "keys: 2 kernels have other keys and the same bytes" in said
    site.compiler.first.write_text(f'{site.compiler.first.read_text()}; set -- "$@" -O1')
    said = diff(site, first, build(site, "three")).out
    assert "demo/answer?size=1: compiled otherwise, as its key does: " in said


def test_archs_and_kernels_that_one_release_lacks_are_named(site: Site) -> None:
    first = build(site, "one", archs=" ".join(ARCHS[:2]))
    change(site.library / "demo/op.toml", 'axes.size = ["1", "1000"]', 'axes.size = ["1"]')
    change(site.library / "demo/op.toml", ', 1000 = "KART_SIZE=1000"', "")
    second = build(site, "two", archs=" ".join(ARCHS[1:3]))
    said = diff(site, first, second).out
    assert f"bundle demo for {ARCHS[0]}: 2 kernels are gone" in said
    assert f"bundle demo for {ARCHS[2]}: 1 kernels are new" in said
    assert "kernels: without 'demo/answer?size=1000'" in said
    assert f"{ARCHS[0]}:" not in diff(site, first, second, "--arch", ARCHS[1]).out


def test_versions_are_compared_by_name_and_a_release_alone_is_said_to_be(site: Site) -> None:
    first, second = build(site, "one"), build(site, "two", "--release-version", "2.0")
    said = diff(site, first, second).out
    assert "version 1.0 became 2.0" in said
    build(site, "one", "--release-version", "2.0")
    alone = diff(site, first, second)
    assert alone.out.startswith("release tinyops 1.0: 1.0, sha256:")
    assert diff(site, first, second, "--versions", "2.0", "2.0").code == 0
    missing = diff(site, first, second, "--versions", "3.0", "2.0")
    assert missing.code == 2
    assert "holds no 3.0; releases there: tinyops 1.0, tinyops 2.0" in missing.err


def test_a_damaged_repository_is_no_difference_but_an_error(site: Site) -> None:
    first = build(site, "one")
    change(site.library / "include/scale.h", "7L", "8L")
    second = build(site, "two")
    pack = max((second / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[len(content) // 2] ^= 1
    pack.write_bytes(content)
    answer = diff(site, first, second)
    assert (answer.code, answer.out) == (5, "")
    assert "is damaged" in answer.err


# -- kernels and reports -----------------------------------------------------------------------------------------------


def test_two_kernels_of_workspaces_are_explained_by_what_their_keys_are_made_of(site: Site) -> None:
    build(site, "one")
    change(site.library / "include/scale.h", "7L", "8L")
    build(site, "two")
    files = kernel_of(site, "one"), kernel_of(site, "two")
    said = diff(site, *files).out
    assert re.search(r"^key:\n( .*\n)* +.*include/scale\.h.*: [0-9a-f]{64} became [0-9a-f]{64}$", said, re.MULTILINE)
    assert re.search(r"^section \.text \(code\): ", said, re.MULTILINE)
    same = diff(site, files[0], files[0])
    assert (same.code, same.out) == (0, "the same files\n")


def test_reports_are_compared_without_what_was_measured(site: Site) -> None:
    reports = [site.root / f"{name}.json" for name in ("one", "two", "three")]
    build(site, "one", "--report", reports[0])
    build(site, "two", "--report", reports[1])
    build(site, "three", "--report", reports[2], archs=" ".join(ARCHS[:2]))
    assert diff(site, *reports[:2]).out == "the same reports\n"
    said = diff(site, reports[0], reports[2])
    assert said.code == 1
    assert f"kernels[demo/answer?size=1 {ARCHS[1]}]" in said.out
    change(reports[1], '"exports"', '"exported"')
    assert "exported" in diff(site, *reports[:2]).out


def test_what_cannot_be_compared_is_refused_with_a_sentence(site: Site) -> None:
    out = build(site, "one")
    mixed = diff(site, out, kernel_of(site, "one"))
    assert (mixed.code, mixed.out) == (2, "")
    assert re.search(r"'.*one-out' is a directory and '.*kernel\.so' is none: they cannot be compared", mixed.err)
    gone = diff(site, kernel_of(site, "one"), site.root / "absent.so")
    assert (gone.code, "there is no file or directory" in gone.err, "absent.so" in gone.err) == (2, True, True)
    assert diff(site, out, site.root / "absent").err.count("there is no file or directory") == 1
    empty = site.root / "empty"
    empty.mkdir()
    assert "holds no release" in diff(site, out, empty).err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--arch", "bogus"], "bogus"),
        (["--arch", "9.0a"], f"neither repository holds a bundle for 9.0a; bundles there: demo for {CPU}"),
        (["--arch", "sm_90a"], "neither repository holds a bundle for 9.0a"),
        (["--family", "nope"], "neither repository holds a bundle nope"),
        (["--family", "nope", "--arch", CPU], f"neither repository holds a bundle nope for {CPU}"),
        (["--library", "nope"], "holds no nope"),
    ],
)
@pytest.mark.parametrize("changed", [False, True], ids=["same", "changed"])
def test_options_that_select_nothing_do_not_make_releases_the_same(
    site: Site, changed: bool, options: list[str], says: str
) -> None:
    first = build(site, "one")
    if changed:
        change(site.library / "include/scale.h", "7L", "8L")
    answer = diff(site, first, build(site, "two"), *options)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err.replace("\nhint: ", "; ")


def test_an_arch_is_known_in_each_of_its_spellings(site: Site) -> None:
    first = build(site, "one")
    change(site.library / "include/scale.h", "7L", "8L")
    second = build(site, "two")
    for spelled in (CPU, CPU.upper().replace("CPU", "cpu")):
        assert diff(site, first, second, "--arch", spelled).code == 1


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "'' names no file or directory of this machine"),
        ("s3://bucket/prefix", "'s3://bucket/prefix' names no file or directory of this machine"),
        ("https://host/x", "names no file or directory of this machine"),
        ("nowhere", "there is no file or directory 'nowhere'"),
        ("./no/where", "there is no file or directory 'no/where'"),
    ],
)
@pytest.mark.parametrize("command", ["diff", "inspect"])
def test_a_place_that_is_not_there_is_called_so(site: Site, command: str, place: str, says: str) -> None:
    answer = site.cli("reader", command, place, *([place] if command == "diff" else []))
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_options_for_repositories_are_refused_where_files_are_compared(site: Site) -> None:
    build(site, "one")
    kernel = kernel_of(site, "one")
    for options in (["--family", "demo"], ["--arch", CPU], ["--library", "tinyops"], ["--versions", "1", "2"]):
        answer = diff(site, kernel, kernel, *options)
        assert (answer.code, "is no repository directory" in answer.err) == (2, True)


# -- inspect -----------------------------------------------------------------------------------------------------------


def inspect(site: Site, *arguments: object) -> Answer:
    return site.cli("reader", "inspect", *arguments, PATH="/nonexistent")


def test_a_kernel_says_what_it_is(site: Site) -> None:
    build(site, "one")
    path = kernel_of(site, "one")
    lines = inspect(site, path).out.splitlines()
    assert lines[0] == f"shared for x86_64, {path.stat().st_size:,} bytes"
    assert {"GPU code: none", "exports: answer"} < {*lines}
    assert "tvm_ffi 0.1" in lines[3]
    data = inspect(site, path, "--json").data
    assert (data["hazards"], data["run_path"], data["build_id"], data["notes"]) == ([], "", False, {})
    assert data["sections"][".text"] > 0


def test_a_repository_says_what_its_bundles_hold_and_were_made_with(site: Site) -> None:
    out = build(site, "one", archs=" ".join(ARCHS[:2]))
    said = inspect(site, out).out
    for arch in ARCHS[:2]:
        assert re.search(
            rf"^tinyops 1\.0: demo for {arch}: 2 kernels, [\d,]+ bytes, ABI tvm-ffi-0\.1$", said, re.MULTILINE
        )
    assert len(re.findall(r"^  version: gcc ", said, re.MULTILINE)) == 2
    [bundle] = inspect(site, out, "--arch", ARCHS[1], "--json").data["bundles"]
    assert (bundle["arch"], bundle["kernels"], bundle["toolchain"]["kind"]) == (ARCHS[1], 2, "cxx")
    assert bundle["needs"]["tvm_ffi"] == "0.1"
    assert set(bundle["programs"]) >= {"compiler", "ld"}


def test_one_kernel_of_a_repository_says_the_same_as_its_file(site: Site) -> None:
    out = build(site, "one")
    for name, count in (("demo/answer", 2), ("demo/answer?size=1000", 1)):
        rows = inspect(site, out, name, "--json").data["kernels"]
        assert len(rows) == count
    file = inspect(site, kernel_of(site, "one"), "--json").data
    assert any({**file, **row} == {**row, "file": file["file"]} for row in inspect_all(site, out))
    text = inspect(site, out, "demo/answer?size=1").out
    assert text.startswith(f"demo/answer?size=1 for {CPU}, of tinyops 1.0:\n  sha256: ")


def inspect_all(site: Site, out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = inspect(site, out, "demo/answer", "--json").data["kernels"]
    return rows


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["demo/other"], "holds no 'demo/other'"),
        (["demo/answer", "--arch", "9.0a"], "holds no bundle for 9.0a"),
        (["--release-version", "7"], "holds no 7; releases there: tinyops 1.0"),
        (["--arch", "sm_nine"], "sm_nine"),
    ],
)
def test_what_a_repository_does_not_hold_is_said(site: Site, options: list[str], says: str) -> None:
    answer = inspect(site, build(site, "one"), *options)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_options_for_repositories_are_refused_for_files(site: Site) -> None:
    build(site, "one")
    for options in (["demo/answer"], ["--arch", CPU], ["--library", "tinyops"]):
        answer = inspect(site, kernel_of(site, "one"), *options)
        assert (answer.code, "is no repository directory" in answer.err) == (2, True)


def test_what_is_no_kernel_and_what_is_damaged_are_errors(site: Site) -> None:
    out = build(site, "one")
    text = inspect(site, site.plan)
    assert (text.code, "is not a sound ELF file" in text.err) == (5, True)
    bundle = inspect(site, out, "--json").data["bundles"][0]["bundle"]
    (out / blob_path(bundle)).write_text(json.dumps({}))
    damaged = inspect(site, out)
    assert (damaged.code, "is damaged" in damaged.err) == (5, True)
