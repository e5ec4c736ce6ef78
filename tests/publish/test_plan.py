"""The release plan finds what a release lacks, and the schemas in the checkout say what the code reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.manifest import BundleManifest, Release
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.gate import check_plan
from kartifacts.publish.plan import Exemption, Plan, read_plan
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.schemas import schemas

from .conftest import promised

MANIFESTS = Path(__file__).parents[2] / "manifests"
Make = Callable[..., Any]


def plan(*archs: str, **more: Any) -> Plan:
    return Plan(schema=1, library="demo", archs=list(archs), **more)


OPS = [f"norm/op{number}?dtype=half" for number in range(4)]


def check(plan: Plan, root: Path, *uris: str) -> None:
    check_plan(plan, Repository(root), Repository(root).pins(), sources=lambda: promised(plan, *uris))


def test_a_release_that_holds_all_passes(make_repository: Make, tmp_path: Path) -> None:
    uris = [f"{family}/op{number}?dtype=half" for family in ("norm", "act") for number in range(4)]
    check(plan("8.0", "9.0a", "cpu:x86-64-v3"), make_repository(tmp_path / "r"), *uris)


def test_an_op_that_was_dropped_for_one_arch_stops_the_publish_and_is_named(
    make_bundle: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    root = tmp_path / "r"
    bundles = [make_bundle(root, arch="9.0a"), make_bundle(root, arch="10.7a", count=3)]
    make_release(root, "demo", "1.0", bundles)
    bucket = cut_bucket(tmp_path / "bucket")
    with pytest.raises(VerificationError, match=r"norm/op3\?dtype=half is missing for 10\.7a"):
        publish(root, bucket, plan=plan("9.0a", "10.7a"), sources=lambda: promised(plan("9.0a", "10.7a"), *OPS))
    assert bucket.written == []
    exempt = [Exemption(uri="norm/op3*", archs=["10.7a"], reason="no such instruction")]
    asked = plan("9.0a", "10.7a", exempt=exempt)
    publish(root, bucket, plan=asked, sources=lambda: promised(asked, *OPS))


def test_an_arch_that_was_forgotten_altogether_is_named(make_repository: Make, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"nothing is there for 10\.0f"):
        check(plan("8.0", "10.0f"), make_repository(tmp_path / "r"))


def test_a_kernel_that_needs_too_new_a_system_is_named(make_bundle: Make, tmp_path: Path) -> None:
    root = tmp_path / "r"
    make_release(root, "demo", "1.0", [make_bundle(root, needs={"glibc": "2.32"})])
    check(plan("9.0a", limits={"glibc": "2.32"}), root, *OPS)
    check(plan("9.0a", limits={"glibcxx": "3.4"}), root, *OPS)
    with pytest.raises(VerificationError, match=r"needs glibc 2\.32; the plan's limit is 2\.4"):
        check(plan("9.0a", limits={"glibc": "2.4"}), root, *OPS)


def test_the_plan_of_another_library_is_not_applied(make_repository: Make, tmp_path: Path) -> None:
    source = make_repository(tmp_path / "r", library="other")
    publish(source, DirectoryBucket(tmp_path / "bucket"), plan=plan("10.0f"))


def test_the_checked_in_plan_can_be_read() -> None:
    assert read_plan(MANIFESTS / "release.toml").library == "kartifacts"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1",
        'schema = 2\nlibrary = "a"\narchs = ["8.0"]',
        'schema = 2\nlibrary = "a"',
        'schema = 3\nlibrary = "a"\narchs = ["8.0"]',
        'schema = 1\nlibrary = "a"\n[[build]]\nname = "b"\narchs = ["8.0"]',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\n[limits]\nglibx = "2.34"',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\n[limits]\nrelease_bytes = "2GB"',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\n[limits]\npack_bytes = 0',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\n[limits]\nglibc = "2."',
        'schema = 1\nlibrary = "a"\narchs = ["native"]',
        'schema = 1\nlibrary = "A"\narchs = ["8.0"]',
        'schema = 1\nlibrary = "a"\narchs = []',
        'schema = 1\nlibrary = "a"\narchs = ["9.9z"]',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\nlimit = 3',
        'schema = 1\nlibrary = "a"\narchs = ["8.0"]\n[limits]\nglibc = "new"',
        "schema = = 1",
        b"\xff\xfe",
    ],
)
def test_a_plan_with_a_mistake_is_refused(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "plan.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError):
        read_plan(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match="cannot read the plan"):
        read_plan(tmp_path / "absent.toml")


def test_the_schemas_in_the_checkout_are_current() -> None:
    found = {path.name: path.read_text() for path in (MANIFESTS / "schemas").iterdir()}
    assert found == schemas(), "run: python -m kartifacts.publish.schemas manifests/schemas"


def test_the_schemas_describe_what_is_really_written(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    [pin] = Repository(root).pins()
    release = Repository(root).release(pin)
    bundle = Repository(root).bundle(release.manifests[0])
    table = Repository(root).table(bundle, "table")
    for name, value in (("release", release), ("bundle", bundle), ("table", table)):
        schema = json.loads(schemas()[f"{name}.schema.json"])
        described = schema["$defs"][schema["$ref"].rpartition("/")[2]]
        written = msgspec.to_builtins(value)
        assert set(described["required"]) <= set(written) <= set(described["properties"])
    assert isinstance(release, Release)
    assert isinstance(bundle, BundleManifest)


# -- builds ------------------------------------------------------------------------------------------------------------

GOOD = {"name": "a", "machine": "x86_64", "cuda": "13.0", "archs": ["cpu:x86-64-v3", "9.0a", "10.0f"]}


def written(path: Path, *builds: dict[str, Any]) -> Path:
    text = 'schema = 2\nlibrary = "demo"\n'
    for build in builds:
        text += "[[build]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in build.items())
    path.write_text(text)
    return path


def refused(path: Path, *builds: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_plan(written(path, *builds))
    return caught.value


def test_a_plan_may_have_one_arch_for_two_versions_of_cuda_and_two_machines(tmp_path: Path) -> None:
    older = {**GOOD, "name": "older", "cuda": "12.9", "archs": ["9.0a", "10.0f"]}
    far = {**GOOD, "name": "far", "machine": "aarch64", "archs": ["cpu:aarch64", "9.0a"]}
    parts = [{**GOOD, "name": name, "archs": ["12.0f"], "ops": [name]} for name in ("norm", "activation")]
    plan = read_plan(written(tmp_path / "plan.toml", GOOD, older, far, *parts))
    assert [build.name for build in plan.builds] == ["a", "older", "far", "norm", "activation"]
    assert plan.only(["far", "a"]).builds == [plan.find("far"), plan.find("a")]
    with pytest.raises(ConfigError, match="has no build 'none'"):
        plan.only(["none"])


@pytest.mark.parametrize(
    ("change", "says", "better"),
    [
        ({"archs": ["7.5", "10.0f"], "cuda": "12.8"}, "10.0f cannot be built with CUDA 12.8", '"7.5", "10.0a"'),
        ({"archs": ["12.1f", "8.0"], "cuda": "12.8"}, "12.1f cannot be built with CUDA 12.8", '"8.0"'),
        ({"archs": ["7.0", "8.0"]}, "7.0 cannot be built with CUDA 13.0", '"8.0"'),
        ({"archs": ["10.1a", "8.0"]}, "which renamed it to 11.0", '"11.0a", "8.0"'),
        ({"archs": ["9.0a", "8.0"], "cuda": "11.8"}, "9.0a cannot be built with CUDA 11.8", '"9.0", "8.0"'),
        ({"archs": ["10.3f+PTX"], "cuda": "12.8"}, "10.3f+PTX cannot be built with CUDA 12.8", ""),
        ({"archs": ["9.0a", "8.0", "sm_90a"]}, "sm_90a is listed twice, also as 9.0a", '"9.0a", "8.0"'),
        ({"archs": ["cpu:aarch64", "8.0"]}, "cpu:aarch64 is not an arch of x86_64 machines", '"8.0"'),
        ({"archs": ["8.0"], "cuda": ""}, "8.0 needs CUDA, and the build names no version of it", ""),
        ({"archs": ["9.9z"]}, "build 'a': unknown arch '9.9z'", ""),
        ({"archs": ["native"]}, "'native' stands for this machine's devices", ""),
        ({"archs": []}, "promises no archs", ""),
        ({"machine": "sparc"}, "machine is 'sparc', expected x86_64 or aarch64", ""),
        ({"machine": ""}, "machine is '', expected", ""),
        ({"cuda": "13"}, "cuda is '13', expected a version such as 13.0", ""),
        ({"shards": 0}, "shards is 0, expected 1 to 1000", ""),
        ({"shards": 1001}, "shards is 1001, expected 1 to 1000", ""),
        ({"name": "A/B"}, "bad build name 'A/B'", ""),
        ({"builder": "../x"}, "bad builder name '../x'", ""),
        ({"arch": ["8.0"]}, "is not a release plan: Object contains unknown field `arch`", ""),
        ({"archs": "8.0"}, "is not a release plan: Expected `array`", ""),
    ],
)
def test_a_build_that_cannot_be_is_refused_with_the_list_that_can(
    change: dict[str, Any], says: str, better: str, tmp_path: Path
) -> None:
    error = refused(tmp_path / "plan.toml", {**GOOD, **change})
    assert says in str(error)
    assert error.hint == (f"build 'a' could list archs = [{better}]" if better else None)


def test_a_corrected_list_is_one_that_is_taken(tmp_path: Path) -> None:
    wrong = {**GOOD, "cuda": "12.8", "archs": ["7.5", "sm_75", "10.0f", "12.1a", "8.0+PTX", "cpu:aarch64", "9.0a"]}
    error = refused(tmp_path / "plan.toml", wrong)
    assert error.hint is not None
    archs = json.loads(error.hint.partition("archs = ")[2])
    assert archs == ["7.5", "10.0a", "8.0+PTX", "9.0a"]
    assert read_plan(written(tmp_path / "plan.toml", {**wrong, "archs": archs})).builds[0].archs == archs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "two builds are called 'a'"),
        ({"name": "b"}, "builds 'a' and 'b' both make 9.0a with CUDA 13.0"),
        ({"name": "b", "cuda": "12.9"}, "builds 'a' and 'b' both make cpu:x86-64-v3"),
        ({"name": "b", "ops": ["norm"], "archs": ["9.0a"]}, "builds 'a' and 'b' both make 9.0a with CUDA 13.0"),
    ],
)
def test_no_two_builds_make_the_same_kernel(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert says in refused(tmp_path / "plan.toml", GOOD, {**GOOD, **change}).message


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    bad = [{**GOOD, "name": "a", "archs": ["7.0"]}, {**GOOD, "name": "b", "archs": ["12.0f"], "cuda": "12.0"}]
    error = refused(tmp_path / "plan.toml", *bad)
    assert "7.0 cannot be built" in error.message
    assert "12.0f cannot be built" in error.message


def test_what_decides_which_kernels_are_made_decides_the_digest_and_nothing_else_does(tmp_path: Path) -> None:
    base = read_plan(written(tmp_path / "plan.toml", GOOD))
    for same in (
        msgspec.structs.replace(base, limits={"glibc": "2.34"}),
        msgspec.structs.replace(base, costs="costs.json", builders="elsewhere"),
    ):
        assert same.digest == base.digest
    others = [{**GOOD, **change} for change in ({"shards": 2}, {"cuda": "12.9"}, {"ops": ["norm"]}, {"archs": ["8.0"]})]
    digests = {read_plan(written(tmp_path / "plan.toml", build)).digest for build in others}
    assert len(digests | {base.digest}) == 5
