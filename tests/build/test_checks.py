"""What must not leave a build is named in a sentence; what a kernel takes of a GPU is what its assembler says."""

from __future__ import annotations

import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kartifacts.build import images
from kartifacts.build.checks import Promise, check, facts_of, judge, over
from kartifacts.build.compile import compile_specs
from kartifacts.build.cubins import Usage
from kartifacts.build.library import open_library
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.manifest import KernelEntry
from kartifacts.model.spec import Spec

from .conftest import CPU, SCALE, Compiler, Cuda, Shared, write_library

SPILLING = """
extern "C" __global__ void spilling(const float* x, float* y, int n) {
  float a[64], s = 0;
  #pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i * n + threadIdx.x];
  for (int k = 0; k < n; k++) {
    #pragma unroll
    for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i * 7 + 1) & 63] + x[k];
  }
  #pragma unroll
  for (int i = 0; i < 64; i++) s += a[i] * i;
  __shared__ float all[128];
  all[threadIdx.x] = s;
  __syncthreads();
  y[threadIdx.x] = all[127 - threadIdx.x];
}
extern "C" __global__ void indexed(const float* x, float* y, int n, const int* p) {
  float a[64], s = 0;
  for (int i = 0; i < 64; i++) a[i] = x[i];
  for (int i = 0; i < n; i++) s += a[p[i] & 63];
  y[0] = s;
}
extern "C" __global__ void plain(float* y) { y[threadIdx.x] = 1; }
"""
PLAIN = 'extern "C" __global__ void plain(float* y) { y[threadIdx.x] = 1; }'
GENCODE = "-gencode=arch=compute_90a,code=sm_90a"
PROMISE = Promise(CPU, ("scale",))


def refused(path: Path, promise: Promise) -> str:
    with pytest.raises(BuildError) as caught:
        check(path, promise, what="demo/scale for cpu", command="make it")
    assert caught.value.command == "make it"
    assert caught.value.message.startswith("demo/scale for cpu is not what was promised: it ")
    return caught.value.message


# -- host code ---------------------------------------------------------------------------------------------------------


def test_a_sound_kernel_passes_and_its_facts_are_plain_data(shared: Shared) -> None:
    path = shared()
    facts = check(path, replace(PROMISE, private=(str(path.parent),)), what="demo/scale for cpu")
    report = facts.report()
    assert (report["bytes"], report["kind"], report["exports"]) == (path.stat().st_size, "shared", ["scale"])
    assert report["needs"]["tvm_ffi"] == "0.1"
    assert "libtvm_ffi.so" in report["libraries"]
    assert report["archs"] == []
    assert report["functions"] == {}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["-Wl,-rpath,/somewhere/else"], "it has a run path, '/somewhere/else'"),
        (["-Wl,--disable-new-dtags,-rpath,$ORIGIN"], r"it has a run path, '\$ORIGIN'"),
        (["-Wl,--build-id=sha1"], "it has a build-id, which is another for the same code"),
        (["-Wl,-z,execstack"], "it asks for a stack that can be executed"),
        (["-lz", "-Wl,--no-as-needed"], r"it needs libz\.so\.1, which link_flags do not declare"),
    ],
)
def test_what_the_linker_was_asked_for_and_no_kernel_may_have_is_named(
    shared: Shared, flags: list[str], sentence: str
) -> None:
    if "-lz" in flags:
        flags = [*reversed(flags)]
        if not list(Path("/usr/lib").rglob("libz.so")):
            pytest.skip("there is no libz to link to")
    assert re.search(sentence, refused(shared(*flags), PROMISE))


def test_libraries_that_are_declared_may_be_needed(shared: Shared) -> None:
    source = 'extern "C" const char* zlibVersion(); extern "C" const char* __tvm_ffi_scale();\n'
    source += 'extern "C" __attribute__((visibility("default"))) const char* __tvm_ffi_scale() {return zlibVersion();}'
    if not list(Path("/usr/lib").rglob("libz.so")):
        pytest.skip("there is no libz to link to")
    path = shared("-lz", source=source)
    assert check(path, replace(PROMISE, libraries=("z",)), what="demo").found.needed
    assert "libz.so.1" in refused(path, replace(PROMISE, libraries=("zstd", "lib")))


