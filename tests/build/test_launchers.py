"""Launchers that come along: taken where they fit, refused with the reason where they do not, never shipped unsound."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kartifacts.build import elf, images, launchers
from kartifacts.build.compile import compile_specs
from kartifacts.build.launchers import Launchers, prebuild
from kartifacts.build.library import open_library
from kartifacts.config import Settings
from kartifacts.errors import BuildError, NoCompiler
from kartifacts.model.digest import sha256
from kartifacts.model.spec import Spec

MakeSettings = Callable[..., Settings]
MakeSpec = Callable[..., Spec]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The launcher of the tiny library, with the sources that it was made of; not to be changed."""
    from kartifacts import config

    from .conftest import IMAGE_FILES, write_files

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    root = write_files(tmp_path_factory.mktemp("prebuilt") / "imagelib", IMAGE_FILES)
    settings = config.read(overrides={"workspace": root.parent / "workspace"})
    written = prebuild(open_library(root), root, settings)
    assert [path.relative_to(root) for path in written] == [
        Path("demo/scale.launcher.so"),  # of the op that has host code alone
        Path("demo/scale.launcher.json"),
    ]
    return root / "demo"


@pytest.fixture
def shipped(made: Path, image_root: Path) -> Path:
    """The tiny library as a wheel brings it; gives the launcher."""
    for suffix in (".so", ".json"):
        shutil.copy(made / f"scale.launcher{suffix}", image_root / "demo")
    return image_root / "demo/scale.launcher.so"


def noted(launcher: Path, **changes: Any) -> None:
    """Say something else of a launcher."""
    file = launcher.with_suffix(".json")
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **changes}))


def test_it_is_taken_where_no_program_is(shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings) -> None:
    found = Launchers(make_settings(PATH=""))
    spec = image_spec()
    assert found.prebuilt(spec) == shipped
    assert found.units(spec) == ()
    assert found.facts(spec)["launcher version"]
    assert elf.inspect(shipped).exports == ("scale",)
    assert (found.prebuilt(image_spec(op="bare")), found.facts(image_spec(op="bare"))) == (None, {})


def test_one_file_serves_all_specialisations_and_archs(
    shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings
) -> None:
    found = Launchers(make_settings(PATH=""))
    assert {found.prebuilt(image_spec(arch, size)) for arch in ("8.0", "10.0f") for size in ("small", "large")} == {
        shipped
    }


def test_it_has_the_key_of_one_that_the_same_compiler_makes_now(
    shipped: Path, image_spec: MakeSpec, settings: Settings
) -> None:
    """Else what is published would fit those alone who have it, or those alone who have not."""
    came = Launchers(settings).facts(image_spec())
    shipped.unlink()
    assert Launchers(settings).prebuilt(image_spec()) is None
    assert Launchers(settings).facts(image_spec()) == came


@pytest.mark.nvrtc
@pytest.mark.nvcc
def test_a_kernel_with_it_is_byte_for_byte_the_one_without_and_nothing_is_linked(
    shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings, tmp_path: Path
) -> None:
    launcher, kernels = shipped.read_bytes(), []
    for name in ("with", "without"):
        build = compile_specs([image_spec()], make_settings(KARTIFACTS_WORKSPACE=str(tmp_path / name)))
        assert build.report["linked"] == (0 if name == "with" else 1)
        kernels.append(build.kernels[0].path.read_bytes())
        shipped.unlink(missing_ok=True)
    assert kernels[0] == kernels[1]
    attached = images.attached(kernels[0])
    assert attached is not None
    assert images.attach(launcher, *attached) == kernels[0]


def changed_source(launcher: Path) -> None:
    source = launcher.with_name("scale_binding.cpp")
    source.write_text(source.read_text() + "// changed\n")


def changed_bytes(launcher: Path) -> None:
    launcher.write_bytes(launcher.read_bytes() + b"\0")


def gone(launcher: Path) -> None:
    launcher.unlink()


def no_file(launcher: Path) -> None:
    launcher.unlink()
    launcher.mkdir()


REASONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other sources": (changed_source, "it was made of other sources"),
    "other bytes": (changed_bytes, "it has changed since it was made"),
    "no launcher": (gone, "none came with the sources"),
    "no note": (lambda launcher: launcher.with_suffix(".json").unlink(), "none came with the sources"),
    "a directory": (no_file, "scale.launcher.so"),
    "another format": (lambda launcher: noted(launcher, schema=99), "it was made of other sources"),
    "another machine": (lambda launcher: noted(launcher, machine="riscv64"), "it was made for riscv64; this is"),
    "a newer glibc": (lambda launcher: noted(launcher, needs={"glibc": "9.9"}), "it needs glibc 9.9; here it is 2."),
    "a note too many": (lambda launcher: noted(launcher, extra=1), "is malformed"),
    "a broken note": (lambda launcher: launcher.with_suffix(".json").write_text("{"), "scale.launcher.json"),
}


