"""Making a release of bundles, and proving that a repository holds all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from kartifacts.errors import ConfigError, PublishConflict, VerificationError
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.model.layout import check_name
from kartifacts.model.manifest import Descriptor, Pin, decode_release, encode
from kartifacts.publish.oci_index import ref_name
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository

Snapshot = Callable[[Path], dict[str, bytes]]
Make = Callable[..., Any]


def blob(root: Path, digest: str) -> Path:
    return root / "blobs" / "sha256" / digest.removeprefix("sha256:")


def test_the_same_bundles_give_the_same_release_in_any_order(
    make_bundle: Make, snapshot: Snapshot, tmp_path: Path
) -> None:
    made = {}
    for name, order in (("a", [0, 1, 2]), ("b", [2, 0, 1, 0])):
        bundles = [make_bundle(tmp_path / name, arch=arch) for arch in ("8.0", "9.0a", "cpu:x86-64-v3")]
        made[name] = make_release(tmp_path / name, "demo", "1.0", [bundles[n] for n in order])
    assert made["a"] == made["b"]
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_a_release_is_an_oci_image_index_with_one_entry_per_bundle(make_bundle: Make, tmp_path: Path) -> None:
    bundles = [make_bundle(tmp_path, arch=arch) for arch in ("9.0a", "8.0")]
    made = make_release(tmp_path, "demo", "1.0", bundles)
    release = decode_release(blob(tmp_path, made.digest).read_bytes())
    assert (release.library, release.version) == ("demo", "1.0")
    assert [entry.note("arch") for entry in release.manifests] == ["8.0", "9.0a"]
    assert {entry.note("abi") for entry in release.manifests} == {"tvm-ffi-0.1"}
    index = json.loads((tmp_path / "index.json").read_bytes())
    assert [entry["digest"] for entry in index["manifests"]] == [made.digest]
    assert json.loads((tmp_path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}


# The grammar of org.opencontainers.image.ref.name, less '+', which older tools refuse.
TAG = re.compile(r"[A-Za-z0-9]+(?:(?:[-._:@]|--)[A-Za-z0-9]+)*")


@pytest.mark.parametrize("version", ["1.0", "1.0+cu13.torch29", "2026-11-30", "1.0_-_x", "0.1.dev3+g1234", "1--2", "1"])
def test_every_version_gives_a_tag_that_tools_take(make_bundle: Make, tmp_path: Path, version: str) -> None:
    make_release(tmp_path, "my-lib", version, [make_bundle(tmp_path, library="my-lib")])
    [entry] = json.loads((tmp_path / "index.json").read_bytes())["manifests"]
    assert TAG.fullmatch(entry["annotations"]["org.opencontainers.image.ref.name"])
    assert Repository(tmp_path).pins()[0].version == version


@pytest.mark.parametrize(
    ("library", "version", "name"),
    [
        ("kartifacts", "1.0", "kartifacts-1.0"),
        ("flash-attn-3", "2.8.3+cu13.torch29", "flash-attn-3-2.8.3_cu13.torch29"),
        ("my_lib.x", "1.0.0-rc.1", "my_lib.x-1.0.0-rc.1"),
        ("my-lib", "2026-11-30", "my-lib-2026-11-30"),
        ("my-lib", "v1", "my-lib-v1"),
        ("a-1", "2", "a-1-2"),
        ("a", "1-2", "a-1-2--c9366029eed0a50d885159a6e08bff26"),
    ],
)
def test_common_releases_have_the_names_that_one_would_type(library: str, version: str, name: str) -> None:
    assert ref_name(Pin(library=library, version=version, sha256="0" * 64, size=1)) == name


def test_no_two_releases_share_a_name_or_a_tag() -> None:
    """Neither with another library's, nor with what is said about one, nor with what else a registry holds."""
    words = [w for n in (1, 2, 3, 4) for w in map("".join, product("a1._+-", repeat=n)) if is_name(w)]
    pairs = list(product(words[:60], words))
    odd = [
        "1.0",
        "1.0.provenance",
        "1.0-provenance",
        "1.0.provenance.provenance",
        "1.0.materials",
        "1--2",
        "v-2026-11-30-1-2",
    ]
    odd += ["2026-11-30", "11-30", "9" * 128, "9" * 127 + "8", "a" * 64]
    pairs += product(["a", "a-2026", "a-1.0", "sha256", "sha512-a", "x" * 128, "x" * 127 + "y", "a-v"], odd)
    for library, version in list(pairs[-96:]):
        hashed = ref_name(Pin(library=library, version=version, sha256="0" * 64, size=1))
        first, _, rest = hashed.partition("-")
        pairs += [("a", hashed), (first, rest), ("a", hashed + ".provenance")]
        pairs.append(("a", hashed + ".materials"))
    names: dict[str, tuple[str, str]] = {}
    for pair in dict.fromkeys(pairs):
        if not all(map(is_name, pair)):
            continue
        name = ref_name(Pin(library=pair[0], version=pair[1], sha256="0" * 64, size=1))
        for each in (name, f"{name}.provenance", f"{name}.materials"):
            assert names.setdefault(each, pair) == pair, each
            assert TAG.fullmatch(each)
            assert len(each) <= 128
            assert not re.fullmatch(r"sha\d+-[0-9a-f]{32,}(\.[a-z]+)?", each)


