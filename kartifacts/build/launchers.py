"""The launcher of an image: host code that is compiled once per op, or came prebuilt beside the library's sources.

    <family>/<op>.launcher.so       what an image is attached to
    <family>/<op>.launcher.json     what it was made of, and what it needs

A prebuilt one is taken if it was made of the very sources and flags that are here now and runs on this machine.  Then
no host compiler is looked for at all.
"""

from __future__ import annotations

import logging
import os
import platform
import posixpath
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.build import closure, elf
from kartifacts.build.toolchains import Unit, cxx, probe
from kartifacts.build.toolchains.options import flags_for
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, KartifactsError, NoCompiler, Refusal
from kartifacts.files.reading import read_regular
from kartifacts.model.arch import targets
from kartifacts.model.digest import Digest, canonical_json, sha256, strict_json
from kartifacts.model.spec import FFI_ABI, Spec

if TYPE_CHECKING:
    from kartifacts.build.library import Library

log = logging.getLogger(__name__)

SCHEMA = 1
MAX_LAUNCHER, MAX_RECORD = 64 << 20, 1 << 20  # bytes
# What every Linux that Python 3.10 is built for has; a launcher that needs more is not worth shipping.
MOST = {"glibc": (2, 17), "glibcxx": (3, 4, 19), "cxxabi": (1, 3, 7)}
_NEWEST = (99, 0)  # CUDA toolkit
_ABSENT = "none came with the sources"
_ONE_WORD = re.compile(r"[!-~]+")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the .json."""

    schema: int
    identity: str
    machine: str
    sha256: str
    needs: dict[str, str]
    compiler: dict[str, str]  # the facts of the host compiler, which go into the key


@dataclass(frozen=True)
class Launchers:
    """Where the launchers of images come from."""

    settings: Settings
    _known: dict[object, Record | Refusal] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def host(self) -> cxx.Cxx:
        """The host compiler; looked for when it is first wanted.

        Raises:
            NoCompiler: there is none.
        """
        return cxx.discover(self.settings)

    @cached_property
    def _usual(self) -> bool:
        """Whether host code is to be compiled as what is shipped was."""
        options = flags_for(self.settings, cxx.Cxx.kind)
        return not options.flags and not options.symbols

    def facts(self, spec: Spec) -> dict[str, str]:
        """What the key of a kernel has to say of its launcher.

        Raises:
            NoCompiler: it must be compiled, and there is no host compiler.
        """
        if not spec.device.host_sources:
            return {}
        found = self._look(spec)
        try:
            made = found.compiler if isinstance(found, Record) else self.host.fingerprint
        except NoCompiler as error:
            assert isinstance(found, Refusal)
            raise NoCompiler(
                f"the launcher of {spec.family}/{spec.op.name} must be compiled: {error.message}",
                searched=(found, *error.searched),
                hint=error.hint,
            ) from None
        return {f"launcher {name}": value for name, value in made.items() if name != "kind"}

    def prebuilt(self, spec: Spec) -> Path | None:
        """The launcher that came with the sources of `spec`; None if there is none that may be used."""
        return place(Path(spec.root), spec) if self._came(spec) else None

    def units(self, spec: Spec) -> tuple[Unit, ...]:
        """What to compile for a launcher; nothing if there is one."""
        if not spec.device.host_sources or self._came(spec):
            return ()
        return self.host.host_units(spec)

    def _came(self, spec: Spec) -> bool:
        return bool(spec.device.host_sources) and isinstance(self._look(spec), Record)

    def _look(self, spec: Spec) -> Record | Refusal:
        """What is said of the launcher that came along, or why it is not used; found out once, until sources change."""
        known_as = spec.root, spec.family, spec.op.name, spec.sources
        if known_as not in self._known:
            self._known[known_as] = found = self._judge(spec)
            if isinstance(found, Refusal) and found.reason != _ABSENT:
                log.info("a prebuilt launcher is not used: %s", found)
        return self._known[known_as]

    def _judge(self, spec: Spec) -> Record | Refusal:
        file = place(Path(spec.root), spec)
        if not self._usual:
            return Refusal(str(file), "the settings ask for other host code than what is shipped")
        try:
            record = _read(file.with_suffix(".json"))
            reason = _unusable(record, file, spec)
            return record if reason is None else Refusal(str(file), reason)
        except FileNotFoundError:
            return Refusal(str(file), _ABSENT)
        except (OSError, KartifactsError) as error:
            return Refusal(str(file), str(error))


def noted_defines(spec: Spec) -> dict[str, str]:
    """What a launcher is told of an image: it is compiled without the macros that tell specialisations apart."""
    pairs = (define.partition("=") for define in spec.defines)
    told = {f"define.{name}": value if equals else "1" for name, equals, value in pairs}
    return {name: value for name, value in told.items() if _ONE_WORD.fullmatch(value)}


def place(root: Path, spec: Spec) -> Path:
    """Where the prebuilt launcher of an op lies in its library."""
    return root / posixpath.dirname(spec.device.host_sources[0]) / f"{spec.op.name}.launcher.so"


def identity(spec: Spec) -> Digest:
    """What a launcher is made of but for its compiler: the same for all specialisations and archs of an op."""
    sources = closure.reached(Path(spec.root), spec.device.host_sources)
    made_of = {
        "schema": SCHEMA,
        "compile": spec.device.host_sources,
        "sources": {source.path: source.sha256 for source in sources},
        "flags": [*cxx.COMPILE, *cxx.LINK],
        "link_flags": spec.device.link_flags,
        "ffi": FFI_ABI,
    }
    return sha256(canonical_json(made_of))


def _read(file: Path) -> Record:
    try:
        return msgspec.convert(strict_json(read_regular(file, MAX_RECORD), what=str(file)), Record)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{file} is malformed: {error}") from error


def _unusable(record: Record, file: Path, spec: Spec) -> str | None:
    if record.schema != SCHEMA or record.identity != identity(spec):
        return "it was made of other sources"
    if record.machine != platform.machine():
        return f"it was made for {record.machine}; this is {platform.machine()}"
    if sha256(read_regular(file, MAX_LAUNCHER)) != record.sha256:
        return "it has changed since it was made"
    wanted, have = _version(record.needs.get("glibc", "")), _glibc()
    here = ".".join(map(str, have)) or "another C library"
    return None if have >= wanted else f"it needs glibc {record.needs['glibc']}; here it is {here}"


def _glibc() -> tuple[int, ...]:
    try:
        return _version(os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):  # another C library
        return ()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


# -- making them -------------------------------------------------------------------------------------------------------


def prebuild(library: Library, into: Path, settings: Settings) -> list[Path]:
    """Compile the launchers of a library into the directory `into`, laid out as the library; gives what was written.

    Raises:
        NoCompiler: there is no host compiler.
        BuildError: it failed, or what it made needs more of its host than is found everywhere.
    """
    launchers = Launchers(settings)
    written: list[Path] = []
    for spec in _launched(library):
        file = place(into, spec)
        file.parent.mkdir(parents=True, exist_ok=True)
        _make(spec, launchers.host, file, settings)
        content = file.read_bytes()
        record = Record(
            schema=SCHEMA,
            identity=identity(spec),
            machine=platform.machine(),
            sha256=sha256(content),
            needs=_checked(spec, content),
            compiler={name: value for name, value in launchers.host.fingerprint.items() if name != "kind"},
        )
        file.with_suffix(".json").write_bytes(canonical_json(msgspec.to_builtins(record)))
        written += [file, file.with_suffix(".json")]
    return written


def _launched(library: Library) -> Iterator[Spec]:
    """One spec of each op whose image needs a launcher; for which arch does not matter."""
    for op in library.ops:
        _, decl = library.find(op)
        device = decl.device.get("cuda")
        if device is None or not device.host_sources:
            continue
        specs, _ = library.specs([op], targets(_NEWEST))
        if specs[0].output == "image":
            yield specs[0]


def _make(spec: Spec, host: cxx.Cxx, file: Path, settings: Settings) -> None:
    objects: list[Path] = []
    shared = closure.shared_include(Path(spec.root))
    try:
        for number, unit in enumerate(host.host_units(spec)):
            unit = unit if shared is None else unit.seeing(shared, closure.SHARED_INCLUDE)
            objects.append(file.with_name(f"{file.name}.{number}.o"))
            _run(unit.command(str(objects[-1]), f"{objects[-1]}.d").line, spec, settings)
        _run(host.link([str(path) for path in objects], str(file)), spec, settings)
    finally:
        for path in objects:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.d").unlink(missing_ok=True)


def _run(command: Iterable[str], spec: Spec, settings: Settings) -> None:
    command = [*command]
    done = subprocess.run(
        command, cwd=spec.root, env=probe.environment(settings), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildError(
            f"the launcher of {spec.family}/{spec.op.name} cannot be made: {done.stderr.strip()[:2000]}",
            command=shlex.join(command),
            exit_status=done.returncode,
        )


def _checked(spec: Spec, content: bytes) -> dict[str, str]:
    """What a launcher needs of its host, once it is what it should be."""
    name = f"{spec.family}/{spec.op.name}"
    found = elf.inspect_bytes(content, f"launcher of {name}")
    if lacking := sorted(set(spec.op.exports) - set(found.exports)):
        raise BuildError(f"the launcher of {name} does not export {', '.join(lacking)}")
    if more := _more_than_usual(found.needs):
        raise BuildError(f"the launcher of {name} needs {more}, which many machines have not got")
    return dict(found.needs)


def _more_than_usual(needs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {needs[name]}" for name, most in MOST.items() if _version(needs.get(name, "")) > most)