@pytest.mark.parametrize("fault", REASONS)
def test_one_that_does_not_fit_is_compiled_anew_and_who_cannot_is_told_why_it_does_not(
    fault: str, shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    harm, reason = REASONS[fault]
    harm(shipped)
    spec = image_spec()
    caplog.set_level(logging.INFO, "kartifacts.build.launchers")
    beside_a_compiler, alone = Launchers(make_settings()), Launchers(make_settings(PATH=""))
    assert beside_a_compiler.prebuilt(spec) is None
    assert [unit.source for unit in beside_a_compiler.units(spec)] == ["demo/scale_binding.cpp"]
    assert (reason in caplog.text) == (reason != "none came with the sources")  # that is no news
    with pytest.raises(NoCompiler) as caught:
        alone.facts(spec)
    said = str(caught.value)
    assert said.startswith("the launcher of demo/scale must be compiled: no host C++ compiler was found")
    assert f"{shipped}: " in said
    assert reason in said
    assert "PATH" in said


@pytest.mark.parametrize("setting", [{"KARTIFACTS_CXX_FLAGS": "-g0"}, {"KARTIFACTS_DEBUG": "1"}])
def test_who_asks_for_other_host_code_gets_it(
    setting: dict[str, str], shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings
) -> None:
    found = Launchers(make_settings(**setting))
    assert found.prebuilt(image_spec()) is None
    assert found.units(image_spec()) != ()
    with pytest.raises(NoCompiler, match="other host code than what is shipped"):
        Launchers(make_settings(PATH="", **setting)).facts(image_spec())


def test_it_is_read_once_for_all_that_is_built_of_it(
    shipped: Path, image_spec: MakeSpec, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel asks eight times, which took a tenth of what NVRTC takes."""
    read: list[Path] = []
    usual = launchers._read

    def count(file: Path) -> launchers.Record:
        read.append(file)
        return usual(file)

    monkeypatch.setattr(launchers, "_read", count)
    found = Launchers(make_settings(PATH=""))
    for size in ("small", "large", "small"):
        spec = image_spec(size=size)
        found.facts(spec)
        found.units(spec)
        assert found.prebuilt(spec) == shipped
    assert len(read) == 1
    changed_source(shipped)
    assert found.prebuilt(image_spec()) is None


# -- making them -------------------------------------------------------------------------------------------------------


def test_what_is_written_says_what_it_was_made_of_and_needs(made: Path) -> None:
    record = json.loads((made / "scale.launcher.json").read_bytes())
    assert record["sha256"] == sha256((made / "scale.launcher.so").read_bytes())
    assert record["needs"] == dict(elf.inspect(made / "scale.launcher.so").needs)
    assert "version" in record["compiler"]
    assert sorted(path.name for path in made.iterdir() if "launcher" in path.name) == [
        "scale.launcher.json",
        "scale.launcher.so",
    ]  # no objects


def test_two_places_make_the_same_bytes(made: Path, image_root: Path, tmp_path: Path, settings: Settings) -> None:
    prebuild(open_library(image_root), tmp_path / "elsewhere", settings)
    for suffix in (".so", ".json"):
        name = f"scale.launcher{suffix}"
        assert (tmp_path / "elsewhere/demo" / name).read_bytes() == (made / name).read_bytes()


# glibc has this function since 2.25.
NEWER = "#include <unistd.h>\nint f(void* p) { return getentropy(p, 1); }\n"


def rewrite(root: Path, old: str, new: str) -> None:
    source = root / "demo/scale_binding.cpp"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("int __tvm_ffi_scale", "int __tvm_ffi_other", "does not export scale"),
        ("static kart::Entry", "oops", "cannot be made: demo/scale_binding.cpp:"),
        ("static kart::Entry", f"{NEWER}static kart::Entry", "needs glibc 2.25, which many machines have not got"),
    ],
    ids=["another export", "a mistake", "a newer glibc"],
)
def test_one_that_would_not_serve_everybody_is_not_made(
    old: str, new: str, says: str, image_root: Path, tmp_path: Path, settings: Settings
) -> None:
    rewrite(image_root, old, new)
    with pytest.raises(BuildError, match=says):
        prebuild(open_library(image_root), tmp_path / "out", settings)
    assert not list((tmp_path / "out").rglob("*.json"))
    assert not list((tmp_path / "out").rglob("*.o"))


def test_without_a_compiler_none_is_made(image_root: Path, tmp_path: Path, make_settings: MakeSettings) -> None:
    with pytest.raises(NoCompiler):
        prebuild(open_library(image_root), tmp_path / "out", make_settings(PATH=""))
    assert not list((tmp_path / "out").rglob("*.launcher.*"))
