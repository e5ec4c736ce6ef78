"""`load()`: process cache → local sources → store → built here before → mirrors → JIT; refusals are kept as reasons.

    0. remembered: the answer of an earlier process, if nothing that it hung on has changed
    1. the op is looked up where it is declared, its axes are checked, the device's arch is found
    2. published, local: pinned bundles that fit, read from directories, wheels and the store       no socket
    3. built here before: a finished JIT build of the same op digest and arch                       no socket
    4. published, remote: the same as 2, mirrors included                                           unless offline
    5. compiled now                                                                                 if policy allows

Wrong bytes met on the way are never answered by 3 or 5: if no source has the right ones, `VerificationError` is raised.
Where settings ask for kernels that are compiled otherwise than published ones are, 2 and 4 are passed over.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kartifacts import config
from kartifacts.config import Settings
from kartifacts.errors import (
    AbiMismatch,
    ArtifactUnavailable,
    ConfigError,
    LoadError,
    MissingKernel,
    Refusal,
    SourceError,
    VerificationError,
)
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.runtime import host, recall
from kartifacts.runtime.content import other_code
from kartifacts.runtime.found import Found
from kartifacts.runtime.kernel import Kernel
from kartifacts.runtime.turn import turn

if TYPE_CHECKING:  # what a remembered kernel does not need is imported where it is used
    from kartifacts.build.library import Libraries
    from kartifacts.fetch import Bundle, Fetcher
    from kartifacts.model.manifest import KernelEntry, Lock
    from kartifacts.model.spec import Spec
    from kartifacts.runtime.resolve import Request

log = logging.getLogger(__name__)


class Registry:
    """Finds, fetches and loads kernels under one set of settings.

    Args:
        settings: the settings in force; read from the environment and the configuration file if not given.
        libraries: directories of ops that are not installed; they hide installed ops of the same name.
    """

    def __init__(self, settings: Settings | None = None, libraries: Iterable[Path] = ()) -> None:
        self.settings = settings or config.read()
        self._explicit = tuple(libraries)
        self._began = time.time_ns()  # before anything that an answer hangs on was read
        self._loaded: dict[tuple[str, str | None, tuple[object, ...]], Kernel] = {}

    def load(self, op: str, *, device: str | None = None, **axes: object) -> Kernel:
        """Load one specialisation of an op for one device.

        Args:
            op: ``norm/rmsnorm``, or ``rmsnorm`` where only one family declares it.
            device: ``cpu``, ``cuda`` (the first GPU) or ``cuda:N``; None takes a GPU if there is one and the op
                supports GPUs, else the CPU.
            axes: every axis that the op declares, e.g. ``dtype="bfloat16"``.

        Raises:
            ConfigError: the op, an axis or the device does not exist, or there is no lock where one is named.
            MissingKernel: nothing published fits and the policy forbids compiling.
            ArtifactUnavailable: nothing published fits and there are no sources to compile.
            VerificationError: sources answered with wrong bytes, and none with the right ones.
            StoreError: the store cannot be used.
            BuildError, NoCompiler: compiling it here failed.
            LoadError: the file does not load in this process.
        """
        wanted = _wanted(op, device, axes)
        kernel = self._loaded.get(wanted)
        if kernel is None:
            with turn():
                kernel = self._loaded.get(wanted)
                if kernel is None:
                    kernel = self._loaded[wanted] = self._load(op, wanted[1], axes)
        return kernel

    def loaded(self, op: str, device: str | None, axes: Mapping[str, object]) -> Kernel | None:
        """The kernel, if this registry has loaded it."""
        return self._loaded.get(_wanted(op, device, axes))

    def explain(self, op: str, *, device: str | None = None, **axes: object) -> list[Refusal]:
        """What `load` would do and why: every place in order, those that would do marked as such.

        May read metadata from mirrors; fetches no kernel and compiles nothing.
        """
        from kartifacts.runtime import lifecycle, variants

        op, device, _ = _wanted(op, device, axes)
        spec, request = self._request(op, device, axes)
        rows = self._without_pins()
        wrong: list[VerificationError] = []
        told: set[str] = set()
        asks = [False, True] if self.settings.mirrors and not self.settings.offline else [False]
        if self._otherwise(spec, rows):
            asks = []
        for remote in asks:
            place = "mirrors" if remote else "local sources and the store"
            with _noting(rows, place, wrong):
                for bundle, entry in self._fitting(request, rows, wrong, remote=remote):
                    where = self._whereabouts(bundle, entry, remote=remote, last=remote is asks[-1])
                    if where is not None and bundle.descriptor.digest not in told:
                        told.add(bundle.descriptor.digest)
                        rows.append(Refusal(place, f"{bundle.name} fits: {where}"))
        if self.settings.offline:
            rows.append(_OFFLINE)
        if wrong:
            rows.append(Refusal("JIT", "refused: wrong bytes are never answered by compiling"))
        elif spec is None:
            rows.append(Refusal("JIT", "no sources of this op are installed"))
        else:
            spec = variants.within_reach(spec, request.device, self.libraries, self.settings)
            rows += lifecycle.explain(spec, self.settings)
        return list(dict.fromkeys(rows))

    def _otherwise(self, spec: Spec | None, refusals: list[Refusal]) -> bool:
        """Whether the op, as it can be compiled here, is to be compiled otherwise than what is published."""
        names = "" if spec is None else self.settings.overrides
        if names:
            refusals.append(Refusal("published kernels", f"not looked at: {names} asks for others"))
        return bool(names)

    def _whereabouts(self, bundle: Bundle, entry: KernelEntry, *, remote: bool, last: bool) -> str | None:
        """Where a kernel would be had from; None if it is not here, unless this is the `last` to ask."""
        fetcher = self._fetcher(remote=remote)
        size = fetcher.missing_bytes(bundle, [entry])
        if not size:
            return f"present, from {fetcher.origin_of(entry)}"
        pack = bundle.manifest.layers[bundle.table.blocks[entry.block].pack]
        for source in fetcher.sources:
            if source.blob(pack.sha256, pack.size) is not None:
                return f"{size} bytes to read from {source.name}"
        if remote:
            asked = ", ".join(source.name for source in fetcher.sources if source.mirror)
            return f"{size} bytes to fetch from {asked}"
        return f"is not here, {size} bytes" if last else None

    def remember(self, uri: str, device: Arch) -> None:
        """Note what loading a kernel that is in the store comes to on a device of this arch, as its first load would.

        Of what cannot be found here, or is not declared here, there is nothing to note.
        """
        op, _, query = uri.partition("?")
        axes = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)
        asked = None if self._explicit else recall.question(self.settings, op, device, axes)
        library = self.libraries.library_of(op)
        if asked is None or library is None:
            return
        from kartifacts.runtime.resolve import Request

        refusals = self._without_pins()
        spec = library.spec(op, axes, library.build_arch(op, device))
        request = Request(spec.library, spec.uri, spec.family, device, spec.op_digest, os.uname().machine)
        for bundle, entry in self._fitting(request, refusals, [], remote=False):
            path = self._here.store.find(entry.digest, entry.size, entry.suffix)
            arch = parse_arch(bundle.descriptor.note("arch"))
            if path is not None and other_code(path, arch) is None:  # else a load will bring it, or say what is wrong
                found = Found(path, arch, "store", tuple(entry.exports))
                self._note(asked, recall.Recalled(request.uri, found, tuple(refusals)), spec)
            return

    # -- the flow ------------------------------------------------------------------------------------------------------

    def _load(self, op: str, device: str | None, axes: Mapping[str, object]) -> Kernel:
        asked = None if self._explicit else self._question(op, device, axes)
        if asked is not None and (kernel := self._remembered(asked)) is not None:
            return kernel
        spec, request = self._request(op, device, axes)
        refusals = self._without_pins()
        kernel = self._found(spec, request, refusals) or self._compiled(spec, request, refusals)
        log.info("%s for %s: %s", request.uri, kernel.arch, kernel.origin)
        if asked is not None and spec is not None and kernel.origin != "store" and request.device == asked.device:
            found = Found(kernel.path, kernel.arch, kernel.origin, kernel.exports)
            self._note(asked, recall.Recalled(request.uri, found, tuple(refusals)), spec)
        return kernel

    def _question(self, op: str, device: str | None, axes: Mapping[str, object]) -> recall.Question | None:
        if self.settings.overrides or (device is None and host.has_driver()):  # then the choice hangs on the op
            return None
        try:
            return recall.question(self.settings, op, host.device_arch(device or "cpu"), axes)
        except ConfigError:  # there is no such device, which the search says better
            return None

    def _remembered(self, asked: recall.Question) -> Kernel | None:
        recalled = recall.look(asked)
        if recalled is None:
            return None
        found = recalled.found
        try:
            kernel = Kernel(recalled.uri, found.arch, found.path, found.origin, found.exports, recalled.refusals)
        except LoadError as error:  # perhaps it needs what this process has otherwise
            log.info("%s was remembered and is looked for anew: %s", recalled.uri, error.message)
            recall.forget(asked)
            return None
        log.info("%s for %s: remembered", recalled.uri, found.arch)
        return kernel

    def _note(self, asked: recall.Question, recalled: recall.Recalled, spec: Spec) -> None:
        from kartifacts.build.remembered import watched

        hung_on = watched(spec)
        if hung_on is not None:
            recall.keep(asked, recalled, {str(self.settings.lock), *hung_on}, since=self._began)

    def _request(self, op: str, device: str | None, axes: Mapping[str, object]) -> tuple[Spec | None, Request]:
        """What is wanted: the spec, if the op is declared on this machine, and what a published kernel must match."""
        from kartifacts.model.spec import check_axes
        from kartifacts.runtime.resolve import Request

        library = self.libraries.library_of(op)
        if library is None:
            return None, self._undeclared(op, device, axes)
        family, decl = library.find(op)
        check_axes(family, decl, dict(axes))
        arch = host.device_arch(device, kinds=tuple(decl.device))
        if arch.kind not in decl.device:
            raise ConfigError(
                f"{family}/{decl.name} is declared for {', '.join(sorted(decl.device))}; {device!r} is {arch}"
            )
        spec = library.spec(op, axes, library.build_arch(op, arch))
        named = library not in self.libraries.explicit or spec.library in {pin.library for pin in self.lock.releases}
        owner = spec.library if named else None
        return spec, Request(owner, spec.uri, family, arch, spec.op_digest, os.uname().machine)

    def _undeclared(self, op: str, device: str | None, axes: Mapping[str, object]) -> Request:
        """A request for an op of which only prebuilt kernels are known; the pin alone vouches for them."""
        from kartifacts.model.spec import make_uri
        from kartifacts.runtime.resolve import Request

        family, _, name = op.rpartition("/")
        unread: list[Refusal] = []
        wrong: list[VerificationError] = []
        bundles = self._bundles(unread, wrong, remote=not self.settings.offline)
        holders = sorted({bundle.pin.library for bundle in bundles if bundle.descriptor.note("family") == family})
        if not holders:
            unknown = self.libraries.unknown(op)
            if wrong:
                raise wrong[-1]
            if unread and family:
                raise ArtifactUnavailable(
                    f"{unknown.message}, and not every pinned release can be read",
                    refusals=tuple(unread),
                    hint=unknown.hint,
                )
            raise unknown
        uri = make_uri(family, name, {axis: str(value) for axis, value in axes.items()})
        if len(holders) > 1:  # whichever came first, the keys of one would speak for the other
            raise ConfigError(
                f"{op} is not declared on this machine, and several pinned libraries have a family {family!r}: "
                f"{', '.join(holders)}",
                hint="install the library that declares it, or use a lock that pins one of them",
            )
        return Request(holders[0], uri, family, host.device_arch(device), None, os.uname().machine)

    def _found(self, spec: Spec | None, request: Request, refusals: list[Refusal]) -> Kernel | None:
        """A kernel for which nothing has to be compiled; else None, and why is added to `refusals`."""
        from kartifacts.runtime import lifecycle

        if spec is not None and self._otherwise(spec, refusals):
            return lifecycle.find(spec, self.settings, refusals)
        wrong: list[VerificationError] = []
        with _noting(refusals, "local sources", wrong):
            if kernel := self._published(request, refusals, wrong, remote=False):
                return kernel
        if spec is not None and not wrong and (kernel := lifecycle.find(spec, self.settings, refusals)):
            return kernel
        if self.settings.offline:
            refusals.append(_OFFLINE)
        elif self.settings.mirrors:
            asked: list[Refusal] = []
            with _noting(asked, "mirrors", wrong):
                if kernel := self._published(request, asked, wrong, remote=True):
                    return kernel
            refusals.extend(refusal for refusal in asked if refusal not in refusals)
        if wrong:
            wrong[-1].refusals = tuple(refusal for refusal in refusals if refusal.reason != wrong[-1].message)
            raise wrong[-1]
        return None

    def _published(
        self, request: Request, refusals: list[Refusal], wrong: list[VerificationError], *, remote: bool
    ) -> Kernel | None:
        fetcher = self._fetcher(remote=remote)
        for bundle, entry in self._fitting(request, refusals, wrong, remote=remote):
            with _noting(refusals, bundle.name):
                path = fetcher.ensure(bundle, [entry])[entry.uri]
                arch, origin = parse_arch(bundle.descriptor.note("arch")), fetcher.origin_of(entry)
                if reason := other_code(path, arch):
                    log.warning("%s of %s is not used: it %s", entry.uri, bundle.name, reason)
                    refusals.append(Refusal(bundle.name, f"{entry.uri} {reason}"))
                    continue
                return Kernel(request.uri, arch, path, origin, tuple(entry.exports), tuple(refusals))
        return None

    def _fitting(
        self, request: Request, refusals: list[Refusal], wrong: list[VerificationError], *, remote: bool
    ) -> Iterator[tuple[Bundle, KernelEntry]]:
        from kartifacts.runtime import resolve

        for bundle in resolve.by_arch(request, self._bundles(refusals, wrong, remote=remote), refusals):
            entry = None
            with _noting(refusals, bundle.name):
                entry = resolve.entry_in(request, bundle.table, host.unmet, refusals)
            if entry is not None:
                yield bundle, entry

    def _compiled(self, spec: Spec | None, request: Request, refusals: list[Refusal]) -> Kernel:
        from kartifacts.runtime import lifecycle, variants

        if spec is None:
            raise ArtifactUnavailable(
                f"no usable kernel for {request.uri} on {request.device}, and its sources are not installed",
                refusals=tuple(refusals),
            )
        try:
            other = variants.within_reach(spec, request.device, self.libraries, self.settings)
            found = None if other is spec else lifecycle.find(other, self.settings, refusals)
            return found or lifecycle.build(other, self.settings, refusals)
        except MissingKernel as error:
            fetch = f"kartifacts fetch --ops {request.uri.partition('?')[0]} --archs {request.device}"
            if self.lock.releases and self._may_be_pinned(request):
                error.hint = f"fetch it first, on a machine with network: {fetch}"
            elif self.lock.releases:
                error.hint = f"no pinned release holds it for {request.device}; {error.hint}"
            else:
                error.hint = (
                    self._to_pin() or f"{error.hint}; or pin a release that holds it, by kartifacts sync or lock"
                )
            raise

    def _may_be_pinned(self, request: Request) -> bool:
        """Whether a bundle that runs here is pinned, or one of the releases cannot be read without a socket."""
        from kartifacts.runtime import resolve

        unread: list[Refusal] = []
        wrong: list[VerificationError] = []
        fitting = resolve.by_arch(request, self._bundles(unread, wrong, remote=False), [])
        return bool(fitting or unread or wrong)

    # -- what it works with, each found at first use -------------------------------------------------------------------

    @cached_property
    def libraries(self) -> Libraries:
        """The libraries of ops on this machine."""
        from kartifacts.build import library

        return library.discover(self._explicit, self.settings.workspace)

    @cached_property
    def lock(self) -> Lock:
        """The pins in force; empty if there is no lock."""
        from kartifacts.runtime.pins import read_lock

        return read_lock(self.settings)

    def fetcher(self) -> Fetcher:
        """The fetcher over all sources that the settings allow."""
        return self._fetcher(remote=True)

    def local_fetcher(self) -> Fetcher:
        """The fetcher over what needs no socket."""
        return self._fetcher(remote=False)

    def _fetcher(self, *, remote: bool) -> Fetcher:
        return self._everywhere if remote else self._here

    @cached_property
    def _here(self) -> Fetcher:
        from kartifacts.fetch import Fetcher
        from kartifacts.sources import from_settings
        from kartifacts.store import Store

        sources = [source for source in from_settings(self.settings) if source.local]
        return Fetcher(Store(self.settings.store), sources, self.settings)

    @cached_property
    def _everywhere(self) -> Fetcher:
        from kartifacts.fetch import Fetcher
        from kartifacts.sources import from_settings

        return Fetcher(self._here.store, from_settings(self.settings), self.settings)

    def _bundles(self, refusals: list[Refusal], wrong: list[VerificationError], *, remote: bool) -> Iterator[Bundle]:
        """Every bundle of the pinned releases; a release that cannot be read keeps none of the others away."""
        for pin in self.lock.releases:
            with _noting(refusals, f"release {pin.library} {pin.version}", wrong):
                yield from self._fetcher(remote=remote).bundles(pin)

    def _to_pin(self) -> str | None:
        from kartifacts.runtime.pins import to_pin

        return None if self.lock.releases else to_pin(self.settings)

    def _without_pins(self) -> list[Refusal]:
        """Why no release is looked at, if none is pinned; also the first to find out that the lock is malformed."""
        if self.lock.releases:
            return []
        why = f"{self.settings.lock} is empty" if self.settings.lock else "there is no kartifacts.lock"
        return [Refusal("published releases", f"none is pinned: {why}")]


@contextmanager
def _noting(refusals: list[Refusal], place: str, wrong: list[VerificationError] | None = None) -> Iterator[None]:
    """Turn what makes one place unusable into a reason, so that the next is tried.

    Wrong bytes are only taken here where `wrong` collects them; elsewhere they go on up.
    """
    try:
        yield
    except VerificationError as error:
        if wrong is None:
            raise
        wrong.append(error)
        refusals.append(Refusal(place, error.message))
    except AbiMismatch as error:
        log.warning("%s", error.message)
        refusals.append(Refusal(place, error.message))
    except (SourceError, ArtifactUnavailable) as error:
        asked = f": {'; '.join(map(str, error.refusals))}" if error.refusals else ""
        refusals.append(Refusal(place, error.message + asked))


_OFFLINE = Refusal("mirrors", "offline")


def _wanted(op: str, device: str | None, axes: Mapping[str, object]) -> tuple[str, str | None, tuple[object, ...]]:
    """What is asked for, so that two spellings are one: 128 and "128", a torch.device and its name."""
    if not isinstance(op, str):
        raise ConfigError(f"expected the name of an op, such as 'norm/rmsnorm'; got {op!r:.80}")
    named = tuple(sorted((axis, str(value)) for axis, value in axes.items()))
    return op, None if device is None else str(device), named


_default: Registry | None = None


def load(op: str, *, device: str | None = None, **axes: object) -> Kernel:
    """Load one specialisation of an op for one device: `Registry.load` on a registry that this process shares.

    Takes an op (``norm/rmsnorm``), a device (``cpu``, ``cuda``, ``cuda:N``; None chooses) and every axis that the op
    declares (``dtype="bfloat16"``); raises what `Registry.load` raises.  What it gives has the op's functions as
    attributes; what they take stands in the op's binding, e.g. ``rmsnorm(x, weight, out, eps)``.

    Changed settings are seen by the next call that finds its kernel not loaded yet.
    """
    global _default
    registry = _default
    if registry is not None and (kernel := registry.loaded(op, device, axes)) is not None:
        return kernel
    settings = config.read()
    with turn():  # of threads that start together, one makes the registry
        registry = _default
        if registry is None or registry.settings != settings:
            registry = _default = Registry(settings)
    return registry.load(op, device=device, **axes)
