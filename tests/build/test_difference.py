"""How two files differ is told by section, symbol and image, cause first; and nothing that differs is passed over."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.build import images
from kartifacts.build.difference import _bytes, differences
from kartifacts.build.sections import sections_of

from .conftest import SCALE, Cuda, Shared

KERNEL = 'extern "C" __global__ void scale(float* x, int n) {{ if (threadIdx.x < n) x[threadIdx.x] *= {factor}f; }}'


def told(first: Path, second: Path) -> list[str]:
    return [str(row) for row in differences(first.read_bytes(), second.read_bytes())]


def text(first: Path, second: Path) -> str:
    return "\n".join(told(first, second))


# -- host code ---------------------------------------------------------------------------------------------------------


def test_the_same_bytes_differ_in_nothing(shared: Shared) -> None:
    assert told(shared(), shared()) == []


def test_a_changed_constant_is_found_where_it_lies(shared: Shared) -> None:
    source = SCALE + '\nextern "C" __attribute__((visibility("default"))) const char* said() { return "%s"; }'
    first, second = shared(source=source % "spoken"), shared(source=source % "spOken")
    [row] = told(first, second)
    place = next(bytes(each.data) for each in sections_of(memoryview(first.read_bytes())) if each.name == ".rodata")
    size, at = len(place), place.index(b"spoken") + 2
    assert row == f"section .rodata (constants): 1 of {size} bytes differ, the first at byte {at}"


def test_causes_are_told_before_what_follows_from_them(shared: Shared) -> None:
    more = SCALE.replace("scale", "shift").replace("#include <tvm/ffi/c_api.h>", "")
    rows = told(shared(), shared(source=SCALE + more))
    assert rows[0] == "exports: with 'shift'"
    assert rows[1] == "symbols: with '__tvm_ffi_shift'"
    assert rows[2].startswith("section .text (code): ")
    following = [row.split()[1] for row in rows[3:]]
    assert ".dynsym" in following
    assert not {".text", ".rodata"} & {*following}


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (["-Wl,-rpath,/x"], "dynamic entries: with 'run path /x'"),
        (["-Wl,-soname,libscale.so"], "dynamic entries: with 'is called libscale.so'"),
        (["-Wl,-z,now"], "dynamic entries: with 'flags 0x8', 'flags 1 0x1'"),
        (["-Wl,--build-id=sha1"], "section .note.gnu.build-id (an identity that the linker gave it): 36 bytes are new"),
    ],
)
def test_what_a_linker_was_asked_for_is_named(shared: Shared, flags: list[str], row: str) -> None:
    usual = shared()
    assert row in told(usual, shared(*flags))
    back = row.replace("with '", "without '").replace("are new", "are gone")
    assert back in told(shared(*flags), usual)


def test_another_compiler_is_named_by_what_it_says_of_itself(shared: Shared, tmp_path: Path) -> None:
    if shutil.which("objcopy") is None:
        pytest.skip("needs objcopy")
    first, second, said = shared(), tmp_path / "other.so", tmp_path / "comment"
    said.write_bytes(b"GCC: (Elsewhere 99.1) 99.1.0\0")
    subprocess.run(["objcopy", "--update-section", f".comment={said}", first, second], check=True)
    row = next(row for row in told(first, second) if "comment" in row)
    assert row.startswith("section .comment (what compiled it): 'GCC: ")
    assert row.endswith("became 'GCC: (Elsewhere 99.1) 99.1.0'")


def test_what_is_no_text_in_a_section_of_text_is_not_passed_over(shared: Shared) -> None:
    first = shared().read_bytes()
    comment = next(each for each in sections_of(memoryview(first)) if each.name == ".comment")
    second = bytearray(first)
    second[comment.offset + comment.size - 1] = 1
    [row] = differences(first, bytes(second))
    size = comment.size
    assert str(row) == f"section .comment (what compiled it): 1 of {size} bytes differ, the first at byte {size - 1}"


def test_a_newer_system_that_is_needed_is_named(shared: Shared) -> None:
    source = "#include <string>\n" + SCALE.replace("return 0;", "return (int)std::string(count, 'x').find('y');")
    rows = told(shared(), shared(source=source))
    assert any(row.startswith("needs glibcxx: is 3.4") for row in rows)


# -- GPU code ----------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
def test_images_differ_by_arch_code_and_the_command_line_that_made_them(nvcc: Cuda) -> None:
    first, _ = nvcc(KERNEL.format(factor=2.0), "-cubin", "-arch=sm_90a")
    other, _ = nvcc(KERNEL.format(factor=3.0), "-cubin", "-arch=sm_90a")
    assert [row.partition(":")[0] for row in told(first, other)] == ["section .text.scale (code)"]
    slow, _ = nvcc(KERNEL.format(factor=2.0), "-cubin", "-arch=sm_90a", "-Xptxas=-O1")
    rows = told(first, slow)
    assert rows[0].startswith("section .note.nv.tkinfo (tools that made it, and their command lines): ")
    assert re.search(r"became '-O ?1 ", rows[0])
    older, _ = nvcc(KERNEL.format(factor=2.0), "-cubin", "-arch=sm_80")
    assert any(row.startswith("header, flags: 0x") for row in told(first, older))


@pytest.mark.nvcc
def test_what_a_function_takes_is_told_as_figures(nvcc: Cuda) -> None:
    source = 'extern "C" __global__ void sum(float* x) {{ {shared} x[threadIdx.x] += 1; {more} }}'
    first, _ = nvcc(source.format(shared="", more=""), "-cubin", "-arch=sm_90a")
    shared = "__shared__ float all[64]; all[threadIdx.x] = x[0]; __syncthreads(); x[1] = all[63 - threadIdx.x];"
    second, _ = nvcc(source.format(shared=shared, more=""), "-cubin", "-arch=sm_90a")
    row = next(row for row in told(first, second) if row.startswith("function sum: "))
    assert "shared 0 became 256" in row
    assert "barriers 0 became 1" in row
    gone, _ = nvcc('extern "C" __global__ void other() {}', "-cubin", "-arch=sm_90a")
    assert {"function sum: is gone", "function other: is new"} <= {*told(first, gone)}


@pytest.mark.nvcc
def test_images_inside_are_taken_apart_attached_or_in_a_fat_binary(nvcc: Cuda, shared: Shared, tmp_path: Path) -> None:
    def cubin(factor: float) -> Path:
        return nvcc(KERNEL.format(factor=factor), "-cubin", "-arch=sm_90a")[0]

    launcher, made = shared().read_bytes(), []
    for factor, notes in ((2.0, {"toolkit": "13.0"}), (3.0, {"toolkit": "13.0", "entry": "scale"})):
        made.append(tmp_path / f"attached{factor}.so")
        made[-1].write_bytes(images.attach(launcher, cubin(factor).read_bytes(), notes))
    rows = told(*made)
    assert rows[0] == "section .kart.launch (what the launcher knows of its image): with 'entry scale'"
    assert any(row.startswith("image for 9.0a: section .text.scale (code): ") for row in rows)

    fat = [
        nvcc(KERNEL.format(factor=factor), "-fatbin", "-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")[0]
        for factor in (2.0, 3.0)
    ]
    ptx, code = sorted(told(*fat))
    assert ptx.startswith("PTX for 9.0a+PTX: ")
    assert code.startswith("image for 9.0a: section .text.scale (code): ")
    alone, _ = nvcc(KERNEL.format(factor=2.0), "-fatbin", "-gencode", "arch=compute_90a,code=sm_90a")
    assert [row.partition(": ")[0] for row in told(fat[0], alone)] == ["PTX for 9.0a+PTX"]


# -- whatever the bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "row"),
    [
        (b"", b"x", "0 bytes became 1; the first difference is at byte 0"),
        (b"same", b"sane", "1 of 4 bytes differ, the first at byte 2"),
        (b"\x7fELF" + bytes(60), b"\x7fELF" + bytes(61), "64 bytes became 65; the first difference is at byte 64"),
    ],
)
def test_what_is_no_elf_file_is_compared_byte_by_byte(first: bytes, second: bytes, row: str) -> None:
    [found] = differences(first, second)
    assert str(found).startswith(f"file: {row}; one of them is no sound ELF file: ")


def test_bytes_outside_of_all_sections_are_not_passed_over(shared: Shared) -> None:
    first = shared().read_bytes()
    second = bytearray(first)
    second[9] = 7  # padding of the header
    [row] = differences(first, bytes(second))
    assert str(row) == f"outside of all sections: 1 of {len(first)} bytes differ, the first at byte 9"


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_the_count_and_place_of_differing_bytes_are_right(first: bytes, second: bytes) -> None:
    places = [at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other]
    at = places[0] if places else min(len(first), len(second))
    if len(first) == len(second):
        expected = f"{len(places)} of {len(first)} bytes differ, the first at byte {at}"
    else:
        expected = f"{len(first)} bytes became {len(second)}; the first difference is at byte {at}"
    assert _bytes(first, second) == expected


@pytest.mark.parametrize("number", range(120))
def test_no_patch_of_a_file_goes_unseen_or_ends_in_anything_but_differences(number: int) -> None:
    """Also where the patch makes it another file, or none."""
    chance, first = random.Random(number), launcher()
    second = bytearray(first)
    header = number % 3 == 0
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(64 if header else len(second))
        second[at : at + 8] = struct.pack("<Q", chance.getrandbits(chance.choice((1, 8, 16, 32, 64))))
    rows = differences(first, bytes(second))
    assert bool(rows) == (first != bytes(second))
    assert all(row.text and row.where for row in rows)


@cache
def launcher() -> bytes:
    """Some real shared object with symbols, versions and notes."""
    return (Path(tvm_ffi.__file__).parent / "lib/libtvm_ffi.so").read_bytes()[: 8 << 20]
