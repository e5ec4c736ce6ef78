"""Signs files that travel from one holder of keys to the next, each of whom adds a signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from securesystemslib.signer import Key, Signer

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.trust.keyfiles import read, replace
from kartifacts.trust.keygrants import add_signatures, grants_of
from kartifacts.trust.keysound import check_unchanged
from kartifacts.trust.signed import parse_any
from kartifacts.trust.signing import check_signed

_ROOT = re.compile(r"([1-9][0-9]{0,17})\.root\.json")


def sign_file(
    path: Path, choose: Callable[[Mapping[str, Key]], Sequence[Signer]], *, copies: Sequence[Path] = ()
) -> list[str]:
    """Add signatures to a root or targets file, in place.

    Args:
        choose: who signs, given the keys that the file asks for.
        copies: other copies of it, whose signatures are taken over.

    Returns:
        What it still lacks; nothing, if it can be published.

    Raises:
        ConfigError: a key is not one that the file asks for, or nothing beside the file says which it asks for.
        VerificationError: it is no such file, or a copy says something else.
    """
    content = read(path)
    kind = parse_any(content, str(path)).signed.type
    if kind not in ("root", "targets"):
        raise ConfigError(f"{str(path)!r} is a {kind}: only root and targets are signed by hand")
    sayers = _delegators(path, content, kind)
    check_unchanged(path, content, list(sayers.values()))
    wanted = {key.keyid: key for sayer in sayers.values() for key in grants_of(sayer)[kind].keys}
    signers = choose(wanted)
    for signer in signers:
        if signer.public_key.keyid not in wanted:
            raise ConfigError(
                f"key {signer.public_key.keyid[:8]} does not sign {str(path)!r}: its keys are "
                f"{', '.join(sorted(keyid[:8] for keyid in wanted))}",
                hint=f"those known by {', '.join(sayers)}; a root is signed by the keys of the one before too, "
                "which has to lie beside it",
            )
    for copy in copies:
        content = add_signatures(content, (), others=read(copy))
    content = add_signatures(content, signers)
    replace(path, content)
    return lacks(content, _delegators(path, content, kind).values())


def lacks(content: bytes, delegators: Iterable[bytes]) -> list[str]:
    """Which signatures a root or targets file still needs, by what each delegator asks."""
    signed = parse_any(content, "the file").signed
    missing = []
    for delegator in delegators:
        try:
            check_signed(delegator, signed.type, content, f"{signed.version}.{signed.type}.json")
        except VerificationError as error:
            missing.append(error.message)
    return missing


def _delegators(path: Path, content: bytes, kind: str) -> dict[str, bytes]:
    """The roots that say who signs a file: a root itself and the one before it, or the newest beside targets."""
    roots = {int(match[1]): name for name in _names(path.parent) if (match := _ROOT.fullmatch(name))}
    if kind == "root":
        before = parse_any(content, str(path)).signed.version - 1
        return {**({roots[before]: read(path.parent / roots[before])} if before in roots else {}), path.name: content}
    if not roots:
        raise ConfigError(
            f"no root lies beside {str(path)!r}, so nothing says who signs it",
            hint="put the newest N.root.json into the same directory, as it is in the keyring",
        )
    newest = roots[max(roots)]
    return {newest: read(path.parent / newest)}


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
