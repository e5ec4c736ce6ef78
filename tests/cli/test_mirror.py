"""Mirrors by the command line, with real keys and a real web server, and the admin's page as it stands there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kartifacts.publish.release import make_release
from kartifacts.publish.repository import Repository
from tests.conftest import CPU_ARCHS, Answer, Machine, Released
from tests.processes import free_ports
from tests.sources.test_nginx import SCRIPT

PAGE = Path(__file__).parents[2] / "docs/howto/air-gap.md"


@dataclass
class Publisher:
    """Has keys, and publishes what was built."""

    machine: Machine
    keys: Path
    bucket: Path
    built: Path

    def publish(self, version: str) -> None:
        out = self.machine.home / f"built {version}"
        shutil.copytree(self.built, out)
        if version != "1.0":
            shelf = Repository(self.built)
            (pin,) = shelf.pins()
            make_release(out, "kartifacts", version, shelf.release(pin).manifests)
        expect(
            self.machine.cli(
                "publish", f"dir:{self.bucket}", "--from", out, "--keys", self.keys, "--release-version", version
            )
        )


def expect(answer: Answer, code: int = 0) -> Answer:
    assert answer.code == code, f"{answer.code}: {answer.out}\n{answer.err}"
    return answer


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, released: Released) -> Publisher:
    """Release 1.0 of this project's own kernels, signed."""
    base = tmp_path_factory.mktemp("published")
    made = Publisher(Machine(base / "home"), base / "ring", base / "origin", released.path)
    expect(made.machine.cli("keys", "init", made.keys, "--library", "kartifacts"))
    expect(made.machine.cli("keys", "root", made.keys, "--out", base / "root.json"))
    expect(made.machine.cli("keys", "root", made.keys, "--view", "airgap", "--out", base / "root.airgap.json"))
    made.publish("1.0")
    return made


@pytest.fixture
def publisher(published: Publisher, tmp_path: Path) -> Publisher:
    """The same with a bucket of this test alone."""
    shutil.copytree(published.bucket, tmp_path / "origin")
    return Publisher(Machine(tmp_path / "publisher"), published.keys, tmp_path / "origin", published.built)


@pytest.fixture
def roots(published: Publisher, tmp_path: Path) -> tuple[Path, Path]:
    """root.json and root.airgap.json, as the publisher gives them out."""
    for name in ("root.json", "root.airgap.json"):
        shutil.copy(published.keys.parent / name, tmp_path)
    return tmp_path / "root.json", tmp_path / "root.airgap.json"


# -- one command after the other ---------------------------------------------------------------------------------------


def test_every_answer_is_one_json_object(publisher: Publisher, roots: tuple[Path, Path], tmp_path: Path) -> None:
    machine, mirror = Machine(tmp_path / "admin"), f"dir:{tmp_path / 'mirror'}"
    both = ("--root", roots[0], "--root", roots[1])
    pulled = expect(machine.cli("mirror", "pull", publisher.bucket, mirror, *both, "--json")).data
    assert (pulled["changed"], pulled["sent"]) == (True, pulled["blobs"])
    assert [(pin["library"], pin["version"]) for pin in pulled["pins"]] == [("kartifacts", "1.0")]
    again = expect(machine.cli("mirror", "pull", publisher.bucket, mirror, *both, "--threads", 2, "--json")).data
    assert (again["changed"], again["sent"]) == (False, 0)
    verified = expect(machine.cli("mirror", "verify", mirror, *both, "--max-age", "1h", "--json")).data
    assert [view["view"] for view in verified["views"]] == ["online", "airgap"]
    assert verified["damaged"] == verified["missing"] == verified["stale"] == []
    listed = expect(machine.cli("mirror", "list", mirror, "--json")).data
    assert len(listed["files"]) > pulled["blobs"]
    carried = expect(machine.cli("mirror", "export", publisher.bucket, tmp_path / "x.tar", *both, "--json")).data
    assert carried["files"] > pulled["blobs"]
    closed = Machine(tmp_path / "closed")
    imported = closed.cli("mirror", "import", tmp_path / "x.tar", f"dir:{tmp_path / 'other'}", *both, "--json")
    assert expect(imported).data["sent"] == pulled["blobs"]


