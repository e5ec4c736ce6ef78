"""Compilers that are Python packages: where one is installed, what it consists of, what a kernel imports beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from kartifacts.build import imports, templates
from kartifacts.build.closure import content
from kartifacts.errors import NoCompiler, Refusal
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.model.spec import Spec

_WORKERS = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """An installed package.

    Args:
        site: the directory that its modules are imported from.
        digest: of the content of all its files, as the wheels have it that it came in.
    """

    version: str
    site: Path
    digest: str


def find(module: str, distributions: Iterable[str], hint: str) -> Package:
    """The package that `module` belongs to, which came in several wheels; nothing of it is imported.

    Raises:
        NoCompiler: one of them is not installed, or not as a wheel.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    names = tuple(distributions)
    files: dict[str, str] = {}
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise _lacking(module, f"{name} is not installed for {sys.executable}", hint) from None
        listed = {str(file): file.hash.value for file in found.files or () if file.hash}
        # What an installer adds or rewrites: its notes about the wheel, and scripts that name the interpreter.
        digests = {
            file: value for file, value in listed.items() if ".dist-info/" not in file and not file.startswith("..")
        }
        if not digests:
            raise _lacking(module, f"{name} {found.version} lists no digests of its files: it came in no wheel", hint)
        files |= digests
    first = distribution(names[0])
    return Package(first.version, Path(str(first.locate_file(""))), sha256(canonical_json(files)))


def _lacking(module: str, reason: str, hint: str) -> NoCompiler:
    return NoCompiler(
        f"the Python package {module!r} was not found",
        searched=(Refusal(f"Python package {module}", reason),),
        hint=hint,
    )


def worker(name: str) -> tuple[str, ...]:
    """How a worker is started that imports packages."""
    return (sys.executable, "-I", str(_WORKERS / name))


def no_headers(directory: str, name: str) -> tuple[str, ...]:
    """Such compilers look for none."""
    del directory, name
    return ()


def imported(spec: Spec, own: Iterable[str]) -> str:
    """Name and version of every package that the sources of `spec` import, but for the compiler's `own` modules."""
    names = {source.path for source in spec.sources}
    sources = [source for source in spec.sources if source.path.endswith(".py")]
    inside = {part for source in sources for part in PurePosixPath(source.path).with_suffix("").parts}
    found: set[str] = set()
    for source in sources:
        axes = spec.axes if source.path + templates.SUFFIX in names else None
        found |= _outside(spec.root, source.path, source.sha256, axes)
    return ", ".join(sorted(_named(top) for top in found - inside - set(own)))


@cache
def _outside(root: str, path: str, digest: str, axes: tuple[tuple[str, str], ...] | None) -> frozenset[str]:
    """The top-level modules that a source imports and that are no part of Python; some may be of its own library.

    Args:
        axes: what its template is rendered with; None: it is a file.
    """
    del digest  # says when to look again
    if axes is None:
        text = content(Path(root), path)
    else:
        text = templates.render(Path(root), [path + templates.SUFFIX], dict(axes))[0][path]
    tops = {module.partition(".")[0] for module in imports.modules(text) if module[0] != "."}
    return frozenset(top for top in tops if top not in sys.stdlib_module_names)


def _named(top: str) -> str:
    names = sorted(set(_providers().get(top, ())))
    return " ".join(names) if names else top


@cache
def _providers() -> dict[str, list[str]]:
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    found: dict[str, list[str]] = {}
    for top, names in packages_distributions().items():
        for name in names:
            try:
                found.setdefault(top, []).append(f"{name} {version(name)}")
            except PackageNotFoundError:  # it is being removed
                found.setdefault(top, []).append(name)
    return found