def test_code_that_can_be_written_to_is_named(shared: Shared) -> None:
    source = SCALE + '\nasm(".section .both,\\"awx\\"\\n.byte 0\\n.previous");'
    assert "it has a segment that can be written and executed" in refused(shared(source=source), PROMISE)
    source = SCALE + '\nasm(".text\\n.quad __tvm_ffi_scale");'
    assert "code that is written to when it is loaded" in refused(shared("-Wl,-z,notext", source=source), PROMISE)


def test_symbols_that_nothing_defines_are_named_before_anybody_opens_the_file(shared: Shared) -> None:
    source = SCALE.replace("return 0;", "return absent() + vanished(1);")
    source = 'extern "C" int absent();\nint vanished(int);\n' + source
    message = refused(shared("-Wl,-z,undefs", source=source), PROMISE)
    assert "it uses _Z8vanishedi, absent, which no library that it needs defines" in message


def test_what_libtvm_ffi_defines_in_c_and_in_cpp_is_not_missing(shared: Shared) -> None:
    source = """
    #include <tvm/ffi/tvm_ffi.h>
    int scale(tvm::ffi::TensorView x, double by) { return x.ndim() + by + std::to_string(by).size(); }
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
    """
    path = shared(source=source)
    assert any(not library for library in facts_of(path).found.undefined.values())
    check(path, PROMISE, what="demo/scale")


def test_an_export_that_is_missing_or_another_machines_code_is_named(shared: Shared) -> None:
    path = shared()
    message = refused(path, replace(PROMISE, exports=("scale", "shift", "turn")))
    assert "it does not export shift, turn (it exports scale)" in message
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 18, 62 if CPU.name == "aarch64" else 183)
    path.write_bytes(content)
    assert "it is code for" in refused(path, PROMISE)


def test_something_that_is_no_shared_object_is_named(shared: Shared, tmp_path: Path) -> None:
    assert "'shared', expected 'cubin'" in refused(shared(), replace(PROMISE, suffix=".cubin"))
    script = tmp_path / "kernel.so"
    script.write_text("INPUT(-lm)")
    with pytest.raises(BuildError, match=r"is not what was promised: .* is not a sound ELF file"):
        check(script, PROMISE, what="demo/scale")


def test_all_faults_are_named_at_once(shared: Shared) -> None:
    message = refused(shared("-Wl,-rpath,/x", "-Wl,--build-id"), replace(PROMISE, exports=("shift",)))
    assert [word in message for word in ("run path", "build-id", "does not export")] == [True] * 3


def test_nothing_of_a_kernel_is_run_when_it_is_checked(shared: Shared, tmp_path: Path) -> None:
    """The machine that releases has neither the GPU nor the libraries that opening it would take."""
    trace = tmp_path / "it was run"
    source = f"""
    #include <stdio.h>
    __attribute__((constructor)) static void begin() {{ fclose(fopen("{trace}", "w")); }}
    """
    path = shared(source=SCALE + source)
    check(path, PROMISE, what="demo/scale")
    assert not trace.exists()
    load = f"import tvm_ffi; tvm_ffi.load_module({str(path)!r})"
    subprocess.run([sys.executable, "-c", load], check=True)
    assert trace.exists(), "opening it would have"


def test_a_newer_system_than_was_asked_for_is_what_the_kernel_needs(shared: Shared) -> None:
    """What a plan limits is read from the versions of symbols, of which each library has its own."""
    source = SCALE.replace("return 0;", "return arc4random() + (int)std::string(count, 'x').find('y');")
    source = "#include <cstdlib>\n#include <string>\n" + source.replace('"TypeError"', "std::string(9, count).c_str()")
    try:
        needs = facts_of(shared(source=source)).needs
    except subprocess.CalledProcessError:
        pytest.skip("this C library has no arc4random (glibc 2.36)")
    assert tuple(map(int, needs["glibc"].split("."))) >= (2, 36)
    assert needs["glibcxx"].startswith("3.4")


