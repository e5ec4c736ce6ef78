"""Without the extra `s3`, every command that is given an s3:// place says how to get it, as a wrong setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from kartifacts.errors import ConfigError
from kartifacts.model.layout import target_path
from kartifacts.model.manifest import Pin
from kartifacts.publish.lockfile import add_pins
from kartifacts.testing import tiny_repository
from tests.conftest import Machine
from tests.trust.simulator import Publisher

S3 = "s3://kernels/v1?endpoint=http://127.0.0.1:9"

# As where neither is installed: sys.modules would say so in another way.
PROGRAM = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("boto3", "botocore", "s3transfer"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
from kartifacts.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    [
        "publish {s3} --from {repository}",
        "publish {s3} --from {repository} --single-writer",
        "sync --root {root}",
        "fetch",
        "explain norm/rmsnorm dtype=float32",
        "mirror pull {s3} dir:{new} --root {root}",
        "mirror pull {s3} dir:{new} --lock {lock}",
        "mirror pull {repository} {s3} --root {root}",
        "mirror export {s3} {new}.tar --root {root}",
        "mirror verify {s3} --root {root}",
        "mirror list {s3}",
    ],
)
def test_a_missing_extra_is_named_and_is_no_fault_of_anything_else(
    machine: Machine, tmp_path: Path, command: str
) -> None:
    tiny = tiny_repository(tmp_path / "repository", {"a.so": b"a" * 5000})
    publisher = Publisher(tiny.path, "tiny")
    index = tiny.path / target_path("tiny", "1.0", tiny.pin.sha256)  # type: ignore[arg-type]
    publisher.release("tiny", "1.0", index.read_bytes())
    root, lock = tmp_path / "root.json", tmp_path / "kartifacts.lock"
    root.write_bytes(publisher.trust)
    add_pins(lock, [Pin(library="tiny", version="1.0", sha256="0" * 64, size=1000)])
    names = {"s3": S3, "repository": tiny.path, "root": root, "lock": lock, "new": tmp_path / "new"}
    words = [word.format(**names) for word in command.split()]
    answer = machine.python(PROGRAM, *words, mirrors=S3, lock=lock)
    assert answer.code == ConfigError.exit_code, answer.err
    assert "pip install 'kartifacts[s3]'" in answer.err


def test_what_is_in_the_store_is_had_without_it(machine: Machine, tmp_path: Path) -> None:
    tiny, lock = tiny_repository(tmp_path / "repository", {"a.so": b"a" * 5000}), tmp_path / "kartifacts.lock"
    add_pins(lock, [tiny.pin])
    assert machine.cli("fetch", mirrors=f"file://{tiny.path}", lock=lock).code == 0
    for command in ("fetch", "status", "verify"):
        answer = machine.python(PROGRAM, command, mirrors=S3, lock=lock)
        assert answer.code == 0, answer.err
