"""Decides which files have to be made for specs that are not built yet, and keeps each as soon as it is there.

    object   every unit, and a link that makes the kernel of them
    image    one unit; attached to a launcher, which is linked once for all specs of an op or came prebuilt, or bare

What lies among the kept objects and still holds is not made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kartifacts.build import checks, closure, costs, elf, images, kept, objects, outside, templates
from kartifacts.build.costs import Costs, name_of
from kartifacts.build.kept import BuiltKernel
from kartifacts.build.outside import Seen
from kartifacts.build.steps import Ran, Step
from kartifacts.build.toolchains import IMAGES, Command, Toolchain, Unit, search
from kartifacts.build.toolchains.cxx import Cxx
from kartifacts.build.workspace import storage_errors
from kartifacts.config import Settings
from kartifacts.errors import BuildError, ConfigError, VerificationError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.spec import Source, Spec

LINK_MEMORY = 200 << 20


@dataclass(frozen=True)
class _Object:
    """An object or image to be made: where, and the files of the library that it may depend on."""

    output: Path
    root: str
    unit: Unit
    reached: tuple[Source, ...]
    asked: frozenset[closure.Asked]
    depfile: Path


@dataclass(frozen=True)
class _Launcher:
    """A launcher to be linked: where, of which objects, and how, but for where they lie."""

    output: Path
    parts: tuple[str, ...]
    line: tuple[str, ...]


@dataclass(frozen=True)
class _Kernel:
    """A kernel to be made: of which objects."""

    spec: Spec
    toolchain: Toolchain
    parts: tuple[str, ...]


class Plan:
    """Every step to run, and what becomes of its output.

    Args:
        costs: what compilations are expected to need.
        staging: where outputs lie until they are kept.
    """

    def __init__(self, settings: Settings, costs: Costs, staging: Path) -> None:
        self.settings = settings
        self.place = settings.workspace
        self.costs = costs
        self.staging = staging
        self.began = time.time_ns()  # before any source is read for it
        self.steps: list[Step] = []
        self.compiled: set[str] = set()  # names of steps
        self.linked: set[str] = set()
        self.objects_reused: set[str] = set()
        self.made: dict[Digest, BuiltKernel] = {}
        self._objects: dict[str, _Object] = {}
        self._launchers: dict[str, _Launcher] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._kept: dict[str, Path] = {}  # name of an object → where it is kept
        self._closures: dict[tuple[str, str], tuple[tuple[Source, ...], frozenset[closure.Asked]]] = {}
        self._outside: dict[str, list[Seen]] = {}

    # -- what is to be done --------------------------------------------------------------------------------------------

    def add(self, key: Digest, spec: Spec, toolchain: Toolchain) -> None:
        """Add the steps that make the kernel of `spec`, which is called by its key."""
        seen = templates.written(spec, self.settings.generated)
        shared = closure.shared_include(Path(spec.root))
        units = toolchain.units(seen)
        if shared is not None:
            units = tuple(unit.seeing(shared, closure.SHARED_INCLUDE) for unit in units)
        names = [self._object(seen, unit) for unit in units]
        image = next((number for number, unit in enumerate(units) if unit.suffix in IMAGES), None)
        self._kernels[key] = _Kernel(spec, toolchain, tuple(names))
        if image is None:
            output = self.staging / key / kept.FILE
            self.linked.add(key)
            self._link(key, f"linking {spec.uri} for {spec.arch}", seen, toolchain, names, output)
            return
        objects = [name for number, name in enumerate(names) if number != image]
        suffix = kept.SUFFIX if objects or toolchain.prebuilt(seen) else units[image].suffix
        output = self.staging / key / f"{kept.NAME}{suffix}"
        found = self._path(names[image])
        title = f"the image of {spec.uri} for {spec.arch}"
        if suffix == kept.SUFFIX:
            launcher = toolchain.prebuilt(seen) or self._launcher(seen, toolchain, objects)
            action = partial(_attach, seen, toolchain, found, launcher, output)
            step = Step(key, f"attaching {title}", seen.root, output, action=action, inputs=(found, launcher))
        else:
            action = partial(_copy, found, output)
            step = Step(key, f"taking {title}", seen.root, output, action=action, inputs=(found,))
        self._add(step, seen)

    def _launcher(self, spec: Spec, toolchain: Toolchain, parts: list[str]) -> Path:
        """Where the shared object lies, or will lie, that the images of an op are attached to."""
        line = _line(spec, toolchain, [f"{name}.o" for name in parts], "launcher.so")
        name = sha256(canonical_json([ascii(word) for word in line]))
        if name in self._launchers:
            return self._launchers[name].output
        if all(part in self._kept for part in parts):
            found = objects.find(self.place, self._launcher_name(parts, line))
            if found is not None:
                self.objects_reused.add(name)
                return found
        output = self.staging / "objects" / f"{name}{kept.SUFFIX}"
        self._launchers[name] = _Launcher(output, tuple(parts), line)
        self.linked.add(name)
        title = f"linking the launcher of {spec.family}/{spec.op.name}"
        self._link(name, title, spec, toolchain, parts, output, shared=True)
        return output

    def _launcher_name(self, parts: Sequence[str], line: Sequence[str]) -> Digest:
        """What a launcher is kept by: its objects were made of headers that are not in their names."""
        return sha256(canonical_json([[self._kept[part].stem for part in parts], [ascii(word) for word in line]]))

    def _link(
        self,
        name: str,
        title: str,
        spec: Spec,
        toolchain: Toolchain,
        parts: Sequence[str],
        output: Path,
        *,
        shared: bool = False,
    ) -> None:
        paths = tuple(self._path(part) for part in parts)
        command = Command(_line(spec, toolchain, [str(path) for path in paths], str(output)))
        step = Step(name, title, spec.root, output, command=command, inputs=paths, memory=LINK_MEMORY, cost=costs.LINK)
        self._add(step, spec, shared=shared)

    def _add(self, step: Step, spec: Spec, *, shared: bool = False) -> None:
        op, arch = (f"{spec.family}/{spec.op.name}", "") if shared else (spec.uri, str(spec.arch))
        self.steps.append(replace(step, op=op, arch=arch))

    def _object(self, spec: Spec, unit: Unit) -> str:
        """The name of the object of `unit`: it is kept, or made by a step that is added here."""
        reached, asked = self._closure(spec, unit.source)
        identity = {
            "source": unit.source,
            "reached": {source.path: source.sha256 for source in reached},
            "flags": unit.flags,
            "compiler": dict(unit.fingerprint),
        }
        name = sha256(canonical_json(identity))
        if name in self._objects or self._reuse(name):
            return name
        output = self.staging / "objects" / f"{name}{unit.suffix}"
        depfile = output.with_suffix(".d")
        self._objects[name] = _Object(output, spec.root, unit, reached, asked, depfile)
        self.compiled.add(name)
        shared = unit.source in spec.device.host_sources
        title = f"compiling {unit.source}" + ("" if shared else f" of {spec.uri} for {spec.arch}")
        known_as = name_of(spec.library, unit.source, Cxx.kind if shared else spec.device.toolchain)
        step = Step(
            name,
            title,
            spec.root,
            output,
            command=unit.command(str(output), str(depfile)),
            known_as=known_as,
            memory=self.costs.memory(known_as, unit.memory),
            cost=self.costs.seconds(known_as),
        )
        self._add(step, spec, shared=shared)
        return name

    def _reuse(self, name: str) -> bool:
        if name not in self._kept:
            found = objects.find(self.place, name)
            if found is None:
                return False
            self._kept[name] = found
            self.objects_reused.add(name)
        return True

    def _path(self, name: str) -> Path:
        """Where an object lies, or will lie once the step that makes it has run."""
        return self._objects[name].output if name in self._objects else self._kept[name]

    def _closure(self, spec: Spec, source: str) -> tuple[tuple[Source, ...], frozenset[closure.Asked]]:
        found = self._closures.get((spec.root, source))
        if found is None:
            asked: set[closure.Asked] = set()
            reached = closure.reached(Path(spec.root), [source], asked=asked)
            found = self._closures[spec.root, source] = reached, frozenset(asked)
        if not set(found[0]) <= set(spec.sources):
            raise BuildError(f"the sources of {spec.uri} have changed since they were read", hint="run it again")
        return found

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def keep(self, ran: Ran) -> None:
        """Check what a step has made, and put it where it is found again.

        Raises:
            BuildError: it is not what was promised.
            StoreError: it cannot be written.
        """
        step = ran.step
        if not _is_made(step.output):
            raise BuildError(
                f"{step.title}: the command succeeded but made no file, or an empty one",
                command=step.shell,
                exit_status=0,
            )
        if step.name in self._objects:
            made = self._objects[step.name]
            if changed := closure.changed(Path(made.root), made.reached, since=self.began):
                raise BuildError(f"{step.title}: {changed} has changed while it was compiled", hint="run it again")
            self._kept[step.name] = objects.keep(
                self.place,
                step.name,
                step.output,
                _outside(made, step),
                step.output.suffix,
                search=search.places(self.settings, Path(made.root), made.unit),
                asked=made.asked,
                since=ran.began,
            )
        elif step.name in self._launchers:
            launcher = self._launchers[step.name]
            called = self._launcher_name(launcher.parts, launcher.line)
            objects.keep(self.place, called, step.output, (), kept.SUFFIX)
        else:
            key = Digest(step.name)
            self.made[key] = self._keep_kernel(key, self._kernels[key], step)

    def _keep_kernel(self, key: Digest, kernel: _Kernel, step: Step) -> BuiltKernel:
        spec = kernel.spec
        promise = checks.promise_of(spec, self.settings, step.output.suffix)
        facts = checks.check(step.output, promise, what=f"{spec.uri} for {spec.arch}", command=step.shell)
        content = read_regular(step.output, kept.MAX_KERNEL)
        record = kept.Record(
            uri=spec.uri,
            arch=str(spec.arch),
            key=key,
            op_digest=spec.op_digest,
            sha256=sha256(content),
            size=len(content),
            exports=list(spec.op.exports),
            needs=facts.needs,
            parts=spec.key_parts(kernel.toolchain.made_with(spec)),
            suffix=step.output.suffix,
        )
        outside = [seen for part in kernel.parts for seen in self._outside_of(part)]
        return kept.keep(step.output.parent, self.place, spec, record, outside=outside)

    def _outside_of(self, part: str) -> list[Seen]:
        if part not in self._outside:
            self._outside[part] = objects.outside_of(self._kept[part])
        return self._outside[part]


def _line(spec: Spec, toolchain: Toolchain, objects: Sequence[str], output: str) -> tuple[str, ...]:
    return (*toolchain.link(objects, output), *toolchain.libraries(spec))


def _is_made(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file() and path.stat().st_size > 0
    return False


def _attach(spec: Spec, toolchain: Toolchain, image: Path, launcher: Path, output: Path) -> None:
    notes, content = toolchain.notes(spec, image), _content(image)
    try:
        if not elf.inspect_bytes(content, image.name).functions:
            raise ConfigError('it holds no kernel: expected an extern "C" __global__ function')
        both = images.attach(_content(launcher), content, notes)
    except (ConfigError, VerificationError) as error:
        raise BuildError(f"the image of {spec.uri} for {spec.arch}: {error.message}") from error
    _write(output, both)


def _copy(image: Path, output: Path) -> None:
    _write(output, _content(image))


def _write(output: Path, content: bytes) -> None:
    with storage_errors(output.parent):
        output.write_bytes(content)


def _content(path: Path) -> bytes:
    with storage_errors(path, "read in"):
        return read_regular(path, objects.MAX_OBJECT)


# -- checks on what was made -------------------------------------------------------------------------------------------


def _outside(made: _Object, step: Step) -> list[str]:
    """What a compiler read outside of the library; refuses an object that depends on more of it than its name says."""
    try:
        read = outside.read_depfile(made.depfile)
    except BuildError as error:
        raise BuildError(f"{step.title}: {error.message}", command=step.shell) from error
    reached = {source.path for source in made.reached}
    for name in read:
        path = closure.relative(Path(made.root), name)
        if path is not None and path not in reached:
            raise BuildError(
                f"{step.title}: the compiler read {path!r}, which the op's identity does not cover",
                command=step.shell,
                hint=_covering(made.unit.source, path),
            )
    return outside.outside(Path(made.root), read)


def _covering(source: str, path: str) -> str:
    """What to write into `source`, so that a file of the library is in the op's identity."""
    if not source.endswith(".py"):
        return f'include it with a plain line: #include "{path}"'
    if path.endswith(".py"):
        module = path.removeprefix(f"{closure.INCLUDE}/").removesuffix(".py").removesuffix("/__init__")
        module = module.removeprefix(source.rpartition("/")[0] + "/").replace("/", ".")
        return f"import it where its name can be read: import {module}"
    return "write what it says into a module in Python, and import that by its name"
