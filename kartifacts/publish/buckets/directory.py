"""A directory as a bucket, which any web server can serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kartifacts.errors import SourceError
from kartifacts.files.reading import read_regular
from kartifacts.model.digest import Digest
from kartifacts.publish import files
from kartifacts.publish.buckets import MAX_SMALL, Listed, Stamped, checked, raced, taken


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
            raise taken(self, path)
        return "same"

    def copy_if_absent(self, source: str, path: str) -> Literal["created", "same"]:
        return self.put_if_absent(path, self._place(source))

    def get(self, path: str, limit: int = MAX_SMALL) -> bytes:
        with self._faults("read", path):
            return read_regular(self._place(path), limit)

    def digest(self, path: str) -> tuple[Digest, int]:
        with self._faults("read", path):
            return files.digest(self._place(path))

    def size(self, path: str) -> int | None:
        with self._faults("read", path):
            place = self._place(path)
            return place.stat().st_size if place.is_file() else None

    def read(self, path: str) -> Stamped | None:
        with self._faults("read", path):
            try:
                return Stamped(read_regular(self._place(path), MAX_SMALL), "")
            except FileNotFoundError:
                return None

    def swap(self, path: str, content: bytes, before: Stamped | None) -> None:
        def changed(current: bytes | None) -> bytes:
            if current != (before.content if before is not None else None):
                raise raced(self, path)
            return content

        with self._faults("write", path):
            files.update(self._place(path), changed)

    def list(self, prefix: str) -> list[Listed]:
        with self._faults("list", prefix):
            found = []
            for path in self._place(prefix).rglob("*"):
                if path.is_file() and not path.name.startswith(files.PARTIAL):
                    status = path.stat()
                    found.append(Listed(path.relative_to(self.root).as_posix(), status.st_size, status.st_mtime))
            return sorted(found)

    def delete(self, path: str) -> None:
        with self._faults("delete", path):
            self._place(path).unlink(missing_ok=True)

    def preflight(self) -> None:
        """A directory keeps what it promises: writers take turns by a lock, and names appear by link."""
        with self._faults("look at", "."):
            if self.root.exists() and not self.root.is_dir():
                raise SourceError(f"{self.name} is no directory, so nothing can be put into it", permanent=True)

    def tidy(self) -> None:
        with self._faults("tidy", "."):
            for directory in (self.root, self.root / "blobs" / "sha256", *self.root.glob("targets/*/*")):
                files.reap(directory)

    def _place(self, path: str) -> Path:
        return self.root / checked(path)

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