def test_the_root_of_this_machine_is_enough_to_verify(
    publisher: Publisher, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    machine, mirror = Machine(tmp_path / "admin"), f"dir:{tmp_path / 'mirror'}"
    expect(machine.cli("mirror", "pull", publisher.bucket, mirror, "--root", roots[0]))
    assert "--root" in expect(machine.cli("mirror", "verify", mirror), 2).err
    (machine.home / ".config/kartifacts").mkdir(parents=True)
    shutil.copy(roots[0], machine.home / ".config/kartifacts/root.json")
    expect(machine.cli("mirror", "verify", mirror))
    assert "--root" in expect(machine.cli("mirror", "pull", publisher.bucket, mirror), 2).err


def test_exit_codes_tell_damage_from_age(publisher: Publisher, roots: tuple[Path, Path], tmp_path: Path) -> None:
    machine, mirror = Machine(tmp_path / "admin"), tmp_path / "mirror"
    expect(machine.cli("mirror", "pull", publisher.bucket, f"dir:{mirror}", "--root", roots[0]))
    command = ("mirror", "verify", f"dir:{mirror}", "--root", roots[0])
    if shutil.which("faketime"):
        program = ["faketime", "-f", "+8d", sys.executable, "-m", "kartifacts", *map(str, command), "--json"]
        done = subprocess.run(program, env=machine.environ({}), capture_output=True, text=True, check=False)
        assert done.returncode == 11, done.stderr
        found = json.loads(done.stdout)
        assert "expired on" in found["stale"][0]
        assert (found["damaged"], found["missing"]) == ([], [])
        assert found["checked"] > 10, "what is expired is looked at all the same"
    victim = max((mirror / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(bytes(victim.stat().st_size))
    assert victim.name in expect(machine.cli(*command), 5).out
    victim.unlink()
    assert "missing" in expect(machine.cli(*command), 5).out
    expect(machine.cli("mirror", "pull", publisher.bucket, f"dir:{mirror}", "--root", roots[0]))
    expect(machine.cli(*command))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("pull", "SRC", "DST"), 2),
        (("pull", "SRC", "DST", "--root", "/absent"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--root", "ROOT"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--lock", "LOCK"), 2),
        (("pull", "SRC", "DST", "--root", "LOCK"), 5),
        (("pull", "/absent", "DST", "--root", "ROOT"), 2),
        (("pull", "ftp://x", "DST", "--root", "ROOT"), 2),
        (("pull", "SRC", "nowhere:x", "--root", "ROOT"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--library", "../x"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--library", "other"), 3),
        (("pull", "SRC", "DST", "--root", "ROOT", "--archs", "9.0"), 3),
        (("pull", "SRC", "DST", "--root", "ROOT", "--archs", "sm_7"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--threads", "0"), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--archs", ""), 2),
        (("pull", "SRC", "DST", "--root", "ROOT", "--library", ""), 2),
        (("pull", "SRC", "DST", "--root", ""), 2),
        (("pull", "SRC", "DST", "--lock", ""), 2),
        (("pull", "", "DST", "--root", "ROOT"), 2),
        (("pull", "SRC", "", "--root", "ROOT"), 2),
        (("pull", "SRC", "dir:LOCK", "--root", "ROOT"), 4),
        (("export", "", "x.tar", "--root", "ROOT"), 2),
        (("export", "SRC", "", "--root", "ROOT"), 2),
        (("export", "SRC", "DIR.tar", "--root", "ROOT"), 2),
        (("export", "SRC", "x.tar", "--root", "ROOT", "--since", ""), 2),
        (("import", "", "DST", "--root", "ROOT"), 2),
        (("import", "SRC", "DST", "--root", "ROOT", "--archs", " "), 2),
        (("import", "SRC", "dir:LOCK", "--root", "ROOT"), 4),
        (("verify", "DST", "--root", "ROOT", "--archs", ""), 2),
        (("list", "DST"), 4),
        (("list", ""), 2),
        (("pull", "https://127.0.0.1:1", "DST", "--root", "ROOT"), 4),
        (("verify", "DST", "--root", "ROOT"), 5),
        (("verify", "DST", "--root", "ROOT", "--max-age", "soon"), 2),
        (("verify", "DST", "--root", "ROOT", "--max-age", "٣d"), 2),
        (("export", "SRC", "x.tar", "--root", "ROOT", "--since", "LOCK"), 5),
        (("import", "/absent", "DST", "--root", "ROOT"), 2),
        (("import", "LOCK", "DST", "--root", "ROOT"), 5),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing(
    publisher: Publisher, roots: tuple[Path, Path], released: Released, tmp_path: Path, arguments: Any, code: int
) -> None:
    names = {
        "SRC": str(publisher.bucket),
        "DST": f"dir:{tmp_path / 'mirror'}",
        "ROOT": str(roots[0]),
        "LOCK": str(released.lock_file),
        "x.tar": str(tmp_path / "x.tar"),
        "dir:LOCK": f"dir:{released.lock_file}",
        "DIR.tar": str(tmp_path / "directory.tar"),
    }
    (tmp_path / "directory.tar").mkdir()
    answer = Machine(tmp_path / "admin").cli("mirror", *(names.get(word, word) for word in arguments))
    expect(answer, code)
    assert answer.err.startswith("error: ")
    assert not (tmp_path / "mirror").exists()
    assert not (tmp_path / "x.tar").exists()


def test_what_a_mirror_holds_is_changed_by_command_only(
    publisher: Publisher, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    """Neither by one that was meant for another mirror, nor by what somebody carries."""
    machine, mirror, part = Machine(tmp_path / "admin"), f"dir:{tmp_path / 'mirror'}", tmp_path / "part.tar"
    root, only = ("--root", roots[1]), ("--release-version", "1.0")
    expect(machine.cli("mirror", "export", publisher.bucket, part, *root, *only))
    expect(machine.cli("mirror", "import", part, mirror, *root, *only))
    publisher.publish("2.0")
    expect(machine.cli("mirror", "pull", publisher.bucket, mirror, *root))
    for command in (("pull", publisher.bucket), ("import", part)):
        told = expect(machine.cli("mirror", *command, mirror, *root, *only), 2).err
        assert "would hold less: --release-version 1.0" in told
        assert "--change-filter" in told
    assert "for a part" not in expect(machine.cli("mirror", "verify", mirror, *root)).out
    expect(machine.cli("mirror", "pull", publisher.bucket, mirror, *root, *only, "--change-filter"))
    assert "for a part: --release-version 1.0" in expect(machine.cli("mirror", "verify", mirror, *root)).out
    assert expect(machine.cli("mirror", "verify", mirror, *root, "--json")).data["filter"] == "--release-version 1.0"


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """Everything below the temporary directory, served with TLS; gives where the server keeps its state."""
    for program in ("nginx", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"the {program} program is not installed")
    state = tmp_path / "nginx"
    port = free_ports(4)
    subprocess.run([SCRIPT, "start", state, tmp_path, str(port)], check=True)
    (state / "port").write_text(str(port + 1))
    yield state
    subprocess.run([SCRIPT, "stop", state], check=True)


class Page:
    """Runs the blocks of the page, each on the machine that its first line names."""

    def __init__(self, base: Path, site: Path, roots: tuple[Path, Path]) -> None:
        self.base = base
        self.authority = site / "ca.pem"
        self.server = f"https://localhost:{(site / 'port').read_text()}"
        self.machines = {
            name: Machine(base / name.replace(" ", "-"))
            for name in ("on the connected machine", "on the closed side", "on each node")
        }
        (base / "media").mkdir()
        (base / "bin").mkdir()
        (base / "bin/kartifacts").write_text(f'#!/bin/sh\nexec {sys.executable} -m kartifacts "$@"\n')
        (base / "bin/kartifacts").chmod(0o755)
        for machine in self.machines.values():
            for root in roots:
                shutil.copy(root, machine.home)

    def run(self, text: str) -> None:
        name = text.partition("\n")[0].removeprefix("# ")
        machine = self.machines[name]
        for told, here in (
            ("/srv/", "$HOME/srv/"),
            ("https://kernels.example", f"{self.server}/origin"),
            ("https://mirror.site.example", f"{self.server}/on-the-closed-side/srv/kartifacts"),
            ("/media/disk", str(self.base / "media")),
            ("9.0a cpu:x86-64-v3", CPU_ARCHS.split()[-1]),  # what these tests have built
        ):
            text = text.replace(told, here)
        environ = machine.environ({"REQUESTS_CA_BUNDLE": self.authority})
        del environ["KARTIFACTS_STORE"], environ["KARTIFACTS_WORKSPACE"]
        environ["PATH"] = f"{self.base / 'bin'}:{environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euc", text], cwd=machine.home, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.nginx
def test_the_page_works_as_it_stands_there(
    publisher: Publisher, roots: tuple[Path, Path], site: Path, tmp_path: Path
) -> None:
    page = Page(tmp_path, site, roots)
    shown = blocks()
    assert len(shown) > 8
    for text in shown:
        if "mirror list" in text:
            publisher.publish("2.0")
        page.run(text)
    node = page.machines["on each node"]
    lock = json.loads((node.home / ".config/kartifacts/kartifacts.lock").read_bytes())
    assert [release["version"] for release in lock["releases"]] == ["2.0"]
    (synced,) = lock["synced"]
    assert synced["view"] == "airgap"
    answer = node.python(
        "from kartifacts import Registry, config\nprint(error_of(Registry(config.read()))[1] < 1e-5)",
        HOME=node.home,
        KARTIFACTS_STORE=None,
        KARTIFACTS_WORKSPACE=None,
        offline=1,
        jit="never",
    )
    assert answer.out == "True\n", answer.err


# -- several mirrors ---------------------------------------------------------------------------------------------------


@pytest.mark.nginx
def test_mirrors_are_asked_in_the_order_of_the_list_and_what_one_lacks_comes_from_the_next(
    publisher: Publisher, roots: tuple[Path, Path], site: Path, tmp_path: Path
) -> None:
    server = f"https://localhost:{(site / 'port').read_text()}"
    admin, node = Machine(tmp_path / "admin"), Machine(tmp_path / "node")
    some = ("--root", roots[0], "--archs", CPU_ARCHS.split()[0])
    expect(admin.cli("mirror", "pull", publisher.bucket, f"dir:{tmp_path / 'some'}", *some))
    urls = {name: f"{server}/{name}" for name in ("absent", "some", "origin")}

    def lists(*names: str) -> dict[str, Any]:
        mirrors = " ".join(urls[name] for name in names)
        lock = node.home / "lock"
        return {"mirrors": mirrors, "lock": lock if lock.exists() else None, "REQUESTS_CA_BUNDLE": site / "ca.pem"}

    def source(*names: str) -> str:
        (node.home / "lock").unlink(missing_ok=True)
        expect(node.cli("sync", "--root", roots[0], "--lock", node.home / "lock", **lists(*names)))
        return str(json.loads((node.home / "lock").read_bytes())["synced"][0]["source"])

    assert source("some", "origin") == urls["some"]
    assert source("origin", "some") == urls["origin"]
    assert source("absent", "some") == urls["some"]
    expect(node.cli("fetch", "--archs", CPU_ARCHS.split()[0], **lists("some")))
    if len(CPU_ARCHS.split()) > 1:
        expect(node.cli("fetch", **lists("some")), 3)
        log = (site / "access.log").read_text().count("/origin/blobs/")
        expect(node.cli("fetch", **lists("some", "origin")))
        assert (site / "access.log").read_text().count("/origin/blobs/") > log
        expect(node.cli("verify", **lists("some")))
