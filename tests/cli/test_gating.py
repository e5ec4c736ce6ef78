"""What a build machine may get wrong, done for real: the gate refuses the release, and names what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from kartifacts.build.checks import facts_of
from kartifacts.build.toolchains import cxx, nvrtc
from kartifacts.errors import BuildError, ConfigError, VerificationError
from kartifacts.model.digest import sha256
from tests.conftest import Answer
from tests.sites import CPU, Site

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs an x86-64 machine: the plans are for it")

ONE: dict[str, Any] = {**CPU, "archs": ["cpu:x86-64"], "shards": 1}
GPU: dict[str, Any] = {"name": "gpu", "machine": "x86_64", "cuda": "13.0", "archs": ["9.0a"]}
KERNEL = "demo/answer?size=1 for cpu:x86-64"
RUNNER = "home/runner/work"
FFI = Path(tvm_ffi.__file__).parent / "lib"
SPILLING = """
extern "C" __global__ void answer(const float* x, float* y, int n) {
  float a[64], s = 0;
  #pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i * n + threadIdx.x];
  for (int k = 0; k < n; k++) {
    #pragma unroll
    for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i * 7 + KART_SIZE) & 63] + x[k];
  }
  #pragma unroll
  for (int i = 0; i < 64; i++) s += a[i] * i;
  __shared__ float all[128];
  all[threadIdx.x] = s;
  __syncthreads();
  y[threadIdx.x] = all[127 - threadIdx.x];
}
"""


def build(site: Site, *options: object, **settings: Any) -> None:
    answer = site.cli("builder", "build", "--plan", site.plan, "--out", site.root / "out", *options, **settings)
    assert answer.code == 0, answer.err


def limit(site: Site, *builds: dict[str, Any], **limits: object) -> None:
    """Write the plan anew, with these limits."""
    site.write(*builds)
    more = "".join(f"{name} = {json.dumps(value)}\n" for name, value in limits.items())
    site.plan.write_text(f"{site.plan.read_text()}[limits]\n{more}")


def refused(answer: Answer, *sentences: str) -> None:
    assert answer.code == VerificationError.exit_code, answer.err or answer.out
    for sentence in sentences:
        assert sentence in answer.err


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_a_release_that_is_what_its_plan_promises_passes_with_no_compiler_at_hand(site: Site) -> None:
    limit(site, ONE, glibc="2.34", kernel_bytes=100_000, release_bytes=100_000, spill_bytes=0, local_bytes=0)
    build(site)
    answer = site.gate("out", "--json")
    assert answer.code == 0, answer.err
    assert (answer.data["kernels"], answer.data["builds"]) == (2, ["cpu"])
    assert site.gate("out", "--release-version", "").code == 0
    said = site.gate("out")
    assert "tinyops 1.0 is what the plan promises: sha256:" in said.out


def test_a_kernel_that_calls_a_newer_libc_is_refused_by_name(site: Site) -> None:
    source = site.library / "demo/answer_cpu.cpp"
    edit(source, '#include "scale.h"', '#include "scale.h"\n#include <unistd.h>')
    edit(source, "SCALE * KART_SIZE", "SCALE * KART_SIZE + gettid()")  # of glibc 2.30
    limit(site, ONE, glibc="2.28")
    build(site)
    refused(site.gate("out"), f"{KERNEL} needs glibc 2.30; the plan's limit is 2.28")
    limit(site, ONE, glibc="2.30")
    assert site.gate("out").code == 0


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"kernel_bytes": 1000}, f"{KERNEL} has "),
        ({"pack_bytes": 100}, "pack 0 of bundle demo for cpu:x86-64 has "),
        ({"release_bytes": 1000}, "the release has "),
    ],
)
def test_what_is_over_its_budget_is_named(limits: dict[str, int], says: str, site: Site) -> None:
    limit(site, ONE)
    build(site)
    limit(site, ONE, **limits)
    (most,) = limits.values()
    refused(site.gate("out"), says, f"bytes; the plan's limit is {most:,}")


@pytest.mark.parametrize("flag", ["-march=native", "-mtune=native"])
def test_a_kernel_cannot_be_declared_for_the_cpu_of_whoever_builds_it(flag: str, site: Site) -> None:
    declaration = site.library / "demo/op.toml"
    edit(declaration, '"cxx"\nsources', f'"cxx"\nflags = ["{flag}"]\nsources')
    site.write(ONE)
    answer = site.shard("builder", "1/1")
    assert answer.code == ConfigError.exit_code
    assert f"answer.device.cpu.flags: '{flag}' is not allowed" in answer.err
    assert site.compiler.starts == 0


@pytest.mark.parametrize("setting", [{"debug": "1"}, {"cxx_flags": "-march=native"}, {"cxx_flags": "-O0"}])
def test_what_was_built_with_settings_of_the_builder_is_refused(setting: dict[str, str], site: Site) -> None:
    site.write(ONE)
    options = ("--archs", "cpu:x86-64", "--library", "tinyops", "--out", site.root / "out")
    answer = site.cli("builder", "build", *options, **setting)
    assert answer.code == 0, answer.err
    refused(site.gate("out"), "bundle demo for cpu:x86-64 was built with further flags")


def forged(site: Site, source: str, name: str) -> None:
    """Put other bytes, made by hand, in the place of a kernel that was handed in, and say so in all documents."""
    made = site.root / f"{name}.so"
    command = ["g++", *cxx.COMPILE, "-x", "c++", "-", "-x", "none", *cxx.LINK, "-Wl,-z,undefs", "-o", str(made)]
    subprocess.run([*command, "-Wl,--no-as-needed", f"-L{FFI}", "-ltvm_ffi"], input=source.encode(), check=True)
    content = made.read_bytes()
    (document,) = (site.root / "meet/shards").rglob("*.json")
    shard = json.loads(document.read_bytes())
    kernel = next(each for each in shard["kernels"] if each["uri"] == "demo/answer?size=1")
    kernel |= {"sha256": sha256(content), "size": len(content), "needs": dict(facts_of(made).needs)}
    (site.root / "meet/blobs/sha256" / sha256(content)).write_bytes(content)
    document.write_text(json.dumps(shard))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return missing_fn();", "uses missing_fn, which no library that it needs defines"),
        (f'said = "/{RUNNER}/f.cpp"; return 0;', f"holds '/{RUNNER}/f.cpp', a path of a machine that"),
        ("return 0;", ""),
    ],
)
def test_a_kernel_that_was_forged_after_its_build_does_not_pass_the_gate(site: Site, body: str, says: str) -> None:
    """What `build` refuses of its own compilers, somebody else's builder may hand in all the same."""
    site.write(ONE)
    assert site.shard("builder", "1/1").code == 0
    head = 'extern "C" int missing_fn(); const char* volatile said;\nextern "C" __attribute__((visibility("default"))) '
    forged(site, f"{head}int __tvm_ffi_answer(void*, void*, int, void*) {{ {body} }}", "forged")
    merged = site.merge("merged")
    assert merged.code == 0, merged.err
    published = ("publish", site.root / "bucket", "--from", site.root / "merged", "--plan", site.plan)
    if not says:
        assert site.gate("merged").code == 0
        return
    refused(site.gate("merged"), f"{KERNEL} {says}")
    refused(site.cli("gate", *published), f"{KERNEL} {says}")
    assert not (site.root / "bucket").exists()