# -- paths of the machine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["/srv/some body/src/x.cpp", "/srv/some body", "file:///srv/some body/x", "-I/srv/some body/include"]
)
def test_a_path_of_the_machine_is_found_and_shown_with_its_section(shared: Shared, text: str) -> None:
    source = SCALE + f'\nextern "C" __attribute__((visibility("default"))) const char* where() {{ return "{text}"; }}'
    message = refused(shared(source=source), replace(PROMISE, private=("/srv/some body",)))
    assert re.search(r"it holds '/srv/some body[^']*', a path of this machine, in its section \.rodata", message)


@pytest.mark.parametrize("text", ["/srv/some body2/x", "/srv/some body-old", "x/srv/some bodys", "/usr/srv/some body"])
def test_what_only_begins_like_a_path_of_the_machine_is_let_pass(shared: Shared, text: str) -> None:
    source = SCALE + f'\nextern "C" __attribute__((visibility("default"))) const char* where() {{ return "{text}"; }}'
    check(shared(source=source), replace(PROMISE, private=("/srv/some body",)), what="demo")


def test_names_of_files_in_between_are_paths_of_the_machine_too(shared: Shared) -> None:
    for name in (
        "tmpxft_00003a32_00000000-6_anon.cudafe1.stub.c",
        "/elsewhere/cc8yTq2x.o",
        "/proc/77/fd/9/objects/x.o",
    ):
        source = SCALE + f'\nextern "C" __attribute__((visibility("default"))) const char* f() {{ return "{name}"; }}'
        assert "a path of this machine" in refused(shared(source=source), PROMISE)


# -- device code -------------------------------------------------------------------------------------------------------


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["7.5", "9.0a", "12.0"])
def test_spills_are_what_the_assembler_would_have_said_and_arrays_are_none(nvcc: Cuda, arch: str) -> None:
    flags = ("-cubin", f"-arch=sm_{arch.replace('.', '')}", "-maxrregcount=32")
    path, silent = nvcc(SPILLING, *flags)
    assert silent == ""
    _, said = nvcc(SPILLING, *flags, "-Xptxas=-v")  # other bytes: what is said is written into the notes
    pattern = (
        r"properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
        r"ptxas info\s+: Used (\d+) registers, used (\d+) barriers(?:.*?(\d+) bytes smem)?"
    )
    expected = {
        name: Usage(int(registers), int(stack), int(stores), int(loads), int(shared or 0), int(barriers))
        for name, stack, stores, loads, registers, barriers, shared in re.findall(pattern, said)
    }
    found = facts_of(path).found.functions
    assert found == expected
    assert found["spilling"].spill_stores > 100
    assert found["indexed"].spills == 0 < found["indexed"].stack
    assert found["plain"].stack == 0


@pytest.mark.nvcc
def test_limits_of_a_plan_name_the_function_that_is_beyond_them(nvcc: Cuda) -> None:
    path, _ = nvcc(SPILLING, "-cubin", "-arch=sm_90a", "-maxrregcount=32")
    facts = facts_of(path)
    assert over(facts, {}) == over(facts, {"kernel_bytes": 1 << 20, "local_bytes": 4096, "spill_bytes": 1 << 20}) == []
    (size,) = over(facts, {"kernel_bytes": 1000, "glibc": "2.28"})
    assert size == f"has {facts.size:,} bytes; the plan's limit is 1,000"
    local = over(facts, {"local_bytes": 100})
    assert [re.findall(r"in (\w+)", fault) for fault in local] == [["indexed"], ["spilling"]]
    (spills,) = over(facts, {"spill_bytes": 0})
    usage = facts.found.functions["spilling"]
    assert f"spills registers in spilling, {usage.spill_stores} bytes of stores" in spills


