"""Says how a release plan has to change to hold what was missing, as entries that can be put in place of its own."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kartifacts.diagnostics.missed import Missed
from kartifacts.errors import ConfigError
from kartifacts.model.arch import Arch, check_toolkit, parse_arch
from kartifacts.publish.plan import Build, Exemption, Plan

_MACHINES = {"x86_64": "x86-64", "aarch64": "aarch64"}  # → how the names of its CPU archs begin
_SHOWN = 5


@dataclass
class Entry:
    """A build of the plan with what is to be added, or one that the plan has not yet."""

    build: Build
    new: bool = False
    archs: dict[Arch, None] = field(default_factory=dict)
    ops: dict[str, None] = field(default_factory=dict)

    @property
    def all_archs(self) -> list[str]:
        return [*self.build.archs, *sorted(map(str, self.archs))]

    @property
    def all_ops(self) -> list[str]:
        return [*self.build.ops, *sorted(self.ops)]


@dataclass
class Advice:
    """What to change, and what no change of the plan will help."""

    entries: list[Entry] = field(default_factory=list)
    lifted: list[tuple[Exemption, list[str]]] = field(default_factory=list)  # with the archs that stay exempt
    promised: list[Missed] = field(default_factory=list)  # the release that was used is not what the plan says

    def report(self) -> dict[str, Any]:
        return {
            "build": [
                {
                    "name": entry.build.name,
                    "new": entry.new,
                    "archs": entry.all_archs,
                    "archs_added": sorted(map(str, entry.archs)),
                    "ops": entry.all_ops if entry.build.ops or entry.new else [],
                    "ops_added": sorted(entry.ops),
                }
                for entry in self.entries
            ],
            "exempt": [{"uri": exemption.uri, "archs": left} for exemption, left in self.lifted],
            "promised": [{"uri": one.uri, "arch": str(one.arch)} for one in self.promised],
        }


def advise(missed: Sequence[Missed], plan: Plan | None) -> Advice:
    """How `plan` would hold all that was missed; without one, the entries that a plan needs."""
    entries = {build.name: Entry(build) for build in (plan.builds if plan else ())}
    advice = Advice()
    lifted: dict[int, set[Arch]] = {}
    for one in missed:
        makers = [entry for entry in entries.values() if not entry.new and _can_make(entry.build, one)]
        serving = [entry for entry in makers if _serves(entry.build, one)]
        named = [entry for entry in serving if _names(entry.build, one)]
        exempt = _exempt(plan, named, one) if plan else {}
        if exempt:
            for number, archs in exempt.items():
                lifted.setdefault(number, set()).update(archs)
        elif named:
            advice.promised.append(one)
        elif serving:
            serving[0].ops[one.op] = None
        else:
            for entry in _homes(makers, one) or [_new(entries, one)]:
                entry.archs[one.arch] = None
                if not _names(entry.build, one) or entry.new:
                    entry.ops[one.op] = None
    if plan is not None:
        advice.lifted = [(plan.exempt[number], _left(plan.exempt[number], archs)) for number, archs in lifted.items()]
    advice.entries = [entry for entry in entries.values() if entry.archs or entry.ops]
    return advice


def _can_make(build: Build, one: Missed) -> bool:
    if not build.machine:  # in plans of schema 1, where there is one build for all
        return True
    if one.arch.kind == "cpu":
        return one.arch.name.startswith(_MACHINES[build.machine])
    if one.machines and build.machine not in one.machines:
        return False
    if one.arch.kind == "cuda" and build.cuda:
        try:
            check_toolkit(one.arch, build.toolkit)
        except ConfigError:
            return False
        return True
    return _has_kind(build, one)


def _has_kind(build: Build, one: Missed) -> bool:
    return any(arch.kind == one.arch.kind for arch in build.parsed)


def _serves(build: Build, one: Missed) -> bool:
    """Whether an arch of the build runs where the kernel was missing."""
    return any(arch.runs_on(one.arch).ok for arch in build.parsed)


def _names(build: Build, one: Missed) -> bool:
    return not build.ops or one.op in build.ops or one.family in build.ops


def _homes(makers: Sequence[Entry], one: Missed) -> list[Entry]:
    """Of the builds that can make it one for each machine and CUDA: the one that makes the most of its kind already."""
    homes: dict[tuple[str, str], Entry] = {}
    for entry in sorted(makers, key=lambda entry: (not _has_kind(entry.build, one), not _names(entry.build, one))):
        homes.setdefault((entry.build.machine, entry.build.cuda if one.arch.kind == "cuda" else ""), entry)
    return list(homes.values())


def _new(entries: dict[str, Entry], one: Missed) -> Entry:
    machines = [name for name, prefix in _MACHINES.items() if one.arch.name.startswith(prefix)] or sorted(one.machines)
    machine = machines[0] if one.arch.kind == "cpu" or len(machines) == 1 else ""
    name = f"{one.arch.kind}-{machine}" if machine else one.arch.kind
    return entries.setdefault(name, Entry(Build(name=name, archs=[], machine=machine), new=True))


def _exempt(plan: Plan, named: Sequence[Entry], one: Missed) -> dict[int, set[Arch]]:
    """The exemptions, by their place in the plan, that keep the kernel out of each arch that would serve."""
    serving = {arch for entry in named for arch in entry.build.parsed if arch.runs_on(one.arch).ok}
    if not all(plan.exempts(one.uri, arch) for arch in serving):
        return {}
    matching = {
        number: serving & set(map(parse_arch, exemption.archs))
        for number, exemption in enumerate(plan.exempt)
        if fnmatch.fnmatchcase(one.uri, exemption.uri)
    }
    return {number: archs for number, archs in matching.items() if archs}


def _left(exemption: Exemption, lifted: set[Arch]) -> list[str]:
    return [arch for arch in exemption.archs if parse_arch(arch) not in lifted]


# -- as lines of a plan ------------------------------------------------------------------------------------------------


def as_toml(missed: Sequence[Missed], advice: Advice) -> str:
    """What was missing as comments, then each entry of the plan as it should be."""
    lines = [f"# {sentence(one)}" for one in missed]
    for entry in sorted(advice.entries, key=lambda entry: entry.build.name):
        lines += ["", *_entry_lines(entry)]
    for exemption, left in sorted(advice.lifted, key=lambda pair: pair[0].uri):
        gone = ", ".join(arch for arch in exemption.archs if arch not in left)
        lines += [
            "",
            f"# the exemption for {_plain(gone)} is to be lifted" + ("" if left else ": leave this entry out"),
        ]
        lines += ["[[exempt]]", f"uri = {_quoted(exemption.uri)}", f"archs = {_listed(left)}"]
        lines += [f"reason = {_quoted(exemption.reason)}"]
    if advice.promised:
        lines += ["", "# The plan promises these already: the release that was used is older, or not what it says."]
        lines += [f"#   {one.uri} for {one.arch}" for one in advice.promised]
    return "\n".join(lines)


def sentence(one: Missed) -> str:
    """One missing kernel with what is known of who missed it."""
    told = [f"{one.times} time{'s' * (one.times != 1)}"]
    told += [f"{one.compiled} of them compiled"] if one.compiled else []
    told += [f"{len(one.pids)} processes"] if len(one.pids) > 1 else []
    if one.tests:
        shown = sorted(one.tests)[:_SHOWN]
        more = f" and {len(one.tests) - _SHOWN} more" if len(one.tests) > _SHOWN else ""
        told.append(f"in {', '.join(shown)}{more}")
    return _plain(f"{one.uri} for {one.arch}: {', '.join(told)}")


def _entry_lines(entry: Entry) -> Iterator[str]:
    build = entry.build
    if added := [*map(str, entry.archs), *entry.ops]:
        place = "a new build" if entry.new else f"in place of the build {build.name!r}" if build.machine else "changed"
        yield f"# {place}: with {', '.join(sorted(added))}"
    if build.machine or entry.new:
        yield "[[build]]"
        texts = {"name": build.name, "machine": build.machine, "cuda": build.cuda, "builder": build.builder}
        yield from (f"{name} = {_quoted(text)}" for name, text in texts.items() if text)
    yield f"archs = {_listed(entry.all_archs)}"
    if entry.all_ops and (build.ops or entry.new):
        yield f"ops = {_listed(entry.all_ops)}"
    if build.shards != 1:
        yield f"shards = {build.shards}"


def _listed(words: Iterable[str]) -> str:
    return f"[{', '.join(map(_quoted, words))}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(text: str) -> str:
    """What may stand in a comment."""
    return "".join(char if char.isprintable() else "?" for char in text)
