"""The gate of Sigstore opens for the right identity, vouched for by the right issuer, over the right release: offline.

The Sigstore is a private one of this test: an authority that certifies identities, a log of certificates, and a log of
signatures with a Merkle tree, each with its own key.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from kartifacts.errors import ConfigError, VerificationError
from kartifacts.model.digest import canonical_json, sha256
from kartifacts.publish.sigstore_gate import Gate

pytest.importorskip("sigstore", reason="the extra sigstore is not installed")

IDENTITY = "https://ci.example/project/workflows/release.yml"
ISSUER = "https://accounts.ci.example"
INDEX = b'{"the": "release index"}'
_SCTS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass
class Sigstore:
    """A private instance: whoever holds it can certify any identity at any time."""

    authority: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificates: ec.EllipticCurvePrivateKey = field(default_factory=new_key)  # signs for the log of certificates
    signatures: ec.EllipticCurvePrivateKey = field(default_factory=new_key)  # signs for the log of signatures
    now: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.timezone.utc).replace(microsecond=0))

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of a test")])
        self.root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.authority.public_key())
            .serial_number(1)
            .not_valid_before(self.now - dt.timedelta(days=1))
            .not_valid_after(self.now + dt.timedelta(days=365))
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(usage(certifies=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key()), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def trusted_root(self, path: Path) -> Path:
        since = {"start": (self.now - dt.timedelta(days=1)).isoformat().replace("+00:00", "Z")}

        def log(key: ec.EllipticCurvePrivateKey, url: str) -> dict[str, Any]:
            public = {"rawBytes": text(der(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since}
            identity = {"keyId": text(hashlib.sha256(der(key)).digest())}
            return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": identity}

        chain = {"certificates": [{"rawBytes": text(self.root.public_bytes(Encoding.DER))}]}
        authority = {
            "subject": {"organization": "test", "commonName": "test"},
            "uri": "https://fulcio.invalid",
            "certChain": chain,
            "validFor": since,
        }
        content = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.signatures, "https://rekor.invalid")],
            "ctlogs": [log(self.certificates, "https://ct.invalid")],
            "certificateAuthorities": [authority],
        }
        path.write_text(json.dumps(content))
        return path

    def certify(
        self, key: ec.EllipticCurvePrivateKey, identity: str, issuer: str, *, logged: bool = True
    ) -> x509.Certificate:
        """A certificate of ten minutes, with the promise of the log to list it."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - dt.timedelta(minutes=1))
            .not_valid_after(self.now + dt.timedelta(minutes=9))
            .add_extension(usage(certifies=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER, issuer.encode()), critical=False)
        )
        unlogged = builder.sign(self.authority, hashes.SHA256())
        if not logged:
            return unlogged
        promise = self._promise(unlogged.tbs_certificate_bytes)
        return builder.add_extension(x509.UnrecognizedExtension(_SCTS, promise), critical=False).sign(
            self.authority, hashes.SHA256()
        )

    def _promise(self, content: bytes) -> bytes:
        """RFC 6962: a signed certificate timestamp over what the certificate says without it, in its list, in DER."""
        when = int(self.now.timestamp() * 1000)
        entry = hashlib.sha256(der(self.authority)).digest() + len(content).to_bytes(3, "big") + content
        signature = sign(self.certificates, struct.pack("!BBQH", 0, 0, when, 1) + entry + b"\0\0")
        identity = hashlib.sha256(der(self.certificates)).digest()
        stamp = b"\0" + identity + struct.pack("!QH", when, 0) + b"\4\3" + struct.pack("!H", len(signature)) + signature
        stamps = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        return bytes([4, len(stamps)]) + stamps if len(stamps) < 128 else bytes([4, 0x81, len(stamps)]) + stamps

    def entry(self, kind: str, body: bytes) -> dict[str, Any]:
        """The second of two leaves of the log, with the way to its head, which is signed."""
        leaf, other = hashlib.sha256(b"\0" + body).digest(), hashlib.sha256(b"\0another entry").digest()
        head = hashlib.sha256(b"\1" + other + leaf).digest()
        identity, when = hashlib.sha256(der(self.signatures)).digest(), int(self.now.timestamp())
        note = f"log.invalid\n2\n{text(head)}\n"
        signature = text(identity[:4] + sign(self.signatures, note.encode()))
        promised = {"body": text(body), "integratedTime": when, "logID": identity.hex(), "logIndex": 1}
        return {
            "logIndex": "1",
            "logId": {"keyId": text(identity)},
            "kindVersion": {"kind": kind, "version": "0.0.1"},
            "integratedTime": str(when),
            "inclusionPromise": {"signedEntryTimestamp": text(sign(self.signatures, canonical_json(promised)))},
            "inclusionProof": {
                "logIndex": "1",
                "rootHash": text(head),
                "treeSize": "2",
                "hashes": [text(other)],
                "checkpoint": {"envelope": f"{note}\n— log.invalid {signature}\n"},
            },
            "canonicalizedBody": text(body),
        }

    def bundle(
        self, content: bytes, *, identity: str = IDENTITY, issuer: str = ISSUER, logged: bool = True
    ) -> dict[str, Any]:
        """A signature over a file."""
        key = new_key()
        certificate, signature = self.certify(key, identity, issuer, logged=logged), sign(key, content)
        verifier = {"content": text(certificate.public_bytes(Encoding.PEM))}
        body = {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": sha256(content)}},
                "signature": {"content": text(signature), "publicKey": verifier},
            },
        }
        digest = {"algorithm": "SHA2_256", "digest": text(hashlib.sha256(content).digest())}
        return {
            **self._material(certificate, self.entry("hashedrekord", canonical_json(body))),
            "messageSignature": {"messageDigest": digest, "signature": text(signature)},
        }

    def statement(self, payload: bytes, payload_type: str = "application/vnd.in-toto+json") -> dict[str, Any]:
        """A signature over a statement about files."""
        key = new_key()
        certificate = self.certify(key, IDENTITY, ISSUER)
        pae = b"DSSEv1 %d %b %d %b" % (len(payload_type), payload_type.encode(), len(payload), payload)
        signature = sign(key, pae)
        verifier = text(certificate.public_bytes(Encoding.PEM))
        body = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": {"algorithm": "sha256", "value": sha256(b"the envelope")},
                "payloadHash": {"algorithm": "sha256", "value": sha256(payload)},
                "signatures": [{"signature": text(signature), "verifier": verifier}],
            },
        }
        envelope = {"payload": text(payload), "payloadType": payload_type, "signatures": [{"sig": text(signature)}]}
        return {**self._material(certificate, self.entry("dsse", canonical_json(body))), "dsseEnvelope": envelope}

    def _material(self, certificate: x509.Certificate, entry: dict[str, Any]) -> dict[str, Any]:
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": text(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [entry],
            },
        }


