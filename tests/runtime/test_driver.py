"""Images without a launcher: what reaches the driver is what was asked for, and what cannot is refused by name.

Where there is no GPU a library stands for the driver that answers as it does and prints what it is told; with a GPU the
real one is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.errors import InputError, LoadError
from kartifacts.model.arch import Arch
from kartifacts.runtime import host
from kartifacts.runtime.kernel import Kernel

DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static int depth = 0, device = -1, asked[8];
static const size_t sizes[] = {8, 4, 4, 8};  // void scale(float*, float, int, long)
int cuInit(unsigned flags) { return 0; }
int cuGetErrorName(int code, const char** text) {
  *text = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_X";
  return 0;
}
int cuCtxGetDevice(int* out) { if (depth == 0) return 201; *out = device; return 0; }
int cuDeviceGet(int* out, int ordinal) { if (ordinal > 1) return 101; *out = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** out, int d) { printf("\"retain %d\",", d); *out = &asked[d]; return 0; }
int cuCtxPushCurrent_v2(void* context) { device = (int*)context - asked; ++depth; return 0; }
int cuCtxPopCurrent_v2(void** out) { --depth; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuPointerGetAttribute(void* out, int which, uint64_t address) { *(int*)out = address == 0x1000 ? 1 : 0; return 0; }
int cuLibraryLoadData(void** out, const char* image, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  printf("\"load\",");
  *out = (void*)1;
  return memcmp(image, "\177ELF", 4) ? 200 : 0;
}
int cuLibraryGetKernel(void** out, void* library, const char* name) {
  *out = (void*)2;
  return strcmp(name, "scale") ? 500 : 0;
}
#ifndef OLD
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  if (index >= 4) return 1;
  *size = sizes[index];
  return 0;
}
#endif
int cuKernelSetAttribute(int which, int value, void* kernel, int d) {
  printf("\"attribute %d = %d on %d\",", which, value, d);
  return 0;
}
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** args, void** extra) {
  printf("\"launch %u,%u,%u %u,%u,%u shared %u stream %p on %d:", gx, gy, gz, bx, by, bz, shared, stream, device);
  printf(" %p %g %d %ld\",", *(void**)args[0], *(float*)args[1], *(int*)args[2], *(int64_t*)args[3]);
  return bx == 1024 ? 1 : 0;
}
"""
PROGRAM = """
import ctypes, json, sys
from pathlib import Path
from kartifacts.errors import KartifactsError
from kartifacts.model.arch import Arch
from kartifacts.runtime.kernel import Kernel

class Tensor:
    is_cuda = True
    device = type("device", (), {"index": 1})
    def data_ptr(self):
        return 0x7000

class Array:
    __cuda_array_interface__ = {"data": (0x1000, False)}

class Stream:
    cuda_stream = 0x55

kernel = Kernel("demo/scale", Arch("cuda", 9, 0), Path(sys.argv[1]), "jit", ("scale", "other"))
libc = ctypes.CDLL(None)
for call in sys.argv[2:]:
    try:
        eval(call)
    except KartifactsError as error:
        libc.fflush(None)
        print(json.dumps(f"{type(error).__name__}: {error.message}"), end=",", flush=True)
libc.fflush(None)
"""
ON_CPU = "type('Tensor', (), {'is_cuda': False, 'device': 'cpu', 'data_ptr': 1})()"
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    home = tmp_path_factory.mktemp("drivers")
    (home / "driver.c").write_text(DRIVER)
    for name, flags in (("new", []), ("old", ["-DOLD"])):
        (home / name).mkdir()
        made = ["-shared", "-fPIC", "-w", "-o", f"{name}/libcuda.so.1", "driver.c"]
        subprocess.run([compiler, *flags, *made], cwd=home, check=True)
    return home


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"\x7fELF image")
    return path


@pytest.fixture
def run(drivers: Path, image: Path) -> Run:
    """What the driver was told, and what was refused, by calls in a process of their own."""

    def told(*calls: str, driver: str = "new") -> list[str]:
        env = {**os.environ, "LD_LIBRARY_PATH": str(drivers / driver)}
        command = [sys.executable, "-c", PROGRAM, str(image), *calls]
        said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        found: list[str] = json.loads(f"[{said.rstrip(',')}]")
        return found

    return told


def test_arguments_reach_the_function_with_the_sizes_that_it_takes(run: Run) -> None:
    assert run("kernel.scale.launch(4, 128, Tensor(), 2.5, -3, 1 << 40, shared=16, stream=Stream())") == [
        "retain 1",
        "load",
        "launch 4,1,1 128,1,1 shared 16 stream 0x55 on 1: 0x7000 2.5 -3 1099511627776",
    ]


