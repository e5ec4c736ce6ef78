"""Shards make a release only if nothing is missing, stands twice, is damaged, or was made otherwise than the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts.errors import ConfigError, KartifactsError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.materials import Content, MadeOp, Materials, Recipe, joined
from kartifacts.model.materials import Made as Described
from kartifacts.publish.buckets import Listed, Unlisted
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.merging import gather
from kartifacts.publish.plan import Build, Plan
from kartifacts.publish.promises import Promised, Promises, line_of
from kartifacts.publish.shards import Compiler, Made, Shard, bring, find, hand_in, offer, place_of

replace = msgspec.structs.replace
URIS = tuple(f"demo/op?n={n}" for n in range(6))
PLAN = Plan(
    schema=2,
    library="demo",
    build=[Build(name="gpu", machine="x86_64", cuda="13.0", archs=["9.0a"], shards=2)],
)
GCC = {"kind": "nvcc", "version": "13.0.88"}
RECIPE = Recipe(name="box", sha256=sha256(b"box"))
BLANK = Shard(
    version=1,
    library="demo",
    promises="",
    plan=PLAN.digest,
    costs=sha256(b""),
    build="gpu",
    number=1,
    of=1,
    machine="x86_64",
    toolchains={"nvcc": Compiler(facts=GCC, programs={"ptxas": sha256(b"ptxas")})},
    recipe=RECIPE,
    overrides={},
    kernels=[],
    materials=[],
)


def op_digest(uri: str) -> str:
    return sha256(uri.encode())


def promise(*, version: str = "1.0", uris: tuple[str, ...] = URIS, plan: Plan = PLAN) -> Promises:
    lines = [line_of(build, [Promised(uri, "9.0a", op_digest(uri)) for uri in uris]) for build in plan.builds]
    return Promises(
        version=1, library="demo", library_version=version, plan=plan.digest, exempt=plan.exempt, builds=lines
    )


class Yard:
    """A bucket in which two shards of one build were handed in; each may be handed in again, changed."""

    def __init__(self, root: Path) -> None:
        self.bucket = DirectoryBucket(root / "bucket")
        self.scratch = root / "scratch"
        self.scratch.mkdir()
        self.promises = promise()
        self.first, self.second = (self.shard(number, 2, URIS[number - 1 :: 2]) for number in (1, 2))

    def made(self, uri: str, maker: str = "") -> Made:
        content = f"the kernel {uri}".encode()
        path = self.scratch / "kernel"
        path.write_bytes(content)
        made = Made(
            uri=uri,
            arch="9.0a",
            key=sha256(f"key {uri}".encode()),
            op_digest=op_digest(uri),
            sha256=sha256(content),
            size=len(content),
            suffix=".so",
            exports=["op"],
            needs={"driver": "13.0"},
            toolchain="nvcc",
            maker=maker or BLANK.maker("nvcc"),
        )
        return offer(self.bucket, made, path)

    def shard(self, number: int, of: int, uris: tuple[str, ...], **changed: Any) -> Shard:
        kernels = [self.made(uri) for uri in uris]
        shard = replace(
            BLANK,
            promises=self.promises.digest,
            number=number,
            of=of,
            kernels=kernels,
            materials=[materials(kernels)] if kernels else [],
        )
        return self.hand_in(replace(shard, **changed))

    def hand_in(self, shard: Shard, promises: Promises | None = None) -> Shard:
        hand_in(self.bucket, shard, promises or self.promises)
        return shard

    def path(self, shard: Shard) -> Path:
        return self.bucket.root / place_of(shard).path


def materials(kernels: list[Made]) -> Materials:
    return Materials(
        version=1,
        kind="build",
        library="demo",
        family="demo",
        arch="9.0a",
        abi="none",
        files=[Content(path="demo/op.cu", sha256=sha256(b"source"), size=6)],
        ops=[
            MadeOp(
                op="demo/op",
                flags=[],
                compile=[["demo/op.cu"], []],
                reached=["demo/op.cu"],
                kernels=[Described(uri=made.uri, key=made.key, op_digest=made.op_digest) for made in kernels],
            )
        ],
        toolchain=GCC,
    )


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


@pytest.mark.parametrize("sources", [True, False], ids=["with sources", "without sources"])
def test_shards_that_make_up_the_promises_are_gathered(yard: Yard, sources: bool, tmp_path: Path) -> None:
    gathered = gather(yard.bucket, PLAN, yard.promises if sources else None)
    assert list(gathered.shards) == [yard.first, yard.second]
    assert gathered.promises.encoded == yard.promises.encoded
    for made in yard.first.kernels:
        bring(yard.bucket, made, tmp_path / "out" / made.sha256)
        assert (tmp_path / "out" / made.sha256).read_bytes() == f"the kernel {made.uri}".encode()


def test_a_shard_without_work_is_a_shard(yard: Yard) -> None:
    yard.path(yard.second).unlink()
    yard.path(yard.first).unlink()
    yard.shard(1, 2, URIS)
    yard.shard(2, 2, ())
    assert len(gather(yard.bucket, PLAN, yard.promises).shards) == 2


# -- what is refused: one test for each kind ---------------------------------------------------------------------------

Change = Callable[[Yard], object]


def _other(**changed: Any) -> Change:
    return lambda yard: yard.hand_in(replace(yard.second, **changed))


def _other_compiler(facts: dict[str, str], programs: dict[str, str]) -> Change:
    return _other(toolchains={"nvcc": Compiler(facts=facts, programs=programs)})


def _without_last(yard: Yard) -> None:
    kernels = yard.second.kernels[:-1]
    yard.hand_in(replace(yard.second, kernels=kernels, materials=[materials(kernels)]))


def _of_other_sources(yard: Yard) -> None:
    yard.path(yard.second).unlink()
    other = promise(version="2.0")
    yard.hand_in(replace(yard.second, promises=other.digest), other)


def _of_another_plan(yard: Yard) -> None:
    yard.path(yard.second).unlink()
    build = replace(PLAN.build[0], archs=["9.0a", "10.0f"])
    other = promise(plan=replace(PLAN, build=[build]))
    yard.hand_in(replace(yard.second, promises=other.digest, plan=other.plan), other)


def _with_unknown_kernel(yard: Yard) -> None:
    yard.shard(2, 2, (*URIS[1::2], "demo/op?n=99"))


def _with_kernel_of_other_sources(yard: Yard) -> None:
    first, *rest = yard.second.kernels
    yard.hand_in(replace(yard.second, kernels=[replace(first, op_digest=sha256(b"edited")), *rest]))


def _with_kernel_of_another_run(yard: Yard) -> None:
    first, *rest = yard.second.kernels
    other = Compiler(facts=GCC, programs={"ptxas": sha256(b"patched")})
    maker = replace(yard.second, toolchains={"nvcc": other}).maker("nvcc")
    yard.hand_in(replace(yard.second, kernels=[replace(first, maker=maker), *rest]))


def _of_cuda(facts: dict[str, str]) -> Change:
    def change(yard: Yard) -> None:
        [described] = yard.second.materials
        yard.hand_in(replace(yard.second, materials=[replace(described, toolchain=facts)]))

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "a gap of a shard": (
        lambda yard: yard.path(yard.second).unlink(),
        r"shard 2/2 of build 'gpu' is missing: run `kartifacts build .*` with this --plan",
    ),
    "a gap of a kernel": (_without_last, r"demo/op\?n=5 for 9\.0a is missing: it is in no shard of build 'gpu'"),
    "an overlap": (
        lambda yard: yard.shard(2, 2, (*URIS[1::2], URIS[0])),
        r"demo/op\?n=0 for 9\.0a is in shard 1/2.* and",
    ),
    "two divisions": (lambda yard: yard.shard(1, 3, URIS[:2]), r"parts of different divisions: 1/2, 1/3, 2/2"),
    "other sources": (_of_other_sources, r"shard 2/2 .* missing; the one that is there was made of other sources"),
    "another plan": (_of_another_plan, r"shard 2/2 .* missing; the one that is there was made .* by another plan"),
    "other costs": (_other(costs=sha256(b"other")), r"shard 2/2 .* has another costs than shard 1/2"),
    "another machine": (_other(machine="aarch64"), r"another machine than shard 1/2 .*: 'aarch64', 'x86_64'"),
    "another version of a compiler": (
        _other_compiler({**GCC, "version": "13.0.48"}, {"ptxas": sha256(b"ptxas")}),
        r"another nvcc than shard 1/2 .*: version is '13\.0\.48', '13\.0\.88'",
    ),
    "another program": (_other_compiler(GCC, {"ptxas": sha256(b"patched")}), r"another nvcc than .*: ptxas is "),
    "no such compiler": (_other(toolchains={}), r"were not both made with nvcc"),
    "another recipe": (_other(recipe=Recipe(name="bench", sha256=sha256(b"b"))), r"another recipe .*: 'bench', 'box'"),
    "no recipe": (_other(recipe=None), r"another recipe .*: 'None', 'box'"),
    "flags of its own": (_other(overrides={"cuda_flags": "-O0"}), r"shard 2/2 .* other settings .*: cuda_flags"),
    "a kernel that nobody promised": (
        _with_unknown_kernel,
        r"demo/op\?n=99 for 9\.0a in shard 2/2 .* was not promised",
    ),
    "a kernel of other sources": (_with_kernel_of_other_sources, r"n=1 for 9\.0a in shard 2/2 .* other sources"),
    "a kernel of a run with other programs": (
        _with_kernel_of_another_run,
        r"n=1 for 9\.0a in shard 2/2 .* was not made with the compilers that it names",
    ),
    "code of another CUDA by nvcc": (
        _of_cuda({**GCC, "version": "12.9.86"}),
        r"what shard 2/2 .* made of demo for 9\.0a is of CUDA 12\.9; the build is for CUDA 13\.0",
    ),
    "code of another CUDA by Triton": (
        _of_cuda({"kind": "triton", "version": "3.9.0", "cuda": "13.4"}),
        r"what shard 2/2 .* made of demo for 9\.0a is of CUDA 13\.4; the build is for CUDA 13\.0",
    ),
    "a kernel that is not described": (_other(materials=[]), r"does not say what demo/op\?n=1 for 9\.0a was made of"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_shards_that_do_not_fit_together_are_refused_by_name(kind: str, yard: Yard) -> None:
    change, says = REFUSED[kind]
    change(yard)
    with pytest.raises(VerificationError, match=says):
        gather(yard.bucket, PLAN, yard.promises)


def test_a_launcher_of_the_compiler_is_no_difference(yard: Yard) -> None:
    yard.hand_in(replace(yard.second, overrides={"cxx_launcher": "ccache"}))
    assert len(gather(yard.bucket, PLAN, yard.promises).shards) == 2


def test_all_that_is_missing_is_named_at_once(yard: Yard) -> None:
    for shard in (yard.first, yard.second):
        yard.path(shard).unlink()
    with pytest.raises(VerificationError) as caught:
        gather(yard.bucket, PLAN, yard.promises)
    assert "shard 1/2" in caught.value.message
    assert "shard 2/2" in caught.value.message


# -- damage ------------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b" x",
    "empty": lambda _: b"",
    "a flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("what", ["kernel", "record", "document", "promises"])
def test_what_was_damaged_where_shards_meet_is_never_taken(what: str, damage: str, yard: Yard, tmp_path: Path) -> None:
    made = yard.second.kernels[0]
    path = {
        "kernel": yard.bucket.root / "blobs/sha256" / made.sha256,
        "record": yard.bucket.root / "kernels" / f"{made.key}.json",
        "document": yard.path(yard.second),
        "promises": yard.bucket.root / "promises" / f"{yard.promises.digest}.json",
    }[what]
    content = DAMAGE[damage](path.read_bytes())
    path.unlink()
    path.write_bytes(content)
    look: dict[str, Callable[[], object]] = {
        "kernel": lambda: bring(yard.bucket, made, tmp_path / "out"),
        "record": lambda: find(yard.bucket, made.key),
    }
    with pytest.raises(KartifactsError):
        look.get(what, lambda: gather(yard.bucket, PLAN))()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uri", "../../etc/passwd"),
        ("uri", "/abs"),
        ("arch", "9.9z"),
        ("key", "beef"),
        ("sha256", "../x"),
        ("size", 0),
        ("size", 1 << 40),
        ("suffix", "/../x"),
    ],
)
def test_a_record_that_means_harm_is_refused(field: str, value: object, yard: Yard) -> None:
    made = yard.second.kernels[0]
    path = yard.bucket.root / "kernels" / f"{made.key}.json"
    content = msgspec.to_builtins(made) | {field: value}
    path.unlink()
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(VerificationError):
        find(yard.bucket, made.key)


def test_a_document_under_the_name_of_another_is_refused(yard: Yard) -> None:
    yard.path(yard.second).unlink()
    yard.path(yard.first).rename(yard.path(yard.second))
    with pytest.raises(VerificationError, match=r"2-of-2\.json .* says that it is shard 1/2"):
        gather(yard.bucket, PLAN)


def test_of_two_who_make_one_kernel_the_first_stands(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(b"other bytes")
    first = yard.second.kernels[0]
    late = replace(first, sha256=sha256(b"other bytes"), size=11, seconds=3.0)
    assert offer(yard.bucket, late, tmp_path / "kernel") == first
    assert find(yard.bucket, first.key) == first


def test_what_another_environment_made_is_replaced_and_its_own_document_still_says_what_it_was(
    yard: Yard, tmp_path: Path
) -> None:
    (tmp_path / "kernel").write_bytes(b"other bytes")
    first = yard.second.kernels[0]
    mended = replace(first, sha256=sha256(b"other bytes"), size=11, maker=sha256(b"mended"))
    assert offer(yard.bucket, mended, tmp_path / "kernel") == mended
    assert find(yard.bucket, first.key) == mended
    bring(yard.bucket, first, tmp_path / "first")  # the bytes of both are there
    assert len(gather(yard.bucket, PLAN, yard.promises).shards) == 2


def test_a_shard_that_is_handed_in_again_is_told_of_only_if_it_differs(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    yard.hand_in(yard.second)
    assert not caplog.records
    yard.hand_in(replace(yard.second, overrides={"cxx_launcher": "ccache"}))
    assert [record.getMessage() for record in caplog.records] == [
        f"shard 2/2 of build 'gpu' had been handed in otherwise at {yard.bucket.name}; this run stands now"
    ]


# -- which run ---------------------------------------------------------------------------------------------------------


def test_without_sources_two_states_of_them_cannot_be_told_apart(yard: Yard) -> None:
    other = promise(version="2.0")
    yard.hand_in(replace(yard.second, promises=other.digest), other)
    with pytest.raises(ConfigError, match="shards of 2 states of the sources"):
        gather(yard.bucket, PLAN)
    assert gather(yard.bucket, PLAN, yard.promises).promises == yard.promises


def test_a_bucket_of_another_plan_alone_says_so(yard: Yard) -> None:
    plan = replace(PLAN, build=[replace(PLAN.build[0], archs=["10.0f"])])
    with pytest.raises(VerificationError, match="no shards that were made by this plan; those there were made by"):
        gather(yard.bucket, plan)


class Silent(DirectoryBucket):
    """A bucket that cannot be listed, as plain web servers are."""

    def list(self, prefix: str) -> list[Listed]:
        raise Unlisted(f"{self.name} cannot be listed", permanent=True)


def test_where_nothing_can_be_listed_the_plan_says_how_many_shards_there_are(yard: Yard) -> None:
    silent = Silent(yard.bucket.root)
    assert len(gather(silent, PLAN, yard.promises).shards) == 2
    with pytest.raises(ConfigError, match="cannot say what it holds"):
        gather(silent, PLAN)


# -- materials ---------------------------------------------------------------------------------------------------------


def test_materials_of_parts_are_those_of_the_whole_in_whatever_order(yard: Yard) -> None:
    parts = [materials(list(shard.kernels)) for shard in (yard.first, yard.second)]
    whole = materials(sorted([*yard.first.kernels, *yard.second.kernels], key=lambda made: made.uri))
    assert joined(parts) == joined(parts[::-1]) == whole


def test_materials_that_contradict_each_other_are_refused(yard: Yard) -> None:
    first, second = (materials(list(shard.kernels)) for shard in (yard.first, yard.second))
    other = replace(second, files=[replace(second.files[0], sha256=sha256(b"edited"))])
    with pytest.raises(VerificationError, match=r"demo/op\.cu has two contents"):
        joined([first, other])
    other = replace(second, ops=[replace(second.ops[0], flags=["-O0"])])
    with pytest.raises(VerificationError, match="demo/op was compiled in two ways"):
        joined([first, other])
