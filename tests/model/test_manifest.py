"""Published metadata: what is written is read back, and each field that could do harm is refused on its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kartifacts.errors import VerificationError
from kartifacts.model import manifest as model
from kartifacts.model.digest import Digest, sha256
from kartifacts.model.manifest import (
    Block,
    BundleManifest,
    Descriptor,
    KernelEntry,
    Lock,
    Pin,
    Release,
    Table,
    decode_bundle,
    decode_lock,
    decode_release,
    decode_table,
    encode,
)

A, B = sha256(b"a"), sha256(b"b")


def descriptor(media_type: str, digest: Digest = A, size: int = 100, **notes: str) -> Descriptor:
    annotations = {model.NOTE + name: value for name, value in notes.items()}
    return Descriptor(media_type=media_type, digest=f"sha256:{digest}", size=size, annotations=annotations)


RELEASE = Release(
    schema_version=2,
    media_type=model.MEDIA_INDEX,
    manifests=[descriptor(model.MEDIA_MANIFEST, arch="9.0a", family="norm")],
    annotations={
        model.NOTE + "format": model.RELEASE_FORMAT,
        model.NOTE + "library": "kartifacts",
        model.NOTE + "version": "1.0",
    },
)
BUNDLE = BundleManifest(
    schema_version=2,
    media_type=model.MEDIA_MANIFEST,
    artifact_type=model.ARTIFACT_BUNDLE,
    config=descriptor(model.MEDIA_TABLE),
    layers=[descriptor(model.MEDIA_PACK, B, 1000), descriptor(model.MEDIA_PACK, A, 50)],
)
TABLE = Table(
    version=1,
    library="kartifacts",
    family="norm",
    arch="9.0a",
    abi="tvm-ffi-0.1",
    blocks=[Block(0, 0, 600, 5000, A), Block(0, 600, 400, 3000, B), Block(1, 0, 50, 60, A)],
    kernels=[
        KernelEntry(
            uri="norm/rmsnorm?dtype=float16&hidden=128", sha256=A, size=5000, block=0, offset=0, op_digest=B, key=A
        ),
        KernelEntry(
            uri="norm/layernorm", sha256=B, size=100, block=1, offset=2900, suffix=".so", needs={"glibc": "2.17"}
        ),
        KernelEntry(uri="fmha/Sm100a/x.cubin", sha256=A, size=0, block=2, offset=60, suffix=".cubin"),
    ],
    toolchain={"kind": "nvcc", "version": "13.0"},
)
LOCK = Lock(version=1, releases=[Pin(library="kartifacts", version="1.0", sha256=A, size=1234)])


def changed(value: Any, path: str, new: object) -> bytes:
    """The JSON of `value` with the field at `path` (``kernels.0.size``) replaced, or removed for `...`."""
    content = json.loads(encode(value))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = content
    for part in parents:
        target = target[part]
    if new is ...:
        del target[last]
    else:
        target[last] = new
    return json.dumps(content).encode()


def read_table(data: bytes) -> Table:
    return decode_table(data, BUNDLE)


def test_what_is_written_is_read_back_the_same() -> None:
    assert decode_release(encode(RELEASE)) == RELEASE
    assert decode_bundle(encode(BUNDLE)) == BUNDLE
    assert read_table(encode(TABLE)) == TABLE
    assert decode_lock(encode(LOCK)) == LOCK
    assert (RELEASE.library, RELEASE.version) == ("kartifacts", "1.0")
    assert RELEASE.manifests[0].note("arch") == "9.0a"
    assert RELEASE.manifests[0].note("abi") == ""
    assert RELEASE.manifests[0].sha256 == A


def test_equal_values_have_equal_bytes_and_are_oci() -> None:
    assert encode(RELEASE) == encode(decode_release(json.dumps(json.loads(encode(RELEASE)), indent=3).encode()))
    content = json.loads(encode(BUNDLE))
    assert content["schemaVersion"] == 2
    assert content["layers"][0] == {"mediaType": model.MEDIA_PACK, "digest": f"sha256:{B}", "size": 1000}


def test_a_newer_publisher_may_add_fields() -> None:
    assert decode_release(changed(RELEASE, "subject", {"x": 1})) == RELEASE
    assert read_table(changed(TABLE, "kernels.0.added", 1)) == TABLE


@pytest.mark.parametrize("decode", [decode_release, decode_bundle, read_table, decode_lock])
@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"<html>", b'{"version":1,"version":1}', b"\xff", b"[" * 99999]
)
def test_what_is_not_the_thing_at_all_is_refused(decode: Any, data: bytes) -> None:
    with pytest.raises(VerificationError, match="malformed"):
        decode(data)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        *(("schemaVersion", wrong) for wrong in (1, 3, "2", None, ...)),
        ("annotations", {}),
        ("annotations", {model.NOTE + "format": "release.v2"}),
        ("mediaType", model.MEDIA_MANIFEST),
        ("manifests", None),
        ("annotations", {"a": 1}),
        ("manifests.0.mediaType", model.MEDIA_INDEX),
        *(
            ("manifests.0.digest", wrong)
            for wrong in ("", "sha256:xyz", "sha512:" + A, f"sha256:{A}0", f"sha256:{A.upper()}")
        ),
        *(("manifests.0.size", wrong) for wrong in (-1, model.MAX_INDEX + 1, 10**30, 1.5, "100", True)),
    ],
)
def test_a_release_index_with_one_bad_field_is_refused(path: str, new: object) -> None:
    with pytest.raises(VerificationError):
        decode_release(changed(RELEASE, path, new))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("schemaVersion", 1),
        ("artifactType", "application/vnd.oci.empty.v1+json"),
        ("mediaType", model.MEDIA_INDEX),
        ("config", ...),
        ("config.mediaType", model.MEDIA_PACK),
        ("config.size", model.MAX_TABLE + 1),
        ("config.digest", "sha256:0"),
        ("layers.1.mediaType", model.MEDIA_TABLE),
        ("layers.1.size", model.MAX_PACK + 1),
        ("layers.1.size", -1),
        ("layers.1.digest", ...),
    ],
)
def test_a_bundle_manifest_with_one_bad_field_is_refused(path: str, new: object) -> None:
    with pytest.raises(VerificationError):
        decode_bundle(changed(BUNDLE, path, new))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        *(("version", wrong) for wrong in (0, 2, "1")),
        *(("library", wrong) for wrong in ("", "../x", "a/b", "X")),
        *(("family", wrong) for wrong in ("", "..", "a\0", "con")),
        # Blocks stay inside the packs that the bundle lists.
        *(("blocks.0.0", wrong) for wrong in (-1, 2, 10**9)),
        *(("blocks.0.1", wrong) for wrong in (-1, 401, 10**18)),
        *(("blocks.0.2", wrong) for wrong in (0, -1, 1001, 2**63)),
        *(("blocks.0.3", wrong) for wrong in (-1, model.MAX_BLOCK_RAW + 1, 4999)),
        *(("blocks.0.4", wrong) for wrong in ("", "sha256", A[:-1])),
        ("blocks.0", [0, 0, 600, 5000]),
        # Kernels stay inside their block.
        *(("kernels.0.block", wrong) for wrong in (-1, 3)),
        *(("kernels.0.offset", wrong) for wrong in (-1, 1)),
        *(("kernels.0.size", wrong) for wrong in (-1, 5001, 2**70)),
        *(("kernels.0.sha256", wrong) for wrong in ("", "0" * 63, A + "\n")),
        *(("kernels.0.key", wrong) for wrong in ("x", A[:10])),
        *(("kernels.0.op_digest", wrong) for wrong in ("x", f"{A} ")),
        # What ends up in names of files and in messages is tame.
        *(
            ("kernels.0.suffix", wrong)
            for wrong in ("so", "/../../x.so", ".so/..", ".", "..", ".s o", ".so\n", ".tar.gz")
        ),
        *(
            ("kernels.0.uri", wrong)
            for wrong in ("", "../x", "/etc/passwd", "a//b", "a\nb", "norm/layernorm", "?dtype=a")
        ),
        *(
            ("kernels.0.uri", f"norm/x?{wrong}")
            for wrong in ("", "a", "a=", "=b", "a=b&", "a=b&&c=d", "a=b?c", "a=\x1b[0m")
        ),
        ("kernels.0.uri", "norm/x?a=" + "b" * 2000),
        ("kernels.0.needs", {"glibc": 2}),
        ("kernels.0.exports", "f"),
        ("kernels.0.uri", ...),
    ],
)
def test_a_kernel_table_with_one_bad_field_is_refused(path: str, new: object) -> None:
    with pytest.raises(VerificationError) as caught:
        read_table(changed(TABLE, path, new))
    assert len(caught.value.message) < 500
    assert caught.value.message.isprintable()


@given(st.integers(-10, 1010), st.integers(-10, 1010), st.integers(-10, 5010), st.integers(-10, 5010))
def test_whatever_a_table_says_no_read_leaves_its_pack_or_block(
    start: int, length: int, offset: int, size: int
) -> None:
    content = json.loads(encode(TABLE))
    content["blocks"][0][1:3] = [start, length]
    content["kernels"][0].update(offset=offset, size=size)
    try:
        table = read_table(json.dumps(content).encode())
    except VerificationError:
        return
    for block in table.blocks:
        assert 0 <= block.offset < block.offset + block.length <= BUNDLE.layers[block.pack].size
    for kernel in table.kernels:
        assert 0 <= kernel.offset <= kernel.offset + kernel.size <= table.blocks[kernel.block].size


@pytest.mark.parametrize(
    ("path", "new"),
    [
        *(("version", wrong) for wrong in (0, 2, "1", ...)),
        *(("releases.0.sha256", wrong) for wrong in ("", "x", A[:-1], ...)),
        *(("releases.0.size", wrong) for wrong in (0, -1, model.MAX_INDEX + 1, "1")),
        *(("releases.0.library", wrong) for wrong in ("", "../../x", "a/b")),
        *(("releases.0.version", wrong) for wrong in ("", "..", "1/0", ".")),
        ("releases", {}),
        ("releases", [json.loads(encode(LOCK))["releases"][0]] * 2),
    ],
)
def test_a_lock_with_one_bad_field_is_refused(path: str, new: object) -> None:
    with pytest.raises(VerificationError):
        decode_lock(changed(LOCK, path, new))


def test_an_error_names_the_file_that_the_caller_named() -> None:
    with pytest.raises(VerificationError, match=r"^/etc/kartifacts.lock is malformed"):
        decode_lock(b"{", what="/etc/kartifacts.lock")
    with pytest.raises(VerificationError) as caught:
        decode_lock(changed(LOCK, "version", 7), what="the lock")
    assert caught.value.message == "version of the lock: expected 1, got 7"
    assert (caught.value.expected, caught.value.actual) == ("1", "7")


def test_who_only_counts_counts_what_the_careful_reader_reads() -> None:
    data = model.encode(TABLE)
    listed = model.decode_listing(data)
    assert [(row.sha256, row.size, row.suffix) for row in listed] == [
        (kernel.sha256, kernel.size, kernel.suffix) for kernel in read_table(data).kernels
    ]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"kernels": 5}', b'{"kernels": [{}]}', b"[" * 100_000, b"\xff"]
)
def test_what_cannot_be_counted_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(VerificationError, match="malformed"):
        model.decode_listing(data)
