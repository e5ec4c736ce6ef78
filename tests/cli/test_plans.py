"""A plan is built by several machines that meet in a bucket, and comes out as if one machine had built it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from kartifacts.errors import BuildError
from kartifacts.model.digest import sha256
from kartifacts.publish.plan import read_plan
from kartifacts.publish.repository import Repository
from tests.conftest import Answer, Compiler
from tests.sites import ARCHS, CPU, Site

pytestmark = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="needs an x86-64 machine, whose CPUs have levels"
)

# -- the same bytes ----------------------------------------------------------------------------------------------------


def test_four_shards_one_shard_and_none_give_the_same_release(site: Site) -> None:
    processes = [site.start(f"runner{n}", f"{n}/4") for n in (1, 2)]  # two at a time
    reports = [json.loads(process.communicate()[0]) for process in processes]
    reports += [site.shard(f"runner{n}", f"{n}/4").data for n in (3, 4)]
    assert [process.returncode for process in processes] == [0, 0]
    assert [report["built"] for report in reports] == [2, 2, 2, 2]
    assert all(report["of_all"] == 8 for report in reports)
    merged = site.merge("merged", "--lock", site.root / "merged.lock")
    assert merged.code == 0, merged.err
    assert site.shard("one", "1/1", meet="single").code == 0
    assert site.merge("single-merged", meet="single").code == 0
    options = ("--archs", " ".join(ARCHS), "--library", "tinyops")
    assert site.cli("plain", "build", *options, "--out", site.root / "plain").code == 0
    planned = ("--plan", site.plan, "--out", site.root / "planned", "--lock", site.root / "planned.lock")
    assert site.cli("plain", "build", *planned).code == 0

    release = {name: data for name, data in site.files("merged").items() if not name.startswith("promises/")}
    assert release == site.files("plain")
    assert site.files("merged") == site.files("single-merged") == site.files("planned")
    assert (site.root / "merged.lock").read_bytes() == (site.root / "planned.lock").read_bytes()
    for place in ("merged", "planned"):
        published = site.cli(
            "gate", "publish", f"dir:{site.root / 'public'}", "--from", site.root / place, "--plan", site.plan
        )
        assert published.code == 0, published.err


def test_an_earlier_release_lends_its_blocks_to_a_merge_as_to_a_build(site: Site) -> None:
    assert site.shard("runner", "1/1").code == 0
    assert site.merge("first", "--release-version", "1.0").code == 0
    header = site.library / "include/scale.h"
    header.write_text(header.read_text().replace("7L", "8L"))
    assert site.shard("runner", "1/1").code == 0
    assert site.merge("second", "--release-version", "2.0", "--since", site.root / "first").code == 0
    options = ("--plan", site.plan, "--release-version", "2.0", "--since", site.root / "first")
    assert site.cli("runner", "build", *options, "--out", site.root / "plain").code == 0
    assert site.files("second") == site.files("plain")
    [pin] = Repository(site.root / "second").pins()
    tables = [
        Repository(site.root / "second").table(Repository(site.root / "second").bundle(descriptor), "table")
        for descriptor in Repository(site.root / "second").release(pin).manifests
    ]
    assert any(kernel.delta for table in tables for kernel in table.kernels)


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_shard_that_is_run_again_builds_nothing_and_says_the_same(site: Site) -> None:
    first = site.shard("runner", "1/2").data
    before = site.files("meet")
    compiled = site.compiler.compiled
    again = site.shard("runner", "1/2").data
    elsewhere = site.shard("another", "1/2").data
    assert (first["taken"], first["built"]) == (0, 4)
    assert (again["taken"], again["built"]) == (elsewhere["taken"], elsewhere["built"]) == (4, 0)
    assert site.compiler.compiled == compiled
    assert site.files("meet") == before


def test_what_is_in_the_workspace_is_handed_in_to_another_bucket_without_a_compiler(site: Site) -> None:
    assert site.shard("runner", "1/2").code == 0
    compiled = site.compiler.compiled
    report = site.shard("runner", "1/2", meet="other").data
    assert (report["taken"], report["kept"], report["built"]) == (0, 4, 0)
    assert site.compiler.compiled == compiled
    assert site.files("other").keys() == site.files("meet").keys()


def test_a_runner_that_was_killed_at_half_leaves_half_to_the_next(site: Site, tmp_path: Path) -> None:
    """The compiler stops at the sixth of eight kernels until the test has killed the whole run."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    count = tmp_path / "count"
    waiting = f'case " $* " in *" -c "*) echo >> {count}; [ $(wc -l < {count}) = 6 ] && : > {gate};; esac\n'
    site.compiler.first.write_text(waiting)
    process = site.start("killed", "1/1")
    with open(gate, "rb"):  # opens once the sixth compilation begins
        process.send_signal(signal.SIGKILL)
        process.communicate()
    site.compiler.first.unlink()

    done = [name for name in site.files("meet") if name.startswith("kernels/")]
    # The sixth is given out when the fourth is made: that one and the fifth may have been on their way.
    assert len(done) in (3, 4, 5)
    assert not any(name.startswith("shards/") for name in site.files("meet"))
    compiled = site.compiler.compiled
    report = site.shard("fresh", "1/1").data
    assert (report["taken"], report["kept"], report["built"]) == (len(done), 0, 8 - len(done))
    assert site.compiler.compiled == compiled + 8 - len(done)
    assert site.merge("merged").code == 0
    assert site.cli("plain", "build", "--plan", site.plan, "--out", site.root / "plain").code == 0
    assert site.files("merged") == site.files("plain")


