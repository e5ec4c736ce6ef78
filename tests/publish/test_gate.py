"""A release is held against what was promised, what it may need and weigh, and how it was made, before it is sent."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts.build.pack import PackInput, pack_bundle
from kartifacts.errors import VerificationError
from kartifacts.model.arch import Arch
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Descriptor, KernelEntry
from kartifacts.model.materials import Made, MadeOp, Materials
from kartifacts.publish.gate import Judge, check_plan
from kartifacts.publish.plan import Build, Exemption, Plan
from kartifacts.publish.promises import Promised, Promises, line_of, write_promises
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository

from .conftest import promised

Make = Callable[..., Any]
replace = msgspec.structs.replace
CPU = Build(name="cpu", machine="x86_64", archs=["cpu:x86-64-v3"])
GPU = Build(name="gpu", machine="x86_64", cuda="13.0", archs=["9.0a", "12.0f"])


def op_digest(uri: str) -> str:
    return sha256(uri.encode())


class Shelf:
    """A repository of small bundles of the family norm, with or without what was promised."""

    def __init__(self, root: Path) -> None:
        self.root = root / "repository"
        self.raw = root / "raw"
        self.raw.mkdir()
        self.bundles: dict[str, tuple[Descriptor, Materials]] = {}

    def add(
        self,
        arch: str,
        *names: str,
        version: str = "13.0.88",
        machine: str = "x86_64",
        facts: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        needs: Mapping[str, str] | None = None,
        size: int = 900,
    ) -> None:
        kind = "cxx" if arch.startswith("cpu") else "nvcc"
        toolchain = {"kind": kind, "version": version, **(facts or {})}
        entries = []
        for name in names:
            uri, path = f"norm/{name}", self.raw / f"{name}-{arch}-{version}-{machine}".replace(":", "-")
            path.write_bytes((f"{name} {arch} {version} {machine} ".encode() * size)[:size])
            key = sha256(str(path).encode())
            entries.append(PackInput(uri, path, ".so", key, op_digest(uri), needs=needs or {}))
        notes: dict[str, Any] = {"library": "demo", "family": "norm", "arch": arch, "abi": "none"}
        tied = "" if kind == "cxx" else machine
        bundle = pack_bundle(entries, self.root, toolchain=toolchain, machine=tied, block_bytes=1, **notes)
        ops = [
            MadeOp(
                op=entry.uri,
                flags=list(flags),
                compile=[[], []],
                reached=[],
                kernels=[Made(uri=entry.uri, key=entry.key, op_digest=entry.op_digest)],
            )
            for entry in entries
        ]
        self.bundles[bundle.digest] = (
            bundle,
            Materials(version=1, kind="build", files=[], ops=ops, toolchain=toolchain, **notes),
        )

    def release(self) -> None:
        made_of = {digest: materials for digest, (_, materials) in self.bundles.items()}
        make_release(self.root, "demo", "1.0", [bundle for bundle, _ in self.bundles.values()], made_of)

    def promise(self, plan: Plan, *names: str) -> None:
        """Say that each build was to make these ops for each of its archs."""
        write_promises(self.root, promised(plan, *(f"norm/{name}" for name in names), digest=op_digest), "1.0")

    def check(self, plan: Plan, judge: Judge | None = None) -> None:
        check_plan(plan, Repository(self.root), Repository(self.root).pins(), judge=judge)

    def refused(self, plan: Plan, judge: Judge | None = None) -> str:
        with pytest.raises(VerificationError) as caught:
            self.check(plan, judge)
        return caught.value.message


def plan(*builds: Build, **more: Any) -> Plan:
    return Plan(schema=2, library="demo", build=list(builds), **more)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


# -- promises ----------------------------------------------------------------------------------------------------------


def test_a_release_that_keeps_its_promises_passes_and_needs_no_sources(shelf: Shelf) -> None:
    for arch in ("cpu:x86-64-v3", "9.0a", "12.0f"):
        shelf.add(arch, "a", "b")
    shelf.release()
    shelf.promise(plan(CPU, GPU), "a", "b")
    shelf.check(plan(CPU, GPU))


def test_an_op_that_is_missing_everywhere_is_missed_all_the_same(shelf: Shelf) -> None:
    shelf.add("9.0a", "a")
    shelf.add("12.0f", "a")
    shelf.release()
    shelf.promise(plan(GPU), "a", "gone")
    said = shelf.refused(plan(GPU))
    assert "norm/gone is missing for 9.0a" in said
    assert "norm/gone is missing for 12.0f" in said


def test_an_arch_an_op_and_another_state_of_the_sources_are_each_named(shelf: Shelf) -> None:
    shelf.add("9.0a", "a", "b", "surplus")
    shelf.release()
    shelf.promise(plan(GPU), "a", "b", "c")
    said = shelf.refused(plan(GPU))
    assert "nothing is there for 12.0f" in said
    assert "norm/c is missing for 9.0a" in said
    assert "norm/surplus for 9.0a is there, and nobody promised it" in said


def test_a_kernel_of_other_sources_than_were_promised_is_named(shelf: Shelf) -> None:
    shelf.add("9.0a", "a")
    shelf.release()
    build = replace(GPU, archs=["9.0a"])
    lines = [line_of(build, [Promised("norm/a", "9.0a", sha256(b"newer"))])]
    asked = plan(build)
    write_promises(
        shelf.root,
        Promises(version=1, library="demo", library_version="1.0", plan=asked.digest, exempt=[], builds=lines),
        "1.0",
    )
    assert "norm/a for 9.0a was built from other sources than were promised" in shelf.refused(asked)


@pytest.mark.parametrize(
    "other",
    [
        plan(replace(GPU, archs=["9.0a", "12.0f", "10.0f"])),
        plan(replace(GPU, archs=["9.0a"])),
        plan(replace(GPU, ops=["norm"])),
        plan(replace(GPU, cuda="12.9")),
        plan(replace(GPU, machine="aarch64")),
        plan(GPU, CPU),
        plan(replace(GPU, name="other")),
        plan(GPU, exempt=[Exemption(uri="norm/a", archs=["9.0a"], reason="none")]),
    ],
)
def test_promises_of_another_plan_do_not_stand_for_this_one(other: Plan, shelf: Shelf) -> None:
    shelf.add("9.0a", "a")
    shelf.add("12.0f", "a")
    shelf.release()
    shelf.promise(plan(GPU), "a")
    shelf.check(plan(GPU))
    with pytest.raises(VerificationError, match=r"the release (was made by|holds)"):
        shelf.check(other)


def test_limits_shards_and_costs_may_change_after_the_build(shelf: Shelf) -> None:
    shelf.add("9.0a", "a")
    shelf.add("12.0f", "a")
    shelf.release()
    shelf.promise(plan(GPU), "a")
    shelf.check(plan(replace(GPU, shards=7, builder="box"), limits={"glibc": "2.34"}, costs="costs.json"))


def test_two_builds_of_one_arch_must_both_be_there(shelf: Shelf) -> None:
    older = replace(GPU, name="older", cuda="12.9")
    far = replace(GPU, name="far", machine="aarch64")
    for arch in GPU.archs:
        shelf.add(arch, "a")
    asked = plan(GPU, older, far)
    shelf.release()
    shelf.promise(asked, "a")
    said = shelf.refused(asked)
    assert "nothing is there for 9.0a by the build 'older'" in said
    assert "nothing is there for 12.0f by the build 'far'" in said
    for arch in GPU.archs:
        shelf.add(arch, "a", version="12.9.86")
        shelf.add(arch, "a", machine="aarch64")
    shutil.rmtree(shelf.root / "targets")
    (shelf.root / "index.json").unlink()
    shelf.release()
    shelf.check(asked)


@pytest.mark.parametrize(
    ("facts", "cuda"),
    [
        ({"kind": "nvcc", "version": "12.9.86"}, "12.9"),
        ({"kind": "nvrtc", "version": "13.0.88", "cudart": "13010"}, "13.0"),
        ({"kind": "triton", "version": "3.9.0", "cuda": "13.4"}, "13.4"),
        ({"kind": "cutedsl", "version": "4.8.1", "cudart": "12090", "host version": "13.2.0"}, "12.9"),
        ({"kind": "cutedsl", "version": "4.8.1", "cudart": "13050"}, "13.5"),
    ],
)
def test_what_one_build_made_counts_for_no_build_of_another_cuda(
    facts: Mapping[str, str], cuda: str, shelf: Shelf
) -> None:
    """Whatever compiled it: drivers of an older CUDA would have nothing, in a release that passed."""
    own, older = replace(GPU, name="own", cuda=cuda), replace(GPU, name="older", cuda="12.4")
    for arch in GPU.archs:
        shelf.add(arch, "a", facts=facts)
    shelf.release()
    shelf.promise(plan(own), "a")
    shelf.check(plan(own))
    shelf.promise(plan(own, older), "a")
    assert "nothing is there for 9.0a by the build 'older'" in shelf.refused(plan(own, older))


@pytest.mark.parametrize("sources", [None, lambda: None])
def test_a_release_of_which_nobody_says_what_was_promised_is_not_sent(
    sources: Callable[[], None] | None, shelf: Shelf, cut_bucket: Make, tmp_path: Path
) -> None:
    """A release that lacked whole ops was signed, since what it held was taken for what it was to hold."""
    for arch in GPU.archs:
        shelf.add(arch, "a")
    shelf.release()
    bucket = cut_bucket(tmp_path / "bucket")
    with pytest.raises(VerificationError, match=r"nothing says what demo 1\.0 was to hold: promises/demo/1\.0\.json"):
        publish(shelf.root, bucket, plan=plan(GPU), sources=sources)
    assert bucket.written == []


def test_where_promises_are_gone_the_sources_say_what_was_promised(shelf: Shelf) -> None:
    for arch in GPU.archs:
        shelf.add(arch, "a")
    shelf.release()
    repository = Repository(shelf.root)

    def check(*names: str) -> None:
        there = promised(plan(GPU), *(f"norm/{name}" for name in names), digest=op_digest)
        check_plan(plan(GPU), repository, repository.pins(), sources=lambda: there)

    check("a")
    with pytest.raises(VerificationError, match=r"norm/gone is missing for 9\.0a"):
        check("a", "gone")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_release_beyond_its_budget_names_the_largest_ops_and_nothing_is_sent(
    shelf: Shelf, cut_bucket: Make, tmp_path: Path
) -> None:
    shelf.add("9.0a", *(f"op{n}" for n in range(12)))
    shelf.add("12.0f", *(f"op{n}" for n in range(12)))
    shelf.release()
    shelf.promise(plan(GPU), *(f"op{n}" for n in range(12)))
    bucket = cut_bucket(tmp_path / "bucket")
    with pytest.raises(VerificationError, match=r"the release has [0-9,]+ bytes; the plan's limit is 1,000") as caught:
        publish(shelf.root, bucket, plan=plan(GPU, limits={"release_bytes": 1000}))
    assert bucket.written == []
    named = [line.split()[-1] for line in caught.value.message.splitlines() if "bytes: norm/" in line]
    assert len(named) == 10
    assert set(named) < {f"norm/op{n}" for n in range(12)}
    publish(shelf.root, bucket, plan=plan(GPU, limits={"release_bytes": 1_000_000, "pack_bytes": 1_000_000}))


def test_a_pack_beyond_its_budget_is_named(shelf: Shelf) -> None:
    shelf.add("9.0a", "a")
    shelf.add("12.0f", "a")
    shelf.release()
    shelf.promise(plan(GPU), "a")
    said = shelf.refused(plan(GPU, limits={"pack_bytes": 10}))
    assert "pack 0 of bundle norm for 9.0a has" in said
    assert "the plan's limit is 10" in said
    assert "bytes: norm/a" in said


@pytest.mark.parametrize(
    ("name", "fine"), [("glibc", "2.34"), ("glibcxx", "3.4.30"), ("cudart", "13"), ("driver", "13.0")]
)
def test_a_kernel_that_needs_too_new_a_system_is_named(name: str, fine: str, shelf: Shelf) -> None:
    shelf.add("9.0a", "a", needs={name: fine})
    shelf.release()
    asked = replace(GPU, archs=["9.0a"])
    shelf.promise(plan(asked), "a")
    shelf.check(plan(asked, limits={name: fine}))
    below = f"{int(fine.split('.')[0]) - 1}.99"
    assert f"norm/a for 9.0a needs {name} {fine}" in shelf.refused(plan(asked, limits={name: below}))


@pytest.mark.parametrize(("cudart", "sound"), [("13", True), ("12", False), ("14", False)])
def test_a_kernel_that_needs_the_runtime_of_another_cuda_is_named(cudart: str, sound: bool, shelf: Shelf) -> None:
    asked = plan(replace(GPU, archs=["9.0a"]))
    shelf.add("9.0a", "a", needs={"cudart": cudart})
    shelf.release()
    shelf.promise(asked, "a")
    if sound:
        shelf.check(asked)
    else:
        said = f"norm/a for 9.0a needs the runtime of CUDA {cudart}, and was built with 13.0"
        assert said in shelf.refused(asked)


# -- how it was made ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"facts": {"overrides": "-g -G"}}, "built with further flags: '-g -G'"),
        ({"facts": {"host overrides": "-O0"}}, "built with further flags: '-O0'"),
        ({"facts": {"flags": "-O3 -march=native"}}, "built for the CPU of its builder"),
        ({"flags": ["-O3", "-march=native"]}, "norm/a for cpu:x86-64-v3 was built for the CPU of its builder"),
        ({"flags": ["-mtune=native"]}, "norm/a for cpu:x86-64-v3 was built for the CPU of its builder"),
    ],
)
def test_what_was_built_for_debugging_or_for_one_cpu_is_not_released(
    how: dict[str, Any], says: str, shelf: Shelf, cut_bucket: Make, tmp_path: Path
) -> None:
    shelf.add("cpu:x86-64-v3", "a", **how)
    shelf.release()
    shelf.promise(plan(CPU), "a")
    bucket = cut_bucket(tmp_path / "bucket")
    with pytest.raises(VerificationError, match=says):
        publish(shelf.root, bucket, plan=plan(CPU))
    assert bucket.written == []


# -- the kernels themselves --------------------------------------------------------------------------------------------


def test_every_kernel_is_looked_into_and_what_is_wrong_is_said_of_it(shelf: Shelf) -> None:
    shelf.add("9.0a", "a", "b")
    shelf.add("12.0f", "a", "b")
    shelf.release()
    shelf.promise(plan(GPU), "a", "b")
    seen: list[tuple[str, str, bytes]] = []

    def judge(content: bytes, entry: KernelEntry, arch: Arch, libraries: Sequence[str]) -> list[str]:
        seen.append((entry.uri, str(arch), content))
        return ["holds code for 8.0"] if (entry.uri, str(arch)) == ("norm/b", "12.0f") else []

    said = shelf.refused(plan(GPU), judge)
    assert said.splitlines()[1:] == ["  norm/b for 12.0f holds code for 8.0"]
    assert {(uri, arch) for uri, arch, _ in seen} == {(f"norm/{n}", arch) for n in "ab" for arch in GPU.archs}
    for uri, arch, content in seen:
        assert content.startswith(f"{uri.removeprefix('norm/')} {arch} ".encode())
