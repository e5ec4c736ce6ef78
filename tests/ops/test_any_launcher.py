"""The launcher of kernels that bring none, such as Triton's: what it gives the driver by notes, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from kartifacts.build.images import attach

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "kernels/include"
NOTES = {
    "entry": "noted_8",
    "arguments": "x=*float16:16 out=*float32 n=int32 stride=int64:16 factor=float32 exact=float64 on=bool small=uint8",
    "threads": "128",
    "shared": "4096",
}
# Tensors wherever they are said to lie; nobody reads what is there.
GIVEN = """
import ctypes, json, sys
import tvm_ffi

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("device", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

alive = []
new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

class Given:
    def __init__(self, code, bits, address=0x1000, kind=2, device=0, size=64, stride=1):
        numbers = (ctypes.c_int64 * 2)(size, stride)
        shape, strides = ctypes.addressof(numbers), ctypes.addressof(numbers) + 8
        self.tensor = Tensor(address, kind, device, 1, code, bits, 1, shape, strides, 0, None, None)
        alive.append((self, numbers))
    def __dlpack_device__(self):
        return self.tensor.kind, self.tensor.device
    def __dlpack__(self, **_):
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

def half(**where): return tvm_ffi.from_dlpack(Given(2, 16, **where))
def single(**where): return tvm_ffi.from_dlpack(Given(2, 32, **where))
"""
PROLOGUE = (
    GIVEN
    + """
driver = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
driver.calls.restype = ctypes.c_char_p
scale = tvm_ffi.load_module(sys.argv[1] + "/" + sys.argv[2]).get_function("scale")

def calls(): return driver.calls().decode().splitlines()
def said(*given):
    try:
        scale(*given)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return calls()
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the launcher, and the driver that writes down."""
    folder = tmp_path_factory.mktemp("any")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = [compiler, "-shared", "-fPIC", "-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{INCLUDE}", f"-isystem{tvm_ffi.libinfo.find_include_path()}", "-DKART_EXPORTED=scale"]
    launcher = INCLUDE / "kart/any_launcher.cpp"
    subprocess.run([*flags, *includes, launcher, "-o", folder / "launcher.so", "-ldl"], check=True)
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*flags, soname, HERE / "driver.cpp", "-o", folder / "libcuda.so.1"], check=True)
    return folder


def run(made: Path, code: str, **notes: str) -> Any:
    """What `code` leaves in `out`, run by a process of its own, since the driver stays in it."""
    text = json.dumps(notes, sort_keys=True)
    name = f"kernel{abs(hash(text))}.so"
    noted = {key: value for key, value in {**NOTES, **notes}.items() if value}
    (made / name).write_bytes(attach((made / "launcher.so").read_bytes(), b"IMAGE", noted))
    program = PROLOGUE + code + "\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", program, str(made), name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SOUND = "(2, 3, 4, half(), single(address=0x2004), -5, 32, 1.5, 2.5, True, 255)"


def test_the_driver_gets_every_argument_in_its_type_and_place(made: Path) -> None:
    calls = run(made, f"out = said{SOUND}")
    where, _, values = next(line for line in calls if line.startswith("launch")).partition(" on 0 ")
    assert where == "launch noted_8 2,3,4 128,1,1 4096 stream 0"
    given = [int(value, 16) for value in values.split()]
    assert given[:2] == [0x1000, 0x2004]
    assert given[2] & 0xFFFFFFFF == 0xFFFFFFFB
    assert given[3] == 32
    assert given[4] & 0xFFFFFFFF == 0x3FC00000
    assert given[5] == 0x4004000000000000
    assert given[6] & 0xFF == 1
    assert given[7] & 0xFF == 255


def test_kernels_are_launched_where_their_tensors_are(made: Path) -> None:
    given = SOUND.replace("half()", "half(device=3)").replace("0x2004", "0x2004, device=3")
    assert any(line.startswith("launch") and " on 3 " in line for line in run(made, f"out = said{given}"))


def test_without_blocks_nothing_is_launched(made: Path) -> None:
    given = SOUND.replace("(2, 3, 4", "(2, 0, 4")
    assert not any(line.startswith("launch") for line in run(made, f"out = said{given}"))


def test_memory_for_blocks_is_taken_and_given_back(made: Path) -> None:
    """Kernels that ask for scratch read its address behind their own arguments."""
    calls = run(made, "out = said(2, 3, 4, half())", arguments="x=*float16:16", entry="noted_3", scratch="100")
    names = [line.split()[0] for line in calls]
    assert names.index("take") < names.index("launch") < names.index("give")
    assert f"take {100 * 2 * 3 * 4}" in calls
    launch = next(line for line in calls if line.startswith("launch"))
    assert launch.endswith(" 1000 abc00 0")


WRONG = [
    ("half()", "single()", "TypeError: scale: x must be float16, got float32"),
    ("half()", "7", "TypeError: scale: x must be a tensor"),
    ("half()", "None", "TypeError: scale: x must be a tensor"),
    ("half()", "half(kind=1)", "ValueError: scale: this kernel runs on cuda, but x is on cpu"),
    ("half()", "half(address=0x1008)", "ValueError: scale: x must lie at a multiple of 16 bytes"),
    ("0x2004", "0x2002", "ValueError: scale: out must lie at a multiple of 4 bytes"),
    (
        "0x2004",
        "0x2004, device=1",
        "ValueError: scale: out must be on cuda:0 as the tensors before it are, got cuda:1",
    ),
    ("-5", "1 << 31", "ValueError: scale: n must be int32, got 2147483648"),
    ("-5", "1.0", "TypeError: scale: n must be an integer"),
    ("32", "33", "ValueError: scale: stride must be a multiple of 16, got 33"),
    ("1.5", "'a'", "TypeError: scale: factor must be a number"),
    ("True", "2", "ValueError: scale: on must be bool, got 2"),
    ("255", "256", "ValueError: scale: small must be uint8, got 256"),
    ("255", "-1", "ValueError: scale: small must be uint8, got -1"),
    ("(2, 3", "(2.0, 3", "TypeError: scale: the number of blocks in x must be an integer"),
    ("(2, 3", "(2, -3", "ValueError: scale: the number of blocks in y is -3"),
    (", 255", "", "TypeError: scale takes 11 arguments, the blocks in x, y and z and 8 of its kernel, got 10"),
]


@pytest.fixture(scope="module")
def refused(made: Path) -> list[tuple[str, list[str]]]:
    """What each wrong call says, and what the driver was called for."""
    assert all(SOUND.count(old) == 1 for old, _, _ in WRONG)
    each = ", ".join(f"[said{SOUND.replace(old, new)}, calls()]" for old, new, _ in WRONG)
    found: list[tuple[str, list[str]]] = run(made, f"out = [{each}]")
    return found


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[error for _, _, error in WRONG])
def test_a_wrong_call_is_refused_by_name_and_nothing_is_launched(
    refused: list[tuple[str, list[str]]], number: int
) -> None:
    told, calls = refused[number]
    assert told == WRONG[number][2]
    assert not any(line.startswith("launch") for line in calls)


@pytest.mark.parametrize(
    "notes",
    [
        {"arguments": "x=*float17"},
        {"arguments": "x"},
        {"arguments": "x=*float16:"},
        {"entry": ""},
        {"threads": ""},
        {"threads": "none"},
        {"arguments": " ".join(f"a{i}=int32" for i in range(121))},
    ],
)
def test_notes_that_cannot_be_used_are_an_error_and_no_launch(made: Path, notes: dict[str, str]) -> None:
    told, calls = run(made, f"out = [said{SOUND}, calls()]", **notes)
    assert isinstance(told, str), told
    assert told.startswith("RuntimeError"), told
    assert not any(line.startswith("launch") for line in calls)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_what_numpy_has_no_type_for_may_come_as_bits(made: Path, dtype: str) -> None:
    bits = 16 if dtype == "bfloat16" else 8
    right, wrong = f"tvm_ffi.from_dlpack(Given(1, {bits}))", f"tvm_ffi.from_dlpack(Given(0, {bits}))"
    told, calls = run(
        made, f"out = [said(1, 1, 1, {wrong}), said(1, 1, 1, {right})]", arguments=f"x=*{dtype}", entry="noted_1"
    )
    assert told == f"TypeError: scale: x must be {dtype}, got int{bits}"
    assert any(line.startswith("launch") for line in calls)


def test_a_launch_that_fails_says_what_the_driver_said(made: Path) -> None:
    told = run(made, f"driver.fail(b'launch')\nout = said{SOUND}")
    assert told.startswith("RuntimeError: scale: the launch on cuda:0 failed:")
    assert "an illegal address" in told
