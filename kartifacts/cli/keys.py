"""The commands of who holds keys: `keys ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kartifacts import config
from kartifacts.cli import emit, json_option
from kartifacts.errors import ConfigError
from kartifacts.model.digest import sha256
from kartifacts.model.layout import VIEWS, View

if TYPE_CHECKING:
    from kartifacts.trust.keysigner import Secret

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)
CHOICES: dict[str, tuple[View, ...]] = {**{view: (view,) for view in VIEWS}, "all": VIEWS}
_MAX_PASSPHRASE = 4096  # bytes

keys_option = click.option(
    "--keys",
    "keyring",
    required=True,
    type=_DIRECTORY,
    help="Keyring directory that `keys init` or `keys export` made.",
)
passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File whose first line opens private keys and tokens, and encrypts new ones; default: asked for where needed.",
)
_encrypt_option = click.option(
    "--encrypt",
    is_flag=True,
    help="Ask for a passphrase and encrypt new private keys by it; a keyring that has encrypted ones always does.",
)
_view_option = click.option(
    "--view", type=click.Choice(list(CHOICES)), default="all", show_default=True, help="Readers that are meant."
)
single_writer_option = click.option(
    "--single-writer",
    is_flag=True,
    help="Nobody else writes to BUCKET meanwhile, so its writes need not be conditional.",
)


def secret_of(passphrase_file: Path | None) -> Secret | None:
    """Who is asked for passphrases and PINs: a file, whoever sits at the terminal, or nobody."""
    if passphrase_file is not None:
        passphrase = _first_line(passphrase_file)
        return lambda _: passphrase
    return _Asked() if sys.stdin.isatty() and sys.stderr.isatty() else None


class _Asked:
    """Asks at the terminal; an empty answer is the one given before."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, name: str) -> str:
        again = " (empty: as before)" if self._last else ""
        answer = click.prompt(f"{name}{again}", hide_input=True, default=self._last, show_default=False, err=True)
        self._last = str(answer)
        return self._last


def _first_line(path: Path) -> str:
    try:
        with click.open_file(str(path), "rb") as file:
            line = bytes(file.read(_MAX_PASSPHRASE)).decode().splitlines()[:1]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the passphrase from {str(path)!r}: {error}") from error
    if not line or not line[0]:
        raise ConfigError(f"{str(path)!r} begins with an empty line: expected a passphrase")
    return line[0]


def _new_passphrase(passphrase_file: Path | None, *, encrypt: bool) -> str | None:
    if passphrase_file is not None:
        return _first_line(passphrase_file)
    if not encrypt:
        return None
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            "new private keys are to be encrypted, and there is nobody to ask for a passphrase",
            hint="pass --passphrase-file",
        )
    return str(click.prompt("Passphrase of the new keys", hide_input=True, confirmation_prompt=True, err=True))


@click.group("keys")
def keys_command() -> None:
    """Make, exchange and use the keys that releases are signed by; see docs/howto/keys.md."""


@keys_command.command("init")
@click.argument("directory", type=_DIRECTORY)
@click.option("--library", "libraries", multiple=True, help="Library that gets a role; may be repeated.")
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    metavar="ROLE=M/N",
    help="M of N keys sign for ROLE; default: 2/3 for root and targets, 1/1 for others.",
)
@click.option(
    "--signer",
    "signers",
    multiple=True,
    metavar="ROLE=URI,PUBLIC",
    help="A key that is no new file: URI of the signer (awskms:, gcpkms:, azurekms:, hv:, hsm:, gnupg:, file2:; empty: "
    "held elsewhere), and its public key (PEM file; for gnupg: the fingerprint).  ROLE: targets, a library, or "
    "online: or airgap: and root, snapshot, timestamp.",
)
@passphrase_option
@_encrypt_option
@json_option
def init_command(
    directory: Path,
    libraries: tuple[str, ...],
    thresholds: tuple[str, ...],
    signers: tuple[str, ...],
    passphrase_file: Path | None,
    encrypt: bool,
    as_json: bool,
) -> None:
    """Make the keyring DIRECTORY: keys of all roles, the first root of both views, the first targets."""
    from kartifacts.cli.flows import keys as flow

    report = flow.init(
        directory,
        libraries=libraries,
        thresholds=thresholds,
        signers=signers,
        passphrase=_new_passphrase(passphrase_file, encrypt=encrypt),
        secret=secret_of(passphrase_file),
    )
    emit(as_json, report, _shown(report))


