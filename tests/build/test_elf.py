"""What `inspect` reads, held against real compilers, readelf's view by pyelftools, and damaged files."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm_ffi
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from kartifacts.build.elf import cubin_arch, inspect, inspect_bytes
from kartifacts.errors import StoreError, VerificationError
from kartifacts.model.arch import parse_arch

KERNEL = """
extern "C" __global__ void add(float* a, const float* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) a[i] += b[i];
}
"""
LAUNCHER = """
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_add(void* a, const void* b, int n, void*) {
  add<<<1, 32>>>((float*)a, (const float*)b, n);
  return (int)cudaGetLastError();
}
"""
Compile = Callable[..., Path]


@pytest.fixture
def cxx(tmp_path: Path) -> Compile:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ on PATH")

    def compile_shared(source: str, *flags: str) -> Path:
        made = tmp_path / f"lib{len(list(tmp_path.iterdir()))}.so"
        command = [compiler, "-x", "c++", "-", "-shared", "-fPIC", "-o", str(made), *flags]
        subprocess.run(command, input=source.encode(), check=True)
        return made

    return compile_shared


@pytest.fixture
def nvcc(tmp_path: Path) -> Compile:
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", os.environ.get("PATH", os.defpath)]
    compiler = shutil.which("nvcc", path=os.pathsep.join(places))
    if compiler is None:
        pytest.skip("there is no nvcc in CUDA_HOME or on PATH")

    def compile_cuda(source: str, *flags: str) -> Path:
        number = len(list(tmp_path.iterdir()))
        code, made = tmp_path / f"k{number}.cu", tmp_path / f"k{number}.out"
        code.write_text(source)
        subprocess.run([compiler, str(code), "-o", str(made), *flags], check=True)
        return made

    return compile_cuda


def images(*archs: str) -> list[str]:
    """nvcc's flags for an image per arch; `+PTX` asks for PTX alone."""
    flags = []
    for arch in archs:
        sm, ptx = arch.removesuffix("+PTX").replace(".", ""), arch.endswith("+PTX")
        flags += ["-gencode", f"arch=compute_{sm},code={'compute' if ptx else 'sm'}_{sm}"]
    return flags


# -- GPU code ----------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["7.5", "8.0", "9.0", "9.0a", "10.0", "10.0a", "10.0f", "12.0f"])
def test_a_cubin_is_never_taken_for_another_arch_or_suffix(nvcc: Compile, arch: str) -> None:
    cubin = nvcc(KERNEL, "-cubin", *images(arch))
    assert cubin_arch(cubin.read_bytes()) == parse_arch(arch)
    found = inspect(cubin)
    assert (found.kind, found.machine, found.archs) == ("cubin", "cuda", (parse_arch(arch),))
    assert found.needs["driver"].endswith(".0")


@pytest.mark.parametrize(("flags", "arch"), [(0x500550, "8.0"), (0x5A055A, "9.0"), (0x5A0D5A, "9.0a")])
def test_a_cubin_of_an_assembler_before_cuda_13_tells_its_suffix(flags: int, arch: str) -> None:
    """As Triton and CuTe DSL bring one for GPUs before Blackwell: there are no notes, and the flags are laid out so."""
    header = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 51, 2, 190, 1, 0, 0, 0, flags, 64, 0, 0, 64, 0, 0
    )
    found = inspect_bytes(header[:8] + b"\x07" + header[9:], "crafted")
    assert found.archs == (parse_arch(arch),)
    [image] = found.images
    assert [str(each) for each in map(parse_arch, ("8.0", "9.0", "9.0a", "9.0+PTX")) if image.is_for(each)] == [arch]


@pytest.mark.nvcc
@pytest.mark.parametrize("mode", ["none", "speed", "balance", "size"])
def test_no_image_in_a_shared_object_is_overlooked_compressed_or_not(nvcc: Compile, mode: str) -> None:
    archs = ("8.0", "9.0a", "10.0f", "12.0f", "12.0+PTX")
    made = nvcc(
        KERNEL + LAUNCHER,
        "-shared",
        "-Xcompiler",
        "-fPIC",
        f"--compress-mode={mode}",
        "-Xlinker",
        "-s",
        *images(*archs),
    )
    found = inspect(made)
    assert set(found.archs) == {parse_arch(arch) for arch in archs}
    assert found.exports == ("add",)
    assert found.kind == "shared"


