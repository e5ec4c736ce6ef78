"""What launchers do with their own file and the CUDA driver, as far as a machine without a GPU can show it."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import elf
from kartifacts.build.images import attach

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "kernels/include"
NOTES = {"define.KART_DTYPE": "2", "define.KART_HEAD_DIM": "128", "toolkit": "13.0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the launcher, and the driver that writes down."""
    folder = tmp_path_factory.mktemp("launcher")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    flags = [compiler, "-shared", "-fPIC", "-std=c++17", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*flags, f"-I{INCLUDE}", HERE / "launcher.cpp", "-o", folder / "launcher.so", "-ldl"], check=True)
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*flags, soname, HERE / "driver.cpp", "-o", folder / "libcuda.so.1"], check=True)
    (folder / "kernel.so").write_bytes(attach((folder / "launcher.so").read_bytes(), b"IMAGE", NOTES))
    return folder


PROLOGUE = """
import ctypes, json, sys, threading
driver = ctypes.CDLL(sys.argv[1] + "/libcuda.so.1") if sys.argv[2] == "driver" else None
kernel = ctypes.CDLL(sys.argv[1] + "/kernel.so")
kernel.error.restype = ctypes.c_char_p
kernel.launch.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
kernel.launch_second.argtypes = kernel.launch_absent.argtypes = [ctypes.c_int, ctypes.c_void_p]
if driver:
    driver.calls.restype = ctypes.c_char_p
def calls():
    return driver.calls().decode().splitlines()
def said(code):
    return kernel.error(code).decode()
"""


def run(made: Path, code: str, driver: str = "driver") -> Any:
    """What `code` leaves in `out`, run by a process of its own, since the driver stays in it."""
    program = PROLOGUE + code + "\nprint(json.dumps(out))"
    command = [sys.executable, "-c", program, str(made), driver]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    return json.loads(done.stdout)


# -- its own file ------------------------------------------------------------------------------------------------------


def test_a_launcher_learns_from_its_file_what_its_code_was_made_for(made: Path) -> None:
    kernel = ctypes.CDLL(str(made / "kernel.so"))
    assert (kernel.dtype(), kernel.head_dim()) == (2, 128)


def test_two_kernels_of_one_launcher_in_one_process_stay_apart(made: Path) -> None:
    other = made / "other.so"
    other.write_bytes(attach((made / "launcher.so").read_bytes(), b"OTHER", {"define.KART_DTYPE": "3"}))
    loaded = [ctypes.CDLL(str(path)) for path in (made / "kernel.so", other, made / "kernel.so")]
    assert [kernel.dtype() for kernel in loaded] == [2, 3, 2]


@pytest.mark.parametrize(
    ("note", "found"),
    [("2", 2), ("0", 0), ("07", 7), ("2.5", 0), ("-1", 0), ("9" * 30, 0), ("KART_FLOAT32", 0)],
)
def test_what_is_no_number_is_none(made: Path, note: str, found: int) -> None:
    path = made / f"note {len(note)} {note[:3]}.so"
    near = {"define.KART_DTYPE2": "5", "define.KART_DTYP": "6"}
    path.write_bytes(attach((made / "launcher.so").read_bytes(), b"IMAGE", {**near, "define.KART_DTYPE": note}))
    assert ctypes.CDLL(str(path)).dtype() == found


def damaged(content: bytes, name: str) -> bytes:
    data = bytearray(content)
    (table,) = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    image, notes = count - 2, count - 1
    changes: dict[str, tuple[str, int, int]] = {  # layout, offset, value
        "headers beyond the end": ("<Q", 40, len(data)),
        "headers far beyond the end": ("<Q", 40, (1 << 64) - 64),
        "headers that wrap around": ("<Q", 40, (1 << 64) - 1),
        "no headers": ("<H", 60, 0),
        "headers of another size": ("<H", 58, 40),
        "names in no section": ("<H", 62, 65535),
        "names beyond the end": ("<Q", table + 64 * names + 24, 1 << 40),
        "a name beyond the names": ("<I", table + 64 * image, 1 << 31),
        "an image beyond the end": ("<Q", table + 64 * image + 24, len(data)),
        "an image that is too long": ("<Q", table + 64 * image + 32, 1 << 62),
        "an empty image": ("<Q", table + 64 * image + 32, 0),
        "notes beyond the end": ("<Q", table + 64 * notes + 24, (1 << 64) - 1),
        "empty notes": ("<Q", table + 64 * notes + 32, 0),
    }
    layout, offset, value = changes[name]
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        "headers beyond the end",
        "headers far beyond the end",
        "headers that wrap around",
        "no headers",
        "headers of another size",
        "names in no section",
        "names beyond the end",
        "a name beyond the names",
        "an image beyond the end",
        "an image that is too long",
        "an empty image",
        "notes beyond the end",
        "empty notes",
    ],
)
def test_a_damaged_file_is_an_error_of_the_launch_and_no_crash(made: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / "kernel.so").write_bytes(damaged((made / "kernel.so").read_bytes(), damage))
    shutil.copy(made / "libcuda.so.1", tmp_path)
    out = run(tmp_path, "out = [kernel.dtype(), kernel.launch(1, 1, 32, 0, 0, None), said(-1), said(0), calls()]")
    text = f"no device code is attached to {tmp_path}/kernel.so"
    assert out == [0, -1, text, text, []]