@keys_command.command("show")
@click.argument("directory", type=_DIRECTORY)
@json_option
def show_command(directory: Path, as_json: bool) -> None:
    """Say who signs for which role, which private keys are here, and what was signed."""
    from kartifacts.cli.flows import keys as flow

    report = flow.show(directory)
    emit(as_json, report, _shown(report))


def _shown(report: dict[str, Any]) -> str:
    lines = [f"keyring {report['keyring']}"]
    for name, role in report["roles"].items():
        keys = [
            f"{key['id'][:8]} {'here' if key['here'] else 'elsewhere'}{' retiring' if key['retiring'] else ''}"
            for key in role["keys"]
        ]
        lines.append(f"{name}: {role['threshold']} of {len(keys)}: {', '.join(keys)}")
    lines += [
        f"{file['file']}: expires {file['expires']}{'; ' + file['lacks'] if file['lacks'] else ''}"
        for file in report["files"]
    ]
    return "\n".join(lines)


@keys_command.command("add-library")
@click.argument("directory", type=_DIRECTORY)
@click.argument("name")
@click.option("--threshold", metavar="M/N", help="M of N keys sign; default: 1/1.")
@click.option("--signer", "signers", multiple=True, metavar="URI,PUBLIC", help="As of `keys init`; may be repeated.")
@passphrase_option
@_encrypt_option
@json_option
def add_library_command(
    directory: Path,
    name: str,
    threshold: str | None,
    signers: tuple[str, ...],
    passphrase_file: Path | None,
    encrypt: bool,
    as_json: bool,
) -> None:
    """Give the library NAME a role of its own; `keys publish` makes it public."""
    from kartifacts.cli.flows import keys as flow

    encrypt = encrypt or (not signers and flow.is_encrypted(directory))
    report = flow.add_library(
        directory,
        name,
        threshold=threshold,
        signers=signers,
        passphrase=_new_passphrase(passphrase_file, encrypt=encrypt),
        secret=secret_of(passphrase_file),
    )
    _emit_staged(as_json, report)


@keys_command.command("remove-library")
@click.argument("directory", type=_DIRECTORY)
@click.argument("name")
@passphrase_option
@json_option
def remove_library_command(directory: Path, name: str, passphrase_file: Path | None, as_json: bool) -> None:
    """Take the role of the library NAME away: readers refuse its releases from then on."""
    from kartifacts.cli.flows import keys as flow

    _emit_staged(as_json, flow.remove_library(directory, name, secret=secret_of(passphrase_file)))


@keys_command.command("rotate")
@click.argument("directory", type=_DIRECTORY)
@click.argument("role")
@_view_option
@click.option("--key", "only", multiple=True, metavar="ID", help="Exchange this key only; may be repeated.")
@click.option("--signer", "signers", multiple=True, metavar="URI,PUBLIC", help="A new key that is no new file.")
@click.option("--finish", is_flag=True, help="Second step: take the old keys away, once the new ones sign in public.")
@passphrase_option
@_encrypt_option
@json_option
def rotate_command(
    directory: Path,
    role: str,
    view: str,
    only: tuple[str, ...],
    signers: tuple[str, ...],
    finish: bool,
    passphrase_file: Path | None,
    encrypt: bool,
    as_json: bool,
) -> None:
    """Exchange the keys of ROLE (root, targets, snapshot, timestamp or a library), without a moment of failure."""
    from kartifacts.cli.flows import keys as flow

    encrypt = encrypt or (not (finish or signers) and flow.is_encrypted(directory))
    report = flow.rotate(
        directory,
        role,
        views=CHOICES[view],
        only=only,
        signers=signers,
        finish=finish,
        passphrase=None if finish else _new_passphrase(passphrase_file, encrypt=encrypt),
        secret=secret_of(passphrase_file),
    )
    _emit_staged(as_json, report)


@keys_command.command("renew")
@click.argument("directory", type=_DIRECTORY)
@click.argument("role", type=click.Choice(["root", "targets"]))
@_view_option
@passphrase_option
@json_option
def renew_command(directory: Path, role: str, view: str, passphrase_file: Path | None, as_json: bool) -> None:
    """Sign the next version of root or targets, which expires later and says the same."""
    from kartifacts.cli.flows import keys as flow

    _emit_staged(as_json, flow.renew(directory, role, views=CHOICES[view], secret=secret_of(passphrase_file)))


