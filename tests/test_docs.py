"""What the documents say is so: settings, commands, exit codes, errors, examples and links."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from kartifacts import config, errors
from kartifacts.cli import _COMMANDS, _root
from kartifacts.errors import KartifactsError
from tests.conftest import Machine

CHECKOUT = Path(__file__).parents[1]
REFERENCE = CHECKOUT / "docs/reference"
PAGES = sorted({CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md")})


def rows(page: Path) -> list[list[str]]:
    """The cells of every table of a page, without the marks around code."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def error_classes() -> dict[str, type[KartifactsError]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, KartifactsError) and kind is not KartifactsError
    }


# -- settings ----------------------------------------------------------------------------------------------------------


def default_of(variable: config.Variable, tmp_path: Path) -> str:
    """The default as a reader of the page would write it."""
    cache, settings_home = tmp_path / "cache", tmp_path / "config"
    lock = settings_home / "kartifacts/kartifacts.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch()
    settings = config.read({"XDG_CACHE_HOME": str(cache), "XDG_CONFIG_HOME": str(settings_home)})
    value: Any = getattr(settings, variable.field)
    if variable.field == "jobs":
        return "from cores and memory"
    if value in ((), "", None):
        return "empty"
    if isinstance(value, Path):
        text = str(value).replace(str(cache / "kartifacts"), "<cache>").replace(str(lock.parent), "<config>")
        return f"{text}` if it exists" if variable.field == "lock" else text
    return str(int(value)) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.field)
def test_every_setting_stands_in_the_reference_with_its_default(variable: config.Variable, tmp_path: Path) -> None:
    documented = {row[0]: row[1] for row in rows(REFERENCE / "settings.md")}
    assert documented[variable.env] == default_of(variable, tmp_path)


def test_the_reference_names_no_setting_that_does_not_exist() -> None:
    known = {variable.env for variable in config.VARIABLES} | {config.CONFIG_VARIABLE}
    for page in PAGES:
        assert set(re.findall(r"KARTIFACTS_[A-Z_]*[A-Z]", page.read_text())) <= known, page


# -- commands ----------------------------------------------------------------------------------------------------------


def test_every_command_stands_in_the_reference_and_no_other() -> None:
    documented = {row[0] for row in rows(REFERENCE / "cli.md") if not row[0].isdigit()}
    assert documented - {"command", "exit code"} == {
        name if name != "import" else "import checksums" for name in _COMMANDS
    }


def test_every_exit_code_stands_in_the_reference_with_its_errors() -> None:
    documented = {
        row[0]: set(re.findall(r"[A-Z]\w+", row[1])) for row in rows(REFERENCE / "cli.md") if row[0].isdigit()
    }
    for name, kind in error_classes().items():
        assert name in documented[str(kind.exit_code)]
    assert {name for names in documented.values() for name in names} == set(error_classes())
    assert {"0", "1", "130"} <= set(documented)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a page that are in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def lines_shown(page: Path) -> list[list[str]]:
    """The words after `kartifacts` in each command line of the blocks for shells and for cron."""
    found = []
    lines = "\n".join([*blocks(page, "sh"), *blocks(page, "")]).replace("\\\n", " ").splitlines()
    for line in filter(re.compile(r"\bkartifacts ").search, lines):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();<>|&"):
                command.append(word)
                continue
            # Before the program stand what it is to find in its environment, or when cron is to start it.
            while command and re.fullmatch(r"export|\w+=.*|[\d*/,-]+", command[0]):
                command.pop(0)
            if command and re.fullmatch(r"(.*/)?kartifacts", command[0]):
                found.append(command[1:])
            command = []
    return found


def mentioned(page: Path) -> list[str]:
    """What is named as `kartifacts ...` within a sentence, which need not be a whole command line."""
    spans = re.findall(r"`kartifacts ([^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return [span for span in spans if not span.startswith("COMMAND")]


def command_of(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that words begin with, and the words that are left."""
    command: click.Command = _root
    context = click.Context(_root, info_name="kartifacts")
    while isinstance(command, click.Group) and words:
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command, context = found, click.Context(found, parent=context, info_name=name)
    return command, context, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_command_line_that_a_page_shows_is_one(page: Path) -> None:
    for line in lines_shown(page):
        command, context, words = command_of(line)
        assert not isinstance(command, click.Group), line
        try:
            command.make_context(command.name, words, parent=context.parent)
        except click.ClickException as error:
            pytest.fail(f"{' '.join(line)}: {error.format_message()}")


def test_the_pages_show_command_lines_and_mention_only_commands_and_options_that_exist() -> None:
    assert sum(len(lines_shown(page)) for page in PAGES) > 40
    for page in PAGES:
        for line in mentioned(page):
            command, context, words = command_of(shlex.split(line))
            try:
                _, more, _ = command.make_parser(context).parse_args(words)
            except click.BadOptionUsage:  # an option is named without the value that it takes
                continue
            except click.UsageError as error:
                pytest.fail(f"{page}: {line}: {error.format_message()}")
            assert not more or isinstance(command, click.Group), (page, line)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_every_error_stands_in_the_reference_and_no_other() -> None:
    documented = {row[0] for row in rows(REFERENCE / "errors.md")} - {"error"}
    assert documented == set(error_classes())


def test_every_error_tells_its_reader_what_to_do() -> None:
    for name, kind in error_classes().items():
        assert kind.__doc__, name
        assert name in (errors.__doc__ or "")


# -- README ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "test"])
def test_ci_finds_the_command_that_a_reader_would_type(name: str) -> None:
    done = subprocess.run([CHECKOUT / "ci/readme", name], capture_output=True, text=True, check=True)
    [command] = done.stdout.splitlines()
    assert command in (CHECKOUT / "README.md").read_text()
    assert command.startswith("python3 -m venv ")


def test_ci_asks_for_no_command_that_is_not_there() -> None:
    done = subprocess.run([CHECKOUT / "ci/readme", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "nothing" in done.stderr
    asked = {
        word
        for script in (*(CHECKOUT / ".ci").iterdir(), *(CHECKOUT / "ci").iterdir())
        if script.is_file()
        for word in re.findall(r"ci/readme (\w+)", script.read_text())
    }
    written = set(re.findall(r"<!-- command: (\w+) -->", (CHECKOUT / "README.md").read_text()))
    assert asked >= written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_examples_of_the_readme_run_one_after_the_other(machine: Machine) -> None:
    first, second = blocks(CHECKOUT / "README.md", "python")
    check = "\nexact = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6)\n"
    same = "\n".join(f"assert abs({name} - exact).max() < 1e-5" for name in ("y", "out"))
    answer = machine.python(f"{first}{second}{check}{same}")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("jit cpu:")


# -- what must not be in the repository --------------------------------------------------------------------------------


def test_nothing_in_the_repository_names_a_place_of_one_machine() -> None:
    if not (CHECKOUT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=True).stdout
    here = {str(CHECKOUT), str(Path(sys.prefix))} - {"/", "/usr", "/usr/local"}
    machine_path = re.compile(r"(?<![\w.~$}/-])/(?:work|workspace|home|Users|root|mnt|data)/\w[^\s\"']*")
    for name in filter(None, listed.decode().split("\0")):
        path = CHECKOUT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_text(errors="replace")
            assert not [place for place in here if f"{place}/" in text], name
            assert not machine_path.findall(text), name
