"""Which published kernels fit a request, best first, and why the others do not: a pure choice over tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kartifacts.errors import ConfigError, Refusal
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import Digest
from kartifacts.model.manifest import Descriptor, KernelEntry, Pin, Table
from kartifacts.model.spec import FFI_ABI


@dataclass(frozen=True)
class Request:
    """What is wanted: a specialisation for one device.

    `op_digest` is None when the op is not declared on this machine; then the pin alone vouches for the kernel.
    `library` is None when the op is declared in a directory that says no name; then one library at most may answer.
    """

    library: str | None  # whose releases alone may answer: the keys of another one vouch for nothing of this one's
    uri: str
    family: str
    device: Arch
    op_digest: Digest | None
    machine: str = ""  # whose host code this process runs: x86_64, aarch64


class Published(Protocol):
    """One bundle of a pinned release; its table is read only when its annotations fit."""

    pin: Pin
    descriptor: Descriptor

    @property
    def name(self) -> str: ...
    @property
    def table(self) -> Table: ...


_Bundle = TypeVar("_Bundle", bound=Published)


def by_arch(request: Request, bundles: Iterable[_Bundle], refusals: list[Refusal]) -> list[_Bundle]:
    """The bundles of the family that run on the device, best first.  Says of each other arch why it does not."""
    fitting: list[tuple[int, _Bundle]] = []
    family = [bundle for bundle in bundles if bundle.descriptor.note("family") == request.family]
    holders = {bundle.pin.library for bundle in family}
    library = request.library or (holders.pop() if len(holders) == 1 else None)
    for bundle in family:
        note = bundle.descriptor.note
        place = f"bundle {bundle.name}"
        if bundle.pin.library != library:
            whose = f"than {library}, which the op belongs to" if library else "than others that hold such an op"
            refusals.append(Refusal(place, f"is of another library {whose}"))
            continue
        if note("abi") != FFI_ABI:
            refusals.append(Refusal(place, f"has the ABI {note('abi')!r}; this process loads {FFI_ABI}"))
            continue
        machine = note("machine")
        if machine and request.machine not in ("", machine):
            refusals.append(Refusal(place, f"its host code is for {machine}; this machine is {request.machine}"))
            continue
        try:
            verdict = parse_arch(note("arch")).runs_on(request.device)
        except ConfigError as error:
            refusals.append(Refusal(place, f"its arch is not known here: {error.message}"))
            continue
        if verdict.ok:
            fitting.append((verdict.rank, bundle))
        else:
            refusals.append(Refusal(place, verdict.reason))
    return [bundle for _, bundle in sorted(fitting, key=lambda pair: pair[0])]


def entry_in(
    request: Request,
    table: Table,
    unmet: Callable[[Mapping[str, str]], str | None],
    refusals: list[Refusal],
) -> KernelEntry | None:
    """The entry of `table` that answers the request, or None with the reason added to `refusals`.

    `unmet` says what this host lacks of an entry's needs.
    """
    place = f"bundle {table.library} {table.family} for {table.arch}"
    entry = next((kernel for kernel in table.kernels if kernel.uri == request.uri), None)
    if entry is None:
        refusals.append(Refusal(place, f"does not hold {request.uri}"))
        return None
    if request.op_digest is not None and entry.op_digest != request.op_digest:
        refusals.append(
            Refusal(
                place,
                f"{request.uri} was built from other sources: op digest {entry.op_digest[:12] or 'none'}, "
                f"installed {request.op_digest[:12]}",
            )
        )
        return None
    lacking = unmet(entry.needs)
    if lacking is not None:
        refusals.append(Refusal(place, lacking))
        return None
    return entry