@pytest.mark.nvcc
def test_an_image_that_fatbinary_compressed_by_lz4_still_tells_its_suffix(nvcc: Compile) -> None:
    made = nvcc(
        KERNEL + LAUNCHER, "-shared", "-Xcompiler", "-fPIC", "-Xfatbin", "-compress-all", *images("9.0a", "10.0f")
    )
    assert set(inspect(made).archs) == {parse_arch("9.0a"), parse_arch("10.0f")}


@pytest.mark.nvcc
def test_ptx_beside_code_does_not_raise_the_driver_that_is_needed(nvcc: Compile) -> None:
    options = ("-shared", "-Xcompiler", "-fPIC", "-Xfatbin", "-compress-all")
    found = inspect(nvcc(KERNEL + LAUNCHER, *options, *images("9.0", "9.0+PTX")))
    assert found.archs == (parse_arch("9.0"), parse_arch("9.0+PTX"))
    assert found.needs["driver"].endswith(".0")


@pytest.mark.nvcc
def test_ptx_alone_is_not_reported_as_code_and_needs_the_driver_of_its_version(nvcc: Compile) -> None:
    made = nvcc(KERNEL + LAUNCHER, "-shared", "-Xcompiler", "-fPIC", *images("8.0+PTX"))
    found = inspect(made)
    assert found.archs == (parse_arch("8.0+PTX"),)
    cubin = inspect(nvcc(KERNEL, "-cubin", *images("8.0")))
    assert found.needs["driver"].partition(".")[0] == cubin.needs["driver"].partition(".")[0]


@pytest.mark.nvcc
def test_local_memory_of_a_kernel_is_seen(nvcc: Compile) -> None:
    spilling = """
    extern "C" __global__ void spill(const float* x, float* y, int n, const int* p) {
      float a[64], s = 0;
      for (int i = 0; i < 64; i++) a[i] = x[i];
      for (int i = 0; i < n; i++) s += a[p[i] & 63];
      y[0] = s;
    }"""
    found = inspect(nvcc(KERNEL + spilling, "-cubin", *images("9.0a"))).functions
    assert {name: (usage.stack, usage.spill_stores) for name, usage in found.items()} == {
        "add": (0, 0),
        "spill": (256, 0),
    }


def test_what_is_no_cubin_has_no_arch(cxx: Compile) -> None:
    assert cubin_arch(b"") is None
    assert cubin_arch(b"//\n// Generated by NVIDIA NVVM Compiler\n") is None
    assert cubin_arch(cxx("int f() { return 1; }").read_bytes()) is None


# -- host code ---------------------------------------------------------------------------------------------------------


def test_reserved_and_hidden_names_are_not_exports(cxx: Compile) -> None:
    reserved = ["main", "_library_ctx", "_library_bin", "_metadata_add", "_doc_add", "_cubin_k"]
    names = ["add", "_private", "mainline", *reserved]
    source = "".join(f'extern "C" int __tvm_ffi_{name}() {{ return 0; }}\n' for name in names)
    source += 'extern "C" __attribute__((visibility("hidden"))) int __tvm_ffi_hidden() { return 0; }\nint other;'
    assert inspect(cxx(source)).exports == ("_private", "add", "mainline")


def test_undefined_symbols_are_listed_and_weak_ones_are_not(cxx: Compile) -> None:
    source = """
    extern "C" int absent(); extern "C" __attribute__((weak)) int optional();
    extern "C" int f() { return absent() + (optional ? optional() : 0); }"""
    found = inspect(cxx(source))
    assert "absent" in found.undefined
    assert "optional" not in found.undefined
    assert "f" not in found.undefined


def test_versions_are_compared_as_numbers(cxx: Compile) -> None:
    # __stack_chk_fail came with GLIBC_2.4, memcpy's present version with 2.14: as text 2.4 would win.
    source = """
    #include <cstring>
    extern "C" void f(char* to, const char* from, unsigned long n) {
      char b[64];
      memcpy(b, from, n);
      memcpy(to, b, n);
    }"""
    made = cxx(source, "-O0", "-fno-builtin", "-fstack-protector-all")
    with made.open("rb") as file:
        assert {"GLIBC_2.4", "GLIBC_2.14"} <= version_names(ELFFile(file))
    assert inspect(made).needs["glibc"] == "2.14"


def test_a_build_path_in_the_file_is_seen(cxx: Compile) -> None:
    assert inspect(cxx("int x;")).run_path == ""
    assert inspect(cxx("int x;", "-Wl,-rpath,/somewhere")).run_path == "/somewhere"
    assert inspect(cxx("int x;", "-Wl,--disable-new-dtags,-rpath,/somewhere")).run_path == "/somewhere"


