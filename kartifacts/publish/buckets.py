"""Where releases are written to: objects that never change under their name, and one pointer that does.

A bucket is chosen by a URL-like text; today ``dir:PATH``, a directory that any web server can serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from kartifacts.errors import ConfigError, PublishConflict, SourceError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest
from kartifacts.model.layout import check_path
from kartifacts.publish import files
from kartifacts.publish.files import Change


class Bucket(Protocol):
    """A place to write to.  Paths are those of `model.layout`; every fault is a `SourceError`."""

    name: str  # for messages, without credentials

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        """Store `content` under `path` for good, whole or not at all.

        Raises:
            PublishConflict: other bytes stand there already; they stay.
        """
        ...

    def get(self, path: str) -> bytes:
        """A small object's content; a `SourceError` that is `missing` if there is none."""
        ...

    def digest(self, path: str) -> tuple[Digest, int]:
        """sha256 and size of what a reader would get now."""
        ...

    def exists(self, path: str) -> bool: ...

    def update(self, path: str, change: Change) -> bool:
        """Replace the pointer at `path` by `change` of it, so that no other writer's update is lost.

        `change` may be asked again after a race.

        Returns:
            False if it is what it was, and nothing was written.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """The paths of all objects below the directory `prefix`, sorted."""
        ...

    def tidy(self) -> None:
        """Remove what writers that were killed have left behind."""
        ...


MAX_SMALL = 64 << 20  # bytes of an object that is read whole
_SCHEMES = {"dir": "dir:PATH"}


def open_bucket(text: str) -> Bucket:
    """The bucket that ``dir:PATH`` names.

    Raises:
        ConfigError: the scheme is unknown, or there is no path.
    """
    scheme, _, rest = text.partition(":")
    if scheme not in _SCHEMES or not rest:
        raise ConfigError(f"cannot publish to {text!r}: expected {' or '.join(_SCHEMES.values())}")
    return DirectoryBucket(Path(rest))


class DirectoryBucket:
    """A directory.  Files appear whole, under their final name, readable by all; they are never changed in place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = f"dir:{root}"

    def __repr__(self) -> str:
        return f"DirectoryBucket({str(self.root)!r})"

    def put_if_absent(self, path: str, content: bytes | Path) -> Literal["created", "same"]:
        with self._faults("write", path):
            if files.create(self._place(path), content):
                return "created"
            same = files.digest(self._place(path)) == files.digest(content)
        if not same:
            raise PublishConflict(
                f"{self.name} already holds other bytes under {path!r}; they were left as they are",
                hint="a name never changes its content: publish under another version; "
                "a blob whose sha256 is not its name is damaged: remove it by hand and publish again",
            )
        return "same"

    def get(self, path: str) -> bytes:
        with self._faults("read", path):
            return read_regular(self._place(path), MAX_SMALL)

    def digest(self, path: str) -> tuple[Digest, int]:
        with self._faults("read", path):
            return files.digest(self._place(path))

    def exists(self, path: str) -> bool:
        with self._faults("read", path):
            return self._place(path).is_file()

    def update(self, path: str, change: Change) -> bool:
        with self._faults("write", path):
            return files.update(self._place(path), change)

    def list(self, prefix: str) -> list[str]:
        with self._faults("list", prefix):
            return sorted(
                path.relative_to(self.root).as_posix()
                for path in self._place(prefix).rglob("*")
                if path.is_file() and not path.name.startswith(files.PARTIAL)
            )

    def tidy(self) -> None:
        with self._faults("tidy", "."):
            for directory in (self.root, self.root / "blobs" / "sha256", *self.root.glob("targets/*/*")):
                files.reap(directory)

    def _place(self, path: str) -> Path:
        return self.root / check_path(path, what="a path in a bucket")

    @contextmanager
    def _faults(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = f" ({error.filename!r})" if error.filename else ""
            raise SourceError(
                f"cannot {verb} {path!r} in {self.name}: {error.strerror or error}{place}",
                missing=isinstance(error, FileNotFoundError),
                permanent=True,
            ) from error