def _emit_staged(as_json: bool, report: dict[str, Any]) -> None:
    lines = [f"staged: {row['file']}{'; ' + row['lacks'] if row['lacks'] else ''}" for row in report["staged"]]
    lacking = any(row["lacks"] for row in report["staged"])
    following = "first `kartifacts keys sign` adds what it lacks, then " if lacking else ""
    emit(as_json, report, "\n".join([*lines, f"{following}`kartifacts keys publish` makes it public"]))


@keys_command.command("sign")
@click.argument("file", type=_FILE)
@click.option(
    "--key", "keys", multiple=True, metavar="PEM|URI,PUBLIC", help="Private key file, or signer; may be repeated."
)
@click.option("--keys", "keyring", type=_DIRECTORY, help="Keyring whose keys sign, as far as FILE asks for them.")
@click.option("--merge", "copies", multiple=True, type=_FILE, help="A copy of FILE whose signatures are taken over.")
@passphrase_option
@json_option
def sign_command(
    file: Path,
    keys: tuple[str, ...],
    keyring: Path | None,
    copies: tuple[Path, ...],
    passphrase_file: Path | None,
    as_json: bool,
) -> None:
    """Add signatures to a staged root or targets FILE, which may lie anywhere; the roots it goes by lie beside it."""
    from kartifacts.cli.flows import keys as flow

    report = flow.sign(file, keys=keys, keyring=keyring, copies=copies, secret=secret_of(passphrase_file))
    state = "; ".join(report["lacks"]) or "complete"
    text = f"{report['role']} {report['version']}, expires {report['expires']}: {len(report['signatures'])} signatures"
    emit(as_json, report, f"{text}; {state}")


@keys_command.command("export")
@click.argument("directory", type=_DIRECTORY)
@click.argument("out", type=_DIRECTORY)
@click.option("--roles", required=True, metavar="ROLE,...", help="Roles whose private keys go along.")
@_view_option
@click.option(
    "--replace", is_flag=True, help="OUT may be an earlier export: bring it up to date, while others sign by it."
)
@json_option
def export_command(directory: Path, out: Path, roles: str, view: str, replace: bool, as_json: bool) -> None:
    """Write the keyring OUT with the private keys of some roles only, for a machine that publishes."""
    from kartifacts.cli.flows import keys as flow

    names = [name.strip() for name in roles.split(",") if name.strip()]
    report = flow.export(directory, out, roles=names, views=CHOICES[view], replace=replace)
    emit(as_json, report, _shown(report))


@keys_command.command("root")
@click.argument("directory", type=_DIRECTORY)
@click.option("--view", type=click.Choice(VIEWS), default="online", show_default=True)
@click.option("--out", type=_FILE, help="File to write; default: standard output.")
@json_option
def root_command(directory: Path, view: View, out: Path | None, as_json: bool) -> None:
    """Give the root that readers begin to trust with: they get it by a way they trust, such as a wheel."""
    from kartifacts.cli.flows import keys as flow

    content = flow.root(directory, view)
    if out is not None:
        flow.write(out, content)
    if out is None or as_json:
        report = {"view": view, "sha256": sha256(content), "out": out, "root": content.decode()}
        emit(as_json, report, content.decode())


@keys_command.command("publish")
@click.argument("bucket")
@keys_option
@single_writer_option
@passphrase_option
@json_option
def publish_keys_command(
    bucket: str, keyring: Path, single_writer: bool, passphrase_file: Path | None, as_json: bool
) -> None:
    """Make staged roots and targets public in BUCKET, each only when readers can follow."""
    from kartifacts.cli.flows import keys as flow

    secret = secret_of(passphrase_file)
    report = flow.publish_staged(bucket, keyring, config.read(), single_writer=single_writer, secret=secret)
    emit(as_json, report, "\n".join(views_shown(report)))


def views_shown(report: dict[str, Any]) -> Sequence[str]:
    return [
        f"{view}: root {seen['root']}, targets {seen['targets']}, snapshot {seen['snapshot']}, "
        f"timestamp {seen['timestamp']}; next to expire: {seen['expires']}"
        for view, seen in report["views"].items()
    ]
