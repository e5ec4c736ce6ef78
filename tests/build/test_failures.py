"""What compilers and linkers say when they fail becomes an error of its own kind, with the line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from kartifacts.build.failures import explain
from kartifacts.build.steps import Step
from kartifacts.errors import BuildError, CompilerKilled, HeaderMissing, LinkMissing

# kind of tool and fault → exit status, what it says, the error, what its message holds
SAID: dict[str, tuple[int, str, type[BuildError], str]] = {
    "gcc, header": (1, "a.cpp:3:10: fatal error: x.h: No such file or directory\n", HeaderMissing, "header 'x.h'"),
    "gcc, header in a header": (
        1,
        "In file included from a.cpp:1:\ninclude/b.h:2:10: fatal error: deep/x.hpp: No such file or directory\n",
        HeaderMissing,
        "'deep/x.hpp'",
    ),
    "clang, header": (1, "a.cpp:3:10: fatal error: 'z.h' file not found\n", HeaderMissing, "header 'z.h'"),
    "nvcc, header": (2, 'a.cu(1): error: could not open source file "y.h"\n', HeaderMissing, "header 'y.h'"),
    "nvrtc, header": (
        1,
        'a.cu(1): catastrophic error: cannot open source file "y.cuh"\n',
        HeaderMissing,
        "header 'y.cuh'",
    ),
    "gcc, source": (1, "g++: error: a.o: No such file or directory\n", BuildError, "a.o: No such file"),
    "gcc, assembler": (
        1,
        "g++: fatal error: cannot execute 'as': execvp: No such file or directory\n",
        BuildError,
        "cannot execute 'as'",
    ),
    "GNU ld": (1, "/usr/bin/ld: cannot find -lcuda: No such file or directory\n", LinkMissing, "library 'cuda'"),
    "GNU ld of a cross compiler": (1, "/usr/bin/aarch64-linux-gnu-ld.bfd: cannot find -lz\n", LinkMissing, "'z'"),
    "GNU ld, a file": (1, "/usr/bin/ld: cannot find Scrt1.o: No such file or directory\n", LinkMissing, "'Scrt1.o'"),
    "lld": (1, "ld.lld: error: unable to find library -lcudart\n", LinkMissing, "library 'cudart'"),
    "mold": (1, "mold: fatal: library not found: cudart_static\n", LinkMissing, "'cudart_static'"),
    "a symbol": (1, "a.o: undefined reference to `f()'\ncollect2: error: ld returned 1\n", BuildError, "`f()'"),
    "clang, no CUDA": (1, "clang: error: cannot find CUDA installation\n", BuildError, "cannot find CUDA"),
    "a crash, as a shell tells it": (139, "", BuildError, "the compiler crashed (SIGSEGV), at compiling"),
    "a crash of a worker": (-6, "terminate called\n", BuildError, "crashed (SIGABRT), at compiling"),
    "status of a shell": (137, "", CompilerKilled, "was killed (exit status 137)"),
    "status of a worker": (-9, "", CompilerKilled, "was killed"),
    "gcc, killed": (1, "g++: fatal error: Killed signal terminated program cc1plus\n", CompilerKilled, "was killed"),
    "clang, killed": (1, "clang: error: unable to execute command: Killed\n", CompilerKilled, "was killed"),
    "nvcc, killed": (255, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", CompilerKilled, "was killed"),
    "sh, killed": (1, "sh: line 1:  4242 Killed                  cc1plus a.cpp\n", CompilerKilled, "was killed"),
    "gcc, memory": (
        1,
        "cc1plus: out of memory allocating 65536 bytes after a total of 1048576 bytes\n",
        CompilerKilled,
        "ran out of memory",
    ),
    "LLVM, memory": (134, "LLVM ERROR: out of memory\nAborted\n", CompilerKilled, "ran out of memory"),
    "ptxas, memory": (1, "ptxas fatal   : Memory allocation failure\n", CompilerKilled, "ran out of memory"),
    "nvrtc, memory": (1, "error: NVRTC_ERROR_OUT_OF_MEMORY (1)\n", CompilerKilled, "ran out of memory"),
    "C++, memory": (
        134,
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        CompilerKilled,
        "ran out of memory",
    ),
    "no memory to start": (127, "g++ does not start: [Errno 12] Cannot allocate memory\n", CompilerKilled, "memory"),
    "an identifier": (1, "a.cpp:1:8: error: 'Killed' was not declared in this scope\n", BuildError, "'Killed' was not"),
    "a text": (1, 'a.cpp:1:2: error: #error "out of memory"\n', BuildError, "#error"),
    "a caught exception": (1, "a.cpp:9:3: error: 'bad_alloc' is not a member of 'std'\n", BuildError, "not a member"),
    "disk": (1, "fatal error: error writing to a.s: No space left on device\n", BuildError, "the disk is full"),
    "warnings first": (
        1,
        "a.cpp:1:5: warning: w\na.cpp:2:1: error: the first\na.cpp:3:1: error: the second\n2 errors generated.\n",
        BuildError,
        "a.cpp:2:1: error: the first",
    ),
    "nothing": (3, "", BuildError, "exit status 3, without a message"),
}


@pytest.mark.parametrize("fault", SAID)
def test_every_fault_has_its_type_one_line_and_the_full_log(fault: str, tmp_path: Path) -> None:
    status, text, kind, message = SAID[fault]
    step = Step("a" * 64, "compiling a.cpp of demo/answer", "/", tmp_path / "a.o")
    error = explain(step, status, text, tmp_path / "logs")
    assert type(error) is kind
    assert message in error.message
    assert step.title in error.message
    assert "\n" not in error.message
    assert error.hint
    assert error.exit_status == status
    assert text in Path(error.log).read_text()


def test_the_kinds_of_faults_can_be_told_apart_without_reading_them() -> None:
    kinds = {HeaderMissing, LinkMissing, CompilerKilled}
    assert {kind for _, _, kind, _ in SAID.values()} == kinds | {BuildError}
    assert not any(issubclass(one, other) for one in kinds for other in kinds - {one})


def test_a_log_that_cannot_be_written_does_not_hide_what_the_compiler_says(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    step = Step("a" * 64, "compiling a.cpp", "/", tmp_path / "a.o")
    error = explain(step, 1, "a.cpp:2:1: error: the first\n", tmp_path / "logs")
    assert "error: the first" in error.message
    assert error.log.startswith("not written: ")