@pytest.mark.parametrize("command", ["gate", "publish"])
def test_a_release_whose_promises_are_gone_is_held_against_the_sources_or_refused(
    command: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(ONE)
    edit(site.library / "demo/op.toml", '["1", "1000"]', '["1"]')
    edit(site.library / "demo/op.toml", ', 1000 = "KART_SIZE=1000"', "")
    build(site)
    edit(site.library / "demo/op.toml", '["1"]', '["1", "1000"]')
    edit(site.library / "demo/op.toml", 'KART_SIZE=1"', 'KART_SIZE=1", 1000 = "KART_SIZE=1000"')
    shutil.rmtree(site.root / "out/promises")

    def ask() -> Answer:
        if command == "gate":
            return site.gate("out")
        return site.cli("gate", "publish", site.root / "bucket", "--from", site.root / "out", "--plan", site.plan)

    refused(ask(), "demo/answer?size=1000 is missing for cpu:x86-64")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(site.packages)])
    refused(ask(), "nothing says what tinyops 1.0 was to hold: promises/tinyops/1.0.json is not in")
    assert not (site.root / "bucket").exists()


def with_device_code(site: Site, *flags: str) -> None:
    """Let the op have a kernel for GPUs that needs more registers than `flags` leave it."""
    before = '"nvcc"\nsources = ["answer_cpu.cpp"]'
    after = f'"nvrtc"\nsources = ["answer.cu"]\nflags = {json.dumps(flags)}'
    edit(site.library / "demo/op.toml", before, after)
    (site.library / "demo/answer.cu").write_text(SPILLING)


