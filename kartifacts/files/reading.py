"""Opens regular files and nothing else: a pipe, socket or device planted under a name is refused, never waited for."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_PIECE = 1 << 16
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; links are followed.

    Raises:
        OSError: it cannot be opened, or it is no regular file; `strerror` says which.
    """
    name = os.fspath(path)
    try:
        # Without O_NONBLOCK a pipe would wait for somebody to write into it.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a NUL byte, or a name that this locale cannot spell
        raise OSError(errno.EINVAL, f"not a name of a file here: {error}", ascii(name)) from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # what opening a socket says
            raise OSError(errno.EINVAL, "it is a socket, not a regular file", name) from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", name)
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; an `OSError` as `open_regular` raises if it is larger."""
    with open_regular(path) as file:
        size = min(os.fstat(file.fileno()).st_size, limit)
        content = file.read(size + 1)  # not more, since so much memory is taken at once
        while len(content) <= limit and (piece := file.read(_PIECE)):  # it grows, or is of /proc and has no size
            content += piece
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", os.fspath(path))
    return content
