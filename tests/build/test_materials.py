"""What a release says of its making is true, is all of it, and is the same wherever it was made."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kartifacts import config
from kartifacts.build.library import Library, open_library
from kartifacts.build.materials import compiled
from kartifacts.build.recipes import read_recipe
from kartifacts.build.toolchains import find
from kartifacts.cli import flows
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Descriptor, encode
from kartifacts.model.materials import Materials, decode_materials
from kartifacts.publish.provenance import statement_of
from kartifacts.publish.referrers import MATERIALS, by_bundle, index_of, refer
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository, check_materials
from kartifacts.publish.verify import verify_repository
from tests.conftest import Machine, declared

CPU = "cpu:x86-64-v3"
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds ops of a copy of our own kernels in a place of its own."""

    def make(
        place: str,
        version: str = "1.0",
        change: Callable[[Path], None] | None = None,
        ops: str = "norm/rmsnorm",
        asked: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Path:
        root = tmp_path / place / "kernels"
        if not root.exists():
            shutil.copytree(Path(__file__).parents[2] / "kernels", root)
        if change is not None:
            change(root)
        library = open_library(root, "kartifacts")
        monkeypatch.setattr("kartifacts.build.library.discover", lambda **_: [library])
        settings = config.read(overrides={"workspace": tmp_path / place / "workspace", "archs": CPU, **(asked or {})})
        out = tmp_path / place / "out"
        flows.build(settings, ops=ops, out=out, library="kartifacts", version=version, lock=None, **more)
        return out

    return make


def only_bundle(repository: Path, version: str = "1.0") -> tuple[Descriptor, Materials]:
    shelf = Repository(repository)
    (pin,) = shelf.pins(version=version)
    (bundle,) = shelf.release(pin).manifests
    index = shelf.made_of(pin)
    assert index is not None
    (layer,) = by_bundle(MATERIALS, index, pin, [bundle], shelf.read)[bundle.sha256].layers
    return bundle, shelf.materials(layer, "materials")


def blobs(repository: Path) -> set[str]:
    return {path.name for path in (repository / "blobs/sha256").iterdir()}


def test_they_name_every_source_and_the_programs_that_compiled_it(build: Build, tmp_path: Path) -> None:
    bundle, materials = only_bundle(build("here"))
    root = tmp_path / "here/kernels"
    assert {"norm/rmsnorm_cpu.cpp", "norm/rmsnorm_binding.cpp", "include/kart/ffi.h"} <= {
        file.path for file in materials.files
    }
    for file in materials.files:
        content = (root / file.path).read_bytes()
        assert (file.sha256, file.size) == (sha256(content), len(content))
        assert file.sha1 == hashlib.sha1(content).hexdigest()
    (op,) = materials.ops
    assert set(op.reached) == {file.path for file in materials.files}
    assert [made.uri for made in op.kernels] == [
        f"norm/rmsnorm?dtype={name}" for name in ("bfloat16", "float16", "float32")
    ]
    toolchain = find("cxx", config.read(overrides={"workspace": tmp_path / "here/workspace"}))
    assert materials.toolchain == toolchain.fingerprint
    assert materials.programs["compiler"] == sha256(toolchain.place.read_bytes())
    assert "libtvm_ffi" in "".join(materials.programs)
    assert bundle.note("arch") == materials.arch == CPU


def test_flags_and_launchers_of_the_settings_are_told_to_who_asks_and_to_who_has_the_release(
    build: Build, tmp_path: Path
) -> None:
    """What `kartifacts config` shows of them while it is built is what the signed statement says of them later."""
    launcher = tmp_path / "ccache"
    launcher.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    launcher.chmod(0o755)
    asked = {"cxx_flags": "-O1 -DX='a b'", "cxx_launcher": f"{launcher} --fast", "debug": True}
    environ = {"cxx_flags": asked["cxx_flags"], "cxx_launcher": asked["cxx_launcher"], "debug": 1}
    rows = Machine(tmp_path / "home").cli("config", "--json", **environ).data["settings"]
    for name, value in environ.items():
        assert rows[name] == {"value": str(value), "origin": f"environment KARTIFACTS_{name.upper()}"}

    bundle, materials = only_bundle(build("here", asked=asked))
    statement = statement_of(bundle, materials, sha256(b"materials"), sha256(b"sbom"), "https://ci.example")
    definition = statement["predicate"]["buildDefinition"]
    assert definition["internalParameters"]["toolchain"]["overrides"] == "-g -O0 -O1 '-DX=a b'"
    started = {"name": "started by ccache", "digest": {"sha256": sha256(launcher.read_bytes())}}
    assert {**started, "annotations": {"kind": "program"}} in definition["resolvedDependencies"]

    usual, plain = only_bundle(build("usual"))
    said = json.dumps(statement_of(usual, plain, sha256(b"materials"), sha256(b"sbom"), "https://ci.example"))
    assert "overrides" not in said
    assert "started by" not in said


def test_of_a_source_that_was_rendered_they_name_the_template(build: Build) -> None:
    """What it was rendered to differs from kernel to kernel, and is no file of the library."""
    _, materials = only_bundle(build("here", ops="rope/apply_rope"))
    paths = {file.path for file in materials.files}
    (op,) = materials.ops
    assert {made.uri for made in op.kernels} == {uri for uri in declared() if uri.startswith("rope/apply_rope?")}
    assert "rope/apply_rope_cpu.cpp.jinja" in paths
    assert "rope/apply_rope_cpu.cpp" not in paths
    assert set(op.reached) == paths


def test_they_are_the_same_wherever_and_however_often_it_is_built(build: Build, tmp_path: Path) -> None:
    first, again, elsewhere = build("here"), build("here"), build("a/longer/way/down")
    contents = [encode(only_bundle(place)[1]) for place in (first, again, elsewhere)]
    assert len(set(contents)) == 1
    assert [pin.sha256 for pin in Repository(first).pins()] == [pin.sha256 for pin in Repository(elsewhere).pins()]
    for private in (str(tmp_path), str(Path.home()), "/usr", "longer"):
        assert private.encode() not in contents[0]


def test_an_unchanged_bundle_of_a_later_release_shares_them(build: Build) -> None:
    before = blobs(build("here", "1.0"))
    repository = build("here", "1.1")
    assert only_bundle(repository, "1.0") == only_bundle(repository, "1.1")
    assert len(blobs(repository) - before) == 2  # the index of the release, and of what it was made of


def test_a_changed_comment_is_in_them_although_the_bytes_are_the_same(build: Build, tmp_path: Path) -> None:
    here = build("here")
    _, old = only_bundle(here)

    def comment(root: Path) -> None:
        with (root / "norm/rmsnorm.h").open("a") as file:
            file.write("// said otherwise\n")

    _, new = only_bundle(build("there", change=comment))
    changed = {file.path for file in new.files if file not in old.files}
    assert changed == {"norm/rmsnorm.h"}


def test_a_release_is_the_same_whatever_compiled_the_same_bytes(build: Build) -> None:
    """Its digest hangs on its kernels; of two builds into one directory the later one says what they were made of."""
    repository = build("here")
    (pin,), (bundle, materials) = Repository(repository).pins(), only_bundle(repository)
    other = msgspec.structs.replace(materials, programs={**materials.programs, "compiler": "0" * 64})
    for made_of in (other, materials):
        make_release(repository, "kartifacts", "1.0", [bundle], {bundle.digest: made_of})
        assert Repository(repository).pins() == [pin]
        assert only_bundle(repository)[1] == made_of
        verify_repository(repository).check("it")
    before = (repository / "index.json").read_bytes()
    make_release(repository, "kartifacts", "1.0", [bundle])  # who does not know leaves what is known
    make_release(repository, "kartifacts", "1.0", [bundle], {bundle.digest: materials})
    assert (repository / "index.json").read_bytes() == before


def test_a_source_that_changed_after_it_was_compiled_is_not_written_down(
    demo: Library, root: Path, settings: Settings
) -> None:
    from kartifacts.build.compile import compile_specs

    spec = demo.spec("answer", {"size": "small"}, parse_arch(CPU))
    built = compile_specs([spec], settings).kernels
    (root / "include/scale.h").write_text("#pragma once\n#define SCALE 8L\n")
    with pytest.raises(BuildError, match=r"include/scale\.h has changed"):
        compiled([(spec, built[0])], arch=CPU, abi="tvm-ffi-0.1", programs={})


def test_a_recipe_is_named_only_where_its_compilers_were_used(build: Build, tmp_path: Path, settings: Settings) -> None:
    found = find("cxx", settings)
    recipe = tmp_path / "builder.toml"
    recipe.write_text(f'name = "ours"\n[cxx]\nversion = {json.dumps(found.fingerprint["version"])}\n')
    _, materials = only_bundle(build("here", recipe=recipe))
    assert materials.recipe is not None
    assert (materials.recipe.name, materials.recipe.sha256) == ("ours", sha256(recipe.read_bytes()))
    for text, complaint in (
        ('name = "ours"\n[cxx]\nversion = "gcc 1"\n', "pins cxx 'gcc 1'"),
        ('name = "ours"\n', "not at all"),
        ("name = 3\n", "is not the recipe"),
        ("\udcff", "is not the recipe"),
    ):
        recipe.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=complaint):
            read_recipe(recipe, [found])
    with pytest.raises(ConfigError, match="cannot read"):
        read_recipe(tmp_path / "none.toml", [found])


