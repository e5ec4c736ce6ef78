"""What workers of compilers for Python see of a library and tell of it, with a compiler that takes any function."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kartifacts.build import outside, planner
from kartifacts.build.steps import Step
from kartifacts.build.toolchains import Unit, python_worker
from kartifacts.errors import BuildError
from kartifacts.model.digest import sha256
from kartifacts.model.spec import Source

from .conftest import write_files

WORKER = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(python_worker.__file__)!r})
import python_worker
del sys.path[0]

def compiled(job, function):
    with open(os.path.join(job.place, "intermediate"), "w+") as file:
        file.write(repr(function()))
    with open(os.path.join(job.place, "intermediate"), "rb") as file:
        return file.read()

python_worker.serve(lambda: None, compiled, ("no_such_package",))
"""
KERNEL = {
    "demo/kernel.py": "from consts import S\n\n\ndef kernel():\n    return S\n",
    "demo/consts.py": "S = 2\n",
    "demo/data.json": "[7]\n",
    "include/shared/__init__.py": "",
    "include/shared/more.py": "S = 20\n",
}
Compile = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_files(tmp_path / "library", KERNEL)


@pytest.fixture
def compiled(root: Path, tmp_path: Path) -> Compile:
    """Does one job; what it makes is the text of what the function of the kernel gives."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    def run(*, site: Path = Path("/no/such/site"), output: Path | None = None) -> subprocess.CompletedProcess[str]:
        output = output or tmp_path / "made"
        job = ("--site", str(site), "--target", "t", "--kernel", json.dumps({"function": "kernel"}))
        files = ("--depfile", f"{output}.d", "--output", str(output), "demo/kernel.py")
        command = [sys.executable, "-I", str(worker), *job, *files]
        return subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)

    return run


def made(done: subprocess.CompletedProcess[str], tmp_path: Path) -> tuple[str, set[str]]:
    """What came out, and what was read for it."""
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return (tmp_path / "made").read_text(), set(outside.read_depfile(tmp_path / "made.d"))


# -- bytecode ----------------------------------------------------------------------------------------------------------


BY_FILE = """
from importlib import util
spec = util.spec_from_file_location("c", "demo/consts.py")
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
S = module.S
"""


def _by_time(path: Path) -> None:
    compileall.compile_file(path, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)


def _unchecked(path: Path) -> None:
    compileall.compile_file(path, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


@pytest.mark.parametrize("kept", [_by_time, _unchecked])
@pytest.mark.parametrize(
    ("way", "module"),
    [
        ("from consts import S", "demo/consts.py"),
        ("from shared.more import S", "include/shared/more.py"),
        ("import importlib\nS = importlib.import_module('consts').S", "demo/consts.py"),
        (BY_FILE, "demo/consts.py"),
        ("import runpy\nS = runpy.run_path('demo/consts.py')['S']", "demo/consts.py"),
        ("import runpy\nS = runpy.run_module('consts')['S']", "demo/consts.py"),
    ],
)
def test_the_text_of_a_module_counts_and_not_bytecode_of_what_it_once_was(
    root: Path, compiled: Compile, tmp_path: Path, kept: Callable[[Path], None], way: str, module: str
) -> None:
    """Whose size and time may be those of another text: an archive unpacked, a cache restored, a checkout."""
    (root / "demo/kernel.py").write_text(KERNEL["demo/kernel.py"].replace("from consts import S", way))
    path = root / module
    for name in ("demo/kernel.py", module):
        kept(root / name)
    stale = path.stat()
    path.write_text(path.read_text().replace("2", "3"))
    os.utime(path, ns=(stale.st_atime_ns, stale.st_mtime_ns))
    assert list(path.parent.glob("__pycache__/*.pyc"))
    said, read = made(compiled(), tmp_path)
    assert said == path.read_text().split()[-1]
    assert module in read
    assert not [name for name in read if name.endswith(".pyc")]


def test_bytecode_without_a_source_is_told_as_a_file_that_was_read(
    root: Path, compiled: Compile, tmp_path: Path
) -> None:
    py_compile.compile(str(root / "demo/consts.py"), str(root / "demo/consts.pyc"), doraise=True)
    (root / "demo/consts.py").unlink()
    assert made(compiled(), tmp_path) == ("2", {"demo/kernel.py", "demo/consts.pyc"})


def test_a_module_elsewhere_is_read_as_text_too(root: Path, compiled: Compile, tmp_path: Path) -> None:
    """Its content is remembered; that of installed packages is not, but their versions."""
    aside = write_files(tmp_path / "aside", {"aside.py": "S = 4\n"}) / "aside.py"
    _unchecked(aside)
    aside.write_text("S = 5\n")
    (root / "demo/kernel.py").write_text(
        f"import sys\nsys.path.append({str(aside.parent)!r})\n" + KERNEL["demo/kernel.py"].replace("consts", "aside")
    )
    assert made(compiled(), tmp_path) == ("5", {"demo/kernel.py", str(aside)})


def test_packages_of_the_environment_are_imported_as_they_are_installed(
    root: Path, compiled: Compile, tmp_path: Path
) -> None:
    """Also where it lies in the midst of the library, as the environments of projects do."""
    site = write_files(root / ".venv/lib/site-packages", {"no_such_package/__init__.py": "S = 4\n"})
    _unchecked(site / "no_such_package/__init__.py")
    (site / "no_such_package/__init__.py").write_text("S = 5\n")
    (root / "demo/kernel.py").write_text(KERNEL["demo/kernel.py"].replace("consts", "no_such_package"))
    assert made(compiled(site=site), tmp_path) == ("4", {"demo/kernel.py"})


# -- other files -------------------------------------------------------------------------------------------------------

HERE = "import os\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
READING = {
    "open": ("S = open(os.path.join(os.path.dirname(__file__), 'data.json')).read()", "demo/data.json"),
    "a path": ("S = HERE.joinpath('data.json').read_bytes()", "demo/data.json"),
    "a relative path": ("S = open('demo/data.json').read()", "demo/data.json"),
    "bytes": ("S = open(b'demo/data.json').read()", "demo/data.json"),
    "os.open": ("S = os.read(os.open('demo/data.json', os.O_RDONLY), 9)", "demo/data.json"),
    "another directory": ("os.chdir('demo')\nS = open('data.json').read()", "demo/data.json"),
    "exec": ("exec(HERE.joinpath('consts.py').read_text())", "demo/consts.py"),
    "a resource": ("import pkgutil\nS = pkgutil.get_data('shared', 'data.txt')", "include/shared/data.txt"),
    "in the function": ("S = 1\ndef kernel():\n    return open('demo/data.json').read()", "demo/data.json"),
    "through a link": ("S = open('../link/data.json').read()", "demo/data.json"),
    "an optional one": ("try:\n    S = open('demo/local.json').read()\nexcept OSError:\n    S = 1", "demo/local.json"),
    "an archive": ("import sys\nsys.path.append('demo/modules.zip')\nfrom zipped import S", "demo/modules.zip"),
    "a shared object": (
        "import ctypes\ntry:\n    ctypes.CDLL(str(HERE / 'lib.so'))\nexcept OSError:\n    S = 1",
        "demo/lib.so",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READING)
def test_every_file_of_the_library_that_is_read_is_told(
    case: str, root: Path, compiled: Compile, tmp_path: Path
) -> None:
    """So that one which the identity does not cover is refused, and not only modules are looked at."""
    code, name = READING[case]
    (root / "demo/kernel.py").write_text(f"{HERE}def kernel():\n    return S\n{code}\n")
    (root / "include/shared/data.txt").write_text("7\n")
    (root / "demo/lib.so").write_bytes(b"no ELF")
    (tmp_path / "link").symlink_to(root / "demo")
    with zipfile.ZipFile(root / "demo/modules.zip", "w") as archive:
        archive.writestr("zipped.py", "S = 1\n")
    _, read = made(compiled(), tmp_path)
    assert read - {"include/shared/__init__.py", "demo/modules.zip/zipped.py"} == {"demo/kernel.py", name}


@pytest.mark.parametrize(
    "code",
    [
        "names = os.listdir(HERE)",
        "names = sorted(HERE.glob('*.json'))",
        "names = [entry.name for entry in os.scandir(str(HERE))]",
        "names = list(os.walk(HERE))",
        "import pkgutil\nnames = list(pkgutil.iter_modules([str(HERE)]))",
        "os.chdir(HERE)\nnames = os.listdir()",
    ],
)
def test_a_kernel_that_hangs_on_which_files_there_are_is_refused(root: Path, compiled: Compile, code: str) -> None:
    (root / "demo/kernel.py").write_text(f"{HERE}{code}\ndef kernel():\n    return names\n")
    done = compiled()
    assert done.returncode == 1
    line = 4 + code.count("\n")
    assert done.stdout.startswith(
        f"demo/kernel.py:{line}: error: it looks what lies in 'demo', which the op's identity"
    )


def test_what_a_job_writes_and_reads_for_itself_and_elsewhere_is_not_of_the_library(
    root: Path, compiled: Compile, tmp_path: Path
) -> None:
    """Its private directory may lie in the library, where the workspace does."""
    code = (
        "import importlib.metadata, tempfile\nopen('/dev/null').read()\nos.listdir('/')\nos.close(os.open('demo', 0))\n"
        "list(importlib.metadata.distributions())\n"
        "with tempfile.NamedTemporaryFile() as file:\n    file.write(b'1')\n    file.flush()\n"
        "    S = open(file.name).read(), os.listdir(tempfile.gettempdir()) != []\n"
    )
    (root / "demo/kernel.py").write_text(f"{HERE}{code}def kernel():\n    return S\n")
    output = root / "workspace/staging/made"
    output.parent.mkdir(parents=True)
    done = compiled(output=output)
    assert (done.returncode, done.stdout) == (0, "")
    assert set(outside.read_depfile(Path(f"{output}.d"))) == {"demo/kernel.py"}


def test_a_library_without_an_include_directory_is_not_asked_for_one(
    root: Path, compiled: Compile, tmp_path: Path
) -> None:
    """Who looks for installed packages, as compilers do, opens each place of modules that is no directory."""
    shutil.rmtree(root / "include")
    code = "import importlib.metadata\nlist(importlib.metadata.distributions())\n"
    (root / "demo/kernel.py").write_text(code + KERNEL["demo/kernel.py"])
    assert made(compiled(), tmp_path) == ("2", {"demo/kernel.py", "demo/consts.py"})


# -- mistakes ----------------------------------------------------------------------------------------------------------

WRAPPED = """
class Wrapped(Exception):
    def __str__(self):
        return "\\n\\x1b[91m\\x1b[1merror:\\x1b[0m it is wrapped\\n --> below"


