"""Specs: what is in an identity, what is not, and what a declaration may not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import ConfigError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.spec import (
    DeviceDecl,
    FamilyDecl,
    KernelDecl,
    OpDecl,
    Source,
    Spec,
    Unsupported,
    check_axes,
    check_family,
    make_uri,
)

DEVICE = DeviceDecl(
    toolchain="nvcc",
    sources=["norm/rmsnorm.cu"],
    host_sources=["norm/rmsnorm_binding.cpp"],
    flags=["--use_fast_math"],
    defines={"dtype": {"float16": "KART_DTYPE=1", "bfloat16": "KART_DTYPE=2"}},
)
OP = OpDecl(
    name="rmsnorm",
    summary="RMS norm",
    exports=["rmsnorm", "rmsnorm_gated"],
    axes={"dtype": ["float16", "bfloat16"], "head_dim": ["64", "128"]},
    device={"cuda": DEVICE},
)
FAMILY = FamilyDecl(schema=1, family="norm", op=[OP])
SPEC = Spec(
    library="kartifacts",
    family="norm",
    op=OP,
    axes=(("dtype", "float16"), ("head_dim", "64")),
    arch=parse_arch("9.0a"),
    device=DEVICE,
    sources=(Source("include/kart/vec.cuh", sha256(b"vec")), Source("norm/rmsnorm.cu", sha256(b"rmsnorm"))),
    root="/somewhere",
)
NVCC = {"kind": "nvcc", "version": "13.0.88"}


def with_device(**changes: Any) -> Spec:
    return replace(SPEC, device=msgspec.structs.replace(DEVICE, **changes))


def with_op(**changes: Any) -> Spec:
    return replace(SPEC, op=msgspec.structs.replace(OP, **changes))


# -- identity ----------------------------------------------------------------------------------------------------------

CHANGES = {
    "an axis": replace(SPEC, axes=(("dtype", "bfloat16"), ("head_dim", "64"))),
    "an axis without a macro": replace(SPEC, axes=(("dtype", "float16"), ("head_dim", "128"))),
    "the family": replace(SPEC, family="norms"),
    "the op's name": with_op(name="rmsnorm2"),
    "an export": with_op(exports=["rmsnorm"]),
    "the content of a header": replace(SPEC, sources=(Source("include/kart/vec.cuh", sha256(b"new")), SPEC.sources[1])),
    "the name of a header": replace(
        SPEC, sources=(Source("include/kart/vec2.cuh", SPEC.sources[0].sha256), SPEC.sources[1])
    ),
    "one header less": replace(SPEC, sources=SPEC.sources[1:]),
    "a flag": with_device(flags=[]),
    "the order of flags": with_device(flags=["-O1", "-O3"]),
    "a macro": with_device(defines={"dtype": {"float16": "KART_DTYPE=9"}}),
    "what is compiled": with_device(sources=["include/kart/vec.cuh"]),
    "the binding": with_device(host_sources=[]),
    "the kind of toolchain": with_device(toolchain="nvrtc"),
    "whether host code is linked in": with_device(output="image"),
    "a flag of the linker": with_device(link_flags=["-lcublas"]),
    "the function in a source in Python": with_device(kernel=KernelDecl(function="f", arguments={})),
    "an argument of it": with_device(kernel=KernelDecl(function="f", arguments={"x": "*fp32"})),
    "a constant of it": with_device(kernel=KernelDecl(function="f", arguments={}, constants={"N": 8})),
    "an option of its compiler": with_device(kernel=KernelDecl(function="f", arguments={}, options={"num_warps": 8})),
}


@pytest.mark.parametrize("what", CHANGES)
def test_all_that_can_change_the_op_changes_both_digests(what: str) -> None:
    changed = CHANGES[what]
    assert changed.op_digest != SPEC.op_digest
    assert changed.key(NVCC) != SPEC.key(NVCC)


def test_no_two_of_these_changes_meet() -> None:
    assert len({changed.op_digest for changed in CHANGES.values()} | {SPEC.op_digest}) == len(CHANGES) + 1


def test_arch_and_toolchain_change_the_key_and_not_the_op() -> None:
    keys = {SPEC.key(NVCC), SPEC.key({**NVCC, "version": "13.1"}), SPEC.key({**NVCC, "host": "g++ 13"})}
    for arch in ("9.0", "9.0+PTX", "10.0a", "10.0f", "12.0"):
        other = replace(SPEC, arch=parse_arch(arch))
        assert other.op_digest == SPEC.op_digest
        keys.add(other.key(NVCC))
    assert len(keys) == 8


def test_where_the_files_lie_and_who_ships_them_changes_nothing() -> None:
    rule = Unsupported(when={"dtype": ["bfloat16"]}, reason="of other kernels nothing is said here")
    for same in (
        replace(SPEC, root="/elsewhere"),
        replace(SPEC, library="other"),
        with_op(summary="better words"),
        with_op(unsupported=[rule]),
        with_device(min_arch="7.5", majors=[9]),
        with_device(output="object"),  # as by itself
    ):
        assert same.op_digest == SPEC.op_digest
        assert same.key(NVCC) == SPEC.key(NVCC)


def test_the_digests_are_of_what_is_shown() -> None:
    assert SPEC.op_digest == sha256(canonical_json(SPEC.identity()))
    assert SPEC.key(NVCC) == sha256(canonical_json(SPEC.key_parts(NVCC)))
    assert SPEC.key_parts(NVCC)["arch"] == "9.0a"
    assert SPEC.key_parts(NVCC)["compiler"] == NVCC


def test_the_identity_is_the_same_in_every_process_and_release() -> None:
    # A change here throws away every published kernel.  It needs a new KEY_SCHEMA and a line in the changelog.
    assert SPEC.op_digest == Digest("3a3adb0943c502338eec7e9a3020403fe8fd2395dbec0fe2cabcced0edce94fb")


def test_macros_follow_the_axes_in_order_and_only_where_declared() -> None:
    assert SPEC.defines == ["KART_DTYPE=1"]
    both = {"head_dim": {"64": "HEAD=64"}, "dtype": {"float16": "HALF"}}
    assert with_device(defines=both).defines == ["HALF", "HEAD=64"]


# -- axes and uris -----------------------------------------------------------------------------------------------------


def test_a_uri_does_not_depend_on_the_order_of_axes() -> None:
    assert SPEC.uri == "norm/rmsnorm?dtype=float16&head_dim=64"
    assert make_uri("norm", "rmsnorm", {"head_dim": "64", "dtype": "float16"}) == SPEC.uri
    assert make_uri("norm", "rmsnorm", {}) == "norm/rmsnorm"


def test_axes_are_given_back_sorted_and_as_text() -> None:
    assert check_axes("norm", OP, {"head_dim": 128, "dtype": "float16"}) == (("dtype", "float16"), ("head_dim", "128"))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"dtype": "float16"}, ["norm/rmsnorm", "'head_dim'", "64, 128"]),
        ({}, ["'dtype'", "float16, bfloat16"]),
        ({"dtype": "float16", "head_dim": 64, "causal": True}, ["no axis 'causal'", "dtype, head_dim"]),
        ({"dtype": "float64", "head_dim": 64}, ["dtype='float64'", "float16, bfloat16"]),
        ({"dtype": "float16", "head_dim": 64.0}, ["head_dim='64.0'"]),
        ({"dtype": None, "head_dim": 64}, ["dtype='None'"]),
        ({"dtype": "float16&head_dim=128", "head_dim": 64}, ["not declared"]),
        ({"dtype": "x" * 9999, "head_dim": 64}, ["not declared"]),
    ],
)
def test_axes_that_are_not_declared_are_refused_with_those_that_are(axes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_axes("norm", OP, axes)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert len(caught.value.message) < 300


@given(st.dictionaries(st.sampled_from("abcdef"), st.text("xyz019_.+-", min_size=1, max_size=3), max_size=4))
def test_different_axes_never_share_a_uri(axes: dict[str, str]) -> None:
    path, _, query = make_uri("f", "o", axes).partition("?")
    assert path == "f/o"
    assert dict(part.split("=") for part in query.split("&") if part) == axes


# -- declarations ------------------------------------------------------------------------------------------------------


def test_a_correct_declaration_is_given_back() -> None:
    assert check_family(FAMILY, what="norm/op.toml") is FAMILY


def changed_op(**changes: Any) -> FamilyDecl:
    return msgspec.structs.replace(FAMILY, op=[msgspec.structs.replace(OP, **changes)])


@pytest.mark.parametrize(
    ("decl", "words"),
    [
        (msgspec.structs.replace(FAMILY, schema=2), "schema 2"),
        (msgspec.structs.replace(FAMILY, family="../norm"), "bad family name"),
        (msgspec.structs.replace(FAMILY, op=[OP, OP]), "'rmsnorm' is declared twice"),
        (changed_op(name="RMSNorm"), "bad op name"),
        (changed_op(name="a/b"), "bad op name"),
        (changed_op(device={}), "for no device"),
        (changed_op(device={"rocm": DEVICE}), "expected cpu, cuda or hip"),
        (changed_op(device={"cuda": msgspec.structs.replace(DEVICE, sources=[])}), "lists no sources"),
        (changed_op(axes={"dtype": ["float16"]}), "bfloat16"),
        (changed_op(axes={}), "dtype"),
        *((changed_op(axes={**OP.axes, name: ["1"]}), f"axis named {name!r}") for name in ("op", "device", "self")),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused_by_file_and_op(decl: FamilyDecl, words: str) -> None:
    with pytest.raises(ConfigError, match=r"norm/op\.toml|bad (op|family) name") as caught:
        check_family(decl, what="norm/op.toml")
    assert words in caught.value.message


@pytest.mark.parametrize("extra", [{"archs": []}, {"op": [{"name": "x", "sumary": ""}]}])
def test_an_unknown_key_is_an_error_at_every_level(extra: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"schema": 1, "family": "norm", "op": [], **extra}, FamilyDecl)