def test_an_import_says_which_lists_promised_its_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "abc/fmha").mkdir(parents=True)
    content = b"not really a kernel"
    (tree / "abc/fmha/one.bin").write_bytes(content)
    promise = f"{sha256(content)}  one.bin\n".encode()
    (tree / "abc/fmha/checksums.txt").write_bytes(promise)
    flows.import_checksums(
        tree, tmp_path / "out", library="demo", version="1.0", allow_unlisted=False, without=(), lock=None,
        settings=config.read(),
    )  # fmt: skip
    _, materials = only_bundle(tmp_path / "out")
    assert materials.kind == "import"
    assert [(file.path, file.sha256) for file in materials.files] == [("abc/fmha/checksums.txt", sha256(promise))]
    assert ("abc/fmha/one.bin", sha256(content), len(content)) in [
        (file.path, file.sha256, file.size) for file in materials.imported
    ]


def test_missing_or_damaged_ones_are_found(build: Build) -> None:
    repository = build("here")
    blob = Repository(repository).blob(sha256(encode(only_bundle(repository)[1])))
    assert blob.name not in {each.digest for each in verify_repository(repository).blobs}  # so it is not published
    data = bytearray(blob.read_bytes())
    blob.unlink()
    (fault,) = verify_repository(repository).faults
    assert "materials of bundle norm" in fault.what
    assert fault.missing
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    faults = verify_repository(repository).faults
    assert faults
    assert not any(fault.missing for fault in faults)
    assert all("materials of bundle norm" in fault.what for fault in faults)