def tried(function):
    try:
        function()
    except Exception as error:
        RAISE
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("raise Wrapped from error", "demo/kernel.py:6: error: NameError: name 'nothing' is not defined"),
        ("raise Wrapped", "demo/kernel.py:6: error: NameError: name 'nothing' is not defined"),
        ("raise Wrapped from None", "error: Wrapped: error: it is wrapped"),
    ],
)
def test_a_mistake_that_a_compiler_has_wrapped_is_told_in_the_first_line(
    root: Path, compiled: Compile, tmp_path: Path, raised: str, said: str
) -> None:
    """The wrapped one has no line of its own there, and its text begins below."""
    site = write_files(tmp_path / "site", {"dsl.py": WRAPPED.replace("RAISE", raised)})
    worker = (tmp_path / "worker.py").read_text()
    start = "def compiled(job, function):\n"
    assert start in worker
    (tmp_path / "worker.py").write_text(worker.replace(start, f"{start}    import dsl\n    dsl.tried(function)\n"))
    (root / "demo/kernel.py").write_text("\n\n\n\ndef kernel():\n    return nothing\n")
    done = compiled(site=site)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == said
    assert "Traceback" in done.stdout
    assert "it is wrapped" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("source", "path", "hint"),
    [
        ("softmax/softmax.py", "softmax/reduce.py", "import it where its name can be read: import reduce"),
        ("softmax/softmax.py", "softmax/parts/each.py", "import it where its name can be read: import parts.each"),
        ("softmax/softmax.py", "include/shared/__init__.py", "import it where its name can be read: import shared"),
        ("softmax/softmax.py", "include/shared/bias.py", "import it where its name can be read: import shared.bias"),
        ("softmax/softmax.py", "softmax/table.json", "write what it says into a module in Python"),
        ("norm/norm.cu", "norm/parts.cuh", 'include it with a plain line: #include "norm/parts.cuh"'),
    ],
)
def test_who_reads_what_no_identity_covers_is_told_how_to_cover_it_in_his_language(
    root: Path, tmp_path: Path, source: str, path: str, hint: str
) -> None:
    depfile = tmp_path / "made.d"
    depfile.write_text(f"made: {source} {path}\n")
    unit = Unit(source, Path("compiler"), (), (), {}, 0)
    made = planner._Object(tmp_path / "made", str(root), unit, (Source(source, sha256(b"")),), frozenset(), depfile)
    step = Step("name", "compiling it", str(root), tmp_path / "made")
    with pytest.raises(BuildError, match=r"the compiler read .*, which the op's identity does not cover") as got:
        planner._outside(made, step)
    assert got.value.hint is not None
    assert hint in got.value.hint
