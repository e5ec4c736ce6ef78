"""Writes down what the kernels of a bundle were made of, out of what the build has in its hands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kartifacts.build import closure, templates
from kartifacts.build.kept import BuiltKernel
from kartifacts.errors import BuildError
from kartifacts.model.digest import sha256
from kartifacts.model.materials import Content, Made, MadeOp, Materials, Recipe
from kartifacts.model.spec import Source, Spec


def compiled(
    made: Sequence[tuple[Spec, BuiltKernel]],
    *,
    arch: str,
    abi: str,
    programs: Mapping[str, str],
    recipe: Recipe | None = None,
) -> Materials:
    """The materials of kernels of one family, one arch and one toolchain.

    Raises:
        BuildError: a source is no longer what its kernels were made of.
    """
    first, kernel = made[0]
    ops: dict[str, list[tuple[Spec, BuiltKernel]]] = {}
    for spec, built in made:
        ops.setdefault(f"{spec.family}/{spec.op.name}", []).append((spec, built))
    sources = {source.path: (spec.root, source) for spec, _ in made for source in _written(spec)}
    return Materials(
        version=1,
        kind="build",
        library=first.library,
        family=first.family,
        arch=arch,
        abi=abi,
        files=[_source(Path(root), source) for _, (root, source) in sorted(sources.items())],
        ops=[_op(name, ops[name]) for name in sorted(ops)],
        toolchain=dict(kernel.toolchain),
        programs=dict(programs),
        recipe=recipe,
    )


def _op(name: str, made: Sequence[tuple[Spec, BuiltKernel]]) -> MadeOp:
    spec = made[0][0]
    return MadeOp(
        op=name,
        flags=spec.device.flags,
        compile=[spec.device.sources, spec.device.host_sources],
        reached=sorted({source.path for each, _ in made for source in _written(each)}),
        kernels=[
            Made(uri=spec.uri, key=kernel.key, op_digest=kernel.op_digest, defines=spec.defines)
            for spec, kernel in sorted(made, key=lambda each: each[0].uri)
        ],
    )


def _written(spec: Spec) -> list[Source]:
    """What people wrote of the sources of `spec`: templates, not what they were rendered to, which differs by axes."""
    made = {templates.rendered(source.path) for source in spec.sources if templates.is_template(source.path)}
    return [source for source in spec.sources if source.path not in made]


def _source(root: Path, source: Source) -> Content:
    content = closure.content(root, source.path)
    if sha256(content) != source.sha256:
        raise BuildError(f"{source.path} has changed since it was compiled", hint="build again")
    return described(source.path, content)


def described(path: str, content: bytes) -> Content:
    sha1 = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return Content(path=path, sha256=sha256(content), size=len(content), sha1=sha1)


def imported(
    *, library: str, family: str, arch: str, abi: str, lists: Iterable[Content], files: Iterable[Content]
) -> Materials:
    """The materials of files that others built: what promised them, and what they are."""
    return Materials(
        version=1,
        kind="import",
        library=library,
        family=family,
        arch=arch,
        abi=abi,
        files=sorted(lists, key=lambda content: content.path),
        imported=sorted(files, key=lambda content: content.path),
    )
