"""Sources that are templates: rendered with the axes of a spec, in memory for its identity, in a tree for its compiler.

A template is for real specialisation: what a macro or a C++ template can say needs none.
"""

from __future__ import annotations

import os
import posixpath
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kartifacts.build import closure as closures
from kartifacts.build import imports
from kartifacts.build.closure import INCLUDE, MAX_SOURCE, content, hangs_on, inside, place_of, reached
from kartifacts.build.stamps import is_file
from kartifacts.build.workspace import replace_file
from kartifacts.errors import ConfigError
from kartifacts.files.faults import storing
from kartifacts.files.reading import read_regular
from kartifacts.files.trust import check_trusted
from kartifacts.model.digest import Digest, canonical_json, sha256
from kartifacts.model.spec import Source, Spec

if TYPE_CHECKING:  # who renders nothing does not import jinja2
    from kartifacts.build.sandbox import Sandbox

SUFFIX = ".jinja"
SETTING = "KARTIFACTS_GENERATED"

Texts = dict[str, bytes]
"""Path of a rendered source, relative to the library's root → its text."""


def is_template(path: str) -> bool:
    return path.endswith(SUFFIX)


def closure(
    root: Path, sources: Iterable[str], axes: Mapping[str, str], missed: set[str] | None = None
) -> tuple[Source, ...]:
    """As `reached`, of sources some of which are templates: these, what they render to, and what either includes.

    Raises:
        ConfigError: as `reached`, or a template cannot be rendered; names it and the line.
    """
    wanted = tuple(sources)
    texts, read = render(root, [path for path in wanted if is_template(path)], axes, missed)
    found = reached(root, [rendered(path) for path in wanted], texts, missed)
    return tuple(sorted({*found, *read}, key=lambda source: source.path))


def traced(root: Path, sources: Iterable[str], axes: Mapping[str, str]) -> tuple[tuple[Source, ...], set[str]]:
    """As `closure`, with every file and directory of which one changes if it would give something else."""
    missed: set[str] = set()
    found = closure(root, sources, axes, missed)
    names = {source.path for source in found}
    there = [source for source in found if source.path + SUFFIX not in names]  # what is rendered lies nowhere
    return found, hangs_on(root, there, missed) | _code(any(map(is_template, names)))


def _code(renders: bool) -> set[str]:
    """Our own part in a closure."""
    files = {module.__file__ for module in (closures, imports)} | {__file__}
    if renders:
        import jinja2

        from kartifacts.build import sandbox

        files |= {jinja2.__file__, sandbox.__file__}
    return {file for file in files if file is not None}


def rendered(path: str) -> str:
    """The path of what is made of a template; of another source its own."""
    return path.removesuffix(SUFFIX)


def written(spec: Spec, generated: Path) -> Spec:
    """The spec as a compiler sees it, whose root, if it has templates, is a tree in `generated` that holds its sources.

    Files are written only where they differ.  The tree has the paths of the library, so that what is compiled in it is
    the same wherever it lies.  Identities are those of `spec`, not of what this gives.

    Raises:
        ConfigError: the sources have changed since `spec` was made, or a template cannot be rendered.
        StoreError: the tree cannot be written, or others could write into it.
    """
    device = spec.device
    wanted = (*device.sources, *device.host_sources)
    if not any(map(is_template, wanted)):
        return spec
    texts, _ = render(Path(spec.root), filter(is_template, wanted), dict(spec.axes))
    name = sha256(canonical_json([(source.path, source.sha256) for source in spec.sources]))
    tree = generated / name
    check_trusted(generated, setting=SETTING)
    for source in spec.sources:
        if is_template(source.path) or source.path.startswith("<"):
            continue
        text = texts[source.path] if source.path in texts else content(Path(spec.root), source.path)
        if sha256(text) != source.sha256:
            raise ConfigError(
                f"{source.path!r} of {spec.uri} has changed since it was read in {spec.root!r}", hint="run it again"
            )
        _write(tree / source.path, text)
    plain = msgspec.structs.replace(
        device,
        sources=[*map(rendered, device.sources)],
        host_sources=[*map(rendered, device.host_sources)],
    )
    sources = tuple(source for source in spec.sources if not is_template(source.path))
    return replace(spec, device=plain, sources=sources, root=str(tree))


