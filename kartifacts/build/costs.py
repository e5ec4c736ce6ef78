"""What compilations have cost: seconds and memory by source and toolchain, learned from each build and kept in a file.

A table that is lost or damaged is no fault: then everything is expected to cost what its toolchain usually does.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

from kartifacts.build.templates import rendered
from kartifacts.build.workspace import replace_file
from kartifacts.errors import ConfigError, KartifactsError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import strict_json
from kartifacts.model.spec import Spec

log = logging.getLogger(__name__)

FILE = "costs.json"  # in the workspace
SCHEMA = 1
MAX_TABLE = 64 << 20  # bytes
LINK = 0.1  # seconds that a link takes
# Of one source, until it has been measured; docs/adr/0018-scheduler.md says where these are from.
_USUAL = {"cxx": 2.0, "nvcc": 2.5, "nvrtc": 0.2, "triton": 1.0, "cutedsl": 1.0}
_USUAL_ELSE = 2.0


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one compilation needs: seconds of a CPU, and bytes of its hungriest process."""

    seconds: float
    memory: int


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    costs: dict[str, Cost]


def name_of(library: str, source: str, toolchain: str) -> str:
    """What the cost of compiling a source, or what a template gives, is known as: the same for all specialisations."""
    return f"{library}:{rendered(source)} {toolchain}"


@dataclass
class Costs:
    """What is known.

    Args:
        known: name → cost.
        learned: those of them that this process has measured.
    """

    known: dict[str, Cost] = field(default_factory=dict)
    learned: dict[str, Cost] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Costs:
        """The table in a file; an empty one if there is none, and also, with a warning, if it is damaged."""
        try:
            return cls.decode(read_regular(path, MAX_TABLE), str(path))
        except FileNotFoundError:
            return cls()
        except (OSError, ConfigError) as error:
            log.warning("what earlier builds have cost is forgotten: %s", error)
            return cls()

    @classmethod
    def decode(cls, data: bytes, what: str) -> Costs:
        """The table that is the content of a file; a `ConfigError` says what is wrong with it."""
        try:
            table = msgspec.convert(strict_json(data, what=what), _Table)
            if table.schema != SCHEMA:
                raise ValueError(f"schema {table.schema} is not known")
            for name, cost in table.costs.items():
                if not (0 <= cost.seconds < math.inf and cost.memory >= 0):
                    raise ValueError(f"{name[:200]!r} has cost {cost}")
        except (KartifactsError, ValueError, RecursionError) as error:
            raise ConfigError(f"{what!r} holds no costs: {error}") from error
        return cls(dict(table.costs))

    def write(self, path: Path) -> None:
        """Write the table, with what others have learned meanwhile.

        Raises:
            StoreError: it cannot be written.
        """
        replace_file(path, Costs({**self.known, **Costs.read(path).known, **self.learned}).encoded)

    @property
    def encoded(self) -> bytes:
        """The table as a file, a line for each figure, so that changes of one that is kept with sources can be read."""
        content = msgspec.json.encode(_Table(SCHEMA, dict(sorted(self.known.items()))))
        return msgspec.json.format(content, indent=1) + b"\n"

    def only(self, library: str) -> Costs:
        """What is known of the sources of one library."""
        return Costs({name: cost for name, cost in self.known.items() if name.startswith(f"{library}:")})

    def learn(self, name: str, seconds: float, memory: int) -> None:
        """Take in a measurement.

        Seconds follow what was seen last, as machines differ in speed; memory goes up at once and down by halves, since
        to expect too little costs more than to expect too much.
        """
        before = self.known.get(name)
        if before is not None:
            seconds = (before.seconds + seconds) / 2
            memory = max(memory, (before.memory + memory) // 2)
        self.known[name] = self.learned[name] = Cost(round(seconds, 4), memory)

    def expect(self, name: str, memory: int) -> None:
        """A compilation was killed that needed less: expect more of the next one."""
        self.known[name] = self.learned[name] = Cost(self.seconds(name), memory)

    def seconds(self, name: str) -> float:
        """What a compilation is expected to take: what it took, else what others of its toolchain do."""
        if name in self.known:
            return self.known[name].seconds
        toolchain = name.rpartition(" ")[2]
        others = [cost.seconds for other, cost in self.known.items() if other.rpartition(" ")[2] == toolchain]
        return median(others) if others else _USUAL.get(toolchain, _USUAL_ELSE)

    def memory(self, name: str, usual: int) -> int:
        """Bytes that a compilation is expected to need, or `usual` if it was never measured."""
        return self.known[name].memory if name in self.known else usual

    def of(self, spec: Spec) -> float:
        """Seconds that the kernel of a spec takes, without what all specs of its op share."""
        names = (name_of(spec.library, source, spec.device.toolchain) for source in spec.device.sources)
        return sum(map(self.seconds, names)) + (LINK if spec.output == "object" else 0.0)
