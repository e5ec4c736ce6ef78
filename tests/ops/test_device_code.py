"""Device code and launchers of one op agree, for the oldest GPU and the one that is tuned for, without spilling."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kartifacts import config
from kartifacts.build import cubins, elf, images
from kartifacts.build.compile import compile_specs
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.library import open_library
from kartifacts.build.sections import sections_of
from kartifacts.build.toolchains import find
from kartifacts.errors import NoCompiler
from kartifacts.model.arch import parse_archs
from kartifacts.model.spec import Spec

KERNELS = Path(__file__).parents[2] / "kernels"
LIBRARY = open_library(KERNELS, "kartifacts")
ARCHS = parse_archs("7.5 9.0a")
DTYPE = "bfloat16"  # the one type that is another instruction on old GPUs


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[BuiltKernel]]:
    """Op → its kernels of one element type, for each arch."""
    folder = tmp_path_factory.mktemp("device_code")
    settings = config.read(overrides={"workspace": folder / "workspace", "generated": folder / "generated"})
    try:
        find("nvrtc", settings)
    except NoCompiler as error:
        pytest.skip(f"needs NVRTC or nvcc: {error}")
    specs = [spec for spec in LIBRARY.specs((), ARCHS)[0] if ("dtype", DTYPE) in spec.axes]
    found: dict[str, list[BuiltKernel]] = {}
    for spec, kernel in zip(specs, compile_specs(specs, settings).kernels, strict=True):
        found.setdefault(_op(spec), []).append(kernel)
    return found


@pytest.fixture(scope="module")
def built(kernels: dict[str, list[BuiltKernel]]) -> dict[str, list[elf.Inspection]]:
    return {op: [elf.inspect(kernel.path) for kernel in each] for op, each in kernels.items()}


def _op(spec: Spec) -> str:
    return f"{spec.family}/{spec.op.name}"


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_a_launcher_names_the_kernels_of_its_image_and_no_others(
    built: dict[str, list[elf.Inspection]], op: str
) -> None:
    """A name that is wrong would be found out on a GPU, at the first row that wants that kernel."""
    family, decl = LIBRARY.find(op)
    texts = [(KERNELS / family / name).read_text() for name in decl.device["cuda"].host_sources]
    named = {name for text in texts for name in re.findall(rf'"({decl.name}_\w+)"', text)}
    assert named
    for inspected in built[op]:
        assert set(inspected.functions) == named


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_no_kernel_spills(built: dict[str, list[elf.Inspection]], op: str) -> None:
    for inspected in built[op]:
        for name, usage in inspected.functions.items():
            assert (usage.spills, usage.stack) == (0, 0), (name, inspected.archs)


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", LIBRARY.ops)
def test_a_launcher_runs_with_any_glibc_of_the_last_decade(built: dict[str, list[elf.Inspection]], op: str) -> None:
    for inspected in built[op]:
        floor = tuple(map(int, inspected.needs.get("glibc", "0").split(".")))
        assert floor <= (2, 17), inspected.needs


# -- how norms are launched --------------------------------------------------------------------------------------------

# Less than, as much as and more than what each kernel holds: of one row, of few and of many.
SHAPES = [
    (rows, columns, misaligned)
    for rows in (1, 3, 512, 513, 100_000)
    for columns in (
        *(1, 7, 8, 100, 256, 264, 333, 512, 513, 2040, 2048, 4096, 4104, 8192, 8200, 16384, 16392, 24576, 32768),
        *(32776, 65536, 1_000_003),
    )
    for misaligned in (False, True)
]
LAUNCHES = """
import ctypes, json, sys
import tvm_ffi
driver = ctypes.CDLL(sys.argv[1])
driver.calls.restype = ctypes.c_char_p
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("dtype", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]
class Argument(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64)]
def launch(function, parameters, rows, columns, misaligned):
    arguments, alive = (Argument * len(parameters))(), []
    for number, name in enumerate(parameters):
        if name == "eps":
            arguments[number] = Argument(3, 0, 0x3EE4F8B588E368F1)
            continue
        shape = [columns] if name in ("weight", "bias") else [rows, columns]
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        place = (number + 1 << 41) + 2 * misaligned
        tensor = Tensor(place, (2, 0), len(shape), (4, 16), 1, ctypes.addressof(sizes), None, 0)
        alive += [sizes, tensor]
        arguments[number] = Argument(7, 0, ctypes.addressof(tensor))
    code = function(None, arguments, len(parameters), ctypes.byref(Argument()))
    calls = driver.calls().decode(errors="replace").splitlines()
    return code, " and ".join(call for call in calls if call.startswith("launch "))