def _write(path: Path, text: bytes) -> None:
    with storing("write in", path.parent, setting=SETTING):
        try:
            if read_regular(path, MAX_SOURCE) == text:
                return
        except OSError:
            pass
    replace_file(path, text)


# -- rendering ---------------------------------------------------------------------------------------------------------


def render(
    root: Path, templates: Iterable[str], axes: Mapping[str, str], missed: set[str] | None = None
) -> tuple[Texts, set[Source]]:
    """Render templates of a library with every axis as a variable, and all of them as ``axes``.

    Args:
        missed: as of `reached`.

    Returns:
        The texts, and every template that was read.

    Raises:
        ConfigError: one is missing, reaches outside the library, or cannot be rendered; names it and the line.
    """
    texts: Texts = {}
    read: dict[str, Digest] = {}
    missed = set() if missed is None else missed
    environment = None
    for path in templates:
        environment = environment or _environment(root, read, missed)
        output = rendered(path)
        missed.add(str(place_of(root, output)))
        if os.path.lexists(place_of(root, output)):
            raise ConfigError(f"{path!r} renders to {output!r}, which is a file of the library too: remove one of them")
        texts[output] = _render(environment, path, axes, read)
    return texts, {Source(path, digest) for path, digest in read.items()}


def _render(environment: Sandbox, path: str, axes: Mapping[str, str], read: Container[str]) -> bytes:
    from kartifacts.build.sandbox import MAX_TEXT

    environment.steps = 0
    try:
        pieces, size = [], 0
        for piece in environment.get_template(path).generate({**axes, "axes": dict(axes)}):
            size += len(piece)
            if size > MAX_TEXT:
                raise ConfigError(f"the template {path!r} renders to more than {MAX_TEXT} bytes")
            pieces.append(piece)
        return "".join(pieces).encode()
    except ConfigError:
        raise
    except Exception as error:  # whatever it is, the template brought it about
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        text = said.partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"the template {_where(error, path, read, environment)} cannot be rendered: {text[:300]}",
            hint=f"its variables are the axes ({', '.join(sorted(axes)) or 'none'}) and 'axes', all of them by name",
        ) from error


def _where(error: BaseException, path: str, read: Container[str], environment: Sandbox) -> str:
    """Template and line: of a mistake in its syntax, or the innermost that was being rendered."""
    if isinstance(error, SyntaxError) and error.filename in read:
        from kartifacts.build.sandbox import line_of

        return f"{error.filename}:{line_of(environment, error) or 1}"
    if isinstance(line := getattr(error, "lineno", None), int):
        return f"{getattr(error, 'name', None) or path}:{line}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{name}:{line}" for name, line in reversed(frames) if name in read), path)


def _environment(root: Path, read: dict[str, Digest], missed: set[str]) -> Sandbox:
    from jinja2 import FunctionLoader

    from kartifacts.build.sandbox import Sandbox

    def beside(template: str, parent: str) -> str:
        """Beside the template that includes another one, else in include/, and nowhere else."""
        homes = (posixpath.dirname(parent), INCLUDE)
        names = [inside(home, template, f"an include in {parent}") for home in homes]
        for name in names:
            if is_file(there := str(place_of(root, name))):
                return name
            missed.add(there)
        return names[0]

    return Sandbox(beside, loader=FunctionLoader(_loader(root, read)))


def _loader(root: Path, read: dict[str, Digest]) -> Callable[[str], tuple[str, str, Callable[[], bool]]]:
    from jinja2 import TemplateNotFound

    def load(path: str) -> tuple[str, str, Callable[[], bool]]:
        try:
            data = content(root, path)
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"the template {path!r} is not text in UTF-8: {error}") from error
        except ConfigError as error:
            if is_file(str(place_of(root, path))):
                raise
            raise TemplateNotFound(path, error.message) from error  # which an include may ignore
        read[path] = sha256(data)
        return text, path, lambda: True

    return load
