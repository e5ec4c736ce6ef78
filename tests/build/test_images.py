"""Device code attached to a launcher: it still loads, others see the sections, crafted files are refused."""

from __future__ import annotations

import ctypes
import io
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kartifacts.build.elf import inspect_bytes
from kartifacts.build.images import ALIGNMENT, IMAGE, LAUNCH, attach, attached
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.arch import parse_arch

# It finds its own file as a launcher does, and tells where the image lies in it.
LAUNCHER = r"""
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

static int counted = 0;
static __attribute__((constructor)) void count() { ++counted; }

extern "C" __attribute__((visibility("default"))) long image_size() {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&image_size), &self);
  FILE* file = fopen(self.dli_fname, "rb");
  Elf64_Ehdr header;
  if (!file || fread(&header, sizeof header, 1, file) != 1) return -1;
  long found = 0;
  for (int number = 0; number < header.e_shnum; ++number) {
    Elf64_Shdr names, section;
    char name[32] = "";
    fseek(file, static_cast<long>(header.e_shoff + sizeof names * header.e_shstrndx), SEEK_SET);
    if (fread(&names, sizeof names, 1, file) != 1) return -2;
    fseek(file, static_cast<long>(header.e_shoff + sizeof section * number), SEEK_SET);
    if (fread(&section, sizeof section, 1, file) != 1) return -3;
    fseek(file, static_cast<long>(names.sh_offset + section.sh_name), SEEK_SET);
    if (fread(name, 1, sizeof name - 1, file) == 0) continue;
    if (!strcmp(name, ".kart.image")) found = static_cast<long>(section.sh_size);
  }
  fclose(file);
  return found;
}

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_answer(
    void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = 41 + counted;
  return 0;
}
"""
# The header of a cubin for sm_90, and bytes that nobody reads.
PICTURE = struct.pack(
    "<4sBBBB8xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 65, 2, 190, 1, 0, 0, 0, 90 << 8, 64, 0, 0, 64, 0, 0
)
PICTURE += random.Random(5).randbytes(5000)
NOTES = {"entry": "answer", "threads": "128", "dtype": "2"}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    import tvm_ffi

    include = tvm_ffi.libinfo.find_include_path()
    home = tmp_path_factory.mktemp("launcher")
    (home / "launcher.cpp").write_text(LAUNCHER)
    flags = ["-shared", "-fPIC", "-O1", "-s", "-Wl,--build-id=none", f"-I{include}", "-o", "launcher.so", "-ldl"]
    subprocess.run([compiler, "launcher.cpp", *flags], cwd=home, check=True)
    return (home / "launcher.so").read_bytes()


