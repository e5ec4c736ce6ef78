"""The page about kernels in Python: its files, as they stand there, are a library that is built for all it names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build import images, toolchains
from kartifacts.build.library import open_library
from kartifacts.build.toolchains import Toolchain
from kartifacts.config import Settings
from kartifacts.model.arch import parse_arch
from kartifacts.model.spec import combinations
from tests.build.pythons import found
from tests.conftest import Machine

PAGE = Path(__file__).parents[2] / "docs/howto/python-kernels.md"
NAMED = re.compile(r"# (\w+/(?:\w+\.py|op\.toml))\n")


def blocks(language: str) -> list[str]:
    """What the page shows in a language."""
    shown = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in shown if name == language]


def write_package(site: Path) -> Path:
    """Write the library of the page as an installed package of the directory `site`; gives its directory."""
    root = site / "acme_kernels/kernels"
    for text in [*blocks("toml"), *blocks("python")]:
        if named := NAMED.match(text):
            (root / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (root / named[1]).write_text(text[named.end() :])
    meta = site / "acme_kernels-0.3.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 0.3.0\n")
    (meta / "entry_points.txt").write_text("[kartifacts.libraries]\nacme = acme_kernels:kernels\n")
    return root


def calls() -> list[str]:
    """The programs that call a loaded kernel: they need a GPU."""
    return [text for text in blocks("python") if not NAMED.match(text)]


def test_the_page_declares_what_its_files_and_its_calls_say(tmp_path: Path) -> None:
    library = open_library(write_package(tmp_path))
    assert library.ops == ("saxpy/saxpy", "softmax/softmax")
    for op, axes, files in (
        ("softmax", {"dtype": "float16", "width": "1024"}, {"softmax/softmax.py", "softmax/reduce.py"}),
        ("saxpy", {"dtype": "float32"}, {"saxpy/saxpy.py"}),
    ):
        sources = {source.path for source in library.spec(op, axes, parse_arch("9.0a")).sources}
        assert {path for path in sources if not path.startswith("<")} == files
    assert [re.findall(r'load\("([\w/]+)"', text) for text in calls()] == [["softmax/softmax"], ["saxpy/saxpy"]]


def test_the_plan_of_the_page_gives_each_build_what_its_compilers_make(machine: Machine, tmp_path: Path) -> None:
    write_package(tmp_path / "site")
    [plan] = [text for text in blocks("toml") if text.startswith("# manifests/")]
    (tmp_path / "release.toml").write_text(plan)
    code = "import sys; from kartifacts.cli import main; sys.exit(main(['plan', sys.argv[1], '--check', '--json']))"
    answer = machine.python(code, tmp_path / "release.toml", PYTHONPATH=tmp_path / "site")
    assert answer.code == 0, answer.err
    assert {job["build"]: job["ops"] for job in answer.data["jobs"]} == {
        "cuda-13.0-x86_64": "saxpy",
        "triton-x86_64": "softmax",
    }
    assert [build["kernels"] for build in answer.data["builds"]] == [6, 18]


def build(family: str, machine: Machine, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Run the page's command; gives the library's directory, and what the repository is read by."""
    root = write_package(tmp_path / "site")
    [words] = [shlex.split(line) for text in blocks("sh") for line in text.splitlines() if f"--ops {family} " in line]
    environ = machine.environ({"PYTHONPATH": tmp_path / "site"})
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = tmp_path / words[words.index("--out") + 1]
    asked = words[words.index("--archs") + 1].split()
    told = machine.cli("coverage", out, "--json").data
    assert all(set(cells["archs"]) == set(asked) for cells in told["coverage"].values())
    _, op = open_library(root).find(family)
    assert (len(told["coverage"]), told["problems"]) == (len(combinations(op)), [])
    return root, {"lock": str(tmp_path / "kartifacts.lock"), "mirrors": str(out), "jit": "never"}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes the compilers away, as they are where kernels run."""

    def refuse(kind: str, settings: Settings) -> Toolchain:
        raise AssertionError(f"{kind} was looked for")

    return lambda: monkeypatch.setattr(toolchains, "find", refuse)


@pytest.mark.triton
def test_the_command_of_the_page_builds_the_op_in_triton(
    machine: Machine, tmp_path: Path, gpus: Callable[..., None], no_compiler: Callable[[], None]
) -> None:
    found("triton", machine.settings())
    root, settings = build("softmax", machine, tmp_path)
    gpus("9.0")
    no_compiler()
    for width, threads in (("1024", "128"), ("4096", "256")):
        kernel = machine.registry(libraries=[root], **settings).load("softmax/softmax", dtype="bfloat16", width=width)
        assert (str(kernel.arch), kernel.exports) == ("9.0a", ("softmax",))
        attached = images.attached(kernel.path.read_bytes())
        assert attached is not None
        assert attached[1]["threads"] == threads
        assert attached[1]["arguments"] == "x=*bfloat16:16 out=*bfloat16:16 columns=int32 stride=int64"
    assert machine.cli("fetch", "--archs", "gfx942", **settings).code == 0


@pytest.mark.cutedsl
def test_the_command_of_the_page_builds_the_op_in_cutedsl(
    machine: Machine, tmp_path: Path, gpus: Callable[..., None], no_compiler: Callable[[], None]
) -> None:
    found("cutedsl", machine.settings())
    root, settings = build("saxpy", machine, tmp_path)
    gpus("9.0")
    no_compiler()
    kernel = machine.registry(libraries=[root], **settings).load("saxpy/saxpy", dtype="float32")
    assert (str(kernel.arch), kernel.exports) == ("9.0a", ("saxpy",))
