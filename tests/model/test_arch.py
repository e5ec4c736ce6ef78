"""The arch model: spellings, compatibility, toolkits; each table row is a promise to a user or a lesson from a bug."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import ConfigError
from kartifacts.model import arch as model
from kartifacts.model.arch import (
    Arch,
    build_arch,
    buildable,
    check_toolkit,
    gencode,
    parse_arch,
    parse_archs,
    sm_name,
    supported,
    targets,
)

CUDA = [Arch("cuda", major, minor) for major, minor in model._CUDA]
V3, V4 = Arch("cpu", name="x86-64-v3"), Arch("cpu", name="x86-64-v4")


def hip_names() -> st.SearchStrategy[str]:
    def features(base: str) -> st.SearchStrategy[str]:
        choices = [st.sampled_from(["", f":{name}+", f":{name}-"]) for name in model._GFX[base]]
        return st.tuples(*choices).map(lambda parts: base + "".join(parts))

    return st.sampled_from(sorted(model._GFX)).flatmap(features)


ARCHS = st.one_of(
    st.builds(
        lambda arch, ptx: parse_arch(f"{arch}+PTX") if ptx else arch, st.sampled_from(list(model._SINCE)), st.booleans()
    ),
    hip_names().map(lambda name: Arch("hip", name=name)),
    st.sampled_from(list(model._CPU)).map(lambda name: Arch("cpu", name=name)),
)


def names(text: str, **options: object) -> str:
    return " ".join(map(str, parse_archs(text, **options)))  # type: ignore[arg-type]


# -- spellings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        *((text, "9.0a") for text in ("9.0a", "sm_90a", "compute_90a", "90a", "9.0A", "SM_90A", "sm90a", " 9.0a\n")),
        *((text, "10.0f") for text in ("10.0f", "100f", "sm_100f", "compute_100f", "10.0F")),
        *((text, "8.0+PTX") for text in ("8.0+PTX", "8.0+ptx", "sm_80+ptx", "80+PTX")),
        ("12.1f", "12.1f"),
        ("9.0a+PTX", "9.0a+PTX"),
        ("7.5", "7.5"),
        ("75", "7.5"),
        ("120", "12.0"),
        ("9.0", "9.0"),
        ("Turing", "7.5+PTX"),
        ("Ampere+Tegra", "8.7"),
        ("hopper", "9.0+PTX"),
        ("gfx942", "gfx942"),
        ("GFX90A:XNACK-", "gfx90a:xnack-"),
        ("gfx90a:xnack-:sramecc+", "gfx90a:sramecc+:xnack-"),
        ("cpu:x86-64", "cpu:x86-64"),
        ("cpu:x86-64-v1", "cpu:x86-64"),
        ("cpu:x86_64", "cpu:x86-64"),
        *((f"cpu:x86-64-v{level}", f"cpu:x86-64-v{level}") for level in (2, 3, 4)),
        ("cpu:aarch64", "cpu:aarch64"),
        ("CPU:arm64", "cpu:aarch64"),
    ],
)
def test_every_spelling_in_use_means_one_arch(text: str, canonical: str) -> None:
    assert str(parse_arch(text)) == canonical
    assert names(text) == canonical


def test_plain_stays_plain_unless_another_dialect_is_asked_for() -> None:
    assert parse_arch("9.0") == Arch("cuda", 9, 0)
    assert names("9.0 12.0 12.1") == "9.0 12.0 12.1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((plain, plain) for plain in ("5.0", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9")),
        ("9.0", "9.0a"),
        ("10.0", "10.0a"),
        ("10.1", "10.1a"),
        ("10.3", "10.3a"),
        ("10.7", "10.7a"),
        ("11.0", "11.0a"),
        ("12.0", "12.0f"),
        ("12.1", "12.1a"),
        *((written, written) for written in ("9.0a", "10.0a", "10.0f", "10.3f", "12.0a", "12.0f", "12.1f", "9.0+PTX")),
        ("9.0 9.0a", "9.0a"),
        ("7.5 8.0 9.0 10.0 12.0", "7.5 8.0 9.0a 10.0a 12.0f"),
        ("cpu:aarch64 gfx942", "cpu:aarch64 gfx942"),
    ],
)
def test_the_flashinfer_dialect_normalises_as_flashinfer_does(text: str, expected: str) -> None:
    assert names(text, dialect="flashinfer") == expected


def test_a_detected_device_and_a_listed_one_are_normalised_alike() -> None:
    for device in CUDA:
        detected = parse_archs("native", native=[device], dialect="flashinfer")
        assert detected == parse_archs(str(device), dialect="flashinfer") == (build_arch(device),)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown arch dialect 'torch'"):
        parse_archs("9.0", dialect="torch")  # type: ignore[arg-type]


@pytest.mark.parametrize("separator", [" ", "  ", "\t", "\n", ",", ";", " , ", ";;", "\r\n", " ;\t,\n"])
def test_lists_are_separated_by_any_mix_of_blanks_commas_and_semicolons(separator: str) -> None:
    assert names(separator.join(["", "9.0a", "8.0+PTX", "cpu:x86-64-v3", ""])) == "9.0a 8.0+PTX cpu:x86-64-v3"


def test_duplicates_collapse_and_the_order_is_kept() -> None:
    assert names("12.0 9.0a sm_120 8.0;compute_90a,90A 12.0") == "12.0 9.0a 8.0"


def test_torchs_names_give_torchs_archs() -> None:
    assert names("Ampere;Ampere+Tegra") == "8.0 8.6+PTX 8.7"
    assert names("Blackwell Blackwell+Tegra") == "10.0 10.3 12.0 12.1+PTX 11.0"
    assert names("Volta Volta+Tegra Ada+PTX") == "7.0+PTX 7.2 8.9+PTX"


def test_one_arch_is_not_several() -> None:
    with pytest.raises(ConfigError, match=r"'Ampere' names several archs \(8.0 8.6\+PTX\)"):
        parse_arch("Ampere")
    with pytest.raises(ConfigError):
        parse_arch("8.0 9.0")


@pytest.mark.parametrize("text", ["", " ", ",", ";;\t\n"])
def test_an_empty_list_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="arch list is empty"):
        parse_archs(text)
    with pytest.raises(ConfigError):
        parse_arch(text)


@pytest.mark.parametrize(
    ("item", "near"),
    [
        ("13.7", "12.1"),
        ("9.9", "9.0a"),
        ("sm_42", "5.0"),
        ("9.0b", "9.0a"),
        ("8.0a", "8.0"),
        ("8.6f", "8.6"),
        ("9.0f", "9.0a"),
        ("9.0aa", "9.0a"),
        ("gfxzzz", "gfx942"),
        ("gfx943", "gfx942"),
        ("cpu:z80", "cpu:x86-64"),
        ("cpu:x86-64-v5", "cpu:x86-64-v4"),
        ("hoper", "hopper"),
        ("nativ", "native"),
    ],
)
def test_an_unknown_arch_is_named_with_those_near_it(item: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_archs(f"8.0 {item} cpu:aarch64")
    assert repr(item) in caught.value.message
    assert near in re.split(r"[ ,;]+", caught.value.message.partition("near ones:")[2])


@pytest.mark.parametrize(
    "item",
    [
        *("9", "900", "9.00", "09.0", "9.0.0", "-9.0", "+PTX", "9.0+PTX+PTX", "9.0+", "sm_9.0", "sm_", "٩.٠"),
        *("9.0a+ptxx", "0", "0.0", "1000.0", "gfx", "gfx942+PTX", "gfx942:", "gfx942:xnack", "gfx90a:xnack+:xnack-"),
        *(
            "gfx1100:xnack+",
            "gfx942:foo+",
            "cpu:",
            "cpu:x86-64+PTX",
            "cpux86",
            "native+PTX",
            "cuda:0",
            "9.0\0",
            "x" * 9999,
        ),
    ],
)
def test_what_is_no_arch_is_refused_and_named(item: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_archs(f"8.0;{item}")
    assert repr(item[:80]) in caught.value.message
    assert len(str(caught.value)) < 1000
    assert caught.value.hint or "expected" in caught.value.message or "it has" in caught.value.message


def test_native_is_what_was_detected() -> None:
    here = [Arch("cuda", 9, 0), Arch("cuda", 12, 1), V4]
    assert names("native", native=here) == "9.0 12.1 cpu:x86-64-v4"
    assert names("8.0 NATIVE", native=here[:1]) == "8.0 9.0"
    assert names("cpu", native=here) == names("cpu:native", native=here) == "cpu:x86-64-v4"


@pytest.mark.parametrize("text", ["native", "cpu", "cpu:native"])
def test_native_without_a_device_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match="none was detected"):
        parse_archs(text, native=[] if text == "native" else [Arch("cuda", 9, 0)])
    with pytest.raises(ConfigError, match="cannot be used here"):
        parse_arch(text)


@given(ARCHS)
def test_what_is_printed_is_read_back_as_the_same_arch(arch: Arch) -> None:
    assert parse_arch(str(arch)) == arch
    assert parse_archs(str(arch)) == (arch,)


@given(ARCHS, ARCHS)
def test_names_and_slugs_tell_archs_apart_and_are_safe_in_a_file_name(one: Arch, other: Arch) -> None:
    assert (one == other) == (str(one) == str(other)) == (one.slug == other.slug)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._+-]*[a-z0-9]", one.slug)


def test_slugs_are_those_that_published_names_use() -> None:
    slugs = [parse_arch(text).slug for text in ("9.0a", "8.0+PTX", "cpu:x86-64-v3", "gfx942", "gfx90a:sramecc+:xnack-")]
    assert slugs == ["9.0a", "8.0+ptx", "cpu-x86-64-v3", "gfx942", "gfx90a-sramecc-on-xnack-off"]


@given(st.text(max_size=30))
def test_no_text_makes_anything_but_an_arch_or_a_config_error(text: str) -> None:
    try:
        found = parse_archs(text)
    except ConfigError:
        return
    assert all(isinstance(arch, Arch) for arch in found)


# -- what runs where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "runs", "does_not"),
    [
        ("9.0", "9.0", "8.0 8.9 10.0 12.0"),
        ("9.0a", "9.0", "8.9 10.0 12.0"),
        ("10.0a", "10.0", "10.1 10.3 10.7 11.0 12.0 9.0"),
        ("10.0f", "10.0 10.3 10.7", "10.1 11.0 12.0 9.0"),
        ("10.3f", "10.3 10.7", "10.0 10.1 11.0 12.0"),
        ("12.0f", "12.0 12.1", "10.0 11.0"),
        ("12.1f", "12.1", "12.0"),
        ("12.0a", "12.0", "12.1 10.0"),
        ("12.1a", "12.1", "12.0"),
        ("12.0", "12.0 12.1", "11.0 10.0"),
        ("8.0", "8.0 8.6 8.8 8.9", "7.5 9.0 12.0"),
        ("8.6", "8.6 8.9", "8.0 9.0"),
        ("8.0+PTX", "8.0 8.6 8.7 8.9 9.0 10.1 12.0 12.1", "7.5 7.0"),
        ("8.6+PTX", "8.6 8.9 9.0 12.1", "8.0 7.5"),
        ("9.0a+PTX", "9.0", "10.0 12.0"),
        ("10.0f+PTX", "10.0 10.3", "11.0 12.0"),
        # No binary code passes between integrated and other GPUs.
        ("8.7", "8.7", "8.6 8.9"),
        ("5.0", "5.0 5.2", "5.3"),
        ("7.0", "7.0 7.5", "7.2"),
    ],
)
def test_a_kernel_runs_where_nvidia_says_and_nowhere_else(built: str, runs: str, does_not: str) -> None:
    for device in parse_archs(runs):
        assert parse_arch(built).runs_on(device).ok, f"{built} should run on {device}"
    for device in parse_archs(does_not):
        verdict = parse_arch(built).runs_on(device)
        assert not verdict.ok, f"{built} should not run on {device}"
        assert built in verdict.reason
        assert str(device) in verdict.reason


@pytest.mark.parametrize(
    ("built", "runs", "does_not"),
    [
        ("gfx90a", "gfx90a gfx90a:xnack- gfx90a:sramecc+:xnack+", "gfx942 gfx908"),
        ("gfx90a:xnack-", "gfx90a:xnack- gfx90a:sramecc+:xnack-", "gfx90a:xnack+ gfx942"),
        ("gfx942", "gfx942:sramecc+:xnack-", "gfx1201 gfx950 9.0 cpu:x86-64"),
        ("cpu:x86-64", "cpu:x86-64 cpu:x86-64-v4", "cpu:aarch64 8.0"),
        ("cpu:x86-64-v3", "cpu:x86-64-v3 cpu:x86-64-v4", "cpu:x86-64 cpu:x86-64-v2 cpu:aarch64 gfx942"),
        ("cpu:aarch64", "cpu:aarch64", "cpu:x86-64-v4 11.0"),
        ("9.0", "9.0", "gfx942 cpu:x86-64-v4"),
    ],
)
def test_other_kinds_run_on_their_own_kind_only(built: str, runs: str, does_not: str) -> None:
    test_a_kernel_runs_where_nvidia_says_and_nowhere_else(built, runs, does_not)


def test_a_refusal_reads_as_a_sentence() -> None:
    reason = parse_arch("9.0a").runs_on(parse_arch("12.0")).reason
    assert reason == "built for 9.0a, which runs on 9.0 only; the device is 12.0"
    reason = parse_arch("8.0").runs_on(parse_arch("8.7")).reason
    assert reason == "built for 8.0, which runs on 8.0 and later 8.x except 8.7; the device is 8.7"
    reason = parse_arch("cpu:x86-64-v4").runs_on(V3).reason
    assert reason == "built for cpu:x86-64-v4, which runs on x86-64-v4 CPUs and later; the device is cpu:x86-64-v3"


@given(ARCHS)
def test_everything_runs_on_the_device_it_was_built_for(arch: Arch) -> None:
    device = Arch("cuda", arch.major, arch.minor) if arch.kind == "cuda" else arch
    assert arch.runs_on(device).ok
    assert arch.runs_on(arch).ok  # the suffix of a device is disregarded


@given(ARCHS, ARCHS)
def test_a_suffix_never_makes_a_kernel_run_on_more_devices(arch: Arch, device: Arch) -> None:
    if arch.kind == "cuda" and arch.runs_on(device).ok:
        assert Arch("cuda", arch.major, arch.minor, ptx=arch.ptx).runs_on(device).ok


@pytest.mark.parametrize(
    ("device", "best_first"),
    [
        ("10.3", "10.3a 10.3f 10.0f 10.3 10.0 9.0+PTX 8.0+PTX"),
        ("12.1", "12.1a 12.1f 12.0f 12.1 12.1+PTX 12.0 11.0+PTX"),
        ("9.0", "9.0a 9.0 9.0+PTX 8.9+PTX 8.0+PTX"),
        ("8.9", "8.9 8.8 8.6 8.6+PTX 8.0 7.5+PTX"),
        ("gfx90a:sramecc+:xnack-", "gfx90a:sramecc+:xnack- gfx90a:xnack- gfx90a"),
        ("cpu:x86-64-v4", "cpu:x86-64-v4 cpu:x86-64-v3 cpu:x86-64-v2 cpu:x86-64"),
    ],
)
def test_the_most_specific_target_is_preferred(device: str, best_first: str) -> None:
    verdicts = [arch.runs_on(parse_arch(device)) for arch in parse_archs(best_first)]
    assert all(verdict.ok for verdict in verdicts)
    ranks = [verdict.rank for verdict in verdicts]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_ptx_ranks_behind_all_code_that_needs_no_compiler() -> None:
    for device in CUDA:
        verdicts = [(arch, arch.runs_on(device)) for base in model._SINCE for arch in (base, parse_arch(f"{base}+PTX"))]
        code = [verdict.rank for arch, verdict in verdicts if verdict.ok and arch.major == device.major]
        jitted = [verdict.rank for arch, verdict in verdicts if verdict.ok and arch.major != device.major]
        assert max(code) < min(jitted, default=1 << 30)


def test_a_device_newer_than_the_table_runs_ptx_and_nothing_else() -> None:
    device = Arch("cuda", 14, 2)
    running = [arch for base in model._SINCE for arch in (base, parse_arch(f"{base}+PTX")) if arch.runs_on(device).ok]
    assert running
    assert all(arch.ptx and not arch.suffix for arch in running)


# -- toolkits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "first"),
    [
        *((arch, (12, 0)) for arch in ("9.0a", "9.0a+PTX")),
        *((arch, (12, 8)) for arch in ("10.0", "10.0a", "12.0", "12.0a", "10.1a")),
        *(
            (arch, (12, 9))
            for arch in ("10.0f", "10.3", "10.3a", "10.3f", "12.0f", "12.1", "12.1a", "12.1f", "12.0f+PTX")
        ),
        *((arch, (13, 0)) for arch in ("8.8", "11.0", "11.0a", "11.0f")),
        *((arch, (13, 4)) for arch in ("10.7", "10.7a", "10.7f")),
        *((arch, (11, 8)) for arch in ("8.9", "9.0")),
    ],
)
def test_a_toolkit_that_is_too_old_is_refused_with_the_rule(arch: str, first: tuple[int, int]) -> None:
    check_toolkit(parse_arch(arch), first)
    before = (first[0], first[1] - 1) if first[1] else (first[0] - 1, 9 if first[0] == 13 else 8)
    with pytest.raises(ConfigError) as caught:
        check_toolkit(parse_arch(arch), before)
    message = caught.value.message
    assert f"arch {arch} " in message
    assert "CUDA {}.{}".format(*before) in message
    assert "CUDA >= {}.{}".format(*first) in message


@pytest.mark.parametrize(
    "arch", ["5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.0+PTX", "10.1", "10.1a", "10.1f"]
)
def test_a_toolkit_that_dropped_the_arch_is_refused(arch: str) -> None:
    check_toolkit(parse_arch(arch), (12, 9))
    with pytest.raises(ConfigError, match=r"CUDA 13\.0: it needs CUDA < 13\.0") as caught:
        check_toolkit(parse_arch(arch), (13, 0))
    assert caught.value.hint
    assert ("renamed it to 11.0" in caught.value.message) == arch.startswith("10.1")


def test_the_error_says_what_the_toolkit_can_build_for_that_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        check_toolkit(parse_arch("10.0f"), (12, 8))
    assert caught.value.hint == "CUDA 12.8 can build for 10.0, 10.0a"
    with pytest.raises(ConfigError) as caught:
        check_toolkit(parse_arch("12.0"), (12, 6))
    assert "7.5" not in str(caught.value)


@pytest.mark.parametrize("arch", [V3, Arch("hip", name="gfx942"), Arch("cuda", 13, 7), Arch("cuda", 8, 0, "f")])
def test_what_no_toolkit_builds_is_refused(arch: Arch) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(arch))):
        check_toolkit(arch, (13, 0))


@given(st.sampled_from(list(model._SINCE)), st.tuples(st.integers(9, 14), st.integers(0, 9)))
def test_targets_lists_exactly_what_passes_the_check(arch: Arch, toolkit: tuple[int, int]) -> None:
    try:
        check_toolkit(arch, toolkit)
        passes = True
    except ConfigError:
        passes = False
    assert (arch in targets(toolkit)) == passes


@pytest.mark.nvcc
def test_the_table_agrees_with_the_installed_nvcc() -> None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(str(Path(home, "bin", "nvcc")))
    if nvcc is None:
        pytest.skip("no nvcc on PATH or under CUDA_HOME")
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", answer)
    assert release is not None
    toolkit = (int(release[1]), int(release[2]))
    refused = []
    for arch in model._SINCE:
        flags = gencode(parse_arch(f"{arch}+PTX"))
        dry = subprocess.run([nvcc, *flags, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, check=False)
        if dry.returncode != 0:
            refused.append(arch)
    assert [arch for arch in model._SINCE if arch not in refused] == targets(toolkit)


def test_nvcc_is_given_code_and_if_asked_ptx_of_the_full_target() -> None:
    assert sm_name(parse_arch("9.0a+PTX")) == "sm_90a"
    assert gencode(parse_arch("12.0f")) == ["-gencode=arch=compute_120f,code=sm_120f"]
    assert gencode(parse_arch("8.0+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    with pytest.raises(ConfigError, match="gfx942"):
        sm_name(parse_arch("gfx942"))


# -- what an op supports -----------------------------------------------------------------------------------------------


def test_a_list_is_cut_to_what_the_op_supports_and_each_refusal_has_a_reason() -> None:
    kept, refused = supported(parse_archs("7.5 8.0 9.0a 10.0"), majors=[8, 9], min_arch=parse_arch("8.0"))
    assert kept == parse_archs("8.0 9.0a")
    assert [refusal.place for refusal in refused] == ["7.5", "10.0"]
    assert "8.x, 9.x" in refused[0].reason


def test_an_op_that_needs_a_suffix_refuses_plain_archs_and_says_what_to_ask_for() -> None:
    kept, refused = supported(parse_archs("7.5 10.0 12.0 12.0f 12.0a"), majors=[12], min_arch=parse_arch("12.0a"))
    assert kept == parse_archs("12.0a")
    assert [refusal.place for refusal in refused] == ["7.5", "10.0", "12.0", "12.0f"]
    assert refused[2].reason == "the op needs the arch-specific variant; ask for 12.0a"


def test_without_limits_everything_is_kept_and_nothing_is_never_an_error_here() -> None:
    archs = parse_archs("7.5 gfx942 cpu:aarch64")
    assert supported(archs) == (archs, ())
    assert supported([], majors=[9]) == ((), ())


@pytest.mark.parametrize(
    ("least", "kept"), [("cpu:x86-64-v3", "cpu:x86-64-v3 cpu:x86-64-v4"), ("cpu:aarch64", "cpu:aarch64")]
)
def test_cpu_levels_have_a_lowest_one_too(least: str, kept: str) -> None:
    archs = parse_archs("cpu:x86-64 cpu:x86-64-v2 cpu:x86-64-v3 cpu:x86-64-v4 cpu:aarch64 9.0")
    assert supported(archs, min_arch=parse_arch(least))[0] == parse_archs(kept)


@pytest.mark.parametrize(
    ("asked", "toolkit", "nearest"),
    [
        ("9.0a", (13, 0), "9.0a"),
        ("10.0f", (12, 8), "10.0a"),
        ("10.0f+PTX", (12, 8), "10.0a+PTX"),
        ("9.0a", (11, 8), "9.0"),
        ("10.1f", (13, 0), "11.0f"),
        ("7.0", (13, 0), None),
        ("12.0", (12, 0), None),
    ],
)
def test_what_comes_nearest_to_an_arch_that_a_toolkit_cannot_build(
    asked: str, toolkit: tuple[int, int], nearest: str | None
) -> None:
    found = buildable(parse_arch(asked), toolkit)
    assert found == (parse_arch(nearest) if nearest else None)
    if found is not None:
        check_toolkit(found, toolkit)


def test_what_a_toolkit_can_build_is_nearest_to_itself() -> None:
    for toolkit in ((11, 8), (12, 8), (12, 9), (13, 0), (13, 4)):
        for arch in targets(toolkit):
            assert buildable(arch, toolkit) == arch
