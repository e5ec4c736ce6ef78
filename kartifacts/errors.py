"""Every error that leaves kartifacts, split by what the caller does next.

    KartifactsError(message, *, hint)
    ├── ConfigError            a setting, an op.toml, an arch list or a command line is wrong: fix it
    ├── InputError             an op was called with a tensor it cannot take: fix the call
    ├── ArtifactUnavailable    nothing that may be used fits; carries what was tried and why it was refused
    │   └── MissingKernel      the same, where only the JIT's being switched off stood in the way
    ├── SourceError            network or storage failed; the next source, or a later try, may succeed
    ├── StoreError             the local store cannot be read or written (permissions, disk full)
    ├── VerificationError      bytes are not what was pinned or signed; never answered by compiling
    │   └── ExpiredMetadata    signed and in order, but older than its signer allows
    ├── BuildError             a compiler failed
    │   ├── HeaderMissing      a source includes a header that is not there
    │   ├── LinkMissing        the linker does not find a library
    │   ├── CompilerKilled     a compiler was killed or ran out of memory, and so it was with fewer at once
    │   └── NoCompiler         there is no compiler; carries the places searched
    ├── LoadError              built and verified, but does not load in this process
    │   └── AbiMismatch        the same, since it asks for a symbol or version that no library here has
    └── PublishConflict        other bytes already stand under that name

The message says what, expected, got, and what was done; the hint says what to do and is shown on its own line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from kartifacts.model.spec import Spec


def printable(text: str) -> str:
    """`text` without what would steer a terminal: remote names and names of files stand in messages."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class Refusal(NamedTuple):
    """One place that was asked for an artifact, and why it did not give it."""

    place: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.place}: {self.reason}")


class KartifactsError(Exception):
    """Base of all errors raised on purpose by kartifacts.

    Args:
        message: what happened, what was expected, what was found.
        hint: what the reader can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = printable(message)
        super().__init__(self.message)
        self.hint = None if hint is None else printable(hint)
        self.refusals: tuple[Refusal, ...] = ()  # places that were asked before, in order

    def _details(self) -> list[str]:
        return [f"  {refusal}" for refusal in self.refusals]

    def __str__(self) -> str:
        lines = [self.message, *self._details()]
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(KartifactsError, ValueError):
    """A setting, a declaration or an argument is wrong."""

    exit_code = 2


class InputError(KartifactsError, ValueError):
    """An op was called with a value it cannot take."""

    exit_code = 2


class ArtifactUnavailable(KartifactsError):
    """No usable artifact was found.

    Args:
        refusals: every place looked at, in order, with the reason it was refused.
    """

    exit_code = 3

    def __init__(self, message: str, *, refusals: tuple[Refusal, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.refusals = refusals


class MissingKernel(ArtifactUnavailable):
    """Nothing published fits and the policy forbids compiling.

    Its message begins with ``no usable kernel for URI on ARCH, and compiling it is refused:`` in every version, so that
    ``kartifacts coverage --from`` can read it out of any log.

    Args:
        uri: the specialisation that was asked for, e.g. ``norm/rmsnorm?dtype=bfloat16``.
        arch: the canonical name of the arch it was asked for.
        spec: what would have to be compiled, or published.
    """

    def __init__(
        self,
        message: str,
        *,
        uri: str = "",
        arch: str = "",
        spec: Spec | None = None,
        refusals: tuple[Refusal, ...] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, refusals=refusals, hint=hint)
        self.uri = uri
        self.arch = arch
        self.spec = spec


class SourceError(KartifactsError):
    """A source could not be read; another source or a later try may succeed.

    Args:
        missing: True when the source answered that it does not hold the object.
        denied: True when it will not say whether it does (403), as a bucket that may not be listed answers.
        retry_after: seconds the source asked us to wait, if it did.
        permanent: True when asking the same source again cannot help (403, bad TLS, ...).
    """

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        missing: bool = False,
        denied: bool = False,
        permanent: bool = False,
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing
        self.denied = denied
        self.permanent = permanent or missing or denied
        self.retry_after = retry_after


class StoreError(KartifactsError):
    """The local store or workspace cannot be read or written."""

    exit_code = 9


class VerificationError(KartifactsError):
    """Bytes are not what was pinned, or metadata is malformed.

    Args:
        source: where the bytes came from (effective URL or path).
        expected: what the pin or the metadata promised.
        actual: what was found.
    """

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        source: str = "",
        expected: str = "",
        actual: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.source = source
        self.expected = expected
        self.actual = actual


class ExpiredMetadata(VerificationError):
    """Metadata whose signatures hold, past its expiry: a mirror that stands still, or a clock that is wrong.

    Args:
        expired: when it expired, ISO 8601 in UTC.
    """

    exit_code = 11

    def __init__(self, message: str, *, expired: str = "", source: str = "", hint: str | None = None) -> None:
        super().__init__(message, source=source, hint=hint)
        self.expired = expired


class BuildError(KartifactsError):
    """A compiler or linker failed.

    Args:
        command: the command line that failed, ready to paste into a shell.
        log: path of the full log.
        exit_status: exit status of the tool; 137 and -9 mean that it was killed, most often for memory.
    """

    exit_code = 6

    def __init__(
        self,
        message: str,
        *,
        command: str = "",
        log: str = "",
        exit_status: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.command = command
        self.log = log
        self.exit_status = exit_status


class HeaderMissing(BuildError):
    """A source includes a header that is in none of the places where the compiler looks."""


class LinkMissing(BuildError):
    """The linker does not find a library, or another file that it was told to link."""


class CompilerKilled(BuildError):
    """A compiler was killed, most often for memory, or ran out of memory by itself; with fewer at once it may live."""


class NoCompiler(BuildError):
    """A compiler is needed and none was found.

    Args:
        searched: every place looked at, with what was found there.
    """

    exit_code = 7

    def __init__(self, message: str, *, searched: tuple[Refusal, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.searched = searched

    def _details(self) -> list[str]:
        return [*(f"  searched {place}" for place in self.searched), *super()._details()]


class LoadError(KartifactsError):
    """A verified artifact does not load in this process."""

    exit_code = 8


class AbiMismatch(LoadError):
    """A verified artifact asks for a symbol, or a version of one, that no library of this process defines.

    None of its code has run.  A published kernel of which this is true is passed over for the next that fits.

    Args:
        wanted: what it asks for, as the dynamic linker names it.
    """

    def __init__(self, message: str, *, wanted: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.wanted = wanted


class PublishConflict(KartifactsError):
    """Other bytes already stand under a name that never changes its content."""

    exit_code = 10