@pytest.mark.nvcc
def test_an_image_for_another_arch_is_never_taken_for_the_promised_one(nvcc: Cuda) -> None:
    path, _ = nvcc(SPILLING, "-cubin", "-arch=sm_90a")
    promise = Promise(parse_arch("9.0a"), ("spilling", "indexed", "plain"), ".cubin")
    check(path, promise, what="demo")
    for arch in ("9.0", "10.0a", "8.0"):
        message = refused(path, replace(promise, arch=parse_arch(arch)))
        assert f"it holds GPU code for 9.0a, expected {arch}" in message
    assert "it does not export absent" in refused(path, replace(promise, exports=("absent",)))
    assert "expected no arch" in refused(path, replace(promise, arch=CPU))


@pytest.mark.nvcc
def test_the_suffix_of_an_arch_is_told_apart_though_the_header_holds_its_base_alone(nvcc: Cuda) -> None:
    family, _ = nvcc(PLAIN, "-cubin", "-arch=sm_100f")
    exact, _ = nvcc(PLAIN, "-cubin", "-arch=sm_100a")
    plain, _ = nvcc(PLAIN, "-cubin", "-arch=sm_100")
    made = {"10.0f": family, "10.0a": exact, "10.0": plain}
    assert len({path.read_bytes()[48:52] for path in made.values()}) == 1
    for arch, path in made.items():
        for other in made:
            promise = Promise(parse_arch(other), ("plain",), ".cubin")
            if arch == other:
                check(path, promise, what="demo")
            else:
                assert f"it holds GPU code for {arch}, expected {other}" in refused(path, promise)


@pytest.mark.nvcc
def test_an_image_that_does_not_tell_its_suffix_is_held_against_the_base_of_the_promised_arch(nvcc: Cuda) -> None:
    """As 648 of the cubins that FlashInfer ships: their notes hold no command line."""
    path, _ = nvcc(PLAIN, "-cubin", "-arch=sm_100f")
    content = path.read_bytes()
    assert content.count(b"-arch sm_100f") == 1
    path.write_bytes(content.replace(b"-arch sm_100f", b"-O3          "))
    for arch in ("10.0f", "10.0a", "10.0"):
        check(path, Promise(parse_arch(arch), ("plain",), ".cubin"), what="demo")
    assert "expected 10.3f" in refused(path, Promise(parse_arch("10.3f"), ("plain",), ".cubin"))


@pytest.mark.nvcc
def test_an_attached_image_for_another_arch_is_named(nvcc: Cuda, shared: Shared) -> None:
    cubin, _ = nvcc(PLAIN, "-cubin", "-arch=sm_80")
    fat, _ = nvcc(PLAIN, "-fatbin", "-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")
    launcher = shared()
    for image, held, wrong in (
        (cubin, "8.0", "9.0a"),
        (fat, "9.0a, 9.0a+PTX (PTX)", "9.0a"),
        (fat, "9.0a, 9.0a+PTX (PTX)", "8.0"),
    ):
        path = launcher.with_name(f"{image.name}.{wrong}.so")
        path.write_bytes(images.attach(launcher.read_bytes(), image.read_bytes(), {"toolkit": "13.0"}))
        message = refused(path, Promise(parse_arch(wrong), ("scale",)))
        assert f"it holds GPU code for {held}, expected {wrong}" in message
        assert facts_of(path).needs["driver"] == "13.0"
    check(path, Promise(parse_arch("9.0a+PTX"), ("scale",)), what="demo")


@pytest.mark.nvcc
def test_one_image_too_many_or_too_few_is_named(nvcc: Cuda) -> None:
    flags = ("-shared", "-Xcompiler", "-fPIC", "-Xlinker", "-s,--build-id=none")
    one, _ = nvcc(SPILLING, *flags, "-gencode", "arch=compute_90a,code=sm_90a")
    promise = Promise(parse_arch("9.0a"), ())
    check(one, promise, what="demo")
    ptx = replace(promise, arch=parse_arch("9.0+PTX"))
    assert "holds GPU code for 9.0a, expected 9.0, 9.0+PTX (PTX)" in refused(one, ptx)
    two, _ = nvcc(
        SPILLING, *flags, "-gencode", "arch=compute_90a,code=sm_90a", "-gencode", "arch=compute_80,code=sm_80"
    )
    assert "holds GPU code for 8.0, 9.0a, expected 9.0a" in refused(two, promise)