def test_an_image_is_loaded_once_and_follows_its_tensors_from_device_to_device(run: Run) -> None:
    told = run(
        "kernel.scale.launch((1, 2, 3), (4, 5), None, 1.0, True, 0)",
        "kernel.scale.launch(1, 1, Array(), 1.0, 0, 0)",
        "kernel.scale.launch(1, 1, Array(), 1.0, 0, 0, device=0)",
    )
    assert told == [
        "retain 0",
        "load",
        "launch 1,2,3 4,5,1 shared 0 stream (nil) on 0: (nil) 1 1 0",
        "retain 1",
        "launch 1,1,1 1,1,1 shared 0 stream (nil) on 1: 0x1000 1 0 0",
        "launch 1,1,1 1,1,1 shared 0 stream (nil) on 0: 0x1000 1 0 0",
    ]


def test_more_shared_memory_than_usual_is_asked_for_on_the_device(run: Run) -> None:
    told = run("kernel.scale.launch(1, 1, Tensor(), 1.0, 0, 0, shared=100_000)")
    assert told[2:3] == ["attribute 8 = 100000 on 1"]


REFUSED = {
    "1, 1, None, 1.0, 0": "InputError: {} takes 4 arguments, got 3",
    "1, 1, None, 1.0, 1 << 32, 0": "InputError: {}: argument 2 is 4294967296, which does not fit into 4 bytes",
    "1, 1, None, 1.0, 0, 0, device=7": "LoadError: GPU 7: cuDeviceGet failed: CUDA_ERROR_X (101)",
    "1, 1, 'x', 1.0, 0, 0": "InputError: {}: argument 0 is a str; expected a tensor on a GPU",
    "1, 1, None, ctypes.c_double(1), 0, 0": "InputError: {}: argument 1 has 4 bytes, got 8 of c_double",
    "0, 1, None, 1.0, 0, 0": "InputError: {}: grid must be up to three numbers from 1 to 2147483647",
    "1, (1, 1, 65), None, 1.0, 0, 0": "InputError: {}: block must be up to three numbers from 1 to 1024, 1024, 64; got",
    "1, (1, 1, 1, 1), None, 1.0, 0, 0": "InputError: {}: block must be",
    "1, 1024, None, 1.0, 0, 0": "InputError: {}: cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE (1)",
    f"1, 1, {ON_CPU}, 1.0, 0, 0": "InputError: {}: argument 0 is on cpu; expected a tensor on a GPU",
}


def test_what_the_function_does_not_take_is_refused_by_name(run: Run) -> None:
    said = run(*(f"kernel.scale.launch({arguments})" for arguments in REFUSED))
    errors = [line for line in said if "Error: " in line]
    for error, expected in zip(errors, REFUSED.values(), strict=True):
        assert error.startswith(expected.format("scale of demo/scale"))


def test_a_driver_that_does_not_tell_sizes_takes_typed_values_only(run: Run) -> None:
    typed = "ctypes.c_float(1), ctypes.c_int32(2), ctypes.c_int64(3)"
    told = run(f"kernel.scale.launch(1, 1, None, {typed})", "kernel.scale.launch(1, 1, None, 1.0, 2, 3)", driver="old")
    assert told[2] == "launch 1,1,1 1,1,1 shared 0 stream (nil) on 0: (nil) 1 2 3"
    assert told[3].startswith("InputError")
    assert "ctypes.c_int32(1)" in told[3]


def test_a_function_that_is_not_in_the_image_is_a_load_error(run: Run) -> None:
    assert run("kernel.other.launch(1, 1)")[-1].startswith("LoadError: demo/scale has no function 'other'")


def test_an_image_that_the_driver_does_not_take_is_a_load_error(run: Run, image: Path) -> None:
    image.write_bytes(b"MZ")
    assert run("kernel.scale.launch(1, 1)")[-1].startswith("LoadError: demo/scale does not load: cuLibraryLoadData")


def _kernel(path: Path) -> Kernel:
    return Kernel("demo/scale", Arch("cuda", 9, 0), path, "jit", ("scale",))


@pytest.mark.skipif(bool(host.gpus()), reason="needs a machine without an NVIDIA driver")
def test_without_a_driver_the_error_says_so(image: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no NVIDIA driver.*libcuda\.so\.1"):
        _kernel(image).scale.launch(1, 1)


def test_a_bare_function_cannot_be_called_without_a_grid(image: Path) -> None:
    with pytest.raises(InputError, match="no launcher") as raised:
        _kernel(image)(1)
    assert "scale.launch(grid, block" in str(raised.value)


def test_images_of_others_and_missing_files_are_load_errors(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"\.hsaco for other GPUs"):
        _kernel(tmp_path / "kernel.hsaco")
    with pytest.raises(LoadError, match="cannot be read"):
        _kernel(tmp_path / "kernel.cubin")
