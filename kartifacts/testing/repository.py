"""Makes a small but complete repository from bytes: blobs, release, lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kartifacts.model.digest import Digest, sha256
from kartifacts.model.layout import OCI_LAYOUT, OCI_LAYOUT_CONTENT, blob_path, release_path, suffix_of
from kartifacts.model.manifest import (
    ARTIFACT_BUNDLE,
    MEDIA_INDEX,
    MEDIA_MANIFEST,
    MEDIA_PACK,
    MEDIA_TABLE,
    NOTE,
    RELEASE_FORMAT,
    Block,
    BundleManifest,
    Descriptor,
    KernelEntry,
    Lock,
    Pin,
    Release,
    Table,
    encode,
)


@dataclass(frozen=True)
class TinyRepository:
    """What was made: where it lies, and what pins it."""

    path: Path
    pin: Pin
    lock: Path
    packs: tuple[Digest, ...]
    table: Digest
    manifest: Digest

    def blob(self, digest: str) -> Path:
        return self.path / blob_path(Digest(digest))


def tiny_repository(
    path: Path,
    files: Mapping[str, bytes],
    *,
    library: str = "tiny",
    version: str = "1.0",
    family: str = "demo",
    arch: str = "any",
    abi: str = "none",
    kernels_per_block: int = 2,
    blocks_per_pack: int = 64,
    level: int = 3,
) -> TinyRepository:
    """Write a repository with one release of one bundle that holds `files`.

    Args:
        path: where; what is there already stays, so that several releases can share blobs.
        files: uri → content, e.g. ``{"norm/rmsnorm?dtype=float32": b"..."}`` or plain relative paths.
    """
    packs, blocks, kernels = _pack(files, kernels_per_block, blocks_per_pack, level)
    table = Table(version=1, library=library, family=family, arch=arch, abi=abi, blocks=blocks, kernels=kernels)
    notes = {"library": library, "version": version, "family": family, "arch": arch, "abi": abi}
    annotations = {NOTE + name: value for name, value in notes.items()}
    raw = encode(table)
    config = _put(path, _compress(raw, level), MEDIA_TABLE, {NOTE + "raw-size": str(len(raw))})
    manifest = BundleManifest(
        schema_version=2,
        media_type=MEDIA_MANIFEST,
        artifact_type=ARTIFACT_BUNDLE,
        config=config,
        layers=[_put(path, pack, MEDIA_PACK) for pack in packs],
        annotations=annotations,
    )
    bundle = _put(path, encode(manifest), MEDIA_MANIFEST, annotations)
    release = Release(
        schema_version=2,
        media_type=MEDIA_INDEX,
        manifests=[bundle],
        annotations={NOTE + "format": RELEASE_FORMAT, NOTE + "library": library, NOTE + "version": version},
    )
    index = _put(path, encode(release), MEDIA_INDEX)
    pin = Pin(library=library, version=version, sha256=index.sha256, size=index.size)
    _write(path / release_path(library, version, index.sha256), encode(release))
    _write(path / OCI_LAYOUT, OCI_LAYOUT_CONTENT)
    lock = path / "kartifacts.lock"
    _write(lock, encode(Lock(version=1, releases=[pin])))
    return TinyRepository(path, pin, lock, tuple(sha256(pack) for pack in packs), config.sha256, bundle.sha256)


def _pack(
    files: Mapping[str, bytes], kernels_per_block: int, blocks_per_pack: int, level: int
) -> tuple[list[bytes], list[Block], list[KernelEntry]]:
    packs: list[bytes] = []
    blocks: list[Block] = []
    kernels: list[KernelEntry] = []
    names = sorted(files)
    for first in range(0, len(names), kernels_per_block):
        if len(blocks) % blocks_per_pack == 0:
            packs.append(b"")
        content = b""
        for name in names[first : first + kernels_per_block]:
            kernels.append(
                KernelEntry(
                    uri=name,
                    sha256=sha256(files[name]),
                    size=len(files[name]),
                    block=len(blocks),
                    offset=len(content),
                    suffix=suffix_of(name.partition("?")[0]),
                )
            )
            content += files[name]
        compressed = _compress(content, level)
        blocks.append(Block(len(packs) - 1, len(packs[-1]), len(compressed), len(content), sha256(compressed)))
        packs[-1] += compressed
    return packs, blocks, kernels


def _compress(content: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(content)


def _put(path: Path, content: bytes, media_type: str, annotations: Mapping[str, str] | None = None) -> Descriptor:
    digest = sha256(content)
    _write(path / blob_path(digest), content)
    return Descriptor(
        media_type=media_type,
        digest=f"sha256:{digest}",
        size=len(content),
        annotations=dict(annotations or {}),
    )


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
