"""What the workers of compilers for Python have in common: each job is done in a fork of a process that imported one.

    WORKER.py --site DIRECTORY --target TARGET --kernel JSON [--set NAME=VALUE] [--debug] [--lineinfo]
              [--module DIRECTORY --made-of JSON --entry NAME] --depfile FILE --output FILE SOURCE

So a compiler is imported once, however many kernels follow; no job sees what another one did; and one in which a
compiler aborts is a job that failed.  The environment holds nothing of the user's that a compiler or a kernel could
read, but for what is --set.  With --module what is made is kept there too (see `modules`), and taken from there.

Of the library a job sees the text of its files alone, never bytecode that was made of them at another time, and every
file of it that is opened is told.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from kartifacts.build.toolchains import modules, worker
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import modules
    import worker

    del sys.path[0]  # files here are called like compilers

_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SOURCE_DATE_EPOCH")  # of the environment
_SOURCE = "kernel_source"  # what the module is called that the source becomes
_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SITES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_IMPORTING = ("<frozen importlib", *(f"{place}importlib{os.sep}" for place in _STDLIB))


class Job(argparse.Namespace):
    """One kernel: what to make it of, for what, and where to."""

    site: str
    target: str
    kernel: dict[str, Any]
    set: list[str]
    debug: bool
    lineinfo: bool
    module: str
    made_of: str
    entry: str
    depfile: str
    output: str
    source: str
    place: str  # a private directory, gone afterwards

    @property
    def kept_in(self) -> modules.Module | None:
        return modules.Module(self.module, json.loads(self.made_of)) if self.module else None

    @property
    def asked(self) -> list[str]:
        """What decides, beside the sources and the compiler, what comes out."""
        flags = [f"--{name}" for name in ("debug", "lineinfo") if getattr(self, name)]
        return [self.target, json.dumps(self.kernel, sort_keys=True), *self.set, *flags]

    def write(self, content: bytes, read: list[str]) -> None:
        with open(self.output, "wb") as file:
            file.write(content)
        with open(self.depfile, "w", encoding="utf-8", errors="surrogateescape") as rule:
            rule.write(f"{_escaped(self.output)}: {' '.join(map(_escaped, read))}\n")


class Mistake(Exception):
    """What is wrong with a kernel; the text says where."""


def serve(prepare: Callable[[], None], compiled: Callable[[Job, Any], bytes], packages: tuple[str, ...]) -> None:
    """Take jobs (see `worker`).

    Args:
        prepare: imports the compiler, with nothing of the user's in the environment.
        compiled: gives the bytes to be written, of a job and the function in its source.
        packages: top-level packages of the compiler, whose files are in its fingerprint.
    """
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update(own)
    # The child of a process with threads has one only, and all that it needs.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    prepared = False

    def run(arguments: list[str]) -> str:
        nonlocal prepared
        job = _parsed(arguments)
        kept_in = job.kept_in
        if kept_in is not None and (found := kept_in.find(job.entry, job.asked)):
            job.write(*found)
            return ""
        if not prepared:
            if job.site not in sys.path:
                sys.path.append(job.site)
            prepare()
            prepared = True
        return _forked(job, compiled, packages)

    worker.serve(run)


def _parsed(arguments: list[str]) -> Job:
    parser = argparse.ArgumentParser()
    for name in ("site", "target", "kernel", "depfile", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--set", action="append", default=[])
    for name in ("debug", "lineinfo"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("module", "made-of", "entry"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("source")
    job = parser.parse_args(arguments, Job())
    job.kernel = json.loads(str(job.kernel))
    return job


def _forked(job: Job, compiled: Callable[[Job, Any], bytes], packages: tuple[str, ...]) -> str:
    job.place = tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(job.output)))
    output = os.memfd_create("output")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _do(job, output, compiled, packages)
        return worker.waited_for(child, output)
    finally:
        os.close(output)
        shutil.rmtree(job.place, ignore_errors=True)


def _do(job: Job, output: int, compiled: Callable[[Job, Any], bytes], packages: tuple[str, ...]) -> NoReturn:
    """Do the job in this process, which is a fork, and end it."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = job.place
        os.environ.update((name, value) for name, _, value in (each.partition("=") for each in job.set))
        library = _Library(job)
        library.watch()
        function, imported = _function(job)
        content = compiled(job, function)
        read = library.read(imported, packages)
        kept_in = job.kept_in
        if kept_in is not None and not any(map(os.path.isabs, read)):
            kept_in.keep(job.entry, job.asked, content, read)
        job.write(content, read)
        status = 0
    except BaseException as error:  # noqa: BLE001  a kernel may raise whatever it likes
        sys.stdout.flush()
        sys.stderr.write(_told(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# -- the source --------------------------------------------------------------------------------------------------------


def _function(job: Job) -> tuple[Any, set[str]]:
    """The function that the kernel is, of the source, which is imported from where it lies; and what came with it."""
    sys.dont_write_bytecode = True
    homes = [os.path.dirname(os.path.abspath(job.source)), os.path.abspath("include")]
    sys.path[:0] = filter(os.path.isdir, homes)  # who looks for packages opens what is no directory as an archive
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(_SOURCE, os.path.abspath(job.source))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[_SOURCE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return getattr(module, job.kernel["function"]), set(sys.modules) - before
    except AttributeError:
        raise Mistake(f"{job.source}:1: error: it has no function {job.kernel['function']!r}") from None


def parameters(job: Job, names: list[str], optional: set[str]) -> None:
    """Refuse a kernel that is declared with other parameters than its function has.

    Args:
        names: of the function.
        optional: those of them that have a default.
    """
    told = {*job.kernel["arguments"], *job.kernel["constants"]}
    unknown, lacking = sorted(told - set(names)), [name for name in names if name not in told | optional]
    if unknown or lacking:
        said = [f"{job.kernel['function']} takes {', '.join(names)}"]
        said += [f"op.toml says nothing of {', '.join(lacking)}"] if lacking else []
        said += [f"op.toml names {', '.join(unknown)}"] if unknown else []
        raise Mistake(f"{job.source}:1: error: {'; '.join(said)}")


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(" ", "\\ ").replace("#", "\\#").replace("$", "$$")


# -- what it reads -----------------------------------------------------------------------------------------------------


class _Library:
    """The directory that a job runs in, and what is read of it.

    What a program reads that a kernel starts, and which files it asks for without opening them, is not seen.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.root = os.getcwd() + os.sep
        self._packages = (*_STDLIB, *_SITES, job.site + os.sep)
        apart = (job.place + os.sep, *self._packages)
        self._apart = tuple(place for place in apart if place.startswith(self.root))
        self._opened: dict[str, None] = {}
        self._listed = ""

    def has(self, path: str) -> bool:
        """Whether a file is of the library; packages may be installed in the midst of it."""
        return path.startswith(self.root) and not path.startswith(self._apart)

    def watch(self) -> None:
        """Let nothing but packages be imported as bytecode, and see from now on what is opened."""
        usual = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> Any:
            path = os.path.abspath(loader.get_filename(name))
            if path.startswith(self._packages) and not self.has(path):
                return usual(loader, name)
            return loader.source_to_code(loader.get_data(path), path)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            written = isinstance(flags, int) and (flags & os.O_ACCMODE == os.O_WRONLY or flags & os.O_TRUNC)
            # os.open, which has no mode, takes names in other directories and directories too.
            if not written and (path := self._path(path)) and (mode is not None or os.path.isfile(path)):
                self._opened[path] = None
        elif event == "ctypes.dlopen" and (path := self._path(arguments[0])):
            self._opened[path] = None
        elif event in ("os.listdir", "os.scandir") and not self._listed:
            caller = sys._getframe(1)  # noqa: SLF001  an import looks for its module so, which is in the text
            path = self._path("." if arguments[0] is None else arguments[0], directory=True)
            if path and not caller.f_code.co_filename.startswith(_IMPORTING):
                self._listed = f"{self._line(caller)}error: it looks what lies in {os.path.relpath(path, self.root)!r}"

    def _path(self, named: Any, *, directory: bool = False) -> str:
        """The full path of what is named so, if that is in the library; else nothing."""
        if not isinstance(named, (str, bytes, os.PathLike)):
            return ""
        path = os.path.abspath(os.fsdecode(named))
        end = os.sep * directory
        if self.has(path + end):
            return path
        try:
            path = os.path.realpath(path)
        except (OSError, ValueError):  # what is no path is opened by nobody
            return ""
        return path if self.has(path + end) else ""

    def _line(self, frame: Any) -> str:
        while frame is not None:
            name = frame.f_code.co_filename
            path = os.path.abspath(name)
            if self.has(path) and not name.startswith("<"):
                return f"{path.removeprefix(self.root)}:{frame.f_lineno}: "
            frame = frame.f_back
        return f"{self.job.source}: "

    def read(self, imported: set[str], packages: tuple[str, ...]) -> list[str]:
        """The files that the job has read: the source, what it took of its library, and imports from elsewhere.

        Raises:
            Mistake: it hangs on which files there are.
        """
        if self._listed:
            raise Mistake(f"{self._listed}, which the op's identity does not cover; name the modules that it imports")
        read = {self.job.source: None}
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None)
            if not isinstance(place, str) or name == _SOURCE:
                continue
            path = os.path.abspath(place)
            own = not path.startswith(_STDLIB) or path.startswith(_SITES)
            if self.has(path) or (own and name in imported and name.partition(".")[0] not in packages):
                read[path.removeprefix(self.root)] = None
        read |= {path.removeprefix(self.root): None for path in self._opened}
        return list(read)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _told(error: BaseException) -> str:
    """The mistake in one line, with the line of the library that it is in; then all about it."""
    if isinstance(error, Mistake):
        return f"{error}\n"
    everything = _plain("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    # A compiler wraps what went wrong in a kernel into an error of its own, whose first line may say nothing.
    told = next((each for each in _chain(error) if _place(each)), error)
    said = next((line.strip() for line in _plain(str(told)).splitlines() if line.strip()), "")
    return f"{_place(told)}error: {type(told).__name__}{f': {said}' * bool(said)}\n\n{everything}"


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error, and what led to it."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _place(error: BaseException) -> str:
    """``norm/rmsnorm.py:12: `` of the innermost line of the library; empty if there is none."""
    root = os.getcwd() + os.sep
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        places = [(error.filename, error.lineno)]
    else:
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    for name, line in reversed(places):
        path = os.path.abspath(name)
        if path.startswith(root) and not name.startswith("<"):
            return f"{path.removeprefix(root)}:{line}: "
    return ""