def test_skopeo_gets_each_of_two_releases_that_look_alike(make_bundle: Make, tmp_path: Path) -> None:
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("the program skopeo is not installed")
    made = {
        pair: make_release(tmp_path, *pair, [make_bundle(tmp_path, library=pair[0])])
        for pair in (("a", "1-2"), ("a-1", "2"), ("a", "1.0+x"), ("a", "1.0_x"))
    }
    for (library, version), release in made.items():
        name = ref_name(Pin(library=library, version=version, sha256="0" * 64, size=1))
        asked = [skopeo, "--insecure-policy", "inspect", "--raw", f"oci:{tmp_path}:{name}"]
        got = subprocess.run(asked, capture_output=True, check=False, timeout=60)
        assert (got.stderr, f"sha256:{sha256(got.stdout)}") == (b"", release.digest)


def is_name(text: str) -> bool:
    try:
        return bool(check_name(text, "word"))
    except ConfigError:
        return False


def test_a_release_that_was_listed_under_another_name_is_listed_once(make_bundle: Make, tmp_path: Path) -> None:
    bundles = [make_bundle(tmp_path)]
    make_release(tmp_path, "demo", "1.0", bundles)
    path = tmp_path / "index.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"demo-1.0"', b'"demo-of-old"'))
    make_release(tmp_path, "demo", "1.0", bundles)
    assert path.read_bytes() == before


def test_making_it_again_changes_nothing(make_repository: Make, snapshot: Snapshot, tmp_path: Path) -> None:
    before = snapshot(make_repository(tmp_path / "r"))
    assert snapshot(make_repository(tmp_path / "r")) == before


def test_another_content_of_the_same_version_is_refused(make_bundle: Make, snapshot: Snapshot, tmp_path: Path) -> None:
    first, second = make_bundle(tmp_path / "r"), make_bundle(tmp_path / "r", content=1)
    make_release(tmp_path / "r", "demo", "1.0", [first])
    before = snapshot(tmp_path / "r")
    with pytest.raises(PublishConflict, match=r"another content of demo 1\.0"):
        make_release(tmp_path / "r", "demo", "1.0", [second])
    assert snapshot(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("library", "version"), [("Demo", "1"), ("demo", "1/0"), ("demo", ".."), ("demo", ""), ("con", "1"), ("a b", "1")]
)
def test_a_name_that_cannot_be_a_path_is_refused(make_bundle: Make, tmp_path: Path, library: str, version: str) -> None:
    with pytest.raises(ConfigError, match=r"bad (library|version) name"):
        make_release(tmp_path / "r", library, version, [make_bundle(tmp_path / "r")])


