"""Says what files and repositories are, by their bytes: plain data for reports, and nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kartifacts.build.checks import Facts
from kartifacts.build.elf import inspect_bytes, read_file
from kartifacts.build.images import noted_in
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.arch import parse_arch
from kartifacts.model.digest import sha256
from kartifacts.model.manifest import Descriptor, KernelEntry, Pin, Table
from kartifacts.model.materials import Materials
from kartifacts.publish.gate import contents
from kartifacts.publish.referrers import MATERIALS, by_bundle
from kartifacts.publish.repository import Repository, bundle_name


@dataclass(frozen=True)
class Wanted:
    """What is looked at in a repository; everything where nothing is said.

    Args:
        kernel: a URI, with or without its axes.
        arch: as it is spelled by whoever asks.
    """

    library: str | None = None
    version: str | None = None
    kernel: str = ""
    arch: str = ""

    def holds(self, arch: str) -> bool:
        return not self.arch or arch == str(parse_arch(self.arch))

    def names(self, uri: str) -> bool:
        return self.kernel in (uri, uri.partition("?")[0])


def file(path: Path) -> dict[str, Any]:
    """What the bytes of a kernel or image say of it.

    Raises:
        VerificationError: it is no sound ELF file.
        StoreError: it cannot be read.
    """
    return {"file": str(path), **_content(read_file(path), str(path))}


def _content(data: bytes, name: str) -> dict[str, Any]:
    facts = Facts(len(data), inspect_bytes(data, name))
    is_container = facts.found.kind == "fatbin"
    return {
        **facts.report(),
        "run_path": facts.found.run_path,
        "build_id": facts.found.build_id,
        "hazards": list(facts.found.hazards),
        "undefined": facts.found.undefined,
        "images": [
            {"arch": str(image.arch), "exact": image.exact, "bytes": len(image.content)} for image in facts.found.images
        ],
        "notes": {} if is_container else noted_in(data),
        "sections": facts.found.sections,
    }


def bundles(path: Path, wanted: Wanted) -> list[dict[str, Any]]:
    """What a repository says of each of its bundles, as far as they are `wanted`.

    Raises:
        ConfigError: it is no repository, or holds none of them.
        VerificationError: it is damaged.
    """
    return [
        {
            "library": pin.library,
            "version": pin.version,
            "release": pin.sha256,
            "bundle": descriptor.sha256,
            "family": table.family,
            "arch": table.arch,
            "abi": table.abi,
            "machine": descriptor.note("machine"),
            "kernels": len(table.kernels),
            "bytes": sum(kernel.size for kernel in table.kernels),
            "needs": _highest(table.kernels),
            "toolchain": table.toolchain,
            "recipe": materials.recipe.name if materials and materials.recipe else "",
            "programs": materials.programs if materials else {},
        }
        for pin, descriptor, table, materials in _held(Repository(path), wanted)
    ]


def kernels(path: Path, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """What the bytes of the kernels say that are `wanted`, and what the tables say of them.

    Raises:
        ConfigError: it is no repository, or holds none of them.
        VerificationError: one of them is damaged.
    """
    repository = Repository(path)
    found = False
    for pin, descriptor, table, _ in _held(repository, wanted):
        if not any(wanted.names(kernel.uri) for kernel in table.kernels):
            continue
        for kernel, content in contents(repository, repository.bundle(descriptor), table):
            if not wanted.names(kernel.uri):
                continue
            found = True
            what = f"{kernel.uri} for {table.arch}"
            if sha256(content) != kernel.sha256:
                raise VerificationError(f"{what} is damaged", expected=kernel.sha256, actual=sha256(content))
            yield {
                "uri": kernel.uri,
                "arch": table.arch,
                "library": pin.library,
                "version": pin.version,
                "sha256": kernel.sha256,
                "key": kernel.key,
                **_content(content, what),
            }
    if not found:
        where = f" for {wanted.arch}" if wanted.arch else ""
        raise ConfigError(
            f"{str(path)!r} holds no {wanted.kernel[:200]!r}{where}",
            hint=f"kartifacts coverage {path} lists what it holds",
        )


def _held(repository: Repository, wanted: Wanted) -> Iterator[tuple[Pin, Descriptor, Table, Materials | None]]:
    found = False
    for pin in repository.pins(wanted.library, wanted.version):
        descriptors = repository.release(pin).manifests
        listed = repository.made_of(pin)
        told = {} if listed is None else by_bundle(MATERIALS, listed, pin, descriptors, repository.read)
        for descriptor in descriptors:
            what = bundle_name(descriptor)
            table = repository.table(repository.bundle(descriptor), f"kernel table of {what}")
            if not wanted.holds(table.arch):
                continue
            found = True
            referrer = told.get(descriptor.sha256)
            materials = None if referrer is None else repository.materials(referrer.layers[-1], f"materials of {what}")
            yield pin, descriptor, table, materials
    if not found:
        raise ConfigError(f"{str(repository.path)!r} holds no bundle for {wanted.arch}")


def _highest(entries: Iterable[KernelEntry]) -> dict[str, str]:
    """The highest version of each thing that one of the kernels needs."""
    needs: dict[str, str] = {}
    for entry in entries:
        for name, version in entry.needs.items():
            needs[name] = max(needs.get(name, version), version, key=_numbers)
    return dict(sorted(needs.items()))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))
