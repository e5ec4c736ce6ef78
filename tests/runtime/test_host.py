"""Facts of the machine: real files, a real loader, and a libcuda compiled here that answers as a driver would."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import ConfigError
from kartifacts.model.arch import Arch
from kartifacts.runtime import host

V2 = "fpu cx8 cmov mmx fxsr sse sse2 syscall lm pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = V2 + " fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
V4 = V3 + " avx512f avx512dq avx512cd avx512bw avx512vl"


def cpuinfo(flags: str) -> str:
    block = (
        f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: some CPU\nflags\t\t: {flags}\nbugs\t\t: avx512f\n\n"
    )
    return block + block.replace("processor\t: 0", "processor\t: 1")


@pytest.mark.parametrize(
    ("machine", "flags", "name"),
    [
        ("x86_64", "fpu cx8 cmov mmx fxsr sse sse2 syscall lm", "x86-64"),
        ("x86_64", V2, "x86-64-v2"),
        ("x86_64", V3, "x86-64-v3"),
        ("AMD64", V3, "x86-64-v3"),
        ("x86_64", V4, "x86-64-v4"),
        # A level is reached only with everything below it.
        ("x86_64", V4.replace(" avx2", ""), "x86-64-v2"),
        ("x86_64", V4.replace(" avx512vl", ""), "x86-64-v3"),
        ("x86_64", V3.replace(" popcnt", ""), "x86-64"),
        # ... and by whole words: avx512_bf16 is not avx512bw.
        ("x86_64", V3 + " avx512f avx512dq avx512cd avx512_bf16 avx512vl", "x86-64-v3"),
        ("x86_64", "", "x86-64"),
        ("aarch64", "", "aarch64"),
        ("arm64", "", "aarch64"),
        ("riscv64", "", "riscv64"),
    ],
)
def test_the_cpu_level_is_the_highest_whose_features_are_all_there(machine: str, flags: str, name: str) -> None:
    assert host.cpu_arch(machine, cpuinfo(flags)) == Arch("cpu", name=name)


def test_a_hidden_cpuinfo_means_the_baseline() -> None:
    assert host.cpu_arch("x86_64", "").name == "x86-64"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_this_cpu_is_found_in_all_of_cpuinfo() -> None:
    assert host.cpu() == host.cpu_arch(os.uname().machine, Path("/proc/cpuinfo").read_text())


# -- needs -------------------------------------------------------------------------------------------------------------

HAVE = {"glibc": (2, 28), "glibcxx": (3, 4, 29), "cxxabi": (1, 3, 13), "driver": (13, 0), "tvm_ffi": (0, 1, 14)}


def judge(needs: dict[str, str]) -> str | None:
    return host.fits(needs, lambda name, wanted: HAVE.get(name))


@pytest.mark.parametrize(
    "needs",
    [
        {},
        {"glibc": "2.28"},
        {"glibc": "2.3.4"},  # 3 < 28, though not as text
        {"glibc": "2.14", "glibcxx": "3.4.9", "cxxabi": "1.3"},
        {"glibcxx": "3.4.29"},
        {"driver": "12.8"},
        {"driver": "13"},
        {"driver": "13.0.0"},
        {"tvm_ffi": "0.1"},
        {"tvm_ffi": "0.1.14"},
    ],
)
def test_the_lowest_version_that_will_do_is_enough(needs: dict[str, str]) -> None:
    assert judge(needs) is None


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"glibc": "2.32"}, ["glibc 2.32", "2.28"]),
        ({"glibc": "2.28.1"}, ["glibc 2.28.1", "2.28"]),
        ({"glibcxx": "3.4.30"}, ["glibcxx 3.4.30", "3.4.29"]),
        ({"cxxabi": "1.3.15"}, ["cxxabi 1.3.15", "1.3.13"]),
        ({"glibc": "2.17", "driver": "13.1"}, ["driver 13.1", "13.0"]),
        ({"tvm_ffi": "0.1.15"}, ["tvm_ffi 0.1.15", "0.1.14"]),
        ({"tvm_ffi": "0.0.9"}, ["tvm_ffi 0.0.9", "0.1.14"]),  # another ABI, though older
        ({"tvm_ffi": "1.0"}, ["tvm_ffi 1.0", "0.1.14"]),
        ({"cudart": "13"}, ["cudart 13", "none here"]),
        ({"rocm": "6.2"}, ["'rocm'", "'6.2'", "cannot judge"]),
        ({"GLIBC": "2.17"}, ["'GLIBC'", "cannot judge"]),
    ],
)
def test_what_is_lacking_is_named_with_both_versions(needs: dict[str, str], words: list[str]) -> None:
    reason = judge(needs)
    assert reason is not None
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize("text", ["", "two", "2.x", "-1", "2..3", " 2.17", "2.17\n", "9" * 99, "1." * 99 + "1", "٢"])
def test_a_need_that_is_no_version_is_refused_shortly(text: str) -> None:
    reason = judge({"glibc": text})
    assert reason is not None
    assert "not a version" in reason
    assert len(reason) < 120


def test_a_library_with_its_major_version_in_its_name_must_have_that_one() -> None:
    assert host.fits({"cudart": "12"}, lambda name, wanted: (12,)) is None
    assert host.fits({"cudart": "12"}, lambda name, wanted: (13,)) is not None


VERSIONS = st.lists(st.integers(0, 99), min_size=1, max_size=4)


@given(VERSIONS, VERSIONS)
def test_versions_compare_as_numbers_and_trailing_zeros_do_not_count(have: list[int], wanted: list[int]) -> None:
    padded = [*have, 0, 0, 0, 0][:4] >= [*wanted, 0, 0, 0, 0][:4]
    reason = host.fits({"glibc": ".".join(map(str, wanted))}, lambda name, version: tuple(have))
    assert (reason is None) == padded


def test_only_what_is_needed_is_looked_at() -> None:
    asked: list[str] = []

    def have(name: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
        asked.append(name)
        return (99,)

    assert host.fits({"glibc": "2.17"}, have) is None
    assert asked == ["glibc"]


@pytest.mark.skipif(host.glibc() is None, reason="another C library than glibc")
def test_this_machine_meets_what_its_own_libraries_define() -> None:
    libc = ctypes.CDLL("libc.so.6")
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    here = libc.gnu_get_libc_version().decode()
    assert host.unmet({"glibc": here}) is None
    assert host.unmet({"glibc": f"{here.partition('.')[0]}.999"}) is not None
    assert host.unmet({"tvm_ffi": "0.1"}) is None


@pytest.mark.skipif(host._libstdcxx("GLIBCXX") is None, reason="no libstdc++.so.6")
def test_the_versions_of_libstdcxx_are_those_of_the_one_that_is_mapped() -> None:
    path = host._mapped("libstdc++.so.6")
    assert path is not None
    data = Path(path).read_bytes()
    for prefix, name in (("GLIBCXX", "glibcxx"), ("CXXABI", "cxxabi")):
        # Independent of how host reads it: every such string in the file.
        found = re.findall(rb"\0" + prefix.encode() + rb"_([0-9.]+)(?=\0)", data)
        highest = max(tuple(map(int, text.split(b"."))) for text in found)
        assert host._libstdcxx(prefix) == highest
        assert host.unmet({name: ".".join(map(str, highest))}) is None
        assert host.unmet({name: ".".join(map(str, (*highest[:-1], highest[-1] + 1)))}) is not None


# -- version definitions -----------------------------------------------------------------------------------------------

CC = shutil.which("cc") or shutil.which("gcc")


def shared_library(directory: Path, name: str, code: str, *flags: str) -> Path:
    source = directory / f"{name}.c"
    source.write_text(code)
    assert CC is not None
    subprocess.run([CC, "-shared", "-fPIC", "-o", str(directory / name), str(source), *flags], check=True)
    return directory / name


@pytest.fixture(scope="module")
def versioned(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    if CC is None:
        pytest.skip("no C compiler (cc, gcc)")
    directory = tmp_path_factory.mktemp("versioned")
    script = directory / "map"
    script.write_text("GLIBCXX_3.4 { global: f; local: *; };\nGLIBCXX_3.4.21 { global: g; } GLIBCXX_3.4;\n")
    code = "int f(void){return 1;} int g(void){return 2;}"
    library = shared_library(directory, "libx.so.1", code, f"-Wl,--version-script={script}", "-nostdlib")
    return library.read_bytes()


def test_defined_versions_are_read_from_the_version_definitions(versioned: bytes) -> None:
    assert host.defined_versions(versioned)[1:] == ["GLIBCXX_3.4", "GLIBCXX_3.4.21"]


@given(
    cut=st.integers(0, 1 << 16), changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3)
)
def test_a_damaged_library_gives_an_error_that_is_caught_and_never_hangs(
    versioned: bytes, cut: int, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(versioned[: cut % (len(versioned) + 1)])
    for place, value in changes if damaged else ():
        damaged[place % len(damaged)] = value
    with contextlib.suppress(ValueError, struct.error):
        host.defined_versions(bytes(damaged))


# -- GPUs --------------------------------------------------------------------------------------------------------------

DRIVER = """
#include <stdlib.h>
static int number(const char *name, int otherwise) { const char *s = getenv(name); return s ? atoi(s) : otherwise; }
int cuInit(unsigned flags) { return number("FAKE_INIT", 0); }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_COUNT", 2); return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device == number("FAKE_LOST", -1)) return 101;
    if (attribute == 75) { *value = device == 40 ? 9 : 12; return 0; }
    if (attribute == 76) { *value = device == 40 ? 0 : 1; return 0; }
    return 1;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return code == 100 || code == 803 ? 0 : 1;
}
"""
# Loading it ends the process: proof that nobody did.
DEADLY = "#include <unistd.h>\n__attribute__((constructor)) static void loaded(void) { _exit(99); }\n"


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if CC is None:
        pytest.skip("no C compiler (cc, gcc)")
    found = {}
    for name, code in (("good", DRIVER), ("deadly", DEADLY), ("empty", "int nothing;")):
        directory = tmp_path_factory.mktemp(name)
        shared_library(directory, "libcuda.so.1", code, "-Wl,-soname,libcuda.so.1")
        found[name] = str(directory)
    return found


def in_new_process(driver: str, code: str, **variables: str) -> Any:
    """Run `code` with the libcuda of that directory in front; it prints JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\nfrom kartifacts.runtime import host\n{code}"],
        env={**os.environ, "LD_LIBRARY_PATH": driver, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return json.loads(done.stdout)


def test_the_gpus_and_the_driver_are_those_that_libcuda_names(drivers: dict[str, str]) -> None:
    code = """print(json.dumps([
        [str(arch) for arch in host.gpus()], host.driver(), str(host.device_arch(None)), str(host.device_arch("cuda")),
        str(host.device_arch("cuda:1")), host.device_arch("cpu").kind, host.device_arch(None, kinds=["cpu"]).kind,
        host.unmet({"driver": "13.1"}), host.unmet({"driver": "13.2"})]))"""
    gpus, driver, *devices, met, unmet = in_new_process(drivers["good"], code)
    assert gpus == ["9.0", "12.1"]
    assert driver == [13, 1]
    assert devices == ["9.0", "9.0", "12.1", "cpu", "cpu"]
    assert met is None
    assert "13.2" in unmet
    assert "13.1" in unmet


def test_the_cpu_path_never_loads_the_driver(drivers: dict[str, str]) -> None:
    code = """print(json.dumps([
        str(host.cpu()), str(host.device_arch("cpu")), str(host.device_arch(None, kinds=("cpu",))),
        host.unmet({"glibc": "2.2", "tvm_ffi": "0.1"})]))"""
    *archs, unmet = in_new_process(drivers["deadly"], code)
    assert archs == [str(host.cpu())] * 3
    assert unmet is None
    with pytest.raises(AssertionError, match="exit status 99"):  # the trap works
        in_new_process(drivers["deadly"], "host.gpus()")


def test_nothing_heavy_is_imported_to_look_at_the_machine(drivers: dict[str, str]) -> None:
    code = """
host.detect()
print(json.dumps(sorted({"torch", "tvm_ffi", "numpy"} & set(sys.modules))))"""
    assert in_new_process(drivers["good"], code) == []


REFUSED = """
try:
    host.device_arch("cuda:{index}")
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), len(host.gpus()), host.device_arch(None).kind]))"""


@pytest.mark.parametrize(
    ("driver", "variables", "index", "words"),
    [
        ("good", {"FAKE_INIT": "100"}, 0, "CUDA_ERROR_NO_DEVICE"),
        ("good", {"FAKE_INIT": "803"}, 0, "cuInit failed: 803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("good", {"FAKE_INIT": "7777"}, 0, "cuInit failed: 7777"),
        ("good", {"FAKE_COUNT": "0"}, 0, "CUDA_ERROR_NO_DEVICE"),
        ("good", {"FAKE_COUNT": "1"}, 1, "this process sees 1"),
        ("good", {"FAKE_LOST": "41"}, 0, "cuDeviceGetAttribute failed: 101"),
        ("empty", {}, 0, "libcuda.so.1 has no cuInit"),
    ],
)
def test_a_missing_or_broken_gpu_is_an_error_only_for_who_asks_for_it(
    drivers: dict[str, str], driver: str, variables: dict[str, str], index: int, words: str
) -> None:
    error, message, count, otherwise = in_new_process(drivers[driver], REFUSED.format(index=index), **variables)
    assert error == "ConfigError"
    assert f"no GPU {index}" in message
    assert words in message
    assert otherwise == ("cuda" if count else "cpu")


def test_a_driver_that_does_not_work_is_logged_and_no_driver_is_not(
    drivers: dict[str, str],
) -> None:
    code = "import logging; logging.basicConfig(stream=sys.stdout, format='\"%(message)s\"'); host.gpus()"
    assert "803" in in_new_process(drivers["good"], code, FAKE_INIT="803")
    assert in_new_process(drivers["good"], code + "; print('[]')", FAKE_INIT="100") == []


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cuda:99999", "cpu:0", "cuda:0 "])
def test_an_unknown_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(device))):
        host.device_arch(device)


@pytest.mark.skipif(bool(host.gpus()), reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_taken_unless_the_op_has_none() -> None:
    assert host.device_arch(None) == host.cpu()
    with pytest.raises(ConfigError, match="no GPU 0: "):
        host.device_arch(None, kinds=("cuda",))


def test_all_facts_are_found_once() -> None:
    assert host.detect() is host.detect()
    assert host.detect().cpu == host.cpu()
    assert bool(host.detect().gpus) != bool(host.detect().no_gpu)


@pytest.mark.gpu
def test_a_real_gpu_is_seen_as_nvidia_smi_sees_it() -> None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        pytest.skip("no nvidia-smi")
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    assert [str(arch) for arch in host.gpus()] == listed
    driver = host.driver()
    assert driver is not None
    assert driver >= (11, 0)
    assert in_new_process("", "print(json.dumps(len(host.gpus())))", CUDA_VISIBLE_DEVICES="") == 0
