"""Data wheels: names that no installer confuses, tags that are true, bytes that are always the same, little memory."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name, parse_wheel_filename

from kartifacts.errors import ConfigError, PublishConflict, StoreError, VerificationError
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Pin, decode_lock
from kartifacts.publish.wheel import (
    REQUIRES_PYTHON,
    Kernel,
    Wheel,
    Written,
    check_sizes,
    plan_wheels,
    write_wheel,
)
from kartifacts.publish.wheel import place as place_wheels

CHECKOUT = Path(__file__).parents[2]
INDEX = b"the release index"


def pin(library: str = "tiny", version: str = "1.0") -> Pin:
    return Pin(library=library, version=version, sha256=sha256(INDEX), size=len(INDEX))


def elf(machine: int, rest: bytes = b"") -> bytes:
    return b"\x7fELF\2\1\1" + bytes(9) + b"\3\0" + machine.to_bytes(2, "little") + rest


def kernel(
    tmp_path: Path, content: bytes, arch: str = "9.0a", suffix: str = ".so", op: str = "norm/rmsnorm", **needs: str
) -> Kernel:
    path = tmp_path / f"{sha256(content)}{suffix}"
    path.write_bytes(content)
    return Kernel(op, arch, path, sha256(content), len(content), suffix, needs)


def plan(*kernels: Kernel, **how: Any) -> list[Wheel]:
    return plan_wheels(pin(), {sha256(INDEX): INDEX}, kernels, **how)


def write(tmp_path: Path, *kernels: Kernel, **how: Any) -> list[Written]:
    out = tmp_path / f"staged-{len(list(tmp_path.iterdir()))}"
    out.mkdir()
    return [write_wheel(each, out) for each in plan(*kernels, **how)]


# -- names and tags ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "arch", "name"),
    [
        ("kartifacts", "9.0a", "kartifacts-kartifacts-sm90a"),
        ("flashinfer-cubin", "8.0+PTX", "kartifacts-flashinfer-cubin-sm80-ptx"),
        ("a.b_c", "cpu:x86-64-v3", "kartifacts-a-b-c-cpu-x86-64-v3"),
        ("x", "gfx942", "kartifacts-x-gfx942"),
        ("x", "12.0f", "kartifacts-x-sm120f"),
        ("x", "any", "kartifacts-x-any"),
    ],
)
def test_the_name_of_a_wheel_is_the_same_for_every_installer(
    tmp_path: Path, library: str, arch: str, name: str
) -> None:
    [wheel] = plan_wheels(pin(library), {}, [kernel(tmp_path, b"x", arch)], one_per_arch=True)
    assert wheel.name == name == canonicalize_name(name)
    assert parse_wheel_filename(wheel.file_name)[0] == name
    assert wheel.package.isidentifier()


@pytest.mark.parametrize("name", ["-x", "x/y", "../x", "1x", "x y", "é", "x" * 200, "x\n", "class@x"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        plan(kernel(tmp_path, b"x"), name=name)


@pytest.mark.parametrize(
    ("version", "spelt"), [("1.0", "1.0"), ("0.6.13", "0.6.13"), ("1.0rc1", "1.0rc1"), ("1.0+cu130", "1.0+cu130")]
)
def test_the_version_of_a_wheel_is_that_of_its_release(tmp_path: Path, version: str, spelt: str) -> None:
    [wheel] = plan_wheels(pin(version=version), {}, [kernel(tmp_path, b"x")])
    assert str(parse_wheel_filename(wheel.file_name)[1]) == wheel.version == spelt


@pytest.mark.parametrize(
    ("machine", "needs", "platform"),
    [
        (62, {}, "manylinux_2_17_x86_64"),
        (62, {"glibc": "2.2.5"}, "manylinux_2_17_x86_64"),
        (62, {"glibc": "2.34"}, "manylinux_2_34_x86_64"),
        (183, {"glibc": "2.17"}, "manylinux_2_17_aarch64"),
        (62, {"glibc": "2.17", "glibcxx": "3.4.30"}, "manylinux_2_35_x86_64"),
        (62, {"glibc": "2.36", "glibcxx": "3.4.20"}, "manylinux_2_36_x86_64"),
        (190, {"driver": "13.0"}, "any"),
        (224, {}, "any"),
        (0, {}, "any"),
    ],
)
def test_the_platform_tag_is_what_the_kernels_need(
    tmp_path: Path, machine: int, needs: dict[str, str], platform: str
) -> None:
    content = elf(machine) if machine else b"a header"
    [wheel] = plan(kernel(tmp_path, content, **needs), kernel(tmp_path, elf(190, b"cubin")))
    assert wheel.platform == platform
    assert len(wheel.kernels) == 2


@pytest.mark.parametrize(
    ("machine", "needs"), [(243, {}), (62, {"glibcxx": "3.4.99"}), (62, {"glibc": "two"}), (62, {"glibcxx": ""})]
)
def test_what_no_tag_can_promise_is_refused(tmp_path: Path, machine: int, needs: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        plan(kernel(tmp_path, elf(machine), **needs))


def test_each_kind_of_host_has_a_wheel_and_each_has_what_runs_on_any(tmp_path: Path) -> None:
    here, there = kernel(tmp_path, elf(62), "cpu:x86-64"), kernel(tmp_path, elf(183), "cpu:aarch64")
    common = kernel(tmp_path, b"header", "any", ".h")
    wheels = plan(here, there, common)
    assert [wheel.name for wheel in wheels] == ["kartifacts-tiny"] * 2
    assert [wheel.platform for wheel in wheels] == ["manylinux_2_17_aarch64", "manylinux_2_17_x86_64"]
    assert [paths(wheel) for wheel in wheels] == [{there.path, common.path}, {here.path, common.path}]
    apart = plan(here, there, common, one_per_arch=True)
    assert [paths(wheel) for wheel in apart] == [{there.path, common.path}, {here.path, common.path}]
    assert len({wheel.name for wheel in apart}) == 2


def paths(wheel: Wheel) -> set[Path]:
    return {kernel.path for kernel in wheel.kernels}


def test_no_kernels_are_no_wheel() -> None:
    with pytest.raises(ConfigError, match="nothing to put into"):
        plan()


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_every_file_of_a_wheel_stands_in_its_record(tmp_path: Path) -> None:
    [made] = write(tmp_path, kernel(tmp_path, elf(62)), kernel(tmp_path, b"header", "any", ".h"))
    with zipfile.ZipFile(made.path) as archive:
        names = archive.namelist()
        record = archive.read("kartifacts_tiny-1.0.dist-info/RECORD").decode()
        rows = {name: (hashed, size) for name, hashed, size in csv.reader(record.splitlines())}
        assert sorted(rows) == sorted(names)
        assert len(set(names)) == len(names)
        for name in names[:-1]:
            data = archive.read(name)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert rows[name] == (f"sha256={hashed}", str(len(data)))
        assert rows[names[-1]] == ("", "")
        assert all(info.external_attr >> 16 == 0o100644 for info in archive.infolist())
        assert archive.testzip() is None
        lock = decode_lock(archive.read("kartifacts_tiny/kartifacts.lock"))
        assert lock.releases == [pin()]
        assert archive.read(f"kartifacts_tiny/blobs/sha256/{sha256(INDEX)}") == INDEX


def test_the_metadata_is_valid_and_asks_for_the_python_that_we_ask_for(tmp_path: Path) -> None:
    [made] = write(tmp_path, kernel(tmp_path, elf(62)))
    with zipfile.ZipFile(made.path) as archive:
        metadata = Metadata.from_email(archive.read("kartifacts_tiny-1.0.dist-info/METADATA"), validate=True)
        wheel = BytesParser().parsebytes(archive.read("kartifacts_tiny-1.0.dist-info/WHEEL"))
    assert (metadata.name, str(metadata.version)) == ("kartifacts-tiny", "1.0")
    assert not metadata.requires_dist  # an index of data wheels is enough; op digests say what fits, not versions
    assert str(metadata.requires_python) == REQUIRES_PYTHON
    assert f'requires-python = "{REQUIRES_PYTHON}"' in (CHECKOUT / "pyproject.toml").read_text()
    assert (wheel["Tag"], wheel["Root-Is-Purelib"]) == ("py3-none-manylinux_2_17_x86_64", "false")


def test_two_wheels_of_one_content_are_one(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, elf(62, bytes([number]) * 5000), op=f"norm/op{number}") for number in range(20)]
    [first] = write(tmp_path, *kernels)
    for each in kernels:
        each.path.chmod(0o600)
        each.path.touch()
    [second] = write(tmp_path, *reversed(kernels), kernels[3])
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", ["bytes", "longer", "gone"])
def test_a_kernel_that_changed_since_it_was_verified_is_in_no_wheel(tmp_path: Path, change: str) -> None:
    changed = kernel(tmp_path, elf(62))
    planned = plan(changed)
    if change == "gone":
        changed.path.unlink()
    else:
        changed.path.write_bytes(elf(62, b"more") if change == "longer" else elf(62)[:-1] + b"\1")
    with pytest.raises(StoreError if change == "gone" else VerificationError):
        write_wheel(planned[0], tmp_path)


MEMORY = """
import re, sys
from pathlib import Path
from kartifacts.model.manifest import Pin
from kartifacts.publish.wheel import Kernel, plan_wheels, write_wheel
path, digest, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pin = Pin(library="large", version="1", sha256="0" * 64, size=1)
kernels = [Kernel("norm/large", "9.0a", path, digest, size, ".cubin", {})]
made = write_wheel(plan_wheels(pin, {}, kernels)[0], path.parent)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])  # of this program alone
"""


@pytest.mark.parametrize("size", [300 << 20, pytest.param((4 << 30) + 5, marks=pytest.mark.slow)])
def test_a_large_wheel_needs_little_memory(tmp_path: Path, size: int) -> None:
    path = tmp_path / "large.cubin"
    hashed = hashlib.sha256()
    with open(path, "wb") as file:
        file.truncate(size)
    for start in range(0, size, 1 << 20):
        hashed.update(bytes(min(1 << 20, size - start)))
    command = [sys.executable, "-c", MEMORY, str(path), hashed.hexdigest(), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150_000
    [made] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        assert max(info.file_size for info in archive.infolist()) == size


# -- sizes and names that are taken ------------------------------------------------------------------------------------


def test_a_wheel_over_its_budget_names_its_largest_ops_and_how_to_split(tmp_path: Path) -> None:
    sizes = [*range(1000, 13_000, 1000)]
    kernels = [
        kernel(tmp_path, hashlib.shake_128(bytes([number])).digest(size), arch, ".cubin", op=f"norm/op{number}")
        for number, (size, arch) in enumerate(zip(sizes, ["8.0", "9.0a"] * 6, strict=True))
    ]
    written = write(tmp_path, *kernels)
    check_sizes(written, written[0].size)
    with pytest.raises(ConfigError) as caught:
        check_sizes(written, written[0].size - 1)
    named = re.findall(r"norm/op(\d+)", caught.value.message)
    assert named == [str(number) for number in reversed(range(2, 12))]
    assert re.search(r"--one-per-arch gives about .* MB for 9.0a, .* MB for 8.0", str(caught.value.hint))
    with pytest.raises(ConfigError) as caught:
        check_sizes(write(tmp_path, *kernels, one_per_arch=True), 1)
    assert "--one-per-arch" not in str(caught.value.hint)


def test_a_name_that_is_taken_keeps_all_wheels_out(tmp_path: Path) -> None:
    kernels = [kernel(tmp_path, elf(62, arch.encode()), arch) for arch in ("8.0", "9.0a")]
    written = write(tmp_path, *kernels, one_per_arch=True)
    out = tmp_path / "out"
    out.mkdir()
    (out / written[1].wheel.file_name).write_bytes(b"other")
    with pytest.raises(PublishConflict):
        place_wheels(written, out)
    assert [path.name for path in out.iterdir()] == [written[1].wheel.file_name]
    (out / written[1].wheel.file_name).unlink()
    assert place_wheels(written, out) == place_wheels(written, out)  # again is no conflict
    assert sorted(path.name for path in out.iterdir()) == sorted(made.wheel.file_name for made in written)