@pytest.mark.nvrtc
@pytest.mark.parametrize("setting", [{"lineinfo": "1"}, {"debug": "1"}])
def test_device_code_with_the_lines_of_its_sources_is_refused(setting: dict[str, str], site: Site) -> None:
    with_device_code(site)
    site.write(GPU)
    options = ("--archs", "9.0a", "--library", "tinyops", "--out", site.root / "out")
    answer = site.cli("builder", "build", *options, **setting)
    assert answer.code == 0, answer.err
    refused(site.gate("out"), "bundle demo for 9.0a was built with further flags")


@pytest.mark.nvrtc
def test_a_kernel_that_spills_registers_is_refused_where_the_plan_forbids_it(site: Site) -> None:
    with_device_code(site, "--maxrregcount=32")
    limit(site, GPU, spill_bytes=0)
    build(site)
    refused(site.gate("out"), "demo/answer?size=1 for 9.0a spills registers in answer, ", "the plan's limit is 0")
    limit(site, GPU, local_bytes=0)
    refused(site.gate("out"), "of local memory per thread in answer; the plan's limit is 0")
    limit(site, GPU, spill_bytes=100_000, local_bytes=100_000)
    assert site.gate("out").code == 0


@pytest.mark.nvrtc
def test_launchers_of_another_compiler_than_the_recipe_pins_are_refused_before_anything_is_compiled(site: Site) -> None:
    """A build for GPUs alone has no kernel of the host compiler, which makes what launches each of its images."""
    declaration = site.library / "demo/op.toml"
    after = '"nvrtc"\nsources = ["answer.cu"]\nhost_sources = ["answer_cpu.cpp"]'
    edit(declaration, '"nvcc"\nsources = ["answer_cpu.cpp"]', after)
    (site.library / "demo/answer.cu").write_text(SPILLING)
    folder = site.root / "builders/box"
    folder.mkdir(parents=True)
    found = nvrtc.discover(site.machine("builder").settings())
    recipe = 'name = "box"\n[nvrtc]\nversion = "{}"\n[cxx]\nversion = "{}"\n'
    site.write({**GPU, "builder": "box"}, more='builders = "builders"\n')
    (folder / "builder.toml").write_text(recipe.format(found.fingerprint["version"], "gcc 1.0"))
    answer = site.shard("builder", "1/1", build="gpu")
    assert answer.code == ConfigError.exit_code, answer.err
    assert "the recipe 'box' pins cxx of launchers 'gcc 1.0'; 'g" in answer.err
    assert site.compiler.compiled == 0


