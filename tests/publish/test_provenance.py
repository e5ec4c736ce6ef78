"""What is signed about how bundles were built is about all of them, by the right keys, and true."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from securesystemslib.signer import CryptoSigner, Key, Signer, SSlibKey

from kartifacts import config
from kartifacts.cli import flows
from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.model.layout import target_path
from kartifacts.model.manifest import Descriptor, Pin, encode
from kartifacts.model.materials import Materials
from kartifacts.publish.attestations import Believed, Origin, check_release, index_of, read_keys
from kartifacts.publish.provenance import Attested, attest, attestable, opened, sealed, statement_of
from kartifacts.publish.referrers import MATERIALS, PROVENANCE, Made, by_bundle, read_referrer, read_said, refer
from kartifacts.publish.referrers import index_of as indexed
from kartifacts.publish.repository import Repository
from kartifacts.publish.verify import verify_repository

BUILDER = "https://ci.example/builders/7"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a release of two bundles that were really compiled."""
    place = tmp_path_factory.mktemp("built")
    archs = "cpu:x86-64-v2 cpu:x86-64-v3"
    chosen = config.read(overrides={"workspace": place / "workspace", "archs": archs})
    flows.build(chosen, ops="norm/rmsnorm", out=place / "out", library="kartifacts", version="1.0", lock=None)
    return place / "out"


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Repository:
    return Repository(shutil.copytree(built, tmp_path / "repository"))


@pytest.fixture
def pin(repository: Repository) -> Pin:
    return repository.pins()[0]


@pytest.fixture(scope="module")
def signer() -> CryptoSigner:
    return CryptoSigner.generate_ed25519()


def believed(*signers: CryptoSigner, threshold: int = 1) -> Believed:
    return Believed(tuple(signer.public_key for signer in signers), threshold)


def put(repository: Repository, pin: Pin, attested: Attested) -> None:
    for digest, content in attested.blobs:
        write(repository.blob(digest), content)
    path = target_path(pin.library, pin.version, sha256(attested.index), "provenance")
    for old in (repository.path / path).parent.glob("*.provenance.json"):
        old.unlink()
    write(repository.path / path, attested.index)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def check(repository: Repository, pin: Pin, whom: Believed, builder_id: str | None = None) -> list[Origin]:
    return check_release(repository, pin, index_of(repository, pin), whom, builder_id=builder_id)


def bundles_of(repository: Repository, pin: Pin) -> list[Descriptor]:
    return repository.release(pin).manifests


def materials_of(repository: Repository, pin: Pin) -> dict[str, Materials]:
    """What the bundles were made of, by the digests in their descriptors."""
    index = repository.made_of(pin)
    assert index is not None
    found = by_bundle(MATERIALS, index, pin, bundles_of(repository, pin), repository.read)
    return {f"sha256:{digest}": repository.materials(each.layers[0], "it") for digest, each in found.items()}


def made_of(attested: Attested) -> list[Made]:
    """The referrers of an attestation, taken apart again so that a test can leave one out or put in another."""
    blobs = dict(attested.blobs)
    made = []
    for descriptor in read_said(PROVENANCE, attested.index, "kartifacts", "1.0"):
        referrer = read_referrer(PROVENANCE, blobs[descriptor.sha256], "it")
        digests = (referrer.config.sha256, *(layer.sha256 for layer in referrer.layers), descriptor.sha256)
        made.append(Made(descriptor, tuple((digest, blobs[digest]) for digest in digests)))
    return made


def documents(made: Made) -> list[bytes]:
    """Envelope, SBOM and materials."""
    return [content for _, content in made.blobs[1:4]]


