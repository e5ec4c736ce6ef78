"""How two releases differ: bundles, kernels, and what their keys are made of, read from tables and materials.

Nothing is believed before its digest was checked; a kernel's bytes are unpacked only where somebody asks how they
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kartifacts.errors import ConfigError, VerificationError, printable
from kartifacts.model.arch import parse_arch
from kartifacts.model.difference import Difference, documents, names, values
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.frames import decompress
from kartifacts.model.manifest import BundleManifest, Descriptor, KernelEntry, Pin, Table
from kartifacts.model.materials import Content, MadeOp, Materials, Recipe
from kartifacts.publish.referrers import MATERIALS, Referrer, by_bundle
from kartifacts.publish.repository import Repository, bundle_name

Compare = Callable[[bytes, bytes], Sequence[Difference]]
"""How the bytes of two kernels differ."""

_SHOWN = 20
_SHORT = 12  # digits of a digest, for people


@dataclass(frozen=True)
class _Bundle:
    """One bundle of a release, and what it was made of, if that is known."""

    repository: Repository
    descriptor: Descriptor
    manifest: BundleManifest
    table: Table
    materials: Materials | None

    @property
    def kernels(self) -> dict[str, KernelEntry]:
        return {kernel.uri: kernel for kernel in self.table.kernels}

    def content(self, kernel: KernelEntry) -> bytes:
        """The bytes of a kernel, by themselves."""
        block = self.table.blocks[kernel.block]
        what = f"{kernel.uri} for {self.table.arch}"
        pack = self.manifest.layers[block.pack].sha256
        frame = self.repository.part(pack, block.offset, block.length, what)
        if sha256(frame) != block.sha256:
            raise VerificationError(f"the block of {what} is damaged", expected=block.sha256, actual=sha256(frame))
        content = decompress(frame, block.size, what=what)[kernel.offset : kernel.offset + kernel.size]
        if sha256(content) != kernel.sha256:
            raise VerificationError(f"{what} is damaged", expected=kernel.sha256, actual=sha256(content))
        return content


@dataclass(frozen=True)
class Scope:
    """What is looked at, all of it unless told otherwise.

    Args:
        depth: how many kernels of each bundle are explained.
        versions: of the first repository, and of the second; empty for all.
        arch: in any spelling.
    """

    depth: int
    library: str | None = None
    versions: tuple[str, str] = ("", "")
    family: str = ""
    arch: str = ""

    def holds(self, descriptor: Descriptor) -> bool:
        return self.family in ("", descriptor.note("family")) and self._arch in ("", descriptor.note("arch"))

    @cached_property
    def _arch(self) -> str:
        return self.arch if self.arch in ("", "any") else str(parse_arch(self.arch))

    def check(self, descriptors: Sequence[Descriptor]) -> None:
        """Refuse a family or arch that selects none of these bundles: nothing would be found to differ."""
        if not any(map(self.holds, descriptors)):
            named = " ".join([self.family] * bool(self.family) + [f"for {self._arch}"] * bool(self._arch))
            held = sorted({f"{each.note('family')} for {each.note('arch')}" for each in descriptors})
            more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
            raise ConfigError(
                f"neither repository holds a bundle {named[:200]}",
                hint=f"bundles there: {printable(', '.join(held[:_SHOWN]))}{more}",
            )


def releases(first: Repository, second: Repository, scope: Scope, compare: Compare) -> Iterator[Difference]:
    """How what two repositories hold differs, release by release; `compare` explains how two kernels do.

    Raises:
        ConfigError: one of them is no repository, or has no such release; or neither has such a bundle.
        VerificationError: one of them is damaged.
    """
    before, after = (
        side.pins(scope.library, version or None) for side, version in zip((first, second), scope.versions, strict=True)
    )
    if scope.family or scope.arch:
        sides = ((first, before), (second, after))
        scope.check([each for side, pins in sides for pin in pins for each in side.release(pin).manifests])
    for name, earlier, later in _paired(before, after):
        if earlier is None or later is None:
            pin = earlier or later
            assert pin is not None, "one of them is there"
            text = f"{pin.version}, sha256:{pin.sha256[:_SHORT]}"
            yield Difference(name, "added" if earlier is None else "removed", text)
        elif earlier.sha256 != later.sha256:
            if earlier.version != later.version:
                yield Difference(name, "changed", f"version {earlier.version} became {later.version}")
            yield from _release(name, (first, earlier), (second, later), scope, compare)


def _paired(before: Sequence[Pin], after: Sequence[Pin]) -> Iterator[tuple[str, Pin | None, Pin | None]]:
    """Releases of the same version; where each side has one release of a library, these, whatever their versions."""
    for library in sorted({pin.library for pin in (*before, *after)}):
        earlier = {pin.version: pin for pin in before if pin.library == library}
        later = {pin.version: pin for pin in after if pin.library == library}
        if len(earlier) == len(later) == 1:
            yield f"release {library}", next(iter(earlier.values())), next(iter(later.values()))
            continue
        for version in sorted({*earlier, *later}):
            yield f"release {library} {version}", earlier.get(version), later.get(version)


def _release(
    name: str, before: tuple[Repository, Pin], after: tuple[Repository, Pin], scope: Scope, compare: Compare
) -> Iterator[Difference]:
    earlier, later = ({each.digest: each for each in side[0].release(side[1]).manifests} for side in (before, after))
    old = _named(each for each in earlier.values() if each.digest not in later and scope.holds(each))
    new = _named(each for each in later.values() if each.digest not in earlier and scope.holds(each))
    if old.keys() & new.keys():
        told = _told(*before, [*earlier.values()]), _told(*after, [*later.values()])
    for bundle in sorted({*old, *new}):
        if bundle not in new:
            yield Difference(f"{name}: {bundle}", "removed", f"{_count(before[0], old[bundle])} are gone")
        elif bundle not in old:
            yield Difference(f"{name}: {bundle}", "added", f"{_count(after[0], new[bundle])} are new")
        else:
            sides = _read(before[0], old[bundle], told[0]), _read(after[0], new[bundle], told[1])
            for row in _bundle(*sides, scope.depth, compare):
                yield row.inside(f"{name}: {bundle}")
    if earlier.keys() == later.keys():
        yield Difference(name, "changed", "the same bundles, listed otherwise")


def _count(repository: Repository, descriptor: Descriptor) -> str:
    table = repository.table(repository.bundle(descriptor), f"kernel table of {bundle_name(descriptor)}")
    return f"{len(table.kernels)} kernels"


def _told(repository: Repository, pin: Pin, bundles: Sequence[Descriptor]) -> dict[Digest, Referrer]:
    """What is said about each bundle of a release by who built it, if anything is."""
    listed = repository.made_of(pin)
    return {} if listed is None else by_bundle(MATERIALS, listed, pin, bundles, repository.read)


def _named(descriptors: Iterator[Descriptor]) -> dict[str, Descriptor]:
    """Bundles by what they are, each name once."""
    named: dict[str, Descriptor] = {}
    for descriptor in descriptors:
        name = bundle_name(descriptor)
        for number in range(2, len(named) + 3):
            if name not in named:
                break
            name = f"{bundle_name(descriptor)} #{number}"
        named[name] = descriptor
    return named


def _read(repository: Repository, descriptor: Descriptor, told: Mapping[Digest, Referrer]) -> _Bundle:
    manifest = repository.bundle(descriptor)
    table = repository.table(manifest, f"kernel table of {bundle_name(descriptor)}")
    referrer = told.get(descriptor.sha256)
    materials = None
    if referrer is not None:
        materials = repository.materials(referrer.layers[-1], f"materials of {bundle_name(descriptor)}")
    return _Bundle(repository, descriptor, manifest, table, materials)


def _bundle(before: _Bundle, after: _Bundle, depth: int, compare: Compare) -> Iterator[Difference]:
    yield from values("toolchain:", _facts(before), _facts(after))
    if before.materials and after.materials:
        yield from _materials(before.materials, after.materials)
    earlier, later = before.kernels, after.kernels
    yield from names("kernels", earlier.keys() - later.keys(), later.keys() - earlier.keys())
    changed = [uri for uri in sorted(earlier.keys() & later.keys()) if earlier[uri].sha256 != later[uri].sha256]
    for number, uri in enumerate(changed):
        yield Difference(uri, "changed", _change(earlier[uri], later[uri]))
        if number < depth:
            rows = compare(before.content(earlier[uri]), after.content(later[uri]))
            yield from (row.inside(uri) for row in rows)
    if len(changed) > depth:
        yield Difference("bytes", "changed", f"explained for {depth} of {len(changed)} kernels")
    same = earlier.keys() & later.keys() - {*changed}
    for uri in sorted(same):
        yield from _entry(uri, earlier[uri], later[uri])
    if renamed := sum(earlier[uri].key != later[uri].key for uri in same):
        yield Difference("keys", "changed", f"{renamed} kernels have other keys and the same bytes")
    if not changed and earlier.keys() == later.keys():
        yield from _packing(before, after)


def _facts(bundle: _Bundle) -> dict[str, str]:
    return bundle.materials.toolchain if bundle.materials else bundle.table.toolchain


def _change(before: KernelEntry, after: KernelEntry) -> str:
    if before.key != after.key:
        what = "declaration or sources differ" if before.op_digest != after.op_digest else "compiled otherwise"
        return f"{what}, as its key does: {before.key[:_SHORT]} became {after.key[:_SHORT]}"
    if not before.key:
        return f"sha256 {before.sha256[:_SHORT]} became {after.sha256[:_SHORT]}"
    return f"other bytes under the same key {before.key[:_SHORT]}: the build is not reproducible"


def _materials(before: Materials, after: Materials) -> Iterator[Difference]:
    """What keys are made of, besides the facts about compilers."""
    yield from values("source", *(_digests(each.files) for each in (before, after)))
    yield from values("imported", *(_digests(each.imported) for each in (before, after)))
    programs = ({name: digest[:_SHORT] for name, digest in each.programs.items()} for each in (before, after))
    yield from values("program", *programs)
    yield from values("recipe", *(_recipe(each.recipe) for each in (before, after)))
    yield from documents(_how(before.ops), _how(after.ops))


def _recipe(recipe: Recipe | None) -> dict[str, str]:
    return {} if recipe is None else {recipe.name: recipe.sha256[:_SHORT]}


def _digests(files: Sequence[Content]) -> dict[str, str]:
    return {file.path: file.sha256[:_SHORT] for file in files}


def _how(ops: Sequence[MadeOp]) -> dict[str, dict[str, object]]:
    """How each op was compiled."""
    return {
        op.op: {
            "flags": op.flags,
            "compile": op.compile,
            "reached": op.reached,
            "defines": {made.uri: made.defines for made in op.kernels},
        }
        for op in ops
    }


def _entry(uri: str, before: KernelEntry, after: KernelEntry) -> Iterator[Difference]:
    """The same bytes, of which the tables say different things, besides who they are."""
    said = (
        {"exports": ", ".join(each.exports), **{f"needs {name}": version for name, version in each.needs.items()}}
        for each in (before, after)
    )
    yield from (row.inside(uri) for row in values("", *said))


def _packing(before: _Bundle, after: _Bundle) -> Iterator[Difference]:
    """Of bundles of the same kernels: where these lie, and what is written beside them."""
    yield from values("note", before.manifest.annotations, after.manifest.annotations)
    blocks = (f"{len(each.table.blocks)} blocks in {len(each.manifest.layers)} packs" for each in (before, after))
    if (before.table.blocks, before.manifest.layers) != (after.table.blocks, after.manifest.layers):
        earlier, later = blocks
        text = f"{earlier} became {later}" if earlier != later else f"{earlier}, compressed otherwise"
        yield Difference("packs", "changed", f"{text}; earlier releases lend blocks, see --since")