def test_a_path_of_the_machine_that_builds_stops_a_shard_before_anything_is_handed_in(site: Site) -> None:
    home = site.machine("runner").settings().user_home
    kept = f'static const char* volatile where __attribute__((used)) = "{home}/data";'
    edit(site.library / "demo/answer_cpu.cpp", '#include "scale.h"', f'#include "scale.h"\n{kept}')
    site.write(ONE)
    answer = site.shard("runner", "1/1")
    assert answer.code == BuildError.exit_code, answer.err
    assert f"holds '{home}/data', a path of this machine" in answer.err
    assert not any(name.startswith(("shards/", "kernels/")) for name in site.files("meet"))


def test_shards_of_two_compilers_of_one_version_make_no_release(site: Site, tmp_path: Path) -> None:
    """The other builder's compiler has a patched assembler; it says the same of itself."""
    site.write({**ONE, "shards": 2})
    assert site.shard("first", "1/2").code == 0
    edit(site.compiler.path, "#!/bin/sh\n", "#!/bin/sh\n# patched\n")
    assert site.shard("second", "2/2").code == 0
    answer = site.merge("merged")
    refused(answer, "shard 2/2 of build 'cpu' was made with another cxx than shard 1/2")
    assert not (site.root / "merged").exists()


def test_a_builder_that_dropped_one_op_for_one_arch_is_caught_where_shards_meet_and_at_the_gate(site: Site) -> None:
    """A matrix forgot one GPU of one CPU's packages, which then ended with "no kernel image" where it was used."""
    site.write({**ONE, "archs": ["cpu:x86-64", "cpu:x86-64-v3"]})
    assert site.shard("builder", "1/1").code == 0
    (document,) = (site.root / "meet/shards").rglob("*.json")
    shard = json.loads(document.read_bytes())
    dropped = ("demo/answer?size=1000", "cpu:x86-64-v3")
    shard["kernels"] = [made for made in shard["kernels"] if (made["uri"], made["arch"]) != dropped]
    for materials in shard["materials"]:
        for op in materials["ops"]:
            op["kernels"] = [made for made in op["kernels"] if (made["uri"], materials["arch"]) != dropped]
    document.write_text(json.dumps(shard))
    refused(site.merge("merged"), "demo/answer?size=1000 for cpu:x86-64-v3 is missing: it is in no shard")
    assert not (site.root / "merged").exists()

    build(site)
    promises = (site.root / "out/promises/tinyops/1.0.json").read_bytes()
    edit(site.library / "demo/op.toml", '["1", "1000"]', '["1"]')
    edit(site.library / "demo/op.toml", ', 1000 = "KART_SIZE=1000"', "")
    options = ("--archs", "cpu:x86-64 cpu:x86-64-v3", "--library", "tinyops", "--out", site.root / "lacking")
    assert site.cli("builder", "build", *options).code == 0
    place = site.root / "lacking/promises/tinyops/1.0.json"
    place.parent.mkdir(parents=True)
    place.write_bytes(promises)
    refused(site.gate("lacking"), f"{dropped[0]} is missing for {dropped[1]}")


def test_a_plan_of_another_library_passes_nothing(site: Site) -> None:
    limit(site, ONE)
    build(site)
    edit(site.plan, '"tinyops"', '"others"')
    assert site.gate("out").code == ConfigError.exit_code


# -- refused before any compiler starts --------------------------------------------------------------------------------


def test_a_list_that_no_op_can_be_built_for_is_refused_within_a_second_with_the_list_that_does(site: Site) -> None:
    """A list such as `7.5 10.0 12.0` failed in the middle of a long build, of an op that needs 12.0a."""
    edit(site.library / "demo/op.toml", 'min_arch = "7.5"', 'min_arch = "12.0a"')
    archs = ["7.5", "10.0", "12.0", "9.0a"]
    site.write({**GPU, "archs": archs})
    began = time.monotonic()
    answer = site.cli("builder", "build", "--plan", site.plan, "--out", site.root / "out")
    assert time.monotonic() - began < 1.0
    assert answer.code == ConfigError.exit_code
    assert 'archs = ["7.5", "10.0", "12.0a", "9.0a"]' in answer.err
    assert site.compiler.starts == 0
