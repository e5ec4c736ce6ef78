"""Decompresses one zstd frame within the size that was declared for it; readers and checkers of tables judge alike."""

from __future__ import annotations

import re

from kartifacts.errors import VerificationError
from kartifacts.model.manifest import MAX_TABLE_RAW, Descriptor

MAX_WINDOW = 1 << 26  # bytes that a reader has to keep in memory
_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE = 256 << 10
_RUN_LENGTH, _RESERVED = 1, 3  # kinds of blocks; a run of one byte is stored as that byte


def table_size(config: Descriptor, what: str) -> int:
    """How many bytes a kernel table has when decompressed, as its manifest says."""
    text = config.note("raw-size")
    if not re.fullmatch(r"0|[1-9][0-9]{0,11}", text) or int(text) > MAX_TABLE_RAW:
        raise VerificationError(
            f"{what} says that it has {text[:40]!r} bytes when decompressed; expected at most {MAX_TABLE_RAW}"
        )
    return int(text)


def decompress(compressed: bytes, size: int, *, what: str) -> bytes:
    """The content of `compressed`, which must be one zstd frame of exactly `size` bytes and nothing after it.

    The frame itself need not say how much it holds.

    Raises:
        VerificationError: it is anything else; no more than `size` bytes were made of it.
    """
    import zstandard

    try:
        declared = zstandard.frame_content_size(compressed)
        if declared not in (-1, size):
            raise VerificationError(f"{what} holds {declared} bytes, {size} were declared")
        end = _end(compressed, zstandard.frame_header_size(compressed), what)
        if end != len(compressed):
            raise VerificationError(f"{what} has {len(compressed) - end} bytes after its zstd frame")
        content = bytearray()
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(compressed)
        while len(content) <= size and (piece := reader.read(min(_PIECE, size + 1 - len(content)))):
            content += piece
    except (zstandard.ZstdError, MemoryError) as error:
        raise VerificationError(f"{what} cannot be decompressed: {error}") from error
    if len(content) != size:
        got = "more" if len(content) > size else len(content)
        raise VerificationError(f"{what} holds {got} bytes, {size} were declared")
    return bytes(content)


def _end(frame: bytes, position: int, what: str) -> int:
    """Where the frame ends whose first block begins at `position`."""
    if frame[:4] != _MAGIC:
        raise VerificationError(f"{what} is no zstd frame: it begins with {frame[:4]!r}")
    while position + 3 <= len(frame):
        header = int.from_bytes(frame[position : position + 3], "little")
        last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            raise VerificationError(f"{what} has a block of no known kind")
        position += 3 + (1 if kind == _RUN_LENGTH else length)
        if last:
            position += 4 if frame[4] & 4 else 0  # its checksum
            if position > len(frame):
                break
            return position
    raise VerificationError(f"{what} ends inside its zstd frame")
