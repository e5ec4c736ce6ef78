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

MANIFESTS = Path(__file__).parents[2] / "manifests"
Make = Callable[..., Any]


def plan(*archs: str, **more: Any) -> Plan:
    return Plan(schema=1, library="demo", archs=list(archs), **more)


def check(plan: Plan, root: Path) -> None:
    check_plan(plan, Repository(root), Repository(root).pins())


def test_a_release_that_holds_all_passes(make_repository: Make, tmp_path: Path) -> None:
    check(plan("8.0", "9.0a", "cpu:x86-64-v3"), make_repository(tmp_path / "r"))


def test_an_op_that_was_dropped_for_one_arch_stops_the_publish_and_is_named(
    make_bundle: Make, cut_bucket: Make, tmp_path: Path
) -> None:
    root = tmp_path / "r"
    bundles = [make_bundle(root, arch="9.0a"), make_bundle(root, arch="10.7a", count=3)]
    make_release(root, "demo", "1.0", bundles)
    bucket = cut_bucket(tmp_path / "bucket")
    with pytest.raises(VerificationError, match=r"norm/op3\?dtype=half is missing for 10\.7a"):
        publish(root, bucket, plan=plan("9.0a", "10.7a"))
    assert bucket.written == []
    exempt = [Exemption(uri="norm/op3*", archs=["10.7a"], reason="no such instruction")]
    publish(root, bucket, plan=plan("9.0a", "10.7a", exempt=exempt))


def test_an_arch_that_was_forgotten_altogether_is_named(make_repository: Make, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"nothing is there for 10\.0f"):
        check(plan("8.0", "10.0f"), make_repository(tmp_path / "r"))


def test_a_family_for_the_cpu_alone_is_not_asked_of_gpus(make_bundle: Make, tmp_path: Path) -> None:
    root = tmp_path / "r"
    bundles = [make_bundle(root, arch="9.0a"), make_bundle(root, family="host", arch="cpu:x86-64-v3")]
    make_release(root, "demo", "1.0", bundles)
    check(plan("9.0a", "cpu:x86-64-v3"), root)


def test_a_kernel_that_needs_too_new_a_system_is_named(make_bundle: Make, tmp_path: Path) -> None:
    root = tmp_path / "r"
    make_release(root, "demo", "1.0", [make_bundle(root, needs={"glibc": "2.32"})])
    check(plan("9.0a", limits={"glibc": "2.32"}), root)
    check(plan("9.0a", limits={"glibcxx": "3.4"}), root)
    with pytest.raises(VerificationError, match=r"needs glibc 2\.32; the plan's limit is 2\.4"):
        check(plan("9.0a", limits={"glibc": "2.4"}), root)


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