op, path, parameters, shapes = json.loads(sys.argv[2])
function = getattr(ctypes.CDLL(path), f"__tvm_ffi_{op}")
print(json.dumps([launch(function, parameters, *shape) for shape in shapes]))
"""
PARAMETERS = {
    "norm/rmsnorm": ["x", "weight", "out", "eps"],
    "norm/layernorm": ["x", "weight", "bias", "out", "eps"],
    "norm/fused_add_rmsnorm": ["x", "residual", "weight", "eps"],
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver that writes down what is launched."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", f"-Wl,-soname,{made.name}"]
    subprocess.run([compiler, *flags, Path(__file__).with_name("driver.cpp"), "-o", made], check=True)
    return made


def sections(kernel: Path, prefix: str) -> dict[str, memoryview]:
    """Function → a section of its own in the image."""
    attached = images.attached(kernel.read_bytes())
    assert attached is not None
    found = sections_of(memoryview(attached[0]))
    return {each.name.removeprefix(prefix): each.data for each in found if each.name.startswith(prefix)}


def most_threads(kernel: Path) -> dict[str, int]:
    """Function → the threads of a block that its registers suffice for."""
    return {
        name: struct.unpack("III", value)[0]
        for name, info in sections(kernel, ".nv.info.").items()
        for attribute, value in cubins._attributes(info)
        if attribute == 0x05  # EIATTR_MAX_THREADS
    }


@pytest.mark.nvrtc
@pytest.mark.parametrize(("op", "most"), [("rmsnorm", 28_000), ("fused_add_rmsnorm", 32_000), ("layernorm", 64_000)])
def test_a_norm_has_no_more_code_than_a_compilation_has_time_for(
    op: str, most: int, kernels: dict[str, list[BuiltKernel]]
) -> None:
    """NVRTC takes 7 µs for a byte of instructions, and 0.3 s is all that a second specialisation may take."""
    path = next(kernel.path for kernel in kernels[f"norm/{op}"] if str(kernel.arch) == "9.0a")
    assert sum(map(len, sections(path, ".text.").values())) < most


@pytest.mark.nvrtc
@pytest.mark.parametrize("op", PARAMETERS)
def test_a_norm_is_launched_with_no_more_threads_than_it_takes_and_they_reach_every_element(
    op: str, kernels: dict[str, list[BuiltKernel]], driver: Path
) -> None:
    """Else a launch fails, or the end of some rows is left alone, at lengths that nobody has tried."""
    path = next(kernel.path for kernel in kernels[op] if str(kernel.arch) == "9.0a")
    name = op.partition("/")[2]
    given = json.dumps([name, str(path), PARAMETERS[op], SHAPES])
    done = subprocess.run([sys.executable, "-c", LAUNCHES, driver, given], capture_output=True, text=True, check=True)
    most, used = most_threads(path), set()
    for (rows, columns, misaligned), (code, said) in zip(SHAPES, json.loads(done.stdout), strict=True):
        shown = f"{rows} x {columns}, {misaligned=}: {said}"
        launched = re.fullmatch(r"launch (\w+) (\d+),1,1 (\d+),(\d+),1 0 stream 0 on 0", said)
        assert launched, shown
        function = launched[1]
        blocks, x, y = map(int, launched.groups()[1:])
        assert code == 0, shown
        assert x * y <= most[function], shown
        assert blocks * y >= rows > (blocks - 1) * y, shown
        assert x % 32 == 0 or (x in (1, 2, 4, 8, 16) and x * y % 32 == 0), shown  # as sum_over_row wants them
        narrow = misaligned or columns % 8 != 0
        assert narrow == function.endswith("_narrow"), shown
        if held := re.search(r"_held_(\w+)$", function):
            assert x * (1 if held[1] == "narrow" else 8 * int(held[1])) >= columns, shown
        else:
            assert y == 1, shown
        used.add(function)
    assert used == set(most)
