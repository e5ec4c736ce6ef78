"""Importing trees in FlashInfer's layout: small ones made here, real cubins, and on request the real wheel."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kartifacts.build.foreign import import_checksums
from kartifacts.errors import ConfigError, StoreError, VerificationError
from kartifacts.model.manifest import Descriptor
from kartifacts.publish.buckets.directory import DirectoryBucket
from kartifacts.publish.protocol import publish
from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository

COMMIT, OTHER = "a" * 40, "b" * 40


def listing(files: dict[str, bytes]) -> str:
    """As sha256sum writes it."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())


def plant(directory: Path, files: dict[str, bytes], text: str | None = None) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (directory / "checksums.txt").write_text(listing(files) if text is None else text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two commits with the same file names and different bytes, files of every suffix and of none."""
    root = tmp_path / "cubins"
    files = {
        "a.cubin": b"no real cubin",
        "b.so": b"\x7fELF but damaged",
        "c.h": b"#pragma once\n",
        "d": b"no suffix",
        "include/deep/flashInferMetaInfo.h": b"upper",
        "include/deep/flashinferMetaInfo.h": b"lower",
        "kernel_map.json": b"{}",
        "empty.txt": b"",
    }
    plant(root / COMMIT / "fmha" / "trtllm-gen", files)
    plant(root / OTHER / "fmha" / "trtllm-gen", {name: content[::-1] for name, content in files.items()})
    return root


def bring(tree: Path, out: Path, **options: Any) -> list[Descriptor]:
    return [bundle for bundle, _ in import_checksums(tree, out, library="foreign", version="1.0", **options)]


def unpacked(out: Path, bundles: list[Descriptor]) -> dict[str, bytes]:
    """Every file of the bundles, by its path."""
    repository, found = Repository(out), {}
    for descriptor in bundles:
        bundle = repository.bundle(descriptor)
        for entry, content in kernels(repository, descriptor):
            assert entry.uri not in found
            assert hashlib.sha256(content).hexdigest() == entry.sha256
            found[entry.uri] = content
        assert bundle.annotations.items() <= descriptor.annotations.items()
    return found


def kernels(repository: Repository, descriptor: Descriptor) -> list[tuple[Any, bytes]]:
    bundle = repository.bundle(descriptor)
    table = repository.table(bundle, "table")
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    packs = [repository.blob(layer.sha256).read_bytes() for layer in bundle.layers]
    blocks = [
        reader.decompress(packs[block.pack][block.offset : block.offset + block.length], max_output_size=block.size)
        for block in table.blocks
    ]
    return [(entry, blocks[entry.block][entry.offset : entry.offset + entry.size]) for entry in table.kernels]


def on_disk(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


# -- what arrives ------------------------------------------------------------------------------------------------------


def test_every_file_of_any_suffix_comes_back_under_its_path(tree: Path, tmp_path: Path) -> None:
    bundles = bring(tree, tmp_path / "out")
    assert unpacked(tmp_path / "out", bundles) == on_disk(tree)
    assert {bundle.note("abi") for bundle in bundles} == {"none"}


def test_equal_names_in_two_families_never_mix(tree: Path, tmp_path: Path) -> None:
    found = unpacked(tmp_path / "out", bring(tree, tmp_path / "out"))
    name = "fmha/trtllm-gen/a.cubin"
    assert found[f"{COMMIT}/{name}"] == b"no real cubin"
    assert found[f"{OTHER}/{name}"] == b"nibuc laer on"


def test_names_that_differ_in_case_alone_are_both_kept(tree: Path, tmp_path: Path) -> None:
    found = unpacked(tmp_path / "out", bring(tree, tmp_path / "out"))
    deep = f"{COMMIT}/fmha/trtllm-gen/include/deep"
    assert (found[f"{deep}/flashInferMetaInfo.h"], found[f"{deep}/flashinferMetaInfo.h"]) == (b"upper", b"lower")


def test_an_import_can_be_released_and_published(tree: Path, tmp_path: Path) -> None:
    bundles = bring(tree, tmp_path / "out")
    make_release(tmp_path / "out", "foreign", "1.0", bundles)
    publish(tmp_path / "out", DirectoryBucket(tmp_path / "bucket"))
    assert unpacked(tmp_path / "bucket", bundles) == on_disk(tree)


def test_importing_again_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    assert bring(tree, tmp_path / "a", jobs=1) == bring(tree, tmp_path / "b", jobs=3)
    assert on_disk(tmp_path / "a") == on_disk(tmp_path / "b")


def test_every_way_in_which_sums_are_written_is_read(tmp_path: Path) -> None:
    files = {"a.cubin": b"1", "b.cubin": b"2", "c.cubin": b"3", "sub/d.cubin": b"4", "e": b"5"}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    text = (
        f"{sums['a.cubin']}  a.cubin\r\n\n"
        f"{sums['b.cubin']} *b.cubin\n   \n"
        f"{sums['c.cubin'].upper()}\tc.cubin  \n"
        f"{sums['sub/d.cubin']}  ./sub/d.cubin\n"
        f"{sums['a.cubin']}  a.cubin\n"
        f"{sums['e']}  e"
    )
    plant(tmp_path / "tree", files, text)
    found = unpacked(tmp_path / "out", bring(tmp_path / "tree", tmp_path / "out"))
    assert found == on_disk(tmp_path / "tree")


def test_a_tree_that_is_one_family_is_taken_too(tmp_path: Path) -> None:
    plant(tmp_path / "tree", {"a.cubin": b"1"})
    [bundle] = bring(tmp_path / "tree", tmp_path / "out")
    assert bundle.note("family") == "foreign"


@pytest.mark.parametrize("directory", ["Gemm-A/b", "_x/y-", "z" * 200, "1/2/3"])
def test_every_directory_gives_a_family_that_readers_take(tmp_path: Path, directory: str) -> None:
    plant(tmp_path / "tree" / directory, {"a": b"1"})
    bundles = bring(tmp_path / "tree", tmp_path / "out")
    assert unpacked(tmp_path / "out", bundles) == on_disk(tmp_path / "tree")


@pytest.mark.parametrize("directory", ["a..b", "with space", "con", ".git"])
def test_a_directory_that_no_uri_may_have_is_named(tmp_path: Path, directory: str) -> None:
    plant(tmp_path / "tree" / directory, {"a": b"1"})
    with pytest.raises(VerificationError, match="not a safe relative path"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_progress_ends_at_twice_the_bytes(tree: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    bring(tree, tmp_path / "out", progress=lambda done, total: told.append((done, total)))
    total = 2 * sum(len(content) for content in on_disk(tree).values())
    assert told[-1] == (total, total)
    assert told == sorted(told)


# -- what is refused ---------------------------------------------------------------------------------------------------


FILES = ["a.cubin", "b.so", "c.h", "d", "empty.txt", "include/deep/flashInferMetaInfo.h"]
DAMAGES = ["missing", "wrong", "grown", "cut", "directory", "dangling link", "pipe"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in FILES for damage in DAMAGES if (name, damage) != ("empty.txt", "cut")],
)
def test_any_listed_file_that_is_not_there_or_not_right_is_named(
    tree: Path, tmp_path: Path, name: str, damage: str
) -> None:
    path = tree / COMMIT / "fmha" / "trtllm-gen" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "wrong":
        path.write_bytes(b"x" * max(1, len(content)))
    elif damage == "grown":
        path.write_bytes(content + b"x")
    elif damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "directory":
        path.mkdir()
    elif damage == "dangling link":
        path.symlink_to("nowhere")
    elif damage == "pipe":
        os.mkfifo(path)
    with pytest.raises(VerificationError) as caught:
        bring(tree, tmp_path / "out")
    assert f"{COMMIT}/fmha/trtllm-gen/{name}: " in caught.value.message
    assert "\n  " in caught.value.message
    assert caught.value.message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_all_faults_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    files = {f"k{number:03}.cubin": b"x" for number in range(100)}
    plant(tmp_path / "tree" / "f", files)
    for number in range(60):
        (tmp_path / "tree" / "f" / f"k{number:03}.cubin").unlink()
    (tmp_path / "tree" / "f" / "k099.cubin").write_bytes(b"y")
    with pytest.raises(VerificationError, match=r"60 missing, 1 wrong") as caught:
        bring(tmp_path / "tree", tmp_path / "out")
    assert caught.value.message.count("\n") == 21
    assert "and 41 more" in caught.value.message


def test_a_file_that_no_list_names_is_refused_or_left_out_when_asked(tree: Path, tmp_path: Path) -> None:
    sound = on_disk(tree)
    (tree / COMMIT / "fmha" / "trtllm-gen" / "a.cubin.lock").write_bytes(b"")
    (tree / "stray.so").write_bytes(b"x")
    with pytest.raises(VerificationError, match="2 not listed") as caught:
        bring(tree, tmp_path / "out")
    assert "stray.so: no checksums.txt lists it" in caught.value.message
    assert unpacked(tmp_path / "out", bring(tree, tmp_path / "out", allow_unlisted=True)) == sound


def test_a_directory_can_be_left_out_by_name(tree: Path, tmp_path: Path) -> None:
    kept = {uri: content for uri, content in on_disk(tree).items() if uri.startswith(COMMIT)}
    (tree / OTHER / "fmha" / "trtllm-gen" / "a.cubin").unlink()
    assert unpacked(tmp_path / "out", bring(tree, tmp_path / "out", without=[f"{OTHER}/"])) == kept
    for absent in ("c" * 40, "..", "/", str(tree / OTHER)):
        with pytest.raises(ConfigError, match="no such directory"):
            bring(tree, tmp_path / "out2", without=[absent])


@pytest.mark.parametrize(
    "line",
    [
        "zz  a.cubin",
        f"{'a' * 63}  a.cubin",
        f"{'a' * 65}  a.cubin",
        f"{'a' * 64}",
        f"{'a' * 64}a.cubin",
        f"{'a' * 64}  ../../etc/passwd",
        f"{'a' * 64}  /etc/passwd",
        f"{'a' * 64}  a\\b",
        f"{'a' * 64}  a b.cubin",
        f"{'a' * 64}  a\0b",
        f"{'a' * 64}  con",
        f"{'a' * 64}  \xe9.cubin",
        "# comment",
        "<html>",
    ],
)
def test_a_line_that_is_no_checksum_or_leads_out_of_the_tree_is_named(tmp_path: Path, line: str) -> None:
    good = {"a.cubin": b"1"}
    plant(tmp_path / "tree" / "f", good, listing(good) + line + "\n")
    with pytest.raises(VerificationError, match=r"f/checksums\.txt line 2: .*\b(expected|not a safe relative path)"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_bytes_that_are_no_text_are_a_typed_error(tmp_path: Path) -> None:
    plant(tmp_path / "tree" / "f", {"a": b"1"})
    (tmp_path / "tree" / "f" / "checksums.txt").write_bytes(b"\xff\xfe\x00\n" * 3)
    with pytest.raises(VerificationError, match="expected a sha256 and a path"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_two_checksums_of_one_file_are_refused(tmp_path: Path) -> None:
    plant(tmp_path / "tree" / "f" / "sub", {"a": b"1"})
    plant(tmp_path / "tree" / "f", {"b": b"2"}, listing({"b": b"2", "sub/a": b"other"}))
    with pytest.raises(VerificationError, match="listed with two checksums"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_a_name_that_is_spelled_otherwise_on_disk_is_pointed_out(tmp_path: Path) -> None:
    plant(tmp_path / "tree" / "f", {"Meta.h": b"1"}, listing({"meta.h": b"1"}))
    with pytest.raises(VerificationError, match=r"f/meta\.h: missing; there is 'f/Meta\.h'"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_a_list_that_is_no_file_is_not_waited_for(tree: Path, tmp_path: Path) -> None:
    (tree / "pipe").mkdir()
    os.mkfifo(tree / "pipe" / "checksums.txt")
    with pytest.raises(VerificationError, match=r"pipe/checksums\.txt: no checksums\.txt lists it"):
        bring(tree, tmp_path / "out")


def test_what_a_link_to_a_directory_holds_is_imported_as_if_it_lay_there(tree: Path, tmp_path: Path) -> None:
    expected = on_disk(tree)
    (tree / OTHER / "fmha").rename(tmp_path / "elsewhere")
    (tree / OTHER / "fmha").symlink_to(tmp_path / "elsewhere")
    (tree / "again").symlink_to(COMMIT)
    expected |= {f"again{uri[40:]}": content for uri, content in expected.items() if uri.startswith(COMMIT)}
    assert unpacked(tmp_path / "out", bring(tree, tmp_path / "out")) == expected
    kept = {uri: content for uri, content in expected.items() if not uri.startswith("again")}
    assert unpacked(tmp_path / "out", bring(tree, tmp_path / "out", without=["again"])) == kept


@pytest.mark.parametrize("target", [".", "..", "../..", "{tree}", "other"])
def test_a_link_that_leads_back_is_named_and_not_followed_for_ever(tree: Path, tmp_path: Path, target: str) -> None:
    (tree / COMMIT / "fmha" / "loop").symlink_to(target.format(tree=tree))
    (tree / COMMIT / "fmha" / "other").mkdir()
    (tree / COMMIT / "fmha" / "other" / "back").symlink_to("..")
    with pytest.raises(ConfigError, match="leads back to where it lies"):
        bring(tree, tmp_path / "out")


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "link to nothing"])
@pytest.mark.parametrize("name", ["a.cubin", "checksums.txt"])
def test_what_is_planted_in_a_tree_is_refused_and_never_waited_for(
    tree: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = tree / COMMIT / "fmha" / "trtllm-gen" / name
    path.unlink()
    plants: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "directory": os.mkdir,
        "device": lambda at: os.symlink("/dev/zero", at),
        "link to nothing": lambda at: os.symlink("absent", at),
    }
    plants[kind](path)
    with pytest.raises(VerificationError, match=r"a\.cubin|checksums\.txt"):
        bring(tree, tmp_path / "out")


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\u202egnp", b"\xff\xfe".decode("utf-8", "surrogateescape")])
def test_names_of_files_cannot_steer_a_terminal(
    tree: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tree / name).write_bytes(b"")
    with pytest.raises(VerificationError) as caught:
        bring(tree, tmp_path / "out")
    assert caught.value.message.count("\n") == 1
    assert caught.value.message.replace("\n", "").isprintable()
    bring(tree, tmp_path / "out", allow_unlisted=True)
    assert caplog.text.replace("\n", "").isprintable()


def test_what_is_called_a_cubin_and_is_none_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Path(sys.executable).resolve().read_bytes()
    files = {"noise.cubin": os.urandom(3000), "host.cubin": host, "half.cubin": host[:100], "data.bin": b"data"}
    plant(tmp_path / "tree" / "f", files)
    bring(tmp_path / "tree", tmp_path / "out")
    for name in files:
        assert (f"'f/{name}' is called a cubin but is no CUDA ELF file" in caplog.text) is name.endswith(".cubin")


def test_nothing_to_import_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        bring(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "tree").mkdir()
    with pytest.raises(ConfigError, match=r"no checksums\.txt"):
        bring(tmp_path / "tree", tmp_path / "out")
    (tmp_path / "tree" / "checksums.txt").write_text("\n\n")
    with pytest.raises(VerificationError, match="it lists nothing"):
        bring(tmp_path / "tree", tmp_path / "out")


def test_an_output_that_cannot_be_written_is_a_typed_error(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError):
        bring(tree, tmp_path / "out")


# -- real cubins -------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
def test_real_cubins_are_sorted_by_the_arch_that_they_say(tmp_path: Path) -> None:
    compiler = shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin") or shutil.which(
        "nvcc"
    )
    if compiler is None:
        pytest.skip("there is no nvcc in CUDA_HOME or on PATH")
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void add(float* a, const float* b) { a[threadIdx.x] += b[threadIdx.x]; }')
    files = {"include/k.h": b"#pragma once\n", "kernel_sm90a.ptx": b"// ptx"}
    for name, sm in {
        "k_Sm100f.cubin": "100f",
        "k.cubin": "90a",
        "lying_sm80.cubin": "90a",
        "plain.cubin": "80",
    }.items():
        subprocess.run([compiler, "-cubin", f"-arch=sm_{sm}", str(source), "-o", str(tmp_path / "made")], check=True)
        files[name] = (tmp_path / "made").read_bytes()
    plant(tmp_path / "tree" / COMMIT / "gemm", files)
    bundles = bring(tmp_path / "tree", tmp_path / "out")
    repository = Repository(tmp_path / "out")
    sorted_out = {
        bundle.note("arch"): {entry.uri.partition("gemm/")[2] for entry, _ in kernels(repository, bundle)}
        for bundle in bundles
    }
    assert sorted_out == {
        "8.0": {"plain.cubin"},
        "9.0a": {"k.cubin", "lying_sm80.cubin", "kernel_sm90a.ptx"},
        "10.0f": {"k_Sm100f.cubin"},
        "any": {"checksums.txt", "include/k.h"},
    }
    needs = {entry.uri[-7:]: entry.needs for bundle in bundles for entry, _ in kernels(repository, bundle)}
    assert set(needs["k.cubin"]) == {"driver"}
    assert unpacked(tmp_path / "out", bundles) == on_disk(tmp_path / "tree")


@pytest.mark.slow
@pytest.mark.network
def test_the_real_flashinfer_cubin_wheel(tmp_path: Path) -> None:
    """458 MB as a wheel, of which one family lists 960 files that it does not hold."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "flashinfer-cubin==0.6.13"]
    subprocess.run([*command, "-d", str(tmp_path)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel", [n for n in archive.namelist() if "/cubins/" in n])
    tree = tmp_path / "wheel" / "flashinfer_cubin" / "cubins"
    with pytest.raises(VerificationError, match=r"\(960 missing\); nothing was imported"):
        bring(tree, tmp_path / "out")
    incomplete = "801e770219613fbf088bc074c414732b26cc550d"
    start = time.monotonic()
    bundles = bring(tree, tmp_path / "out", without=[incomplete])
    seconds = time.monotonic() - start
    make_release(tmp_path / "out", "foreign", "1.0", bundles)
    publish(tmp_path / "out", DirectoryBucket(tmp_path / "bucket"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    packed = sum(path.stat().st_size for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    print(f"imported in {seconds:.1f} s, {packed / 1e6:.1f} MB published, wheel {wheel.stat().st_size / 1e6:.1f} MB")
    print(f"peak {peak} MiB")
    assert packed < wheel.stat().st_size / 2
    assert peak < 500
    shutil.rmtree(tree / incomplete)
    repository, seen = Repository(tmp_path / "bucket"), set()
    for bundle in bundles:
        for entry, content in kernels(repository, bundle):
            assert (tree / entry.uri).read_bytes() == content
            seen.add(entry.uri)
    assert seen == {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
