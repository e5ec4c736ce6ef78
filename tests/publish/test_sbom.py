"""The bill of materials is valid SPDX and names all that the bundle was compiled from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kartifacts.model.digest import sha256
from kartifacts.model.materials import Content, Made, MadeOp, Materials, Recipe
from kartifacts.publish.sbom import sbom

BUNDLE = sha256(b"bundle")


def some_materials() -> Materials:
    files = [
        Content(path=path, sha256=sha256(path.encode()), size=3, sha1="0" * 40)
        for path in ("<kartifacts>/include/kart/ffi.h", "norm/a b.cu", "norm/rmsnorm.h")
    ]
    made = Made(uri="norm/rmsnorm?dtype=float32", key="1" * 64, op_digest="2" * 64)
    op = MadeOp(op="norm/rmsnorm", flags=["-O3"], compile=[["norm/a b.cu"], []], reached=[], kernels=[made])
    return Materials(
        version=1,
        kind="build",
        library="demo",
        family="norm",
        arch="9.0a",
        abi="tvm-ffi-0.1",
        files=files,
        ops=[op],
        toolchain={"kind": "nvcc", "version": "13.0.88", "cudart": "13000", "host tvm_ffi": "0.1.15"},
        programs={"nvcc": sha256(b"nvcc"), "host cc1plus": sha256(b"cc1plus")},
        recipe=Recipe(name="cuda", sha256=sha256(b"recipe")),
    )


def test_the_validator_of_spdx_finds_nothing_wrong(tmp_path: Path) -> None:
    from spdx_tools.spdx.model.checksum import ChecksumAlgorithm
    from spdx_tools.spdx.model.relationship import RelationshipType
    from spdx_tools.spdx.parser.parse_anything import parse_file
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

    materials = some_materials()
    imported = msgspec.structs.replace(
        materials,
        kind="import",
        ops=[],
        programs={},
        toolchain={},
        imported=[Content(path="x", sha256="0" * 64, size=1)],
    )
    for each in (materials, imported):
        path = tmp_path / "bundle.spdx.json"
        path.write_bytes(sbom(each, BUNDLE))
        document = parse_file(str(path))
        assert validate_full_spdx_document(document, "SPDX-2.3") == []
        sums = {
            checksum.value
            for file in document.files
            for checksum in file.checksums
            if checksum.algorithm is ChecksumAlgorithm.SHA256
        }
        assert sums == {content.sha256 for content in each.files}
        made_from = [
            relation.related_spdx_element_id
            for relation in document.relationships
            if relation.relationship_type is RelationshipType.GENERATED_FROM
        ]
        assert made_from == [file.spdx_id for file in document.files]
        products = {package.name: package for package in document.packages}
        assert products["demo/norm/9.0a/tvm-ffi-0.1"].checksums[0].value == BUNDLE
        assert set(each.programs) <= set(products)
        if each.toolchain:
            assert products["apache-tvm-ffi"].version == "0.1.15"


def test_it_is_a_function_of_the_materials_alone() -> None:
    materials = some_materials()
    assert sbom(materials, BUNDLE) == sbom(materials, BUNDLE)
    assert sbom(msgspec.structs.replace(materials, programs={}), BUNDLE) != sbom(materials, BUNDLE)