@pytest.mark.nvcc
def test_a_path_in_a_compressed_image_is_found(nvcc: Cuda) -> None:
    source = (
        '__device__ char where[] = "/srv/somebody/x.cu"; extern "C" __global__ void k(char* y) { y[0] = where[1]; }'
    )
    flags = ("-shared", "-Xcompiler", "-fPIC", "-Xlinker", "-s,--build-id=none", "--compress-mode=size", GENCODE)
    path, _ = nvcc(source + 'extern "C" int f() { k<<<1, 1>>>(nullptr); return 0; }', *flags)
    assert b"/srv/somebody" not in path.read_bytes()
    promise = Promise(parse_arch("9.0a"), (), private=("/srv/somebody",))
    assert "it holds '/srv/somebody/x.cu', a path of this machine" in refused(path, promise)


@pytest.mark.nvcc
def test_a_cuda_runtime_outside_of_the_kernel_is_named_unless_declared(
    nvcc: Cuda,
) -> None:
    flags = ("-shared", "-cudart=shared", "-Xcompiler", "-fPIC", "-Xlinker", "-s,--build-id=none", GENCODE)
    try:
        path, _ = nvcc(SPILLING + 'extern "C" int f() { plain<<<1, 1>>>(nullptr); return 0; }', *flags)
    except subprocess.CalledProcessError:
        pytest.skip("this toolkit has no shared runtime to link to")
    promise = Promise(parse_arch("9.0a"), ())
    message = refused(path, promise)
    assert re.search(r"it needs libcudart\.so\.\d+: the CUDA runtime belongs into the kernel", message)
    facts = check(path, replace(promise, libraries=("cudart",)), what="demo")
    assert facts.needs["cudart"].isdigit()


def test_what_code_for_amd_takes_is_read_from_its_metadata(tmp_path: Path) -> None:
    functions = [
        {
            ".name": "scale",
            ".args": [{".size": 8}],
            ".vgpr_count": 40,
            ".vgpr_spill_count": 3,
            ".private_segment_fixed_size": 16,
            ".group_segment_fixed_size": 512,
        }
    ]
    path = tmp_path / "k.hsaco"
    for target, name in (("gfx942", "gfx942"), ("gfx90a:sramecc+:xnack-", "gfx90a:sramecc+:xnack-")):
        metadata = {
            "amdhsa.target": f"amdgcn-amd-amdhsa--{target}",
            "amdhsa.kernels": functions,
            "amdhsa.version": [1, 2],
        }
        path.write_bytes(code_object(msgspec.msgpack.encode(metadata)))
        facts = check(path, Promise(parse_arch(name), ("scale",), ".hsaco"), what="demo")
        assert facts.found.functions == {"scale": Usage(40, 16, 12, 12, 512)}
    assert "expected gfx950" in refused(path, Promise(parse_arch("gfx950"), ("scale",), ".hsaco"))
    path.write_bytes(code_object(b"\x91" * 100_000))
    with pytest.raises(BuildError, match="describes itself wrongly"):
        check(path, PROMISE, what="demo")


def code_object(metadata: bytes) -> bytes:
    """An ELF file for an AMD GPU with nothing but its note of metadata."""
    note = struct.pack("<III8s", 7, len(metadata), 32, b"AMDGPU\0") + metadata + bytes(-len(metadata) % 4)
    names = b"\0.note\0.names\0"
    rows = [(1, 7, 64, len(note)), (7, 3, 64 + len(note), len(names))]
    identity = b"\x7fELF\x02\x01\x01\x40\x03" + bytes(7)
    table = 64 + len(note) + len(names)
    head = identity + struct.pack("<HHIQQQIHHHHHH", 3, 224, 1, 0, 0, table, 0x4C, 64, 56, 0, 64, 3, 2)
    sections = [bytes(64)] + [
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 4, 0) for name, kind, offset, size in rows
    ]
    return head + note + names + b"".join(sections)


# -- published kernels -------------------------------------------------------------------------------------------------


