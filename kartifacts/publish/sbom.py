"""The bill of materials of a bundle, as SPDX 2.3: what it was compiled from, and by what.

It is made of the materials alone, so that an unchanged bundle has the same one in every release.  Its `created` is the
time that compilers were told (SOURCE_DATE_EPOCH = 0), since when it was written says nothing about what was built.
"""

from __future__ import annotations

from typing import Any

from kartifacts.model.digest import Digest, canonical_json
from kartifacts.model.materials import Content, Materials

_CREATED = "1970-01-01T00:00:00Z"
_TOOL = "Tool: kartifacts-1"  # the version of what is derived here, not of the package
_UNKNOWN = "NOASSERTION"
_BUNDLE = "SPDXRef-Bundle"


def sbom(materials: Materials, bundle: Digest) -> bytes:
    """The SPDX document about the bundle whose manifest has this digest."""
    name = f"{materials.library}/{materials.family}/{materials.arch}/{materials.abi}"
    files = [_file(number, content) for number, content in enumerate(materials.files)]
    tools = [_tool(number, *each) for number, each in enumerate(sorted(materials.programs.items()))]
    parts = [_package(f"SPDXRef-Part-{number}", *each) for number, each in enumerate(_parts(materials))]
    product = _package(_BUNDLE, name, "", bundle)
    if materials.imported:
        product["comment"] = f"{len(materials.imported)} files that others built, as the lists among the files promise"
    return canonical_json(
        {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": name,
            "documentNamespace": f"urn:kartifacts:sbom:sha256:{bundle}",
            "creationInfo": {"created": _CREATED, "creators": [_TOOL]},
            "packages": [product, *tools, *parts],
            "files": files,
            "relationships": [
                _relation("SPDXRef-DOCUMENT", "DESCRIBES", _BUNDLE),
                *(_relation(_BUNDLE, "GENERATED_FROM", file["SPDXID"]) for file in files),
                *(_relation(tool["SPDXID"], "BUILD_TOOL_OF", _BUNDLE) for tool in tools),
                *(_relation(_BUNDLE, "DEPENDS_ON", part["SPDXID"]) for part in parts),
            ],
        }
    )


def _parts(materials: Materials) -> list[tuple[str, str]]:
    """Name and version of what kernels are linked with, as far as the toolchain's facts tell."""
    facts = {name.removeprefix("host "): value for name, value in materials.toolchain.items()}
    known = {"tvm_ffi": "apache-tvm-ffi", "cudart": "CUDA runtime"}
    return [(called, facts[name]) for name, called in sorted(known.items()) if name in facts]


def _file(number: int, content: Content) -> dict[str, Any]:
    sums = [("SHA1", content.sha1), ("SHA256", content.sha256)]
    return {
        "SPDXID": f"SPDXRef-File-{number}",
        "fileName": f"./{content.path}",
        "checksums": [{"algorithm": name, "checksumValue": value} for name, value in sums if value],
        "licenseConcluded": _UNKNOWN,
        "copyrightText": _UNKNOWN,
    }


def _tool(number: int, name: str, digest: str) -> dict[str, Any]:
    return _package(f"SPDXRef-Tool-{number}", name, "", digest)


def _package(reference: str, name: str, version: str, digest: str = "") -> dict[str, Any]:
    package: dict[str, Any] = {
        "SPDXID": reference,
        "name": name,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
    }
    if version:
        package["versionInfo"] = version
    if digest:
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": digest}]
    return package


def _relation(element: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": other}
