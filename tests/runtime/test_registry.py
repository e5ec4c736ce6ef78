"""`load()` as programs use it: bad arguments, threads, forks, changed settings, and what a loaded kernel is."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kartifacts
from kartifacts.errors import ConfigError, KartifactsError, LoadError
from tests.conftest import Compiler, Content, Machine, MakeRelease, Released

ANSWER: dict[str, Any] = {"op": "demo/answer", "device": "cpu", "size": 1000}


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"op": "norm/rmsnorm"}, ["needs the axis 'dtype'", "float16, bfloat16, float32"]),
        ({"op": "norm/rmsnorm", "dtype": "float64"}, ["dtype='float64'", "float32"]),
        ({"op": "norm/rmsnorm", "dtype": None}, ["dtype='None'"]),
        ({"op": "norm/rmsnorm", "dtype": ["float32"]}, ["dtype=", "declared: float16"]),
        ({"op": "norm/rmsnorm", "dtype": float}, ["dtype=", "class 'float'"]),
        ({"op": "norm/rmsnorm", "dtype": "x" * 10_000}, ["declared: float16"]),
        ({"op": "norm/rmsnorm", "dtype": "float32", "hidden": 4096}, ["no axis 'hidden'", "dtype"]),
        ({"op": "norm/rmsnrom", "dtype": "float32"}, ["no op 'norm/rmsnrom'", "norm/rmsnorm"]),
        ({"op": "rmsnrom", "dtype": "float32"}, ["no op 'rmsnrom'", "norm/rmsnorm"]),
        ({"op": "nrom/rmsnorm", "dtype": "float32"}, ["no op 'nrom/rmsnorm'", "norm/rmsnorm"]),
        ({"op": "", "dtype": "float32"}, ["no op ''"]),
        ({"op": "norm/", "dtype": "float32"}, ["no op 'norm/'"]),
        ({"op": "/rmsnorm", "dtype": "float32"}, ["no op '/rmsnorm'"]),
        ({"op": "../norm/rmsnorm", "dtype": "float32"}, ["no op '../norm/rmsnorm'"]),
        ({"op": "norm/rmsnorm?dtype=float32"}, ["no op 'norm/rmsnorm?dtype=float32'"]),
        ({"op": "norm\0", "dtype": "float32"}, ["no op 'norm\\x00'"]),
        ({"op": None, "dtype": "float32"}, ["name of an op", "None"]),
        ({"op": ["norm/rmsnorm"], "dtype": "float32"}, ["name of an op"]),
        ({"op": b"norm/rmsnorm", "dtype": "float32"}, ["name of an op", "b'norm/rmsnorm'"]),
        ({"op": "norm/rmsnorm", "device": "gpu", "dtype": "float32"}, ["unknown device 'gpu'", "cuda:N"]),
        ({"op": "norm/rmsnorm", "device": 0, "dtype": "float32"}, ["unknown device '0'"]),
        ({"op": "norm/rmsnorm", "device": [], "dtype": "float32"}, ["unknown device '[]'"]),
        ({"op": "norm/rmsnorm", "device": "cuda:-1", "dtype": "float32"}, ["unknown device 'cuda:-1'"]),
        ({"op": "norm/rmsnorm", "device": "cuda:99", "dtype": "float32"}, ["no GPU 99"]),
    ],
    ids=lambda value: repr(value)[:70],
)
def test_a_wrong_argument_is_named_with_what_would_do(
    machine: Machine, arguments: dict[str, Any], words: list[str]
) -> None:
    registry = machine.registry()
    for ask in (registry.load, registry.explain):
        with pytest.raises(ConfigError) as caught:
            ask(**arguments)
        for word in words:
            assert word in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_an_op_for_the_cpu_only_says_so_when_a_gpu_is_asked_for(
    machine: Machine, tiny: Path, gpus: Callable[..., None]
) -> None:
    text = (tiny / "demo/op.toml").read_text()
    (tiny / "demo/op.toml").write_text(text[: text.index("[op.device.cuda]")])
    gpus("9.0")
    registry = machine.registry(libraries=[tiny])
    with pytest.raises(ConfigError, match=r"declared for cpu; 'cuda' is 9\.0"):
        registry.load("demo/answer", device="cuda", size=1)
    assert registry.load("demo/answer", size=1)() == 7  # and is not sent to the GPU when nothing is asked for


def test_a_number_and_its_text_are_one_axis_value_and_true_is_not_1(machine: Machine, tiny: Path) -> None:
    registry = machine.registry(libraries=[tiny])
    one = registry.load("demo/answer", device="cpu", size=1)
    assert registry.load("demo/answer", device="cpu", size="1") is one
    with pytest.raises(ConfigError, match="size='True'"):
        registry.load("demo/answer", device="cpu", size=True)


def test_a_library_that_is_none_is_a_typed_error(machine: Machine, tmp_path: Path) -> None:
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"no \*/op.toml"):
            machine.registry(libraries=[wrong]).load("demo/answer", size=1)


# -- threads and forks -------------------------------------------------------------------------------------------------


def test_many_threads_that_want_one_kernel_compile_it_once_and_share_it(
    machine: Machine, tiny: Path, compiler: Compiler
) -> None:
    registry = machine.registry(libraries=[tiny], cxx=compiler.path)
    start = threading.Barrier(8)

    def load(_: int) -> Any:
        start.wait()
        return registry.load(**ANSWER)

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(load, range(8)))
    assert len({id(kernel) for kernel in kernels}) == 1
    assert compiler.compiled == 1


def test_a_failure_is_not_remembered(machine: Machine, tiny: Path) -> None:
    registry = machine.registry(libraries=[tiny], jit="never")
    for _ in range(2):
        with pytest.raises(KartifactsError):
            registry.load(**ANSWER)
    machine.registry(libraries=[tiny]).load(**ANSWER)  # somebody else builds it
    assert registry.load(**ANSWER)() == 7000


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_compiles_does_not_wait_for_ever(machine: Machine, tiny: Path) -> None:
    """The child has the lock, but not the thread that would give it back."""
    compiling, go_on = machine.home / "compiling", machine.home / "go-on"
    slow = machine.home / "slow-g++"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) touch {compiling}; while [ ! -e {go_on} ]; do sleep 0.01; done;; esac\n'
        'exec g++ "$@"\n'
    )
    slow.chmod(0o755)
    machine.registry(libraries=[tiny]).load("demo/answer", device="cpu", size=1)
    registry = machine.registry(libraries=[tiny], cxx=slow)
    thread = threading.Thread(target=registry.load, kwargs=ANSWER)
    thread.start()
    try:
        while not compiling.exists():
            thread.join(0.01)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that hangs
            code = 1
            try:
                code = 0 if registry.load("demo/answer", device="cpu", size=1)() == 7 else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.touch()
        thread.join()
    assert registry.load(**ANSWER)() == 7000


# -- the shared registry -----------------------------------------------------------------------------------------------


@mock.patch("kartifacts.runtime.registry._default", None)  # which another test may have filled
def test_load_sees_changed_settings_for_what_is_not_loaded_yet(machine: Machine, released: Released) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    with mock.patch.dict(os.environ, machine.environ({"jit": "never"}), clear=True):
        with pytest.raises(KartifactsError, match="none is pinned"):
            kartifacts.load("norm/rmsnorm", **arguments)
        os.environ["KARTIFACTS_PATH"] = str(released.path)
        os.environ["KARTIFACTS_LOCK"] = str(released.lock_file)
        kernel = kartifacts.load("norm/rmsnorm", **arguments)
        assert kernel.origin == str(released.path)
        assert kartifacts.load("norm/rmsnorm", **arguments) is kernel
        os.environ["KARTIFACTS_OFLINE"] = "1"  # misspelt: found out by the next call that needs the settings
        assert kartifacts.load("norm/rmsnorm", **arguments) is kernel
        with pytest.raises(ConfigError, match="KARTIFACTS_OFLINE"):
            kartifacts.load("norm/layernorm", **arguments)


# -- what a kernel is --------------------------------------------------------------------------------------------------


def test_a_kernel_has_its_exports_and_nothing_else(machine: Machine, tiny: Path) -> None:
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    assert kernel.answer() == kernel() == 7000
    assert kernel.answer is kernel.answer
    assert (kernel.uri, kernel.exports) == ("demo/answer?size=1000", ("answer",))
    assert "demo/answer?size=1000" in repr(kernel)
    for name in ("anser", "__len__", "_repr_html_", "__array_interface__"):
        assert not hasattr(kernel, name)
    with pytest.raises(AttributeError, match="exports answer, not 'anser'"):
        kernel.anser()


def test_copying_or_pickling_a_kernel_ends_in_an_answer_and_no_recursion(machine: Machine, tiny: Path) -> None:
    kernel = machine.registry(libraries=[tiny]).load(**ANSWER)
    assert copy.copy(kernel).answer() == 7000
    with pytest.raises((TypeError, AttributeError, NotImplementedError, pickle.PicklingError, RuntimeError)) as caught:
        pickle.loads(pickle.dumps(kernel))
    assert not isinstance(caught.value, RecursionError)


def test_an_export_that_the_file_lacks_is_named_with_the_file(
    machine: Machine, released: Released, make_release: MakeRelease, tmp_path: Path
) -> None:
    real = Machine(tmp_path / "other").registry(path=released.path, lock=released.lock_file)
    data = real.load("norm/rmsnorm", device="cpu", dtype="float32").path.read_bytes()
    made = make_release(Content("cpu:x86-64", {"norm/rmsnorm?dtype=float32": data}, exports=("rmsnorm", "extra")))
    kernel = machine.registry(path=made.path, lock=made.lock_file).load("norm/rmsnorm", device="cpu", dtype="float32")
    assert callable(kernel.rmsnorm)
    with pytest.raises(LoadError, match="does not export 'extra'"):
        kernel.extra()
    with pytest.raises(LoadError, match="name the one to call"):
        kernel()