def test_a_release_of_nothing_or_of_strangers_is_refused(make_bundle: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no bundles"):
        make_release(tmp_path, "demo", "1.0", [])
    with pytest.raises(ConfigError, match="a bundle of 'other'"):
        make_release(tmp_path, "demo", "1.0", [make_bundle(tmp_path, library="other")])
    with pytest.raises(VerificationError, match="is missing"):
        make_release(tmp_path / "elsewhere", "demo", "1.0", [make_bundle(tmp_path)])


# -- verify_repository -------------------------------------------------------------------------------------------------


def test_a_sound_repository_has_no_faults(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    make_repository(root, "2.0", content=1)
    told: list[tuple[int, int]] = []
    report = verify_repository(root, deep=True, progress=lambda done, total: told.append((done, total)))
    assert report.faults == ()
    assert report.kernels == 2 * 6 * 4
    assert [pin.version for pin in report.pins] == ["1.0", "2.0"]
    assert told[-1] == (report.size, report.size)
    on_disk = {path.name for path in (root / "blobs" / "sha256").iterdir()}
    assert {blob.digest for blob in report.blobs} == on_disk


def test_every_single_damaged_blob_is_found_and_named(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    for needed in verify_repository(root).blobs:
        path = blob(root, needed.digest)
        sound = path.read_bytes()
        path.write_bytes(sound[:10] + bytes([sound[10] ^ 0xFF]) + sound[11:])
        faults = verify_repository(root).faults
        path.write_bytes(sound)
        assert any(needed.digest in str(fault) for fault in faults)


def test_all_faults_are_listed_not_only_the_first(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    packs = [needed for needed in verify_repository(root).blobs if needed.what.startswith("pack")]
    for needed in packs:
        blob(root, needed.digest).unlink()
    report = verify_repository(root)
    assert {fault.what for fault in report.faults} == {needed.what for needed in packs}
    with pytest.raises(VerificationError, match=f"{len(packs)} faults") as caught:
        report.check("the repository")
    assert f"and {len(packs) - 10} more" in caught.value.message


def test_two_contents_of_one_version_are_a_fault(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    other = make_repository(tmp_path / "other", content=1)
    name = next((other / "targets").rglob("*.json"))
    (root / name.relative_to(other)).write_bytes(name.read_bytes())
    with pytest.raises(VerificationError, match="two contents of demo"):
        verify_repository(root)


def test_a_release_under_a_name_of_another_is_a_fault(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    (root / "targets" / "demo" / "1.0").rename(root / "targets" / "demo" / "9.9")
    assert "is not the release that its name says" in str(verify_repository(root).faults[0])


@pytest.mark.parametrize("name", ["x.index.json", "A" * 64 + ".index.json"])
def test_a_strange_name_among_the_releases_is_a_typed_error(make_repository: Make, tmp_path: Path, name: str) -> None:
    root = make_repository(tmp_path / "r")
    (root / "targets" / "demo" / "1.0" / name).write_text("{}")
    with pytest.raises(VerificationError, match="not the name of a release"):
        verify_repository(root)


def rewritten(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Make a release anew whose only bundle has a changed kernel table; all digests on the way are right."""
    [pin] = Repository(root).pins()
    [descriptor] = Repository(root).release(pin).manifests
    manifest = json.loads(blob(root, descriptor.digest).read_bytes())
    table = json.loads(zstandard.ZstdDecompressor().decompress(blob(root, manifest["config"]["digest"]).read_bytes()))
    change(table)
    raw = canonical_json(table)
    compressed = zstandard.ZstdCompressor().compress(raw)
    manifest["config"] |= {"digest": f"sha256:{sha256(compressed)}", "size": len(compressed)}
    manifest["config"]["annotations"]["dev.kartifacts.raw-size"] = str(len(raw))
    content = json.dumps(manifest).encode()
    for data in (compressed, content):
        blob(root, sha256(data)).write_bytes(data)
    changed = msgspec.structs.replace(descriptor, digest=f"sha256:{sha256(content)}", size=len(content))
    make_release(root, "demo", "2.0", [Descriptor(**msgspec.structs.asdict(changed))])


@pytest.mark.parametrize("what", ["kernel", "block", "overlap", "size"])
def test_a_table_that_promises_other_bytes_than_the_packs_hold_is_found_by_a_deep_check(
    make_bundle: Make, tmp_path: Path, what: str
) -> None:
    make_release(tmp_path / "r", "demo", "1.0", [make_bundle(tmp_path / "r")])

    def change(table: dict[str, Any]) -> None:
        if what == "kernel":
            table["kernels"][2]["sha256"] = "0" * 64
        elif what == "block":
            table["blocks"][2][4] = "0" * 64
        elif what == "overlap":
            table["kernels"][2]["offset"] += 1
            table["kernels"][2]["size"] -= 1
        else:
            table["blocks"][2][3] += 1

    rewritten(tmp_path / "r", change)
    assert verify_repository(tmp_path / "r", deep=True, version="1.0").faults == ()
    assert verify_repository(tmp_path / "r", version="2.0").faults == ()
    assert len(verify_repository(tmp_path / "r", deep=True, version="2.0").faults) == 1


def test_a_table_that_points_outside_its_pack_is_found_by_any_check(make_bundle: Make, tmp_path: Path) -> None:
    make_release(tmp_path / "r", "demo", "1.0", [make_bundle(tmp_path / "r")])
    rewritten(tmp_path / "r", lambda table: table["blocks"][0].__setitem__(1, 1 << 40))
    assert "outside its pack" in str(verify_repository(tmp_path / "r", version="2.0").faults[0])


def test_a_table_that_is_a_bomb_is_not_decompressed(make_bundle: Make, tmp_path: Path) -> None:
    make_release(tmp_path / "r", "demo", "1.0", [make_bundle(tmp_path / "r")])
    rewritten(tmp_path / "r", lambda table: table["toolchain"].update(x="x" * (300 << 20)))
    assert "bytes when decompressed" in str(verify_repository(tmp_path / "r", version="2.0").faults[0])


def test_a_release_without_bundles_is_a_fault(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    [pin] = Repository(root).pins()
    empty = encode(msgspec.structs.replace(Repository(root).release(pin), manifests=[]))
    blob(root, sha256(empty)).write_bytes(empty)
    old = next((root / "targets").rglob("*.json"))
    old.with_name(f"{sha256(empty)}.index.json").write_bytes(empty)
    old.unlink()
    assert "without bundles" in str(verify_repository(root).faults)