def test_a_launcher_alone_says_that_it_is_one(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "launcher.so", tmp_path / "kernel.so")
    out = run(tmp_path, "out = [kernel.launch(1, 1, 32, 0, 0, None), said(-1)]", "none")
    assert out == [-1, f"no device code is attached to {tmp_path}/kernel.so"]


def test_notes_without_an_element_type_say_so(made: Path, tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(attach((made / "launcher.so").read_bytes(), b"IMAGE", {"toolkit": "13.0"}))
    out = run(tmp_path, "out = [kernel.dtype(), said(0)]", "none")
    assert out == [0, "the notes about its device code name no element type (KART_DTYPE)"]


def test_the_file_may_be_gone_once_it_is_loaded(made: Path, tmp_path: Path) -> None:
    """As a store that is collected removes it from under a process."""
    shutil.copy(made / "kernel.so", tmp_path)
    shutil.copy(made / "libcuda.so.1", tmp_path)
    code = "import os; os.unlink(sys.argv[1] + '/kernel.so'); driver.set_current(0)\n"
    out = run(tmp_path, code + "out = [kernel.launch(1, 1, 32, 0, 0, None), calls()[1]]")
    assert out == [0, "load IMAGE mode 2"]


def test_a_launcher_runs_with_any_glibc_of_the_last_decade(made: Path) -> None:
    """dlopen and its kin moved in glibc 2.34, fstat in 2.33, strtol in 2.38: none of these may be asked for."""
    needs = dict(elf.inspect(made / "launcher.so").needs)
    assert tuple(map(int, needs.get("glibc", "0").split("."))) <= (2, 17), needs


# -- the driver --------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_driver_can_hold_a_kernel_but_not_launch_it(made: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a CUDA driver")
    except OSError:
        pass
    code, text, dtype = run(made, "out = [kernel.launch(1, 1, 32, 0, 0, None), said(-1), kernel.dtype()]", "none")
    assert (code, dtype) == (-1, 2)
    assert text.startswith("the CUDA driver cannot be opened: libcuda.so.1: ")


def test_an_old_driver_is_named_by_what_it_lacks(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "kernel.so", tmp_path)
    source = re.sub(r"\bcuLibrary(\w+)", r"cuOlder\1", (HERE / "driver.cpp").read_text())
    (tmp_path / "driver.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "driver.cpp", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    code, text = run(tmp_path, "out = [kernel.launch(1, 1, 32, 0, 0, None), said(-1)]")
    assert (code, text) == (-1, "the CUDA driver is older than 12.0: it has no cuLibraryLoadData")


def test_the_image_is_loaded_once_and_a_launch_is_one_call(made: Path) -> None:
    out = run(
        made,
        """
driver.set_current(1)
out = [kernel.launch(7, 3, 96, 100, 1, 5), calls(), kernel.launch(2, 1, 32, 0, 1, None), calls()]
out += [kernel.launch_second(1, None), calls(), driver.get_mode()]
""",
    )
    first = ["cuInit", "load IMAGE mode 2", "kernel first", "launch first 7,3,1 96,1,1 100 stream 5 on 1 given 0.5 42"]
    again = ["launch first 2,1,1 32,1,1 0 stream 0 on 1 given 0.5 42"]
    other = ["kernel second", "launch second 1,1,1 32,1,1 0 stream 0 on 1"]
    assert out == [0, first, 0, again, 0, other, 0]


@pytest.mark.parametrize("before", [-1, 0], ids=["none", "another"])
def test_the_device_of_the_tensors_is_made_current_and_left_as_it_was(made: Path, before: int) -> None:
    out = run(
        made,
        f"""
driver.set_current({before})
out = [kernel.launch(1, 1, 32, 0, 2, None), calls()[3:], driver.get_current()]
""",
    )
    launch = "launch first 1,1,1 32,1,1 0 stream 0 on 2 given 0.5 42"
    assert out == [0, ["retain 2", "push", launch, "pop", "release 2"], before]


def test_a_launch_that_fails_leaves_the_context_as_it_was_and_says_what_was_tried(made: Path) -> None:
    out = run(
        made,
        """
driver.set_current(0)
driver.fail(b"launch")
out = [kernel.launch(1, 2, 32, 8, 2, None), said(-1), calls()[3:], driver.get_current()]
""",
    )
    text = "cuLaunchKernel of first, 1 × 2 × 1 blocks of 32 × 1 × 1 threads and 8 bytes: an illegal address (700)"
    assert out[:2] == [-1, text]
    assert [line.split()[0] for line in out[2]] == ["retain", "push", "launch", "pop", "release"]
    assert out[3] == 0


@pytest.mark.parametrize(
    ("failing", "text", "calls"),
    [
        ("cuInit", "cuInit: an illegal address (700)", ["cuInit"]),
        ("load", "cuLibraryLoadData of the attached image: an illegal address (700)", ["cuInit", "load"]),
        (
            "kernel",
            "looking for the kernel first in the attached image: an illegal address (700)",
            ["cuInit", "load", "kernel"],
        ),
        (
            "retain",
            "making a context of device 2 current: an illegal address (700)",
            ["cuInit", "load", "kernel", "retain"],
        ),
        (
            "push",
            "making a context of device 2 current: an illegal address (700)",
            ["cuInit", "load", "kernel", "retain", "push", "release"],
        ),
    ],
)
def test_whatever_fails_is_said_and_tried_again_the_next_time(
    made: Path, failing: str, text: str, calls: list[str]
) -> None:
    out = run(
        made,
        f"""
driver.fail(b"{failing}")
out = [kernel.launch(1, 1, 32, 0, 2, None), said(-1), [line.split()[0] for line in calls()], driver.get_mode()]
driver.fail(b"")
out.append(kernel.launch(1, 1, 32, 0, 2, None))
""",
    )
    assert out == [-1, text, calls, 0, 0]


def test_a_device_or_a_kernel_that_is_not_there_is_named(made: Path) -> None:
    out = run(made, "out = [kernel.launch(1, 1, 32, 0, 9, None), said(-1), kernel.launch_absent(0, None), said(-1)]")
    assert out == [
        -1,
        "making a context of device 9 current: unknown error (101)",
        -1,
        "looking for the kernel absent in the attached image: unknown error (500)",
    ]


def test_more_shared_memory_than_every_launch_has_is_asked_for(made: Path) -> None:
    out = run(made, "out = [kernel.launch(1, 1, 32, each, 1, None) for each in (49152, 49153, 200000)] + calls()")
    assert [line for line in out if str(line).startswith("attribute")] == [
        "attribute 8 49153 on 1",
        "attribute 8 200000 on 1",
    ]


@pytest.mark.parametrize(("blocks", "rows"), [(2**31, 1), (1, 65536), (2**40, 2**40)])
def test_more_blocks_than_a_launch_has_are_refused_and_not_cut_off(made: Path, blocks: int, rows: int) -> None:
    out = run(made, f"out = [kernel.launch({blocks}, {rows}, 32, 0, 0, None), said(-1), calls()[3:]]")
    assert out == [-1, f"first needs {blocks} × {rows} × 1 blocks; a launch has at most 2147483647 × 65535 × 65535", []]


def test_threads_that_launch_at_once_load_the_image_once(made: Path) -> None:
    out = run(
        made,
        """
gate = threading.Barrier(8)
codes = []
def work():
    gate.wait()
    codes.append(kernel.launch(1, 1, 32, 0, 0, None))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
names = [line.split()[0] for line in calls()]
out = [codes, names.count("cuInit"), names.count("load"), names.count("launch")]
""",
    )
    assert out == [[0] * 8, 1, 1, 8]


def test_each_thread_reads_its_own_failure(made: Path) -> None:
    out = run(
        made,
        """
out = [kernel.launch(2**31, 1, 32, 0, 0, None)]
other = threading.Thread(target=lambda: out.append(kernel.launch_absent(0, None)))
other.start(); other.join()
out.append(said(-1))
""",
    )
    assert out[:2] == [-1, -1]
    assert out[2].startswith("first needs 2147483648")