def usage(*, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not certifies, False, False, False, False, certifies, certifies, False, False)


def statement_about(content: bytes) -> bytes:
    subject = [{"name": "a release", "digest": {"sha256": sha256(content)}}]
    return canonical_json({"_type": "https://in-toto.io/Statement/v1", "subject": subject, "predicateType": "x"})


@pytest.fixture(scope="module")
def sigstore() -> Sigstore:
    return Sigstore()


Check = Callable[..., Path]


@pytest.fixture
def check(sigstore: Sigstore, tmp_path: Path) -> Check:
    """Verifies bundles over the release index by files."""

    def run(*bundles: object, index: bytes = INDEX, identity: str = IDENTITY, issuer: str = ISSUER) -> Path:
        paths = []
        for number, bundle in enumerate(bundles):
            paths.append(tmp_path / f"{number}.sigstore.json")
            paths[-1].write_bytes(bundle if isinstance(bundle, bytes) else json.dumps(bundle).encode())
        gate = Gate(sigstore.trusted_root(tmp_path / "trusted_root.json"), identity=identity, issuer=issuer)
        return gate.check(index, gate.read(paths), "demo 1.0")

    return run


def test_a_signature_and_a_statement_open_the_gate(sigstore: Sigstore, check: Check) -> None:
    assert check(sigstore.bundle(INDEX)).name == "0.sigstore.json"
    assert check(sigstore.statement(statement_about(INDEX))).name == "0.sigstore.json"
    assert check(sigstore.bundle(b"another release"), sigstore.bundle(INDEX)).name == "1.sigstore.json"


def test_other_content_identity_or_issuer_is_refused(sigstore: Sigstore, check: Check) -> None:
    for bundle in (sigstore.bundle(INDEX), sigstore.statement(statement_about(INDEX))):
        with pytest.raises(VerificationError, match=r"no Sigstore bundle proves demo 1\.0"):
            check(bundle, index=INDEX + b" ")
        with pytest.raises(VerificationError, match="do not match"):
            check(bundle, identity="https://ci.example/project/workflows/other.yml")
        with pytest.raises(VerificationError, match=r"[Ii]ssuer"):
            check(bundle, issuer="https://accounts.elsewhere")
    with pytest.raises(VerificationError):
        check(sigstore.bundle(INDEX, issuer="https://accounts.elsewhere"))
    with pytest.raises(VerificationError):
        check()


def test_a_statement_of_another_kind_is_refused(sigstore: Sigstore, check: Check) -> None:
    good = statement_about(INDEX)
    for bundle in (
        sigstore.statement(good, "text/plain"),
        sigstore.statement(good.replace(b"Statement/v1", b"Statement/v9")),
        sigstore.statement(b"[]"),
        sigstore.statement(b"\xff"),
        sigstore.statement(good.replace(b'{"sha256"', b'{"sha512"')),
    ):
        with pytest.raises(VerificationError):
            check(bundle)