def test_a_failed_build_keeps_what_it_made_for_the_next_try(site: Site) -> None:
    broken = 'case " $* " in *"-march=x86-64-v4"*) echo "answer_cpu.cpp:1: error: no" >&2; exit 1;; esac\n'
    site.compiler.first.write_text(broken)
    answer = site.shard("runner", "1/1")
    assert answer.code == BuildError.exit_code
    assert "x86-64-v4" in answer.err
    made = [name for name in site.files("meet") if name.startswith("kernels/")]
    assert made
    site.compiler.first.unlink()
    report = site.shard("fresh", "1/1").data
    assert (report["taken"], report["built"]) == (len(made), 8 - len(made))


@pytest.mark.parametrize("victim", ["bytes", "record", "length", "nothing", "size", "garbage"])
def test_what_was_damaged_in_the_bucket_is_made_again_and_replaced(victim: str, site: Site) -> None:
    site.write({**CPU, "archs": ARCHS[:2], "shards": 1})
    assert site.shard("runner", "1/1").code == 0
    record = next(path for path in (site.root / "meet/kernels").iterdir())
    blob = site.root / "meet/blobs/sha256" / json.loads(record.read_bytes())["sha256"]
    path = record if victim in ("record", "size") else blob
    content = path.read_bytes()
    path.unlink()
    damaged = {
        "length": content + b"x",
        "nothing": b"",
        "size": content.replace(b'"size":', b'"size":1'),
        "garbage": b"\xff" * 200,
    }
    path.write_bytes(damaged.get(victim, content[:-1] + bytes([content[-1] ^ 1])))
    compiled = site.compiler.compiled
    answer = site.shard("fresh", "1/1")
    assert answer.code == 0, answer.err
    assert site.compiler.compiled > compiled
    if path is blob:
        assert blob.read_bytes() == content
    else:
        said, before = json.loads(record.read_bytes()), json.loads(content)
        assert (said["sha256"], said["size"]) == (before["sha256"], before["size"])
    assert site.merge("merged").code == 0