def test_a_launcher_with_an_image_loads_and_finds_it_in_its_own_file(launcher: bytes, tmp_path: Path) -> None:
    module = tmp_path / "kernel.so"
    module.write_bytes(attach(launcher, PICTURE, NOTES))
    code = (
        "import ctypes, sys, tvm_ffi\n"
        "print(tvm_ffi.load_module(sys.argv[1]).answer(), ctypes.CDLL(sys.argv[1]).image_size())\n"
    )
    said = subprocess.run([sys.executable, "-c", code, str(module)], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["42", str(len(PICTURE))]


def test_the_image_and_the_notes_come_back_and_the_bytes_depend_on_nothing_else(launcher: bytes) -> None:
    module = attach(launcher, PICTURE, NOTES)
    assert attached(module) == (PICTURE, NOTES)
    assert attached(launcher) is None
    assert attach(launcher, PICTURE, dict(reversed(NOTES.items()))) == module


def test_nothing_that_is_loaded_changes(launcher: bytes) -> None:
    """But for the two numbers in the header that say where the section headers are, and how many."""
    module = bytearray(attach(launcher, PICTURE, NOTES))
    module[40:48] = launcher[40:48]
    module[60:62] = launcher[60:62]
    assert bytes(module[: len(launcher)]) == launcher


def test_others_readers_see_the_sections(launcher: bytes, tmp_path: Path) -> None:
    module = attach(launcher, PICTURE, NOTES)
    read = ELFFile(io.BytesIO(module))
    *before, image, notes = read.iter_sections()
    assert [section.name for section in before] == [s.name for s in ELFFile(io.BytesIO(launcher)).iter_sections()]
    assert (image.name, notes.name) == (IMAGE, LAUNCH)
    assert image.data() == PICTURE
    assert image["sh_offset"] % ALIGNMENT == 0
    assert image["sh_flags"] == notes["sh_flags"] == 0  # not loaded
    assert notes.data() == b"dtype 2\nentry answer\nthreads 128\n"
    found = inspect_bytes(module, "kernel.so")
    assert (found.exports, found.archs) == (("answer",), (parse_arch("9.0"),))
    (tmp_path / "kernel.so").write_bytes(module)
    shown = subprocess.run(["readelf", "-SW", "kernel.so"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert IMAGE in shown.stdout
    assert shown.stderr == ""


def test_what_strip_leaves_still_holds_the_image(launcher: bytes, tmp_path: Path) -> None:
    module = tmp_path / "kernel.so"
    module.write_bytes(attach(launcher, PICTURE, NOTES))
    subprocess.run(["strip", "--strip-all", str(module)], check=True)
    assert attached(module.read_bytes()) == (PICTURE, NOTES)
    assert ctypes.CDLL(str(module)).image_size() == len(PICTURE)


def test_half_of_what_was_attached_is_refused(launcher: bytes, tmp_path: Path) -> None:
    module = tmp_path / "kernel.so"
    for name in (IMAGE, LAUNCH):
        module.write_bytes(attach(launcher, PICTURE, NOTES))
        subprocess.run(["objcopy", f"--remove-section={name}", str(module)], check=True)
        with pytest.raises(VerificationError, match="expected one"):
            attached(module.read_bytes())


def test_a_second_image_is_refused(launcher: bytes) -> None:
    with pytest.raises(VerificationError, match="already"):
        attach(attach(launcher, PICTURE, NOTES), PICTURE, NOTES)


def test_notes_that_are_no_lines_and_empty_images_are_refused(launcher: bytes) -> None:
    for notes in ({"a b": "1"}, {"": "1"}, {"a": ""}, {"a": "1\n2"}, {"a": " 1"}, {"a": "\u00e9"}, {"a": "x" * 70000}):
        with pytest.raises(ConfigError):
            attach(launcher, PICTURE, notes)
    with pytest.raises(ConfigError, match="empty"):
        attach(launcher, b"", NOTES)


def _with(offset: int, layout: str, value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        out = bytearray(data)
        struct.pack_into(layout, out, offset, value)
        return bytes(out)

    return change


CRAFTED = {
    "nothing": lambda _: b"",
    "no ELF": lambda data: b"MZ" + data[2:],
    "32 bits": _with(4, "B", 1),
    "big-endian": _with(5, "B", 2),
    "cut": lambda data: data[:40],
    "an executable": _with(16, "<H", 2),
    "an object": _with(16, "<H", 1),
    "section headers behind the end": _with(40, "<Q", 1 << 40),
    "section headers at the end of memory": _with(40, "<Q", (1 << 64) - 1),
    "other section headers": _with(58, "<H", 40),
    "no sections": _with(60, "<H", 0),
    "more sections than there are": _with(60, "<H", 0xFFFF),
    "names in no section": _with(62, "<H", 0xFFF0),
    "names in the empty section": _with(62, "<H", 0),
    "names in code": _with(62, "<H", 1),
}


@pytest.mark.parametrize("fault", CRAFTED)
def test_a_crafted_launcher_is_refused(fault: str, launcher: bytes) -> None:
    with pytest.raises(VerificationError):
        attach(CRAFTED[fault](launcher), PICTURE, NOTES)


def test_any_damaged_byte_of_the_headers_is_refused_or_harmless(launcher: bytes) -> None:
    """Never anything but our own error, and never an image that was not put there."""
    module = attach(launcher, PICTURE, NOTES)
    (table,) = struct.unpack_from("<Q", module, 40)
    chance = random.Random(7)
    for place in [*range(64), *range(table, table + 128), *range(len(module) - 256, len(module))]:
        damaged = bytearray(module)
        damaged[place] ^= 1 << chance.randrange(8)
        try:
            found = attached(bytes(damaged))
        except VerificationError:
            continue
        assert found is None or len(found[0]) <= len(module)


def test_notes_that_were_tampered_with_are_refused(launcher: bytes) -> None:
    module = attach(launcher, PICTURE, NOTES)
    for forged in (b"entry answer\ndtype 2\n", b"dtype\n", b"dtype 2", b"dtype 2\ndtype 2\n", b"dtype \xff\n"):
        text = b"dtype 2\nentry answer\nthreads 128\n"
        with pytest.raises(VerificationError, match="sorted lines"):
            attached(module.replace(text, forged.ljust(len(text), b"\n")))