def test_what_another_instance_signed_or_nobody_logged_is_refused(sigstore: Sigstore, check: Check) -> None:
    other = Sigstore()
    for bundle in (
        other.bundle(INDEX),
        Sigstore(authority=sigstore.authority, signatures=sigstore.signatures).bundle(INDEX),
        Sigstore(authority=sigstore.authority, certificates=sigstore.certificates).bundle(INDEX),
        Sigstore(certificates=sigstore.certificates, signatures=sigstore.signatures).bundle(INDEX),
        sigstore.bundle(INDEX, logged=False),
    ):
        with pytest.raises(VerificationError, match="no Sigstore bundle proves"):
            check(bundle)


def test_a_signature_made_when_its_certificate_was_over_is_refused(sigstore: Sigstore, check: Check) -> None:
    later = sigstore.now + dt.timedelta(hours=1)
    late = Sigstore(sigstore.authority, sigstore.certificates, sigstore.signatures, later)
    bundle = sigstore.bundle(INDEX)
    (entry,) = bundle["verificationMaterial"]["tlogEntries"]
    body = base64.b64decode(entry["canonicalizedBody"])
    for when, holds in ((sigstore, True), (late, False)):
        bundle["verificationMaterial"]["tlogEntries"] = [when.entry("hashedrekord", body)]
        if holds:
            check(bundle)
        else:
            with pytest.raises(VerificationError, match="certificate"):
                check(bundle)
    entry["integratedTime"] = str(int(entry["integratedTime"]) + 1)
    bundle["verificationMaterial"]["tlogEntries"] = [entry]
    with pytest.raises(VerificationError, match="SET"):
        check(bundle)


def test_no_part_of_a_bundle_can_be_changed(sigstore: Sigstore, check: Check) -> None:
    """Flips a bit of each value that is bytes; others are covered by what they are of."""
    bundle = sigstore.bundle(INDEX)
    changed = 0
    for path, value in leaves(bundle):
        try:
            data = bytearray(base64.b64decode(value, validate=True))
        except ValueError:
            continue
        if len(data) < 16:
            continue
        data[len(data) // 2] ^= 1
        with pytest.raises(VerificationError):
            check(replaced(bundle, path, text(bytes(data))))
        changed += 1
    assert changed >= 8


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    if isinstance(value, str):
        return [(path, value)]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, each in pairs for leaf in leaves(each, (*path, key))]


def replaced(value: Any, path: tuple[Any, ...], leaf: str) -> Any:
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = leaf
    return copy


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b'{"mediaType": "x"}', b'{"a": 1, "a": 2}', b"[" * 9999]
)
def test_what_is_no_bundle_is_said(content: bytes, check: Check) -> None:
    with pytest.raises(VerificationError, match=r"0\.sigstore\.json"):
        check(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"mediaType": "x"}'])
def test_what_is_no_trusted_root_is_said(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trusted_root.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not the trusted root"):
        Gate(path, identity=IDENTITY, issuer=ISSUER)
    with pytest.raises(ConfigError, match="cannot read"):
        Gate(tmp_path / "none", identity=IDENTITY, issuer=ISSUER)


def test_a_missing_extra_is_said_and_no_socket_is_opened(sigstore: Sigstore, tmp_path: Path) -> None:
    root, bundle, index = sigstore.trusted_root(tmp_path / "root"), tmp_path / "bundle", tmp_path / "index"
    bundle.write_text(json.dumps(sigstore.bundle(INDEX)))
    index.write_bytes(INDEX)
    program = f"""
import sys
from pathlib import Path
sys.addaudithook(lambda event, _: sys.exit(event) if event in ("socket.connect", "socket.getaddrinfo") else None)
from kartifacts.publish.sigstore_gate import Gate
gate = Gate(Path({str(root)!r}), identity={IDENTITY!r}, issuer={ISSUER!r})
print(gate.check(Path({str(index)!r}).read_bytes(), gate.read([Path({str(bundle)!r})]), "it"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(bundle)), done.stderr
    blocked = f"import sys; sys.modules['sigstore'] = None\n{program}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'kartifacts[sigstore]'" in done.stderr


@pytest.mark.parametrize("content", [b"junk", b"{}", b"[]", b'{"mediaType": 5, "tlogs": [{"a": 1}]}', b"\xff", b""])
def test_what_is_no_bundle_and_no_trusted_root_is_said_in_one_line(
    sigstore: Sigstore, tmp_path: Path, content: bytes
) -> None:
    junk = tmp_path / "junk.json"
    junk.write_bytes(content)
    gate = Gate(sigstore.trusted_root(tmp_path / "trusted_root.json"), identity=IDENTITY, issuer=ISSUER)
    with pytest.raises(ConfigError, match="junk") as as_root:
        Gate(junk, identity=IDENTITY, issuer=ISSUER)
    with pytest.raises(VerificationError, match="junk") as as_bundle:
        gate.read([junk])
    for raised in (as_root, as_bundle):
        message = raised.value.message
        assert len(message.splitlines()) == 1
        assert len(message) < 500
        assert "pydantic" not in message
        assert "input_value" not in message
    if content == b"{}":
        assert "mediaType: Field required" in as_root.value.message
        assert "mediaType: Field required" in as_bundle.value.message