@pytest.mark.parametrize("content", ["text", '{"schema": 9, "costs": {}}', "", "[]"])
def test_costs_that_are_none_are_refused_in_one_sentence(
    content: str, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.write(CPU, more='costs = "costs.json"\n')
    (site.root / "costs.json").write_text(content)
    refused(site.shard("runner", "1/4"), "costs.json' holds no costs", site.compiler)
    assert "forgotten" not in caplog.text


def test_a_place_where_no_shards_can_be_is_not_called_missing_work(site: Site) -> None:
    for place in ("nowhere", "plan.toml"):
        refused(site.merge("merged", meet=place), "there is no such directory", site.compiler)
        assert not (site.root / "merged").exists()


def test_a_kernel_that_is_no_kernel_is_named_by_who_merges_and_nothing_is_released(site: Site) -> None:
    site.write({**CPU, "archs": ARCHS[:1], "shards": 1})
    assert site.shard("runner", "1/1").code == 0
    (document,) = (site.root / "meet/shards").rglob("*.json")
    shard = json.loads(document.read_bytes())
    for content in (b"\x7fELF" + b"\xff" * 200, b"text"):
        digest = sha256(content)
        (site.root / "meet/blobs/sha256" / digest).write_bytes(content)
        shard["kernels"][0] |= {"sha256": digest, "size": len(content)}
        document.write_text(json.dumps(shard))
        answer = site.merge("merged")
        assert answer.code == 5, answer.err
        assert f"{shard['kernels'][0]['uri']} for cpu:x86-64" in answer.err
        assert "is not a sound ELF file" in answer.err
        assert str(site.machine("merger").workspace) not in answer.err
        assert not list((site.root / "merged").glob("targets/*/*/*.index.json"))


def test_an_op_whose_declaration_cannot_be_read_is_not_just_unknown(site: Site) -> None:
    (site.library / "more").mkdir()
    (site.library / "more/op.toml").write_text("schema = ")
    for named in ("scale", "more/scale", "more"):
        options = ("--archs", ARCHS[0], "--library", "tinyops", "--out", site.root / "out")
        refused(site.cli("runner", "build", "--ops", named, *options), "more/op.toml' is not", site.compiler)


def test_a_document_that_gives_a_kernel_another_size_is_what_is_said_to_be_wrong(site: Site) -> None:
    site.write({**CPU, "archs": ARCHS[:1], "shards": 1})
    assert site.shard("runner", "1/1").code == 0
    (document,) = (site.root / "meet/shards").rglob("*.json")
    document.write_bytes(document.read_bytes().replace(b'"size":', b'"size":1', 1))
    answer = site.merge("merged")
    assert answer.code == 5
    assert re.search(r"demo/answer\?size=1\d* for cpu:x86-64 in .* is whole, and what was handed in says", answer.err)
    assert site.shard("runner", "1/1").code == 0
    assert site.merge("merged").code == 0


def test_what_is_gone_from_the_bucket_is_made_again_and_missed_by_a_merge(site: Site) -> None:
    site.write({**CPU, "archs": ARCHS[:2], "shards": 1})
    assert site.shard("runner", "1/1").code == 0
    record = json.loads(next((site.root / "meet/kernels").iterdir()).read_bytes())
    (site.root / "meet/blobs/sha256" / record["sha256"]).unlink()
    answer = site.merge("merged")
    assert answer.code == 5
    assert "is missing: blobs/sha256/" in answer.err
    assert not (site.root / "merged").exists()
    compiled = site.compiler.compiled
    assert site.shard("fresh", "1/1").data["built"] > 0
    assert site.compiler.compiled > compiled
    assert site.merge("merged").code == 0


def test_two_runs_of_one_shard_with_two_compilers_are_never_mixed(site: Site) -> None:
    """The second was begun after the builder was mended: its compiler says the same and is another program."""
    site.write({**CPU, "archs": ARCHS[:2], "shards": 2})
    assert site.shard("first", "1/2").code == 0
    assert site.shard("first", "2/2").code == 0
    program = site.compiler.path
    program.write_text(program.read_text().replace("#!/bin/sh\n", "#!/bin/sh\n# mended\n"))
    again = site.shard("mended", "1/2").data
    assert (again["taken"], again["built"]) == (0, 2), "nothing of the other compiler is taken for its own"
    answer = site.merge("merged")
    assert answer.code == 5
    assert "shard 2/2 of build 'cpu' was made with another cxx than shard 1/2" in answer.err
    assert site.shard("mended", "2/2").data["built"] == 2
    compiled = site.compiler.compiled
    assert site.shard("third", "1/2").data["taken"] == 2, "who has the same compiler takes what is there"
    assert site.compiler.compiled == compiled
    assert site.merge("merged").code == 0


# -- refused before anything is compiled -------------------------------------------------------------------------------


def refused(answer: Answer, says: str, compiler: Compiler) -> None:
    assert answer.code == 2, answer.err
    assert says in answer.err
    assert compiler.compiled == 0


def test_another_machine_s_build_is_refused_by_this_one(site: Site) -> None:
    site.write({"name": "arm", "machine": "aarch64", "builder": "", "archs": ["cpu:aarch64"], "shards": 1})
    refused(
        site.shard("runner", "1/1", build="arm"),
        "build 'arm' is for aarch64 machines; this one is x86_64",
        site.compiler,
    )
    plain = site.cli("runner", "build", "--plan", site.plan, "--out", site.root / "out")
    refused(plain, "build 'arm' is for aarch64 machines; this one is x86_64", site.compiler)


@pytest.mark.nvcc
def test_another_cuda_than_the_plan_says_is_refused(site: Site, toolkit: Path) -> None:
    site.write({"name": "old", "machine": "x86_64", "cuda": "12.0", "archs": ["9.0a"], "shards": 1})
    refused(site.shard("runner", "1/1", build="old"), "build 'old' is for CUDA 12.0; nvcc in", site.compiler)


@pytest.mark.parametrize("name", ["debug", "lineinfo", "cxx_flags", "cuda_flags"])
def test_a_release_is_not_built_with_settings_of_the_builder(name: str, site: Site) -> None:
    value = "1" if name in ("debug", "lineinfo") else "-DX=1"
    answer = site.shard("runner", "1/1", **{name: value})
    refused(answer, f"KARTIFACTS_{name.upper()} is set", site.compiler)


def test_archs_that_an_op_misses_by_a_suffix_are_refused_with_the_list_that_does(site: Site) -> None:
    declaration = site.library / "demo/op.toml"
    declaration.write_text(declaration.read_text().replace('min_arch = "7.5"', 'min_arch = "12.0a"'))
    site.write({"name": "gpu", "machine": "x86_64", "cuda": "13.0", "archs": ["7.5", "10.0", "12.0"]})
    for answer in (
        site.shard("runner", "1/1", build="gpu"),
        site.cli("runner", "plan", site.plan, "--check"),
        site.cli("runner", "build", "--archs", "7.5 10.0 12.0", "--library", "tinyops", "--out", site.root / "out"),
    ):
        refused(answer, "demo/answer is not for 12.0: it needs 12.0a", site.compiler)
        assert 'archs = ["7.5", "10.0", "12.0a"]' in answer.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shard", "1/2"], "pass --plan and --build too"),
        (["--plan", "P", "--shard", "1/2"], "pass --plan and --build too"),
        (["--build", "cpu"], "pass --plan too"),
        (["--plan", "P", "--shard", ""], "pass --plan and --build too"),
        (["--plan", "P", "--build", "cpu", "--shard", ""], "--shard '': expected a number of a shard"),
        (["--plan", "P", "--build", "cpu", "--shard", " "], "--shard ' ': expected a number of a shard"),
        (["--archs", "cpu:x86-64", "--library", "tinyops", "--ops", ","], "',' names no ops"),
        (["--archs", "cpu:x86-64", "--library", "tinyops", "--ops", " ,, "], "' ,, ' names no ops"),
        (["--plan", "P", "--build", "cpu", "--shard", "0/2"], "expected a number of a shard"),
        (["--plan", "P", "--build", "cpu", "--shard", "3/2"], "expected a number of a shard"),
        (["--plan", "P", "--build", "cpu", "--shard", "1 / 2"], "expected a number of a shard"),
        (["--plan", "P", "--build", "nope", "--shard", "1/2"], "has no build 'nope'"),
        (["--plan", "P", "--build", "cpu", "--shard", "1/2", "--lock", "x"], "--lock cannot be given with --shard"),
        (["--plan", "P", "--build", "cpu", "--archs", "8.0"], "--archs cannot be given with --plan"),
        (["--plan", "P", "--library", "demo", "--ops", "norm"], "--library, --ops cannot be given with --plan"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], says: str, site: Site) -> None:
    given = [str(site.plan) if option == "P" else option for option in options]
    refused(site.cli("runner", "build", "--out", site.root / "out", *given), says, site.compiler)
    assert not (site.root / "out").exists()


