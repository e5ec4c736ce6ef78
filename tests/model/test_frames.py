"""One zstd frame of the declared size and nothing else, however it was compressed."""

from __future__ import annotations

import random

import pytest
import zstandard

from kartifacts.errors import VerificationError
from kartifacts.model.frames import decompress, table_size
from kartifacts.model.manifest import MAX_TABLE_RAW, MEDIA_TABLE, NOTE, Descriptor

CONTENTS = {
    "nothing": b"",
    "a byte": b"a",
    "one run": b"x" * 1_000_000,
    "noise": random.Random(1).randbytes(300_000),
    "words": b"kernel table " * 50_000,
}
SKIPPED = b"\x50\x2a\x4d\x18\0\0\0\0"


def compress(content: bytes, *, checksum: bool = False, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=size).compress(content)


@pytest.mark.parametrize("size", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("kind", CONTENTS)
def test_a_frame_is_judged_by_what_it_holds_and_not_by_how_it_was_written(
    kind: str, checksum: bool, size: bool
) -> None:
    content = CONTENTS[kind]
    frame = compress(content, checksum=checksum, size=size)
    assert decompress(frame, len(content), what="it") == content
    others = [frame + frame, frame + b"\0", frame + SKIPPED, SKIPPED + frame, frame[:-1], frame[:7], b"", content]
    for wrong, declared in [*((other, len(content)) for other in others), (frame, len(content) + 1)]:
        with pytest.raises(VerificationError, match=r"^it "):
            decompress(wrong, declared, what="it")
    if content:
        with pytest.raises(VerificationError, match=r"^it "):
            decompress(frame, len(content) - 1, what="it")


def test_every_flipped_bit_gives_the_content_or_a_typed_error() -> None:
    content = CONTENTS["words"][:2000]
    frame = compress(content, checksum=True)
    for position in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[position // 8] ^= 1 << position % 8
        try:
            assert decompress(bytes(flipped), len(content), what="it") == content
        except VerificationError:
            continue


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "01", "1 ", "1e3", "٣", "9" * 13, str(MAX_TABLE_RAW + 1)])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    config = Descriptor(media_type=MEDIA_TABLE, digest="", size=1, annotations={f"{NOTE}raw-size": text})
    with pytest.raises(VerificationError, match="bytes when decompressed"):
        table_size(config, "it")