def test_the_ffi_is_needed_with_and_without_a_link_to_it(cxx: Compile) -> None:
    calling = 'extern "C" int TVMFFIErrorSetRaised(); extern "C" int f() { return TVMFFIErrorSetRaised(); }'
    called = 'extern "C" int __tvm_ffi_f(void*, const void*, int, void*) { return 0; }'
    for source in (calling, called):  # the second has nothing undefined that would tell
        assert inspect(cxx(source)).needs["tvm_ffi"] == "0.1"
    libraries = Path(tvm_ffi.__file__).parent / "lib"
    linked = cxx("int x;", "-Wl,--no-as-needed", f"-L{libraries}", "-ltvm_ffi")
    assert inspect(linked).needs["tvm_ffi"] == "0.1"
    assert "tvm_ffi" not in inspect(cxx("int x;")).needs


def version_names(elf: ELFFile) -> set[str]:
    return {
        auxiliary.name
        for section in elf.iter_sections()
        if isinstance(section, GNUVerNeedSection)
        for _, entries in section.iter_versions()
        for auxiliary in entries
    }


def installed_libraries() -> list[Path]:
    return sorted(Path(tvm_ffi.__file__).parent.rglob("*.so"))


@pytest.mark.parametrize("library", installed_libraries(), ids=lambda path: path.name)
def test_real_libraries_read_as_pyelftools_reads_them(library: Path) -> None:
    found = inspect(library)
    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic, symbols, text = (elf.get_section_by_name(name) for name in (".dynamic", ".dynsym", ".text"))
        assert isinstance(dynamic, DynamicSection)
        assert isinstance(symbols, SymbolTableSection)
        assert text is not None
        assert list(found.needed) == [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]  # type: ignore[attr-defined]
        expected = {
            symbol.name
            for symbol in symbols.iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }
        assert set(found.undefined) == expected
        names = version_names(elf)
        assert found.sections[".text"] == text["sh_size"]
    for family, prefix in (("glibc", "GLIBC_"), ("glibcxx", "GLIBCXX_"), ("cxxabi", "CXXABI_")):
        numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix) and name[-1].isdigit()]
        assert found.needs.get(family) == max(numbers, key=lambda text: [int(n) for n in text.split(".")], default=None)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01\x01\x01" + bytes(80), b"\x7fELF\x02\x02" + bytes(80)]
)
def test_what_is_no_elf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    with pytest.raises(VerificationError, match="not a sound ELF file"):
        inspect(path)


def test_a_file_that_cannot_be_read_is_no_bare_oserror(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        inspect(tmp_path / "absent.so")
    with pytest.raises(StoreError, match="cannot read"):
        inspect(tmp_path)


def survives_damage(sound: bytes, path: Path) -> int:
    """Cut and flip `sound` in many places; count the refusals.  Anything but a VerificationError escapes."""
    chance = random.Random(7)
    damaged = [sound[: len(sound) * step // 40] for step in range(40)]
    for _ in range(600):
        broken = bytearray(sound)
        for _ in range(chance.choice((1, 4, 64))):
            broken[chance.randrange(len(broken))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        damaged.append(bytes(broken))
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            inspect(path)
        except VerificationError:
            refused += 1
        try:
            cubin_arch(data)
        except VerificationError:
            refused += 1
    return refused


def test_a_damaged_shared_object_raises_only_a_typed_error(cxx: Compile, tmp_path: Path) -> None:
    made = cxx('#include <string>\nextern "C" int __tvm_ffi_f(int n) { return std::to_string(n).size(); }', "-Wl,-s")
    assert survives_damage(made.read_bytes(), tmp_path / "damaged.so") > 20


@pytest.mark.nvcc
def test_a_damaged_cubin_raises_only_a_typed_error(nvcc: Compile, tmp_path: Path) -> None:
    assert survives_damage(nvcc(KERNEL, "-cubin", *images("9.0a")).read_bytes(), tmp_path / "damaged.cubin") > 20


@pytest.mark.nvcc
def test_a_damaged_fat_binary_raises_only_a_typed_error(nvcc: Compile, tmp_path: Path) -> None:
    made = nvcc(
        KERNEL, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "--compress-mode=size", *images("9.0a", "8.0+PTX")
    )
    assert survives_damage(made.read_bytes(), tmp_path / "damaged.so") > 20