def joined(pin: Pin, made: Sequence[Made]) -> Attested:
    index = indexed(PROVENANCE, pin.library, pin.version, made)
    blobs = {digest: content for each in made for digest, content in each.blobs}
    return Attested((*blobs.items(), (sha256(index), index)), index)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_every_bundle_is_proved_to_come_from_its_builder(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    assert attestable(repository, pin)
    put(repository, pin, attest(repository, pin, [signer], builder_id=BUILDER))
    verify_repository(repository.path).check("it")
    origins = check(repository, pin, believed(signer), BUILDER)
    assert [origin.digest for origin in origins] == [bundle.sha256 for bundle in bundles_of(repository, pin)]
    assert {origin.builder for origin in origins} == {BUILDER}
    assert {origin.keyids for origin in origins} == {(signer.public_key.keyid,)}


def test_a_statement_says_what_in_toto_and_slsa_ask_for(repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    attested = attest(repository, pin, [signer], builder_id=BUILDER)
    bundle = bundles_of(repository, pin)[0]
    made = made_of(attested)[0]
    assert read_referrer(PROVENANCE, made.blobs[-1][1], "it").subject.digest == bundle.digest
    envelope = json.loads(documents(made)[0])
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [
        {"name": "kartifacts/norm/cpu:x86-64-v2/tvm-ffi-0.1", "digest": {"sha256": bundle.sha256}}
    ]
    definition, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert definition["externalParameters"]["archs"] == ["cpu:x86-64-v2"]
    assert definition["externalParameters"]["ops"]["norm/rmsnorm"]["flags"]
    materials = materials_of(repository, pin)[bundle.digest]
    digests = {each["digest"]["sha256"] for each in definition["resolvedDependencies"]}
    assert digests == {file.sha256 for file in materials.files} | set(materials.programs.values())
    assert definition["internalParameters"]["toolchain"] == materials.toolchain
    assert run["builder"] == {"id": BUILDER}
    assert {each["name"]: each["digest"]["sha256"] for each in run["byproducts"]} == {
        "SBOM": sha256(documents(made)[1]),
        "materials": sha256(encode(materials)),
    }
    assert documents(made)[2] == encode(materials)


def test_a_bundle_has_one_short_entry(repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    """The whole index is sent anew when one bundle of many changes, as is that of the release."""
    said = json.loads(attest(repository, pin, [signer]).index)["manifests"]
    assert len(said) == len(bundles_of(repository, pin))
    for entry in said:
        assert set(entry) == {"mediaType", "digest", "size"}
        assert len(canonical_json(entry)) < 165
    for bundle in bundles_of(repository, pin):
        assert set(bundle.annotations) == {f"dev.kartifacts.{name}" for name in ("family", "arch", "abi")}


def test_an_unchanged_bundle_has_the_same_envelope_in_a_later_release(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    from kartifacts.publish.release import make_release

    make_release(repository.path, "kartifacts", "1.1", bundles_of(repository, pin), materials_of(repository, pin))
    later = repository.pins(version="1.1")[0]
    first, second = attest(repository, pin, [signer]), attest(repository, later, [signer])
    assert first.index != second.index
    assert dict(first.blobs).keys() - {sha256(first.index)} == dict(second.blobs).keys() - {sha256(second.index)}


def test_what_names_a_blob_comes_after_it(repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    attested = attest(repository, pin, [signer])
    seen: set[str] = set()
    names = {digest for digest, _ in attested.blobs}
    for digest, content in attested.blobs:
        assert sha256(content) == digest
        if content[:1] == b"{" and b'"schemaVersion"' in content:
            for word in json.dumps(json.loads(content)).replace('"', " ").split():
                if word.startswith("sha256:") and word[7:] in names:
                    assert word[7:] in seen
        seen.add(digest)


def test_a_release_that_does_not_say_what_it_was_made_of_is_not_attested(
    make_repository: Callable[..., Path], tmp_path: Path, signer: CryptoSigner
) -> None:
    old = Repository(make_repository(tmp_path / "old"))
    (pin,) = old.pins()
    assert not attestable(old, pin)
    with pytest.raises(ConfigError, match="does not say what it was made of"):
        attest(old, pin, [signer])
    with pytest.raises(VerificationError, match=r"no provenance of bundle act for 8\.0"):
        check(old, pin, believed(signer))


@pytest.mark.parametrize("builder", ["", "builder", "a b:c", ":x", "1:x", "urn:", "urn:ü", "urn:\n", "x:" + "y" * 1000])
def test_a_builder_is_named_by_a_uri(builder: str, repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    with pytest.raises(ConfigError, match="URI"):
        attest(repository, pin, [signer], builder_id=builder)
    with pytest.raises(ConfigError, match="nobody signs"):
        attest(repository, pin, [])


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_another_builder_than_was_asked_for_is_refused(repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    put(repository, pin, attest(repository, pin, [signer], builder_id="urn:somewhere"))
    with pytest.raises(VerificationError, match=r"bundle norm for cpu:x86-64-v2.*built by 'urn:somewhere'"):
        check(repository, pin, believed(signer), BUILDER)


def test_keys_of_others_and_too_few_of_the_right_ones_are_refused(repository: Repository, pin: Pin) -> None:
    first, second, stranger = (CryptoSigner.generate_ed25519() for _ in range(3))
    put(repository, pin, attest(repository, pin, [first, stranger]))
    check(repository, pin, believed(first, second))
    with pytest.raises(VerificationError, match=r"bundle norm for cpu:x86-64-v2.* signed by 1 .* 2 must"):
        check(repository, pin, believed(first, second, threshold=2))
    with pytest.raises(VerificationError, match="signed by 0"):
        check(repository, pin, believed(second))
    with pytest.raises(VerificationError):
        check(repository, pin, Believed((), 0))
    put(repository, pin, attest(repository, pin, [second, first]))
    (origin, _) = check(repository, pin, believed(first, second, threshold=2))
    assert set(origin.keyids) == {first.public_key.keyid, second.public_key.keyid}


def test_one_key_under_two_ids_counts_once() -> None:
    signer = CryptoSigner.generate_ed25519()
    own = signer.public_key
    twin = SSlibKey("00" * 32, own.keytype, own.scheme, own.keyval)
    twice: list[Signer] = [signer, CryptoSigner(signer._private_key, twin)]
    envelope = sealed(b"{}", twice)
    opened(envelope, [own, twin], 1, what="it")
    with pytest.raises(VerificationError, match="signed by 1"):
        opened(envelope, [own, twin], 2, what="it")


def test_a_missing_a_foreign_or_a_second_statement_is_refused(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    made = made_of(attest(repository, pin, [signer]))
    bundles = bundles_of(repository, pin)
    names = [f"bundle norm for {bundle.note('arch')}" for bundle in bundles]
    for number in range(len(made)):
        put(repository, pin, joined(pin, [*made[:number], *made[number + 1 :]]))
        with pytest.raises(VerificationError, match=f"{names[number]}.* has no provenance"):
            check(repository, pin, believed(signer))
    put(repository, pin, joined(pin, [*made, made[0]]))
    with pytest.raises(VerificationError, match=f"{names[0]}.*provenance twice"):
        check(repository, pin, believed(signer))
    other = msgspec.structs.replace(bundles[0], digest="sha256:" + "ab" * 32)
    put(repository, pin, joined(pin, [*made, refer(PROVENANCE, other, documents(made[1]))]))
    with pytest.raises(VerificationError, match="another release: sha256:abab"):
        check(repository, pin, believed(signer))
    put(repository, pin, Attested((), b"{}"))
    with pytest.raises(VerificationError):
        check(repository, pin, believed(signer))
    put(repository, pin, Attested((), indexed(PROVENANCE, "kartifacts", "2.0", made)))
    with pytest.raises(VerificationError, match="it says"):
        check(repository, pin, believed(signer))


def test_the_envelope_of_another_bundle_is_refused(repository: Repository, pin: Pin, signer: CryptoSigner) -> None:
    made = made_of(attest(repository, pin, [signer]))
    bundles = bundles_of(repository, pin)
    for number, complaint in enumerate((r"externalParameters\.archs", "SBOM", "SBOM")):
        swapped = documents(made[0])
        swapped[number] = documents(made[1])[number]
        put(repository, pin, joined(pin, [refer(PROVENANCE, bundles[0], swapped), made[1]]))
        with pytest.raises(VerificationError, match=f"bundle norm for cpu:x86-64-v2.*{complaint}|{complaint}.*v2"):
            check(repository, pin, believed(signer))
    put(repository, pin, joined(pin, [refer(PROVENANCE, bundles[0], documents(made[1])), made[1]]))
    with pytest.raises(VerificationError, match=r"SBOM of bundle norm for cpu:x86-64-v2"):
        check(repository, pin, believed(signer))
    assert "materials of bundle norm for cpu:x86-64-v2" in str(verify_repository(repository.path).faults)


def test_documents_of_other_kinds_or_in_another_order_are_refused(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    made = made_of(attest(repository, pin, [signer]))
    (descriptor, blobs), rest = made[0], made[1:]
    manifest = json.loads(blobs[-1][1])
    layers = manifest["layers"]
    wrong: tuple[dict[str, Any], ...] = (
        {"layers": layers[:2]},
        {"layers": [*layers, layers[0]]},
        {"layers": layers[::-1]},
        {"layers": [{**layers[0], "size": 1 << 30}, *layers[1:]]},
        {"layers": []},
        {"artifactType": "application/spdx+json"},
        {"artifactType": "application/vnd.kartifacts.materials.v1+json"},
        {"config": layers[0]},
        {"subject": layers[0]},
        {"mediaType": "application/vnd.oci.image.index.v1+json"},
    )
    for changed in wrong:
        content = canonical_json({**manifest, **changed})
        named = msgspec.structs.replace(descriptor, digest=f"sha256:{sha256(content)}", size=len(content))
        put(repository, pin, joined(pin, [Made(named, (*blobs[:-1], (sha256(content), content))), *rest]))
        with pytest.raises(VerificationError, match="provenance 0 of kartifacts"):
            check(repository, pin, believed(signer))


@pytest.mark.parametrize(
    "change",
    [
        lambda statement: statement["subject"].append(statement["subject"][0]),
        lambda statement: statement["subject"][0]["digest"].update(sha256="0" * 64),
        lambda statement: statement["predicate"]["buildDefinition"]["resolvedDependencies"].pop(),
        lambda statement: statement["predicate"]["runDetails"]["byproducts"][0]["digest"].update(sha256="0" * 64),
        lambda statement: statement["predicate"]["runDetails"]["byproducts"][1]["digest"].update(sha256="0" * 64),
        lambda statement: statement["predicate"]["runDetails"].update(builder={"id": 7}),
        lambda statement: statement["predicate"].update(runDetails=[]),
        lambda statement: statement.update(predicateType="https://slsa.dev/provenance/v0.2"),
        lambda statement: statement.update(more=1),
        lambda statement: statement.clear(),
    ],
)
def test_a_statement_that_is_signed_but_not_true_is_refused(
    change: Callable[[Any], object], repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    made = made_of(attest(repository, pin, [signer]))
    bundle = bundles_of(repository, pin)[0]
    _, bill, content = documents(made[0])
    materials = materials_of(repository, pin)[bundle.digest]
    statement = statement_of(bundle, materials, sha256(content), sha256(bill), BUILDER)
    statement = json.loads(canonical_json(statement))
    change(statement)
    lie = refer(PROVENANCE, bundle, [sealed(canonical_json(statement), [signer]), bill, content])
    put(repository, pin, joined(pin, [lie, *made[1:]]))
    with pytest.raises(VerificationError, match="bundle norm for cpu:x86-64-v2"):
        check(repository, pin, believed(signer))


def test_of_several_documents_only_signed_metadata_says_which_counts(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    first = attest(repository, pin, [signer], builder_id="urn:one")
    put(repository, pin, first)
    second = attest(repository, pin, [signer], builder_id="urn:two")
    path = target_path(pin.library, pin.version, sha256(second.index), "provenance")
    write(repository.path / path, second.index)
    with pytest.raises(VerificationError, match="2 provenance documents"):
        check(repository, pin, believed(signer))
    assert index_of(repository, pin, sha256(first.index)) == first.index
    with pytest.raises(VerificationError, match="missing"):
        index_of(repository, pin, sha256(b""))


def test_whatever_is_missing_or_damaged_is_found_without_keys_too(
    repository: Repository, pin: Pin, signer: CryptoSigner
) -> None:
    attested = attest(repository, pin, [signer])
    for digest, content in attested.blobs:
        put(repository, pin, attested)
        repository.blob(digest).unlink()
        assert verify_repository(repository.path).faults
        put(repository, pin, attested)
        repository.blob(digest).write_bytes(content[:-1] + b"x")
        assert verify_repository(repository.path).faults
        with pytest.raises(VerificationError):
            verify_repository(repository.path).check("it")
    put(repository, pin, attested)
    verify_repository(repository.path).check("it")
    named = repository.path / target_path(pin.library, pin.version, sha256(attested.index), "provenance")
    named.write_bytes(attested.index + b" ")
    assert verify_repository(repository.path).faults
    with pytest.raises(VerificationError, match="damaged"):
        check(repository, pin, believed(signer))


# -- every byte --------------------------------------------------------------------------------------------------------

_SIGNER = CryptoSigner.generate_ed25519()
_ENVELOPE = sealed(b'{"_type":"x","n":1}', [_SIGNER])


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(_ENVELOPE) - 1), st.integers(1, 255))
def test_a_changed_byte_of_an_envelope_is_never_accepted(place: int, flip: int) -> None:
    changed = bytearray(_ENVELOPE)
    changed[place] ^= flip
    with pytest.raises(VerificationError):
        opened(bytes(changed), [_SIGNER.public_key], 1, what="it")


def test_no_bit_of_an_envelope_can_be_flipped() -> None:
    opened(_ENVELOPE, [_SIGNER.public_key], 1, what="it")
    for place in range(len(_ENVELOPE)):
        for bit in range(8):
            changed = bytearray(_ENVELOPE)
            changed[place] ^= 1 << bit
            with pytest.raises(VerificationError):
                opened(bytes(changed), [_SIGNER.public_key], 1, what="it")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.floats(allow_nan=False)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.dictionaries(
                    st.sampled_from(
                        ["payload", "payloadType", "signatures", "keyid", "sig", "manifests", "mediaType", "layers"]
                    ),
                    inner,
                    max_size=5,
                ),
            ),
            max_leaves=20,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
@example(b'{"payload":"e30=","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"\\ud800","sig":""}]}')
def test_parsers_raise_nothing_else(data: bytes) -> None:
    readers: list[Callable[[], object]] = [
        lambda: opened(data, [_SIGNER.public_key], 1, what="it"),
        lambda: read_said(PROVENANCE, data, "a", "1"),
        lambda: read_referrer(MATERIALS, data, "it"),
    ]
    for read in readers:
        with pytest.raises(VerificationError):
            read()


def test_a_key_that_is_none_is_said(tmp_path: Path, signer: CryptoSigner) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    good = tmp_path / "good.pem"
    private = Ed25519PrivateKey.generate()
    good.write_bytes(private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
    (key,) = read_keys([good])
    assert isinstance(key, Key)
    envelope = sealed(b"{}", [CryptoSigner(private)])
    assert opened(envelope, [key], 1, what="it") == (b"{}", (key.keyid,))
    for content in (b"", b"\xff", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"):
        good.write_bytes(content)
        with pytest.raises(ConfigError, match="not a public key"):
            read_keys([good])
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys([tmp_path / "none.pem"])