def test_those_of_other_kernels_are_refused(build: Build) -> None:
    repository = build("here")
    bundle, materials = only_bundle(repository)
    shelf = Repository(repository)
    table = shelf.table(shelf.bundle(bundle), "table")
    check_materials(materials, table, "it")
    (op,) = materials.ops
    fewer = msgspec.structs.replace(op, kernels=op.kernels[1:])
    other = msgspec.structs.replace(op, kernels=[*op.kernels[:2], msgspec.structs.replace(op.kernels[2], key="0" * 64)])
    for wrong in (
        msgspec.structs.replace(materials, arch="9.0a"),
        msgspec.structs.replace(materials, ops=[fewer]),
        msgspec.structs.replace(materials, ops=[other]),
        msgspec.structs.replace(materials, files=materials.files[1:]),
        msgspec.structs.replace(materials, files=[*materials.files, materials.files[0]]),
        msgspec.structs.replace(materials, kind="import"),
    ):
        with pytest.raises(VerificationError):
            check_materials(decode_materials(encode(wrong)), table, "it")


def test_an_index_of_them_that_does_not_hold_is_refused(build: Build) -> None:
    """Whatever leads to them, what it says is looked at, and all of it is about the bundles of the release, once."""
    repository = build("here")
    shelf, listed = Repository(repository), repository / "index.json"
    bundle, materials = only_bundle(repository)
    before = json.loads(listed.read_bytes())
    (entry,) = (each for each in before["manifests"] if "dev.kartifacts.materials-of" in each["annotations"])
    made = refer(MATERIALS, bundle, [encode(materials)])
    foreign = refer(MATERIALS, msgspec.structs.replace(bundle, digest="sha256:" + "ab" * 32), [encode(materials)])
    stranger = refer(MATERIALS, bundle, [encode(msgspec.structs.replace(materials, arch="9.0a"))])

    def complaint(**changed: Any) -> str:
        others = [each for each in before["manifests"] if each != entry]
        listed.write_text(json.dumps({**before, "manifests": [*others, {**entry, **changed}]}))
        return " ".join(map(str, verify_repository(repository).faults))

    def with_index(index: bytes) -> str:
        shelf.blob(sha256(index)).write_bytes(index)
        return complaint(digest=f"sha256:{sha256(index)}", size=len(index))

    assert complaint() == ""
    for digest in ("", "sha256:0", "sha256:" + "0" * 64, None, 7):
        assert "materials of kartifacts 1.0" in complaint(digest=digest)
    for size in ("5", -1, None, entry["size"] + 1, 9 << 40):
        assert "materials of kartifacts 1.0" in complaint(size=size)
    for each in (foreign, stranger):
        for digest, content in each.blobs:
            shelf.blob(digest).write_bytes(content)
    assert with_index(index_of(MATERIALS, "kartifacts", "1.0", [made])) == ""
    assert "it says" in with_index(index_of(MATERIALS, "kartifacts", "2.0", [made]))
    assert "twice" in with_index(index_of(MATERIALS, "kartifacts", "1.0", [made, made]))
    assert "another release" in with_index(index_of(MATERIALS, "kartifacts", "1.0", [made, foreign]))
    assert "those of" in with_index(index_of(MATERIALS, "kartifacts", "1.0", [stranger]))
    assert "malformed" in with_index(b"{}")