def test_a_table_that_says_something_else_than_its_kernel_is_found_out(shared: Shared) -> None:
    path = shared()
    content, facts = path.read_bytes(), facts_of(path)
    look = judge({"kernel_bytes": facts.size})
    entry = KernelEntry(
        uri="demo/scale",
        sha256="",
        size=0,
        block=0,
        offset=0,
        suffix=".so",
        key="x",
        exports=["scale"],
        needs=facts.needs,
    )
    assert look(content, entry, CPU, ()) == []
    changed = msgspec.structs.replace
    (needs,) = look(content, changed(entry, needs={"glibc": "2.2"}), CPU, ())
    assert re.fullmatch(r"needs .*tvm_ffi 0\.1, and its table says glibc 2\.2", needs)
    (exports,) = look(content, changed(entry, exports=["shift"]), CPU, ())
    assert exports == "does not export shift (it exports scale)"
    assert look(content, entry, parse_arch("9.0"), ()) == ["holds GPU code for no arch, expected 9.0"]
    (broken,) = look(content[: len(content) // 2], entry, CPU, ())
    assert broken.startswith("cannot be read: ")
    assert look(b"whatever it is", changed(entry, key=""), CPU, ()) == []  # imported: others promised it
    assert judge({"kernel_bytes": facts.size - 1})(content, entry, CPU, ()) != []


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("-Wl,-rpath,/x", "has a run path, '/x'"),
        ("-Wl,--build-id=sha1", "has a build-id"),
        ("-Wl,-z,execstack", "asks for a stack that can be executed"),
        ("-D__tvm_ffi_scale=__tvm_ffi_shift", "does not export scale"),
        ('-DSAID="/elsewhere/cc8yTq2x.o"', "holds '/cc8yTq2x.o', a path of a machine that builds"),
        *(
            (f'-DSAID="/{path}"', f"holds '/{path}', a path of a machine that builds")
            for path in (
                "tmp/build/f.cpp",
                "home/alice/src/f.cu",
                "root/.cache/f.h",
                "var/tmp/x",
                "Users/alice/f.h",
                "private/var/folders/x",
                "builds/group/f.cu",
                "__w/f.cu",
                "github/workspace/f.cu",
                "workspace/f.cu",
                "workspaces/f.cu",
                "var/lib/jenkins/f.cu",
            )
        ),
        ('-DSAID="at /tmp/x:12"', "holds '/tmp/x:12', a path of a machine that builds"),
        ('-DSAID="-I/home/x"', f"holds '/{'home'}/x', a path of a machine that builds"),
    ],
)
def test_what_no_build_of_ours_would_have_let_pass_is_found_where_it_is_published(
    shared: Shared, flag: str, sentence: str
) -> None:
    """The gate does not believe whoever handed a kernel in."""
    path = shared(flag, source='#ifndef SAID\n#define SAID ""\n#endif\n' + SCALE.replace('"expected nothing"', "SAID"))
    entry = published(path)
    [fault] = judge({})(path.read_bytes(), entry, CPU, ())
    assert sentence in fault


@pytest.mark.parametrize(
    "harmless",
    [
        "/usr/include/f.h",
        "/proc/self/maps",
        "/dev/shm/x",
        "/opt/f.h",
        "/tmp",
        "/home/",
        "a/tmp/b",
        "https://x.org/home/y",
        "~/tmp/x",
        "$HOME/tmp/x",
        "%s/tmp/x",
        "and/or",
        "/tmpfs/x",
        "/homes/x",
    ],
)
def test_a_path_that_is_the_same_on_all_machines_is_no_fault(shared: Shared, harmless: str) -> None:
    path = shared(source=SCALE.replace("expected nothing", harmless))
    assert harmless.encode() in path.read_bytes()
    assert judge({})(path.read_bytes(), published(path), CPU, ()) == []