@pytest.mark.parametrize(
    "command", [("merge", "--plan", "P", "--out", "O"), ("publish", "dir:O", "--plan", "P"), ("wheel", "--out", "O")]
)
def test_a_second_place_to_take_from_is_not_dropped_in_silence(command: tuple[str, ...], site: Site) -> None:
    told = {"P": site.plan, "O": site.root / "out"}
    sides = [word for place in ("first", "second") for word in ("--from", site.root / place)]
    answer = site.cli("runner", *(told.get(word, word) for word in command), *sides)
    refused(answer, "--from is taken once, and was given 2 times: ", site.compiler)
    assert all(place in answer.err for place in ("first", "second"))
    assert not (site.root / "out").exists()


def test_a_division_that_is_not_the_plans_is_said_before_it_is_missed(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    assert site.shard("runner", "1/4").code == 0
    assert "shards" not in caplog.text
    assert site.shard("runner", "1/5").code == 0
    assert "the plan divides build 'cpu' into 4 shards, and this is one of 5" in caplog.text


def test_an_op_of_another_library_is_found_there(site: Site) -> None:
    for named in ("answer", "demo/answer", "demo"):
        answer = site.cli("runner", "build", "--ops", named, "--archs", "cpu:x86-64", "--out", site.root / "out")
        refused(answer, "is declared in library 'kartifacts', but in tinyops", site.compiler)
        assert "--library tinyops" in answer.err


def test_a_compiler_that_is_not_there_is_missed_for_ops_that_are_named(site: Site) -> None:
    for options in (("--plan", site.plan), ("--library", "tinyops", "--archs", "cpu:x86-64")):
        answer = site.machine("bare").cli("build", *options, "--out", site.root / "out", PATH="/nonexistent")
        assert answer.code == 7
        assert "it is needed for demo/answer" in answer.err
        assert "name other ops with --ops" in answer.err


def test_exempt_kernels_are_neither_built_nor_missed(site: Site) -> None:
    exempt = '[[exempt]]\nuri = "demo/answer?size=1"\narchs = ["cpu:x86-64"]\nreason = "none"\n'
    site.write(CPU)
    site.plan.write_text(site.plan.read_text() + exempt)
    told = site.cli("runner", "plan", site.plan, "--check")
    assert "cpu: 7 kernels" in told.out
    assert "left out: demo/answer?size=1 for cpu:x86-64: exempt, 1 kernels: none" in told.out
    made = site.shard("runner", "1/1").data
    assert (made["built"], made["skipped"]) == (7, ["demo/answer?size=1 for cpu:x86-64: exempt, 1 kernels: none"])
    assert site.merge("merged").code == 0
    options = (f"dir:{site.root / 'public'}", "--from", site.root / "merged", "--plan", site.plan)
    assert site.cli("gate", "publish", *options).code == 0


@pytest.mark.parametrize(
    ("uri", "archs", "reason", "says"),
    [
        ("demo/anwser*", ["cpu:x86-64"], "x", "'demo/anwser*', exempts nothing for cpu:x86-64"),
        ("demo/answer", ["cpu:x86-64"], "x", "'demo/answer', exempts nothing for cpu:x86-64"),
        ("demo/answer?size=1", ["9.0a"], "x", "'demo/answer?size=1' is for 9.0a, which no build lists"),
        ("demo/answer?size=1", [], "x", "'demo/answer?size=1' has no archs"),
        ("demo/answer?size=1", ["cpu:x86-64"], " ", "'demo/answer?size=1' has no reason"),
        ("", ["cpu:x86-64"], "x", "'' has no uri"),
        ("*", ["cpu:x86-64"], "x", "build 'cpu' has no kernels for cpu:x86-64: all of them are exempt"),
    ],
)
def test_an_exemption_that_exempts_nothing_or_all_is_refused_before_any_work(
    uri: str, archs: list[str], reason: str, says: str, site: Site
) -> None:
    site.write({**CPU, "archs": ARCHS[:2], "shards": 1})
    entry = f"[[exempt]]\nuri = {json.dumps(uri)}\narchs = {json.dumps(archs)}\nreason = {json.dumps(reason)}\n"
    site.plan.write_text(site.plan.read_text() + entry)
    refused(site.cli("runner", "plan", site.plan, "--check"), says, site.compiler)
    refused(site.shard("runner", "1/1"), says, site.compiler)


@pytest.mark.parametrize("ops", [[""], ["demo", " "], [","]])
def test_a_name_of_no_op_does_not_stand_for_all(ops: list[str], site: Site) -> None:
    site.write({**CPU, "ops": ops})
    refused(site.shard("runner", "1/1"), "build 'cpu': ops holds an empty name", site.compiler)


# -- merge and gate ----------------------------------------------------------------------------------------------------


def test_a_part_of_a_plan_is_merged_and_published_only_when_asked_for_by_name(site: Site) -> None:
    far = {"name": "far", "machine": "aarch64", "archs": ["cpu:aarch64"]}
    site.write({**CPU, "shards": 1}, far)
    assert site.shard("runner", "1/1").code == 0
    answer = site.merge("merged")
    assert answer.code == 5
    assert "shard 1/1 of build 'far' is missing" in answer.err
    assert not (site.root / "merged").exists()
    assert site.merge("merged", "--build", "cpu").code == 0
    planned = ("--plan", site.plan, "--build", "cpu", "--out", site.root / "planned")
    assert site.cli("plain", "build", *planned).code == 0
    assert site.files("merged") == site.files("planned")
    options = (f"dir:{site.root / 'public'}", "--from", site.root / "merged", "--plan", site.plan)
    answer = site.cli("gate", "publish", *options)
    assert answer.code == 5
    assert "no build 'far'" in answer.err
    assert site.cli("gate", "publish", *options, "--build", "cpu").code == 0


def test_edited_sources_and_an_edited_plan_do_not_mix_with_what_was_handed_in(site: Site) -> None:
    site.write({**CPU, "shards": 2})
    assert site.shard("runner", "1/2").code == 0
    header = site.library / "include/scale.h"
    before = header.read_text()
    header.write_text(before.replace("7L", "8L"))
    assert site.shard("runner", "2/2").code == 0
    answer = site.merge("merged")
    assert answer.code == 5
    assert "shard 1/2 of build 'cpu' is missing; the one that is there was made of other sources" in answer.err
    header.write_text(before)
    site.write({**CPU, "shards": 2, "archs": ARCHS[:3]})
    answer = site.merge("merged")
    assert answer.code == 5
    assert "was made of other sources or by another plan" in answer.err


def test_publishing_needs_neither_the_library_nor_a_compiler(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.write({**CPU, "shards": 1})
    assert site.shard("runner", "1/1").code == 0
    sys.path.remove(str(site.packages))
    merged = site.merge("merged")
    assert merged.code == 0, merged.err
    options = (f"dir:{site.root / 'public'}", "--from", site.root / "merged", "--plan", site.plan)
    assert site.cli("gate", "publish", *options, PATH="/nonexistent").code == 0
    table = Repository(site.root / "merged").path / "promises/tinyops/1.0.json"
    promises = json.loads(table.read_bytes())
    promises["builds"][0]["kernels"].append(["demo/dropped", "cpu:x86-64", "0" * 64])
    table.write_text(json.dumps(promises))
    answer = site.cli("gate", "publish", *options)
    assert answer.code == 5
    assert "demo/dropped is missing for cpu:x86-64" in answer.err


# -- the matrix and figures --------------------------------------------------------------------------------------------


def test_the_matrix_has_a_row_for_each_shard_with_all_that_a_job_needs(site: Site) -> None:
    folder = site.root / "builders/box"
    folder.mkdir(parents=True)
    (folder / "builder.toml").write_text('name = "box"\nimage = "debian:12"\n')
    gpu = {"name": "gpu", "machine": "x86_64", "cuda": "13.0", "archs": ["sm_90a"], "builder": "box", "ops": ["demo"]}
    site.write({**CPU, "shards": 2}, gpu, more='builders = "builders"\n')
    rows = site.cli("ci", "plan", site.plan, "--format", "json").data["jobs"]
    assert [(row["build"], row["shard"]) for row in rows] == [("cpu", "1/2"), ("cpu", "2/2"), ("gpu", "1/1")]
    assert rows[2] == {
        "build": "gpu",
        "shard": "1/1",
        "builder": "box",
        "image": "debian:12",
        "cuda": "13.0",
        "machine": "x86_64",
        "archs": "9.0a",
        "ops": "demo",
    }
    github = site.cli("ci", "plan", site.plan, "--format", "github").out
    assert github.count("\n") == 1
    assert json.loads(github) == {"include": rows}
    gitlab = json.loads(site.cli("ci", "plan", site.plan, "--format", "gitlab").out)
    assert gitlab["build"]["parallel"]["matrix"][2] == {
        "BUILD": "gpu",
        "SHARD": "1/1",
        "BUILDER": "box",
        "IMAGE": "debian:12",
        "MACHINE": "x86_64",
    }
    table = site.cli("ci", "plan", site.plan, "--build", "gpu").out.splitlines()
    assert len(table) == 2
    assert table[1].split()[:4] == ["gpu", "1/1", "box", "debian:12"]
    checked = site.cli("ci", "plan", site.plan, "--check")
    assert "cpu: 8 kernels" in checked.out
    assert "gpu: 2 kernels" in checked.out


def of_github(site: Site, *plan: object) -> list[dict[str, str]]:
    """The rows of a matrix, which is what GitHub documents: one line, `include` alone, at most 256 objects of texts."""
    out = site.cli("ci", "plan", *plan, "--format", "github").out
    assert out.count("\n") == 1
    assert out.isascii()
    assert not re.search(r"[\r\n%]", out[:-1])
    matrix = json.loads(out)
    assert list(matrix) == ["include"]
    rows: list[dict[str, str]] = matrix["include"]
    assert 1 <= len(rows) <= 256
    for row in rows:
        assert all(re.fullmatch("[a-z_][a-z0-9_-]*", name) and isinstance(row[name], str) for name in row)
    return rows


def of_gitlab(site: Site, *plan: object) -> list[dict[str, str]]:
    """The same of GitLab: jobs of a child pipeline, at most 200 rows of variables, names of at most 255 characters."""
    pipeline = json.loads(site.cli("ci", "plan", *plan, "--format", "gitlab").out)
    assert list(pipeline) == ["build"], "and no keyword of a pipeline, as `stages` or `image`"
    assert pipeline["build"].keys() == {"extends", "parallel"}
    assert pipeline["build"]["extends"].startswith("."), "a hidden job, which runs by itself never"
    assert list(pipeline["build"]["parallel"]) == ["matrix"]
    rows: list[dict[str, str]] = pipeline["build"]["parallel"]["matrix"]
    assert 1 <= len(rows) <= 200
    for row in rows:
        assert all(re.fullmatch("[A-Z][A-Z0-9_]*", name) and isinstance(row[name], str) for name in row)
        assert len(f"build: [{', '.join(row.values())}]") <= 255
    assert len({tuple(row.values()) for row in rows}) == len(rows), "their names tell them apart"
    return rows


def test_the_matrix_of_our_own_plan_is_one_that_both_systems_take(site: Site) -> None:
    plan = Path(__file__).parents[2] / "manifests/release.toml"
    rows, variables = of_github(site, plan), of_gitlab(site, plan)
    assert [(row["build"], row["shard"]) for row in rows] == [(row["BUILD"], row["SHARD"]) for row in variables]
    assert {row["build"] for row in rows} == {build.name for build in read_plan(plan).builds}


@pytest.mark.parametrize(("form", "most"), [("github", 256), ("gitlab", 200)])
def test_more_jobs_than_a_matrix_may_have_are_refused_before_a_pipeline_is(form: str, most: int, site: Site) -> None:
    site.write({**CPU, "shards": most})
    assert len({"github": of_github, "gitlab": of_gitlab}[form](site, site.plan)) == most
    site.write({**CPU, "shards": most + 1})
    answer = site.cli("ci", "plan", site.plan, "--format", form)
    assert answer.code == 2
    assert f"the plan has {most + 1} jobs" in answer.err
    assert f"at most {most}" in answer.err
    assert site.cli("ci", "plan", site.plan).code == 0


def test_a_name_that_gitlab_would_fail_of_without_a_word_is_refused(site: Site) -> None:
    folder = site.root / "builders/box"
    folder.mkdir(parents=True)
    builder = {**CPU, "shards": 1, "builder": "box"}
    room = 255 - len("build: [cpu, 1/1, box, , x86_64]")
    for length, fine in ((room, True), (room + 1, False)):
        (folder / "builder.toml").write_text(f'name = "box"\nimage = "{"x" * length}"\n')
        site.write(builder, more='builders = "builders"\n')
        answer = site.cli("ci", "plan", site.plan, "--format", "gitlab")
        assert answer.code == (0 if fine else 2), answer.err
        assert fine or "256 characters, of which it takes 255" in answer.err


def test_the_report_of_a_build_adds_up_to_what_is_in_the_directory(site: Site) -> None:
    files = {"report": site.root / "report.json", "costs": site.root / "costs.json"}
    options = ("--report", files["report"], "--costs-out", files["costs"])
    assert site.cli("runner", "build", "--plan", site.plan, "--out", site.root / "out", *options).code == 0
    report = json.loads(files["report"].read_bytes())
    repository = Repository(site.root / "out")
    [pin] = repository.pins()
    manifests = [repository.bundle(descriptor) for descriptor in repository.release(pin).manifests]
    tables = [repository.table(manifest, "table") for manifest in manifests]
    kernels = {(kernel.uri, table.arch): kernel.size for table in tables for kernel in table.kernels}
    assert {(row["uri"], row["arch"]): row["bytes"] for row in report["kernels"]} == kernels
    assert report["bytes"] == sum(kernels.values())
    packs = {layer.digest: layer.size for manifest in manifests for layer in manifest.layers}
    assert report["packed_bytes"] == sum(packs.values())
    assert (
        packs.items()
        <= {f"sha256:{path.name}": path.stat().st_size for path in repository.path.glob("blobs/*/*")}.items()
    )
    coverage = {(uri, arch) for uri, archs in report["coverage"].items() for arch in archs}
    assert coverage == kernels.keys()
    assert json.loads(files["costs"].read_bytes())["costs"]


def test_costs_that_are_measured_again_replace_those_that_were_kept(site: Site) -> None:
    """What another library took, and a source that is gone, is not written down again."""
    costs = site.root / "costs.json"
    old = {"seconds": 9999.0, "memory": 1}
    content = {"schema": 1, "costs": {"tinyops:demo/answer_cpu.cpp cxx": old, "tinyops:demo/gone.cpp cxx": old}}
    costs.write_text(json.dumps(content))
    own = site.machine("runner").settings().workspace / "costs.json"
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps({"schema": 1, "costs": {"others:a.cu nvcc": old}}))
    site.write({**CPU, "shards": 2})
    options = ("--plan", site.plan, "--build", "cpu", "--shard", "1/2", "--out", site.root / "meet")
    answer = site.cli("runner", "build", *options, "--costs-out", costs)
    assert answer.code == 0, answer.err
    ((name, measured),) = json.loads(costs.read_bytes())["costs"].items()
    assert name == "tinyops:demo/answer_cpu.cpp cxx"
    assert 0 < measured["seconds"] < 100


def test_measured_costs_decide_who_builds_what_and_others_than_these_are_refused(site: Site) -> None:
    def costs(seconds: float) -> None:
        content = {"schema": 1, "costs": {"tinyops:demo/answer_cpu.cpp cxx": {"seconds": seconds, "memory": 1}}}
        (site.root / "costs.json").write_text(json.dumps(content))

    site.write({**CPU, "shards": 2}, more='costs = "costs.json"\n')
    answer = site.shard("runner", "1/2")
    assert "cannot read the costs" in answer.err
    (site.root / "costs.json").write_text("{}")
    answer = site.shard("runner", "1/2")
    assert "holds no costs" in answer.err
    costs(1.0)
    assert site.shard("runner", "1/2").code == 0
    costs(2.0)
    assert site.shard("runner", "2/2").code == 0
    answer = site.merge("merged")
    assert answer.code == 5
    assert "has another costs than" in answer.err
