"""`kartifacts`, the command line: translates words into calls, prints data to stdout and all else to stderr.

Exit codes are those of `kartifacts.errors`, and stand in docs/reference/cli.md.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from typing import Any

import click

from kartifacts import __version__
from kartifacts.errors import ConfigError, KartifactsError, Refusal, printable

log = logging.getLogger(__name__)

# command → module that holds it, so that one command does not pay for the imports of all
_COMMANDS = {
    "build": "producing",
    "plan": "planning",
    "merge": "planning",
    "gate": "planning",
    "import": "producing",
    "publish": "producing",
    "promote": "releasing",
    "retire": "releasing",
    "retain": "releasing",
    "lock": "producing",
    "wheel": "producing",
    "index": "producing",
    "mirror": "mirroring",
    "keys": "keys",
    "timestamp": "timestamp",
    "sync": "trusting",
    "fetch": "consuming",
    "status": "consuming",
    "verify": "consuming",
    "list": "consuming",
    "gc": "consuming",
    "coverage": "coverage",
    "inspect": "comparing",
    "diff": "comparing",
    "explain": "asking",
    "explain-key": "asking",
    "config": "asking",
    "doctor": "asking",
    "demo": "demo",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = getattr(importlib.import_module(f"kartifacts.cli.{module}"), cmd_name.replace("-", "_") + "_command")
        assert isinstance(found, click.Command)
        return found


class _Printable(logging.Formatter):
    """Lines for a terminal, which nothing in them steers, whoever wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="kartifacts")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for debugging.")
def _root(verbose: int) -> None:
    """Build, publish, mirror, fetch, verify and load GPU kernels."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def emit(as_json: bool, data: dict[str, Any], text: str) -> None:
    """Print the answer of a command: `data` as JSON, or `text`."""
    click.echo(json.dumps(data, indent=2, sort_keys=True, default=str) if as_json else printable(text).rstrip("\n"))


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `kartifacts` script."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _root.main(args=arguments, prog_name="kartifacts", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except KartifactsError as error:
        _fail(error, as_json="--json" in arguments)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        _fail(_usage(error), as_json="--json" in arguments)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; say nothing more
        sys.exit(141)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # of standard output, which has no name
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries again at its end
            _fail(KartifactsError(f"cannot write the answer: {error}"), as_json=False)
        log.debug("unexpected", exc_info=True)  # a fault of ours, whose traceback helps nobody who cannot mend it
        hint = "this is a fault of kartifacts; `kartifacts -vv ...` shows where it happened: please report it"
        _fail(KartifactsError(f"unexpected {type(error).__name__}: {error}", hint=hint), as_json="--json" in arguments)


def _usage(error: click.ClickException) -> ConfigError:
    context = getattr(error, "ctx", None)
    return ConfigError(
        error.format_message().strip().replace("\n", " "),
        hint=f"see {context.command_path if context else 'kartifacts'} --help",
    )


def _fail(error: KartifactsError, *, as_json: bool) -> None:
    if as_json:
        facts = {name: _plain(value) for name, value in vars(error).items()}
        facts |= {"error": _kind(type(error)), "exit_code": error.exit_code}
        click.echo(json.dumps(facts, indent=2, sort_keys=True, default=str))
    click.echo(f"error: {error}", err=True)
    sys.exit(error.exit_code)


def _kind(error: type[KartifactsError]) -> str:
    """The name of a class of errors, or of the one above it that docs/reference/errors.md knows."""
    return next(kind.__name__ for kind in error.__mro__ if kind.__module__ == KartifactsError.__module__)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [item._asdict() if isinstance(item, Refusal) else item for item in value]
    return value