@pytest.mark.parametrize(
    ("library", "declared", "sentence"),
    [
        ("libevil.so", (), "needs libevil.so, which link_flags do not declare"),
        ("libevil.so", ("other",), "needs libevil.so, which link_flags do not declare"),
        ("libevil.so", ("evil",), ""),
        ("libcudart.so.12", (), "needs libcudart.so.12: the CUDA runtime belongs into the kernel"),
        ("libcudart.so.12", ("cudart",), ""),
    ],
)
def test_a_published_kernel_needs_only_what_was_declared(
    shared: Shared, tmp_path: Path, library: str, declared: tuple[str, ...], sentence: str
) -> None:
    stub = tmp_path / library
    subprocess.run(["g++", "-shared", "-o", stub, f"-Wl,-soname,{library}", "-x", "c++", "/dev/null"], check=True)
    path = shared("-Wl,--no-as-needed", str(stub))
    found = judge({})(path.read_bytes(), published(path), CPU, declared)
    assert (sentence in found[0] and len(found) == 1) if sentence else found == []


def test_a_published_kernel_that_calls_what_nothing_defines_is_found(shared: Shared) -> None:
    called = SCALE.replace("return 0;", "return missing_fn();").replace(
        'extern "C"', 'extern "C" int missing_fn();\nextern "C"', 1
    )
    path = shared("-Wl,-z,undefs", source=called)
    [fault] = judge({})(path.read_bytes(), published(path), CPU, ())
    assert fault == "uses missing_fn, which no library that it needs defines"


def published(path: Path) -> KernelEntry:
    """What a table says of a kernel."""
    needs = facts_of(path).needs
    return KernelEntry(
        uri="demo/scale", sha256="", size=0, block=0, offset=0, suffix=".so", key="x", exports=["scale"], needs=needs
    )


# -- through a build ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("-Wl,-rpath,/x", "it has a run path, '/x'"),
        ("-Wl,--build-id=sha1", "it has a build-id"),
        ("-Wl,-z,execstack", "it asks for a stack that can be executed"),
    ],
)
def test_a_compiler_that_adds_to_what_it_was_asked_for_fails_the_build(
    make_spec: Callable[..., Spec], make_settings: Callable[..., Settings], compiler: Compiler, flag: str, sentence: str
) -> None:
    compiler.misbehave(f'exec {compiler.real} "$@" {shlex.quote(flag)}', on="-shared")
    settings = make_settings(KARTIFACTS_CXX=str(compiler.path))
    with pytest.raises(BuildError, match=sentence) as caught:
        compile_specs([make_spec()], settings)
    assert "demo/answer?size=small for cpu:" in caught.value.message
    assert flag not in caught.value.command  # what it was asked for
    assert not list(settings.workspace.glob("kernels/*/*/kernel.so"))


@pytest.mark.parametrize("place", ["library", "workspace", "home"])
def test_a_path_of_the_machine_in_a_source_fails_the_build(
    root: Path, make_spec: Callable[..., Spec], settings: Settings, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = root.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    path = {"library": root, "workspace": settings.workspace, "home": home}[place] / "data.bin"
    write_library(
        root,
        {
            "demo/answer_cpu.cpp": f'#include "answer.h"\nstatic const char* volatile data = "{path}";\n'
            "long kart_answer() { return data[0]; }\n"
        },
    )
    with pytest.raises(BuildError, match=f"it holds '{re.escape(str(path))}', a path of this machine"):
        compile_specs([make_spec()], settings)


@pytest.mark.parametrize("macro", ["__TIME__", "__DATE__", "__TIMESTAMP__"])
def test_a_source_that_tells_when_it_was_compiled_is_refused_and_a_comment_is_not(root: Path, macro: str) -> None:
    before = (root / "demo/answer_cpu.cpp").read_text()
    spoken = f'// no {macro} here\n/* nor {macro}\n */ static const char text[] = "\\"{macro}"; // {macro}\n'
    write_library(root, {"demo/answer_cpu.cpp": spoken + before})
    open_library(root).spec("answer", {"size": "small"}, CPU)
    write_library(root, {"include/scale.h": f"#define SCALE {macro}[0]\n"})
    with pytest.raises(ConfigError, match=rf"include/scale\.h uses {macro}: the kernel would be another each time"):
        open_library(root).spec("answer", {"size": "small"}, CPU)
