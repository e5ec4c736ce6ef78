"""Errors: what they say, and that they survive what happens to errors on their way to a reader."""

from __future__ import annotations

import copy
import pickle

import pytest

from kartifacts import errors
from kartifacts.errors import (
    ArtifactUnavailable,
    BuildError,
    ConfigError,
    InputError,
    KartifactsError,
    MissingKernel,
    NoCompiler,
    Refusal,
    SourceError,
    VerificationError,
)

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KartifactsError)]
PLACES = (Refusal("bundle norm for 9.0a", "the device is 12.0"), Refusal("mirrors", "offline"))


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_its_message_and_then_the_hint(kind: type[KartifactsError]) -> None:
    error = kind("expected 1, got 2", hint="ask for 1")
    assert str(error) == "expected 1, got 2\nhint: ask for 1"
    assert error.message == "expected 1, got 2"
    assert str(kind("alone")) == "alone"


@pytest.mark.parametrize(
    "error",
    [
        *(kind("it broke", hint="mend it") for kind in ALL),
        MissingKernel("no", uri="norm/rmsnorm?dtype=float16", arch="9.0a", refusals=PLACES, hint="build it"),
        SourceError("gone", missing=True, retry_after=2.5),
        VerificationError("bad", source="http://x", expected="a", actual="b"),
        BuildError("failed", command="nvcc -c x.cu", log="/log", exit_status=137),
        NoCompiler("none", searched=PLACES),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_process_borders_whole(error: KartifactsError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_exit_codes_tell_apart_what_the_caller_does_next() -> None:
    codes = {kind.__name__: kind.exit_code for kind in ALL}
    assert codes.pop("KartifactsError") == 1
    assert codes.pop("InputError") == codes["ConfigError"]  # both: what was asked for is wrong
    assert codes.pop("MissingKernel") == codes["ArtifactUnavailable"]
    assert codes.pop("AbiMismatch") == codes["LoadError"]
    for name in ("HeaderMissing", "LinkMissing", "CompilerKilled"):
        assert codes.pop(name) == codes["BuildError"]
    assert len(set(codes.values())) == len(codes)
    assert all(1 < code < 64 for code in codes.values())  # 64 and up are taken by shells and sysexits


def test_every_place_is_shown_in_order_before_the_hint() -> None:
    error = ArtifactUnavailable("nothing fits", refusals=PLACES, hint="build it")
    assert str(error).splitlines() == [
        "nothing fits",
        "  bundle norm for 9.0a: the device is 12.0",
        "  mirrors: offline",
        "hint: build it",
    ]
    assert "  searched mirrors: offline" in str(NoCompiler("none", searched=PLACES))


def test_any_error_can_carry_the_places_asked_before() -> None:
    error = VerificationError("wrong bytes", hint="tell the mirror's owner")
    error.refusals = PLACES
    assert str(error).splitlines()[1:3] == ["  bundle norm for 9.0a: the device is 12.0", "  mirrors: offline"]


def test_wrong_input_is_a_value_error_too_and_lack_of_a_compiler_a_build_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(InputError, ValueError)
    assert issubclass(NoCompiler, BuildError)
    assert issubclass(MissingKernel, ArtifactUnavailable)
    assert not issubclass(VerificationError, (ArtifactUnavailable, SourceError))  # or it would be answered by the JIT


def test_what_a_source_does_not_hold_is_not_asked_for_again() -> None:
    assert SourceError("404", missing=True).permanent
    assert SourceError("403", permanent=True).permanent
    assert not SourceError("503", retry_after=1).permanent


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\x9b0m", "\u202egnp", "\r", "\udcff", "\0"])
def test_no_message_steers_a_terminal_or_fails_to_be_printed(text: str) -> None:
    error = ConfigError(f"a file {text}\n  line", hint=f"not {text}")
    error.refusals = (Refusal(f"mirror {text}", text),)
    assert str(error).replace("\n", "").isprintable()
    assert "a file " in error.message
    assert "\n  line" in error.message
    assert f"{error.message}".encode()
