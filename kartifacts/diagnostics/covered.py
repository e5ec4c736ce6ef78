"""Says which op is there for which arch, by the content of the kernels and not by what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kartifacts.build.elf import Inspection, inspect, inspect_bytes
from kartifacts.errors import VerificationError
from kartifacts.model.arch import Arch, parse_arch
from kartifacts.model.digest import sha256
from kartifacts.publish.gate import contents
from kartifacts.publish.repository import Repository, bundle_name


class Covered(NamedTuple):
    """One kernel."""

    uri: str
    archs: tuple[str, ...]  # that its content is for
    said: str  # what its bundle says; empty of a file
    problem: str  # where that is something else


def of_repository(path: Path, library: str | None = None) -> Iterator[Covered]:
    """Every kernel of every release in a repository; files of others that are for any arch are left out."""
    repository = Repository(path)
    done: set[str] = set()
    for pin in repository.pins(library):
        for descriptor in repository.release(pin).manifests:
            if descriptor.sha256 in done:
                continue
            done.add(descriptor.sha256)
            manifest = repository.bundle(descriptor)
            table = repository.table(manifest, f"kernel table of {bundle_name(descriptor)}")
            if table.arch == "any":
                continue
            said = parse_arch(table.arch)
            for kernel, content in contents(repository, manifest, table):
                if sha256(content) != kernel.sha256:
                    yield Covered(kernel.uri, (), table.arch, f"it is damaged: its sha256 is {sha256(content)}")
                    continue
                yield _covered(kernel.uri, said, content)


def of_file(path: Path) -> list[Covered]:
    """The functions of one built file."""
    found = inspect(path)
    return [Covered(name, archs_of(found), "", "") for name in found.exports or sorted(found.functions) or [path.name]]


def archs_of(found: Inspection) -> tuple[str, ...]:
    """What its images are for; of a file without any its machine, since no file tells the level of its CPU."""
    return tuple(sorted(map(str, found.archs))) or (found.machine,)


def _covered(uri: str, said: Arch, content: bytes) -> Covered:
    try:
        found = inspect_bytes(content, uri)
    except VerificationError as error:
        return Covered(uri, (), str(said), error.message)
    problem = "" if _is_for(found, said) else f"its content is for {', '.join(archs_of(found))}"
    return Covered(uri, archs_of(found), str(said), problem)


def _is_for(found: Inspection, said: Arch) -> bool:
    if said.kind == "cpu":
        return not found.images and said.name.startswith(found.machine.replace("_", "-"))
    promised = (replace(said, ptx=False), *((said,) if said.ptx else ()))
    there = all(any(image.is_for(arch) for image in found.images) for arch in promised)
    return there and all(any(image.is_for(arch) for arch in promised) for image in found.images)
